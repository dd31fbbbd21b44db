r"""Leading eigenpairs of many positive semi-definite matrices without looking at a number.

K squared q times is K^(2^q): of it only the leading eigenvector is left, and every column shows it. What remains of the
second one is (λ₂/λ₁)^(2^q), so that the residual ‖Kv − θv‖ is at most λ₁/(e·2^q), whatever the gap: q = 20 makes it
less than 1e-6 λ₁. Each further vector is found the same way once those before it are taken out. A GPU that would take
a hundred milliseconds to decompose some hundred small matrices multiplies them in a few microseconds, and nothing waits
for the device: the work can be captured in a graph.

Larger matrices are first restricted to a subspace that was sharpened by a few products (see `subspace`), which the
residual tells when it was not enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slangvi.linalg.krylov import Eigenpairs
from slangvi.linalg.products import product
from slangvi.linalg.subspace import orthonormal, sharpened, starting_block

__all__ = ["pairs_by_squaring"]

# Rows up to which squaring takes less time than restricting first, and vectors beyond those asked for otherwise.
_SMALL = 96
_EXTRA = 8
# Squarings after which lengths are brought back to one: by then λ₁, at least 1/n of the trace, is at least n⁻¹⁶.
_BETWEEN = 4


def pairs_by_squaring(matrix: Tensor, count: int, tolerance: float, start: int = 0, products: int = 6) -> Eigenpairs:
    """The `count` largest eigenvalues and their vectors of symmetric positive semi-definite matrices.

    Args:
        matrix: K, float64, (..., n, n). What is not finite makes its own pairs NaN and no others.
        count: L, 1…n.
        tolerance: allowed residual relative to the largest eigenvalue, which decides how often K is squared.
        start: the subspace starts from the first `start` coordinates, where the previous factor lies.
        products: with K, that sharpen the subspace when n is large.

    Returns:
        Values largest first, up to the tolerance; columns, zero where K has nothing left; and the residual as it is,
        which is above the tolerance when the subspace was not good enough.

    Example:
        >>> K = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> pairs_by_squaring(K, 2, 1e-6).values
        tensor([3., 2.], dtype=torch.float64)
    """
    size, width = matrix.shape[-1], count + _EXTRA
    if size <= max(_SMALL, 2 * width):
        vectors = _leading(matrix, count, tolerance)
    else:
        block = starting_block(size, count, min(start, count), matrix.dtype, matrix.device, _EXTRA)
        basis = orthonormal(sharpened(matrix.__matmul__, block, products))
        vectors = basis @ _leading(basis.mT @ (matrix @ basis), count, tolerance)
    image = matrix @ vectors
    values = (vectors * image).sum(-2)
    residual = torch.linalg.vector_norm(image - vectors * values.unsqueeze(-2), dim=-2).amax(-1)
    return Eigenpairs(values.clamp_min(0.0), vectors, residual)


def _leading(matrix: Tensor, count: int, tolerance: float) -> Tensor:
    """One vector after the other, (..., n, L)."""
    squarings = math.ceil(-math.log2(math.e * tolerance))
    # What rounding leaves of a matrix when all of it has been taken out.
    nothing = 16 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps * _trace(matrix)
    found = [_dominant(matrix, squarings)]
    for _ in range(count - 1):
        known = torch.cat(found, -1)
        matrix = matrix - _part(matrix, found[-1])
        matrix = matrix.masked_fill(_trace(matrix) <= nothing, 0.0)
        new = _dominant(matrix, squarings)
        found.append(_unit(new - known @ (known.mT @ new)))
    return torch.cat(found, -1)


def _dominant(matrix: Tensor, squarings: int) -> Tensor:
    """The column of K^(2^q) that is longest on the diagonal, at length one, (..., n, 1)."""
    for turn in range(squarings):
        matrix = matrix / _trace(matrix) if turn % _BETWEEN == 0 else matrix
        matrix = product(matrix, matrix)
    longest = matrix.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True).unsqueeze(-1)
    return _unit(matrix.gather(-1, longest.expand(*matrix.shape[:-1], 1)))


def _part(matrix: Tensor, vector: Tensor) -> Tensor:
    """What K does along a vector, θvvᵀ."""
    return ((vector * (matrix @ vector)).sum(-2, keepdim=True) * vector) * vector.mT


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(matrix.dtype).tiny)[..., None, None]


def _unit(column: Tensor) -> Tensor:
    """At length one; zero stays zero."""
    length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
    unit: Tensor = column / length.clamp_min(torch.finfo(column.dtype).tiny)
    return unit
