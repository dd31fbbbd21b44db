"""Leading eigenvectors of small positive semi-definite matrices, in two ways.

`decompose` is the dense eigendecomposition. `iterate` is a randomised subspace iteration for matrices of many rows, X ←
orthonormalise(KX) followed by Rayleigh–Ritz, which starts from the previous factor: one step of SLANG moves K by a
share β only. After k products the angle to the leading L vectors has shrunk by (λ_{b+1}/λ_L)^k, where b is the number
of columns of X. `advance` and `ritz` are the two halves of one round, before and after the wait for a GPU.

All of this is in float64, for single matrices and batches of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.linalg.threads import one_thread

__all__ = [
    "SMALL",
    "TOLERANCE",
    "Eigenpairs",
    "Subspace",
    "advance",
    "decompose",
    "iterate",
    "iteration_pays",
    "leading_eigenpairs",
    "ritz",
    "starting_block",
]

# Residual allowed relative to the largest eigenvalue, by the dtype of what the matrix was made from. An eigenvalue is
# off by the square of it over a gap: 1e-3 loses less of the trace than a millionth, where examples of a batch and draws
# of the weights vary by percents. float64 is for those who want all digits.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-11}
# Columns beyond the L asked for: they speed up convergence, and find what the previous factor lacks.
OVERSAMPLING = 8
# How much chance is mixed into the start. Without it a factor made of exact eigenvectors would never show that others
# have overtaken it.
_CHANCE = 0.1
# Products between two looks at the residual, and looks before the iteration gives up.
PRODUCTS = 3
MOST_LOOKS = 8
# Rows up to which a GPU is slower than a CPU at decomposing one matrix.
SMALL = 384


class Eigenpairs(NamedTuple):
    """Leading eigenpairs.

    Args:
        values: largest first, clamped at 0, (..., L).
        vectors: columns, (..., n, L).
        residual: largest ‖Ky − θy‖ of the pairs relative to the largest eigenvalue; 0 if decomposed in full, (...).
    """

    values: Tensor
    vectors: Tensor
    residual: Tensor


class Subspace(NamedTuple):
    """Columns that nearly span the leading space of K.

    Args:
        block: X, (..., n, b), orthonormal but for columns that are zero.
        image: KX, (..., n, b).
        small: XᵀKX and (KX)ᵀKX, all that `ritz` has to know, (..., 2, b, b).
    """

    block: Tensor
    image: Tensor
    small: Tensor


def leading_eigenpairs(matrix: Tensor, count: int, tolerance: float = 0.0, start: Tensor | None = None) -> Eigenpairs:
    """Return the `count` largest eigenvalues and their vectors of symmetric positive semi-definite matrices.

    Args:
        matrix: K, float64, (..., n, n).
        count: L, 0…n.
        tolerance: allowed residual relative to the largest eigenvalue; 0 asks for the full decomposition.
        start: columns that nearly span the leading space, (..., n, L); None begins anywhere.

    Example:
        >>> K = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> leading_eigenpairs(K, 2).values
        tensor([3., 2.], dtype=torch.float64)
    """
    if count == 0:
        none = matrix[..., :0]
        return Eigenpairs(none[..., 0, :], none, none.sum((-2, -1)))
    if tolerance <= 0.0 or not iteration_pays(matrix.shape[-1], count):
        return decompose(matrix, count)
    found, done = iterate(matrix, advance(matrix, starting_block(matrix, count, start)), count, tolerance)
    if not bool(done.all()):
        if matrix.ndim == 2:
            return decompose(matrix, count)
        for part, whole in zip(found, decompose(matrix[~done], count), strict=True):
            part[~done] = whole
    return found


def iteration_pays(size: int, count: int) -> bool:
    """Tell whether a few products with L + OVERSAMPLING columns take less time than decomposing an n×n matrix."""
    return count > 0 and size >= 64 and size > 4 * (count + OVERSAMPLING)


def decompose(matrix: Tensor, count: int) -> Eigenpairs:
    """Return the leading eigenpairs by decomposing the matrices in full."""
    values, vectors = eigh(matrix)
    first = values.shape[-1] - count
    leading = values[..., first:].flip(-1).clamp_min(0.0)
    return Eigenpairs(leading, vectors[..., first:].flip(-1), values.new_zeros(values.shape[:-1]))


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, smallest first, and vectors; small matrices of a GPU are decomposed on the host."""
    if not _is_small(matrix):
        return torch.linalg.eigh(matrix)  # type: ignore[no-any-return]
    with one_thread():  # more of them wait for each other longer than they work
        values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)


def _is_small(matrix: Tensor) -> bool:
    """Tell whether a matrix is worked on by one thread of the host, wherever it is."""
    return matrix.ndim == 2 and len(matrix) <= SMALL


