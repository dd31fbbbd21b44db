"""The prior over the weights, and the evidence lower bound that it enters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ELBO", "Prior"]


@dataclass(frozen=True, eq=False)
class Prior:
    """N(μ₀, diag(λ)⁻¹).

    Args:
        precision: λ, (P,).
        mean: μ₀, (P,).
    """

    precision: Tensor
    mean: Tensor

    @cached_property
    def bounds(self) -> tuple[float, float, float]:
        """Smallest and largest λ, and the length of μ₀, as numbers."""
        low, high = torch.aminmax(self.precision)
        found = torch.stack([low, high, torch.linalg.vector_norm(self.mean)]).tolist()
        return found[0], found[1], found[2]


class ELBO(NamedTuple):
    """The evidence lower bound in its two parts.

    Args:
        expected_log_likelihood: Σ_i E_q[log p(y_i | θ)], estimated.
        kl: KL(q ‖ prior), in closed form.
    """

    expected_log_likelihood: float
    kl: float

    @property
    def value(self) -> float:
        """Expected log-likelihood − KL."""
        return self.expected_log_likelihood - self.kl
