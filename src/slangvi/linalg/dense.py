r"""A dense precision P = RRᵀ, factorised once and then solved, sampled and measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.linalg.noise import standard_normal

__all__ = ["DensePrecision", "factorize_dense"]

# Matrices from this size on, in bytes, take a CPU's inner cache for themselves.
_LARGE = 1 << 18


@dataclass(frozen=True)
class DensePrecision:
    """Factorised P; build it with `factorize_dense`.

    Args:
        matrix: P, (..., P, P).
        cholesky: lower R with RRᵀ = P, (..., P, P).
        failed: 0 where the factor exists, else the order of the first leading minor that is not positive, (...).
    """

    matrix: Tensor
    cholesky: Tensor
    failed: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        """P⁻¹ x for x of shape (..., P)."""
        # Two triangular solves; torch.cholesky_solve copies the factor first.
        half = torch.linalg.solve_triangular(self.cholesky, rhs.unsqueeze(-1), upper=False)
        solved: Tensor = torch.linalg.solve_triangular(self.cholesky.mT, half, upper=True)
        return solved.squeeze(-1)

    def transform_noise(self, noise: Tensor) -> Tensor:
        r"""Turn standard normal noise into a zero-mean draw with covariance P⁻¹.

        $$ \operatorname{Cov}[R^{-\top}\varepsilon] = R^{-\top} R^{-1} = P^{-1} $$

        Args:
            noise: ε, shape (*sample_shape, ..., P).
        """
        lead = noise.ndim + 1 - self.cholesky.ndim  # dimensions of samples, in front of those of the batch
        columns = noise.reshape(noise.shape[:lead].numel(), *noise.shape[lead:]).movedim(0, -1)
        drawn: Tensor = torch.linalg.solve_triangular(self.cholesky.mT, columns, upper=True)
        return drawn.movedim(-1, 0).reshape(noise.shape)

    def whiten(self, rows: Tensor) -> Tensor:
        """R⁻¹x for every row x of (..., K, P): inner products of results are covariances, ⟨R⁻¹x, R⁻¹y⟩ = xᵀP⁻¹y."""
        white: Tensor = torch.linalg.solve_triangular(self.cholesky, rows.mT, upper=False)
        return white.mT

    def sample(
        self,
        sample_shape: tuple[int, ...] | torch.Size = (),
        generator: torch.Generator | None = None,
        loc: Tensor | None = None,
    ) -> Tensor:
        """Draws of shape (*sample_shape, ..., P) around `loc`, or around zero."""
        noise = standard_normal((*sample_shape, *self.matrix.shape[:-1]), self.matrix, generator)
        drawn = self.transform_noise(noise)
        return drawn if loc is None else loc + drawn

    def inv_diag(self) -> Tensor:
        """Diagonal of P⁻¹ = R⁻ᵀR⁻¹, (..., P)."""
        eye = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        inverse: Tensor = torch.linalg.solve_triangular(self.cholesky, eye.expand_as(self.cholesky), upper=False)
        return inverse.square().sum(-2)

    def inv_quadratic(self, rows: Tensor) -> Tensor:
        """xᵀP⁻¹x for every row x of (..., K, P), (..., K)."""
        return self.whiten(rows).square().sum(-1)

    def logdet(self) -> Tensor:
        """Log det P in float64, (...)."""
        return 2.0 * self.cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1, dtype=torch.float64)


def factorize_dense(matrix: Tensor) -> DensePrecision:
    """Factorise a symmetric P once, in P³/3; only its lower triangle is read.

    Nothing is raised for a matrix that is not positive definite: look at `failed`.

    Args:
        matrix: P, (..., P, P).

    Returns:
        An object with `solve`, `sample`, `inv_diag`, `logdet`.

    Example:
        >>> p = factorize_dense(torch.tensor([[10.0, 0.0], [0.0, 4.0]]))
        >>> p.solve(torch.tensor([10.0, 4.0]))
        tensor([1., 1.])
        >>> p.inv_diag()
        tensor([0.1000, 0.2500])
    """
    in_turn = matrix.ndim > 2 and matrix.device.type == "cpu" and matrix[..., 0, 0].numel() > 1
    if in_turn and matrix.shape[-1] ** 2 * matrix.element_size() >= _LARGE and not matrix.requires_grad:
        return DensePrecision(matrix, *_one_by_one(matrix))
    return DensePrecision(matrix, *torch.linalg.cholesky_ex(matrix))


def _one_by_one(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Work on large members of a batch one by one, each while it is in the cache.

    The library writes the factor by columns and reads the matrix by rows, a jump in memory for every number. Filling
    the factor with zeros first, in order, brings it into the cache; for P = 257 that saves a third of the time.
    """
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    factors = torch.empty_like(flat, memory_format=torch.contiguous_format).mT  # by columns, as the library wants it
    failed = torch.empty(len(flat), dtype=torch.int32, device=flat.device)
    for member, factor, failure in zip(flat, factors, failed, strict=True):
        torch.linalg.cholesky_ex(member, out=(factor.zero_(), failure))
    return factors.reshape(matrix.shape), failed.view(matrix.shape[:-2])
