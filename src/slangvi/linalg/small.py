r"""UUᵀ + diag(d) of few parameters, which is cheapest when held as the P×P matrix it is.

For a batch of small problems the number of operations counts, not their size: one Cholesky factor of the matrix serves
solves and draws, where the low-rank form needs a Gram matrix, its Cholesky factor, its eigenvectors, and products on
either side of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.linalg.dense import DensePrecision, factorize_dense
from slangvi.linalg.lowrank import LowRankPrecision, factorize
from slangvi.linalg.products import product

__all__ = ["SmallPrecision", "factorize_batch"]

# Multiplications of the Cholesky factors, times three, up to which they take less time than what they replace.
_MOST = 1 << 21
# Largest (UUᵀ)ₚₚ / dₚ for the matrix: variances are right to about so many units of rounding.
_STEEP = 1e5


@dataclass(frozen=True)
class SmallPrecision:
    """Factorised UUᵀ + diag(d); build it with `factorize_batch`.

    Args:
        factor: U by rows, (..., L, P).
        diag: d > 0, (..., P).
        dense: the matrix and its Cholesky factor.
    """

    factor: Tensor
    diag: Tensor
    dense: DensePrecision

    def solve(self, rhs: Tensor) -> Tensor:
        """(UUᵀ + diag d)⁻¹ x for x of shape (..., P)."""
        return self.dense.solve(rhs)

    def transform_noise(self, noise: Tensor) -> Tensor:
        """Turn standard normal noise (*sample_shape, ..., P) into a zero-mean draw with covariance (UUᵀ + diag d)⁻¹.

        R⁻ᵀε with the lower Cholesky factor R: as with the symmetric root of `LowRankPrecision` the draw depends on
        UUᵀ alone and not on signs or rotation of the columns of U, but it is another draw.
        """
        return self.dense.transform_noise(noise)

    def sample(
        self,
        sample_shape: tuple[int, ...] | torch.Size = (),
        generator: torch.Generator | None = None,
        loc: Tensor | None = None,
    ) -> Tensor:
        """Draws of shape (*sample_shape, ..., P) around `loc`, or around zero."""
        return self.dense.sample(sample_shape, generator, loc)

    def inv_diag(self) -> Tensor:
        """Diagonal of (UUᵀ + diag d)⁻¹, (..., P)."""
        return self.dense.inv_diag()

    def logdet(self) -> Tensor:
        """Log det(UUᵀ + diag d) in float64, (...)."""
        return self.dense.logdet()


def factorize_batch(factor: Tensor, diag: Tensor) -> LowRankPrecision | SmallPrecision:
    """Factorise UUᵀ + diag(d): batches of small problems as matrices, all others in the low-rank form.

    Args:
        factor: U by rows, (..., L, P).
        diag: d > 0, (..., P).

    Example:
        >>> p = factorize_batch(torch.tensor([[[3.0, 0.0]]]).double(), torch.tensor([[1.0, 4.0]]).double())
        >>> type(p).__name__, p.solve(torch.tensor([[10.0, 4.0]]).double()).round(decimals=9)
        ('SmallPrecision', tensor([[1., 1.]], dtype=torch.float64))
    """
    size = diag.shape[-1]
    # In float32 the low-rank form is the more accurate one: its small matrices are float64.
    if factor.ndim == 2 or factor.dtype != torch.float64 or diag.numel() * size * size > _MOST:
        return factorize(factor, diag)
    matrix = product(factor.mT, factor)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    # Beside a UUᵀ that much larger the matrix keeps too few digits of d; the low-rank form keeps them apart.
    if not bool((diagonal <= _STEEP * diag).all()):
        return factorize(factor, diag)
    diagonal.add_(diag)
    return SmallPrecision(factor, diag, factorize_dense(matrix))
