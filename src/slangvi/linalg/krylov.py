r"""Leading eigenpairs of a positive semi-definite matrix without diagonalising it.

Block Krylov iteration with Rayleigh–Ritz: the space spanned by X, KX, K²X, … is kept orthonormal, and the leading
eigenpairs of K are read off K restricted to it. What is left over, the residual ‖Ky − θy‖, bounds the error of each
pair: some eigenvalue of K lies within it of θ. That the pairs are the leading ones rests on the random starting
vectors, of which there are more than pairs asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Eigenpairs", "leading_eigenpairs"]

# Extra starting vectors, and how often the space may grow before the full decomposition is cheaper.
OVERSAMPLING = 4
MOST_ROUNDS = 8


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


def leading_eigenpairs(matrix: Tensor, count: int, tolerance: float = 0.0, start: int = 0) -> Eigenpairs:
    """The `count` largest eigenvalues and their vectors of a symmetric positive semi-definite matrix.

    Args:
        matrix: K, float64, (..., n, n).
        count: L, 0…n.
        tolerance: allowed residual relative to the largest eigenvalue; 0 asks for the full decomposition.
        start: the iteration starts from the first `start` coordinates, where the previous factor lies.

    Example:
        >>> K = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> leading_eigenpairs(K, 2).values
        tensor([3., 2.], dtype=torch.float64)
    """
    size = matrix.shape[-1]
    start = min(start, count)
    block = start + count + OVERSAMPLING
    # The space of all rounds must stay well below the whole for the iteration to pay.
    if tolerance <= 0.0 or count == 0 or matrix.ndim > 2 or 4 * block > size or size < 128:
        return _full(matrix, count)
    return _iterated(matrix, count, block, tolerance, start)


def _full(matrix: Tensor, count: int) -> Eigenpairs:
    values, vectors = torch.linalg.eigh(matrix)
    first = values.shape[-1] - count
    leading = values[..., first:].flip(-1).clamp_min(0.0)
    return Eigenpairs(leading, vectors[..., first:].flip(-1), values.new_zeros(values.shape[:-1]))


def _iterated(matrix: Tensor, count: int, block: int, tolerance: float, start: int) -> Eigenpairs:
    basis = torch.linalg.qr(_starting_block(matrix, block, start)).Q
    image = matrix @ basis
    last = basis
    for turn in range(MOST_ROUNDS):
        values, inner = torch.linalg.eigh(basis.mT @ image)
        values, inner = values[-count:].flip(-1), inner[:, -count:].flip(-1)
        vectors = basis @ inner
        residual = (image @ inner - vectors * values).norm(dim=0).max()
        # The previous factor alone may consist of exact eigenvectors; what is new shows only once the space has grown.
        if turn and bool(residual <= tolerance * values[0].clamp_min(torch.finfo(values.dtype).tiny)):
            return Eigenpairs(values.clamp_min(0.0), vectors, residual)
        if basis.shape[1] + block > matrix.shape[0] // 2:
            break
        last = _orthogonal_to(basis, matrix @ last)
        basis = torch.cat([basis, last], dim=1)
        image = torch.cat([image, matrix @ last], dim=1)
    return _full(matrix, count)


def _starting_block(matrix: Tensor, block: int, start: int) -> Tensor:
    """Coordinates of the previous factor beside L + OVERSAMPLING random vectors.

    The random ones make sure that nothing leading is missed, whatever the previous factor was; they come from a source
    of their own, so that no random state is involved.
    """
    size = matrix.shape[0]
    unit = torch.eye(size, start, dtype=matrix.dtype, device=matrix.device)
    source = torch.Generator().manual_seed(0)
    mixed = torch.randn(size, block - start, dtype=matrix.dtype, generator=source).to(matrix.device)
    return torch.cat([unit, mixed], dim=1)


def _orthogonal_to(basis: Tensor, new: Tensor) -> Tensor:
    """New directions made orthonormal among themselves and to the basis; twice, for the digits the first pass loses."""
    for _ in range(2):
        new = new - basis @ (basis.mT @ new)
        new = torch.linalg.qr(new).Q
    return new
