r"""Leading eigenpairs of a positive semi-definite matrix without diagonalising it.

Three ways, the next when the one before does not reach the tolerance: a few rounds of warm-started subspace iteration
(see `subspace`), on a GPU with a filter; block Krylov iteration, where the space spanned by X, KX, K²X, … is kept
orthonormal and the pairs are read off K restricted to it; the full decomposition. What is left over, the residual ‖Ky
− θy‖, bounds the error of each pair: some eigenvalue of K lies within it of θ. That the pairs are the leading ones
rests on the random starting vectors, of which there are more than pairs asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.linalg.subspace import OVERSAMPLING, filtered, projected, ritz, sharpened, starting_block

__all__ = ["Eigenpairs", "decomposed", "leading_eigenpairs"]

# Products before the first look at the residual, how many looks, and how often a Krylov space may grow.
STEPS = 3
LOOKS = 2
# Looks on a GPU, for which products with a filter in between are cheaper than the small problems of a Krylov space.
GPU_LOOKS = 6
MOST_ROUNDS = 8
_SMALL = 384


class Eigenpairs(NamedTuple):
    """What `leading_eigenpairs` returns.

    Args:
        values: largest first, clamped at 0, (..., L).
        vectors: columns, (..., n, L).
        residual: largest ‖Ky − θy‖ over the L pairs; 0 for the full decomposition, (...).
    """

    values: Tensor
    vectors: Tensor
    residual: Tensor


def leading_eigenpairs(
    matrix: Tensor, count: int, tolerance: float = 0.0, start: int = 0, tried: bool = False
) -> Eigenpairs:
    """The `count` largest eigenvalues and their vectors of a symmetric positive semi-definite matrix.

    Args:
        matrix: K, float64, (..., n, n).
        count: L, 0…n.
        tolerance: allowed residual relative to the largest eigenvalue; 0 asks for the full decomposition.
        start: the iteration starts from the first `start` coordinates, where the previous factor lies.
        tried: whether subspace iteration was tried already, in vain.

    Example:
        >>> K = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> leading_eigenpairs(K, 2).values
        tensor([3., 2.], dtype=torch.float64)
    """
    if count == 0:
        none = matrix[..., :0]
        return Eigenpairs(none[..., 0, :], none, none.sum((-2, -1)))
    if tolerance <= 0.0 or not iteration_pays(matrix.shape[-1], count):
        return _full(matrix, count)
    if matrix.ndim > 2:
        return _batched(matrix, count, tolerance, min(start, count))
    found = None if tried else _iterated(matrix, count, tolerance, min(start, count))
    return found or _krylov(matrix, count, tolerance, min(start, count)) or _full(matrix, count)


def iteration_pays(size: int, count: int) -> bool:
    """Whether a few products with L + OVERSAMPLING columns count less than tridiagonalising n×n."""
    return count > 0 and size >= 32 and size > 4 * (count + OVERSAMPLING)


def decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """All eigenvalues, smallest first, and their vectors as columns."""
    # A GPU is slower than a CPU on a single matrix of a few hundred rows.
    if matrix.is_cuda and matrix.ndim == 2 and matrix.shape[-1] <= _SMALL:
        values, vectors = torch.linalg.eigh(matrix.cpu())
        return values.to(matrix.device), vectors.to(matrix.device)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def _full(matrix: Tensor, count: int) -> Eigenpairs:
    values, vectors = decomposed(matrix)
    first = values.shape[-1] - count
    leading = values[..., first:].flip(-1).clamp_min(0.0)
    return Eigenpairs(leading, vectors[..., first:].flip(-1), values.new_zeros(values.shape[:-1]))


def _iterated(matrix: Tensor, count: int, tolerance: float, start: int) -> Eigenpairs | None:
    """By subspace iteration, or None when it is too slow for this matrix."""
    for found, done in _looks(matrix, count, tolerance, start):
        if bool(done):
            return found
    return None


def _batched(matrix: Tensor, count: int, tolerance: float, start: int) -> Eigenpairs:
    """By subspace iteration, and in full those of a batch for which it is too slow."""
    for found, done in _looks(matrix, count, tolerance, start):
        if bool(done.all()):
            return found
    rest = ~done
    for part, whole in zip(found, _full(matrix[rest], count), strict=True):
        part[rest] = whole
    return found


def _looks(matrix: Tensor, count: int, tolerance: float, start: int) -> Iterator[tuple[Eigenpairs, Tensor]]:
    """What the subspace iteration has, and whether that is good enough, each time it looks."""
    block = starting_block(matrix.shape[-1], count, start, matrix.dtype, matrix.device)
    block, cheap = sharpened(matrix.__matmul__, block, STEPS), products_are_cheap(matrix)
    for left in reversed(range(GPU_LOOKS if cheap else LOOKS)):
        values, inner, residual, edge = ritz(projected(matrix.__matmul__, block), count)
        yield Eigenpairs(values, block @ inner, residual), residual <= _allowed(tolerance, values)
        if left and cheap and bool((edge > 0).all()):
            block = filtered(matrix.__matmul__, block, edge)
        elif left:
            block = sharpened(matrix.__matmul__, block, STEPS)


def products_are_cheap(matrix: Tensor) -> bool:
    """Whether they take less time than decomposing matrices of a hundred rows."""
    return matrix.is_cuda


def _krylov(matrix: Tensor, count: int, tolerance: float, start: int) -> Eigenpairs | None:
    """By block Krylov iteration, or None when the space has grown too large to pay."""
    basis = starting_block(len(matrix), count, start, matrix.dtype, matrix.device)
    image = matrix @ basis
    last, width = basis, basis.shape[1]
    for _ in range(MOST_ROUNDS):
        if basis.shape[1] + width > len(matrix) // 2:
            return None
        last = _orthogonal_to(basis, matrix @ last)
        basis = torch.cat([basis, last], dim=1)
        image = torch.cat([image, matrix @ last], dim=1)
        values, inner = decomposed(basis.mT @ image)
        values, inner = values[-count:].flip(-1), inner[:, -count:].flip(-1)
        vectors = basis @ inner
        residual = (image @ inner - vectors * values).norm(dim=0).max()
        if bool(residual <= _allowed(tolerance, values)):
            return Eigenpairs(values.clamp_min(0.0), vectors, residual)
    return None


def _allowed(tolerance: float, values: Tensor) -> Tensor:
    return tolerance * values[..., 0].clamp_min(torch.finfo(values.dtype).tiny)


def _orthogonal_to(basis: Tensor, new: Tensor) -> Tensor:
    """New directions made orthonormal among themselves and to the basis; twice, for the digits the first pass loses."""
    for _ in range(2):
        new = new - basis @ (basis.mT @ new)
        new = torch.linalg.qr(new.cpu()).Q.to(new.device)  # which a GPU is slower at, too
    return new
