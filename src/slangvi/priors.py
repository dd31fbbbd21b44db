"""The prior over the weights, and the evidence lower bound that it enters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["ELBO", "Prior"]


@dataclass(frozen=True)
class Prior:
    """N(μ₀, diag(λ)⁻¹)."""

    precision: Tensor  # λ, (P,)
    mean: Tensor  # μ₀, (P,)


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
