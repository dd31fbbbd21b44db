r"""Leading eigenvectors of small positive semi-definite matrices, in two ways.

`decompose` is the dense eigendecomposition. `iterate` is a subspace iteration for matrices of many rows, X ←
orthonormalise(KX) followed by Rayleigh–Ritz, which starts from the previous factor: one step of SLANG moves K by a
share β only. After k products the angle to the leading L vectors has shrunk by (λ_{b+1}/λ_L)^k, where b is the number
of columns of X. K may be a matrix or a function that applies one.

All of this is in float64, for single matrices and batches of them.
"""

from __future__ import annotations

from collections.abc import Callable
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
    "decompose",
    "iterate",
    "iteration_pays",
    "leading_eigenpairs",
    "project",
]

Apply = Callable[[Tensor], Tensor]

# Residual allowed relative to the largest eigenvalue, by the dtype of what the matrix was made from: far below what its
# rounding promises there, far above the rounding of the iteration.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}
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
    found, done = iterate(matrix.__matmul__, starting_block(matrix, count, start), count, tolerance)
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


def iterate(apply: Apply, block: Tensor, count: int, tolerance: float) -> tuple[Eigenpairs, Tensor]:
    """Return the leading pairs that subspace iteration finds, and whether each matrix has reached the tolerance.

    Args:
        apply: X ↦ KX.
        block: X to start from, (..., n, b).
        count: L.
        tolerance: allowed residual relative to the largest eigenvalue.
    """
    found: Eigenpairs | None = None
    done = torch.zeros(block.shape[:-2], dtype=torch.bool, device=block.device)
    for _ in range(MOST_LOOKS):
        for k in range(PRODUCTS - 1):
            block = orthonormalize(apply(block), passes=1 if k < PRODUCTS - 2 else 2)
        new, block = project(apply(block), block, count)
        # What was good enough before stays as it was: no matrix depends on others that it is in a batch with.
        found = new if found is None else _keep_done(found, new, done)
        done = found.residual <= tolerance
        if bool(done.all()):
            break
    assert found is not None
    return found, done


def _keep_done(old: Eigenpairs, new: Eigenpairs, done: Tensor) -> Eigenpairs:
    """Return the new pairs, and the old ones of matrices that were done before."""
    values = torch.where(done.unsqueeze(-1), old.values, new.values)
    vectors = torch.where(done[..., None, None], old.vectors, new.vectors)
    return Eigenpairs(values, vectors, torch.where(done, old.residual, new.residual))


def project(image: Tensor, block: Tensor, count: int) -> tuple[Eigenpairs, Tensor]:
    """Return the leading pairs of K restricted to the span of X (Rayleigh–Ritz), and KX for the next product.

    Args:
        image: KX, (..., n, b).
        block: X, (..., n, b), orthonormal but for columns that are zero.
        count: L.
    """
    small = block.mT @ image
    values, turned = eigh(0.5 * (small + small.mT))
    values, turned = values[..., -count:].flip(-1), turned[..., -count:].flip(-1)
    vectors = block @ turned
    left = torch.linalg.vector_norm(image @ turned - vectors * values.unsqueeze(-2), dim=-2).amax(-1)
    values = values.clamp_min(0.0)
    return Eigenpairs(values, vectors, left / values[..., 0].clamp_min(torch.finfo(torch.float64).tiny)), image


def orthonormalize(block: Tensor, passes: int = 2) -> Tensor:
    """Return orthonormal columns with the same span; columns without content of their own are zero or rounding.

    The second pass repairs what the shift of the first has cost.
    """
    for _ in range(passes):
        gram = block.mT @ block
        with one_thread() if _is_small(gram) else nullcontext():
            turn = _whitening(gram.cpu() if _is_small(gram) else gram)
        block = block @ turn.to(gram.device)
    return block


def _whitening(gram: Tensor) -> Tensor:
    """Return T with XT orthonormal for columns X with a given Gram, (..., b, b)."""
    tiny, eps = torch.finfo(gram.dtype).tiny, torch.finfo(gram.dtype).eps
    shrink = gram.diagonal(dim1=-2, dim2=-1).clamp_min(tiny).rsqrt()
    unit = gram * shrink.unsqueeze(-1) * shrink.unsqueeze(-2)
    unit.diagonal(dim1=-2, dim2=-1).add_(16 * gram.shape[-1] * eps)
    lower, eye = torch.linalg.cholesky_ex(unit).L, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return inverse.mT * shrink.unsqueeze(-1)
