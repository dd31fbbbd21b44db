"""The precision diag(s), with the same operations as the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.linalg.noise import standard_normal

__all__ = ["DiagonalPrecision"]


@dataclass(frozen=True)
class DiagonalPrecision:
    """diag(s), which needs no factorisation.

    Args:
        diag: s > 0, (..., P).

    Example:
        >>> p = DiagonalPrecision(torch.tensor([10.0, 4.0]))
        >>> p.solve(torch.tensor([10.0, 4.0])), p.inv_diag()
        (tensor([1., 1.]), tensor([0.1000, 0.2500]))
    """

    diag: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        """diag(s)⁻¹ x for x of shape (..., P)."""
        return rhs / self.diag

    def transform_noise(self, noise: Tensor) -> Tensor:
        """s^(−½) ∘ ε: a zero-mean draw with covariance diag(s)⁻¹ from standard normal noise (..., P)."""
        return noise * self.diag.rsqrt()

    def whiten(self, rows: Tensor) -> Tensor:
        """s^(−½) ∘ x: inner products of results are covariances, Σ xᵢyᵢ/sᵢ; rows x of shape (..., P)."""
        return self.transform_noise(rows)

    def sample(
        self,
        sample_shape: tuple[int, ...] | torch.Size = (),
        generator: torch.Generator | None = None,
        loc: Tensor | None = None,
    ) -> Tensor:
        """Draws of shape (*sample_shape, ..., P) around `loc`, or around zero."""
        drawn = self.transform_noise(standard_normal((*sample_shape, *self.diag.shape), self.diag, generator))
        return drawn if loc is None else loc + drawn

    def inv_diag(self) -> Tensor:
        """1 / s, (..., P)."""
        return self.diag.reciprocal()

    def inv_quadratic(self, rows: Tensor) -> Tensor:
        """xᵀ diag(s)⁻¹ x for every row x of (..., P)."""
        return (rows.square() / self.diag).sum(-1)

    def logdet(self) -> Tensor:
        """Σ log s in float64, (...)."""
        return self.diag.log().sum(-1, dtype=torch.float64)