def starting_block(like: Tensor, count: int, start: Tensor | None = None) -> Tensor:
    """Return columns to start from, (..., n, L + OVERSAMPLING): the given ones with a little chance, and random ones.

    The random numbers come from a source of their own, so that no random state is involved.

    Args:
        like: float64 tensor of shape (..., n, k).
        count: L.
        start: (..., n, at most L); None for random ones alone.
    """
    block = _random_block(like.shape[-2], count + OVERSAMPLING, like.device)
    if start is None:
        return block.expand(*like.shape[:-2], -1, -1)
    lengths = torch.linalg.vector_norm(start, dim=-2, keepdim=True)
    known = start / lengths.clamp_min(torch.finfo(torch.float64).tiny)
    block = block.expand(*like.shape[:-2], -1, -1)
    first = known + _CHANCE * block[..., : known.shape[-1]]
    return torch.cat([first, block[..., known.shape[-1] :]], -1)


@lru_cache(maxsize=16)
def _random_block(size: int, count: int, device: torch.device) -> Tensor:
    """Return columns of random numbers with lengths near one, the same for the same size."""
    source, here = torch.Generator().manual_seed(0), {"dtype": torch.float64, "device": "cpu"}
    return torch.randn(size, count, generator=source, **here).div_(size**0.5).to(device)  # type: ignore[call-overload, no-any-return]


def advance(matrix: Tensor, block: Tensor) -> Subspace:
    """Return the columns after some products with K; nothing waits for a GPU.

    Args:
        matrix: K, (..., n, n).
        block: X to start from, (..., n, b).
    """
    for k in range(PRODUCTS - 1):
        block = orthonormalize(matrix @ block, passes=1 if k < PRODUCTS - 2 else 2)
    image = matrix @ block
    return Subspace(block, image, torch.stack([block.mT @ image, image.mT @ image], -3))


def ritz(space: Subspace, count: int, small: Tensor | None = None) -> Eigenpairs:
    """Return the leading pairs of K restricted to the span of X (Rayleigh–Ritz).

    Args:
        space: the columns.
        count: L.
        small: `space.small` as fetched from a GPU, where residuals below 1e-8 are rounding; None waits for the GPU.
    """
    device, (inner, squares) = space.block.device, (space.small if small is None else small).unbind(-3)
    values, turned = eigh(0.5 * (inner + inner.mT))
    values, turned = values[..., -count:].flip(-1), turned[..., -count:].flip(-1)
    vectors = space.block @ turned.to(device)
    if small is None:
        left = (space.image @ turned - vectors * values.unsqueeze(-2)).square().sum(-2)
    else:  # ‖KXt‖² − θ²
        left = (turned * (squares @ turned)).sum(-2) - values.square()
    values = values.clamp_min(0.0)
    residual = left.clamp_min(0.0).amax(-1).sqrt() / values[..., 0].clamp_min(torch.finfo(torch.float64).tiny)
    return Eigenpairs(values, vectors, residual)


def iterate(matrix: Tensor, space: Subspace, count: int, tolerance: float) -> tuple[Eigenpairs, Tensor]:
    """Return the leading pairs that subspace iteration finds, and whether each matrix has reached the tolerance.

    Args:
        matrix: K, (..., n, n).
        space: what `advance` has made of the start.
        count: L.
        tolerance: allowed residual relative to the largest eigenvalue.
    """
    found = ritz(space, count)
    done = found.residual <= tolerance
    for _ in range(MOST_LOOKS - 1):
        if bool(done.all()):
            break
        space = advance(matrix, space.image)
        # What was good enough before stays as it was: no matrix depends on others that it is in a batch with.
        found = _keep_done(found, ritz(space, count), done)
        done = found.residual <= tolerance
    return found, done


def _keep_done(old: Eigenpairs, new: Eigenpairs, done: Tensor) -> Eigenpairs:
    """Return the new pairs, and the old ones of matrices that were done before."""
    values = torch.where(done.unsqueeze(-1), old.values, new.values)
    vectors = torch.where(done[..., None, None], old.vectors, new.vectors)
    return Eigenpairs(values, vectors, torch.where(done, old.residual, new.residual))


def orthonormalize(block: Tensor, passes: int = 2) -> Tensor:
    """Return orthonormal columns with the same span; columns without content of their own are zero or rounding.

    The second pass repairs what the shift of the first has cost.
    """
    tiny, eps = torch.finfo(block.dtype).tiny, torch.finfo(block.dtype).eps
    for _ in range(passes):
        gram = block.mT @ block
        shrink = gram.diagonal(dim1=-2, dim2=-1).clamp_min(tiny).rsqrt()
        unit = gram * shrink.unsqueeze(-1) * shrink.unsqueeze(-2)
        unit.diagonal(dim1=-2, dim2=-1).add_(16 * gram.shape[-1] * eps)
        with nullcontext() if gram.is_cuda or gram.ndim > 2 else one_thread():
            lower = torch.linalg.cholesky_ex(unit).L
        block = torch.linalg.solve_triangular(lower.mT, block * shrink.unsqueeze(-2), upper=True, left=False)
    return block
