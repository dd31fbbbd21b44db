r"""Warm-started subspace iteration: X ← orthonormalise(KX), then Rayleigh–Ritz.

K is seen only through the product X ↦ KX, which may be a matrix or an operator. Nothing here waits for the device
except `ritz`, whose small eigenproblem (L + OVERSAMPLING rows) is solved on the CPU: it is far below the size at which
a GPU is any faster.

After k products the angle to the leading L vectors has shrunk by (λ_{L+OVERSAMPLING+1}/λ_L)^k. One step of SLANG moves
K by a share β only, so the previous factor, which lies along the first L coordinates, is close already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.linalg.cholesky import lower_factor
from slangvi.linalg.constants import constant

__all__ = [
    "OVERSAMPLING",
    "Pursued",
    "Ritz",
    "filtered",
    "orthonormal",
    "projected",
    "pursued",
    "ritz",
    "sharpened",
    "starting_block",
]

Apply = Callable[[Tensor], Tensor]

# Vectors beyond the L asked for: they speed up convergence, and find what the previous factor lacks.
OVERSAMPLING = 4
# How much chance is mixed into the coordinates of the previous factor. Without it an old factor made of exact
# eigenvectors would never show that others have overtaken it.
_CHANCE = 0.1
# A zero of T₃(x) = 4x³ − 3x.
_ZERO = 3**0.5 / 2
# Edge of a filter relative to the largest eigenvalue, below which that one would grow so much that others are lost
# beside it. There powers of K tell eigenvalues apart quickly anyway.
_STEEP = 1e-4
# Directions of a basis that are this many roundings long are not there.
_ROUNDING = 1e3


class Ritz(NamedTuple):
    """Leading pairs of K restricted to the span of X.

    Args:
        values: θ, largest first, clamped at 0, (..., L).
        inner: coordinates of the Ritz vectors in X, (..., b, L).
        residual: largest ‖Ky − θy‖ of the L pairs, (...).
        edge: the smallest θ of all of X, above which lies what `filtered` is to bring out; 0 where that would do harm,
            because it is too small beside the largest or X has directions within its rounding, (...).
    """

    values: Tensor
    inner: Tensor
    residual: Tensor
    edge: Tensor


@constant
def starting_block(
    size: int, count: int, known: int, dtype: torch.dtype, device: torch.device, extra: int = OVERSAMPLING
) -> Tensor:
    """Orthonormal (n, L + extra): the first `known` coordinates with a little chance, and random vectors.

    The random numbers come from a source of their own, so that no random state is involved.
    """
    source = torch.Generator().manual_seed(0)
    here: dict[str, Any] = {"dtype": torch.float64, "device": source.device}
    block = torch.randn(size, count + extra, generator=source, **here) / size**0.5
    block[:, :known] *= _CHANCE
    block[:known, :known] += torch.eye(known, **here)
    basis: Tensor = torch.linalg.qr(block).Q
    return basis.to(device, dtype)


def sharpened(apply: Apply, block: Tensor, steps: int) -> Tensor:
    """The block after `steps` products. Columns are straightened in between; `ritz` does not need them orthonormal."""
    block = apply(block)
    for _ in range(steps - 1):
        block = apply(_straightened(block))
    return block


def filtered(apply: Apply, block: Tensor, edge: Tensor, times: int = 2) -> Tensor:
    r"""The block after a Chebyshev polynomial of K, which tells eigenvalues apart that powers of K hardly do.

    $$ X \leftarrow T_3\bigl((1 + z) K / e - z\bigr) X, \qquad T_3(x) = 4x^3 - 3x, \quad T_3(-z) = 0 $$

    Eigenvalues up to e stay within ±1, those above grow; 0 goes to 0, so that what K does not have is gone at once.

    Args:
        apply: X ↦ KX.
        block: X, (..., n, b).
        edge: e > 0, (...).
        times: how often; three products each.
    """
    scale = (1.0 + _ZERO) / edge[..., None, None]
    for _ in range(times):
        block = _straightened(block)
        once = apply(block) * scale - _ZERO * block
        twice = 2.0 * (apply(once) * scale - _ZERO * once) - block
        block = 2.0 * (apply(twice) * scale - _ZERO * twice) - once
    return block


def orthonormal(block: Tensor) -> Tensor:
    """Columns with the same span, orthonormal to rounding where they are not dependent."""
    return _straightened(_straightened(block))


def _straightened(block: Tensor) -> Tensor:
    """Columns with the same span, orthonormal up to rounding times their condition; applied twice, exactly so.

    The shift, relative to each column's length, keeps the factorisation alive when columns are dependent; what it costs
    is repaired by the second time. Columns without content stay zero.
    """
    if block.shape[-1] == 1:
        length: Tensor = torch.linalg.vector_norm(block, dim=-2, keepdim=True)
        return block / length.clamp_min(torch.finfo(block.dtype).tiny ** 0.5)  # below that its square is none
    gram = block.mT @ block
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal.mul_(1.0 + 16 * block.shape[-1] * torch.finfo(block.dtype).eps).add_(torch.finfo(block.dtype).tiny)
    factor, _ = lower_factor(gram)
    straight: Tensor = torch.linalg.solve_triangular(factor.mT, block, upper=True, left=False)
    return straight


class Pursued(NamedTuple):
    """Columns that nearly span the leading space, and what shows how nearly.

    Args:
        vectors: X, (n, L).
        small: XᵀKX, whose eigenvalues are theirs, (L, L).
        left: ‖KX − X(XᵀKX)‖ of each column, (L,).
        gram: XᵀX, (L, L).
    """

    vectors: Tensor
    small: Tensor
    left: Tensor
    gram: Tensor


def pursued(apply: Apply, block: Tensor, rounds: int) -> Pursued:
    """The leading L vectors without Rayleigh–Ritz, for when the start is good and nothing may wait.

    Two products between straightenings: the columns of a good start are close to single eigenvectors, so that lengths
    are all that sets them apart.

    Args:
        apply: X ↦ KX.
        block: start, one column for each pair asked for, (n, L).
        rounds: of two products each.

    Returns:
        The vectors, and what shows how good they are.
    """
    for _ in range(rounds):
        block = _straightened(apply(apply(block)))
    image = apply(block)
    small = _products(block, image)
    left: Tensor = torch.linalg.vector_norm(image.addmm_(block, small, alpha=-1), dim=0)
    return Pursued(block, small, left, _products(block, block))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB; for one column each a GPU's libraries take longer over it than over a large matrix."""
    return (a * b).sum(-2, keepdim=True) if a.shape[-1] == b.shape[-1] == 1 else a.mT @ b


def projected(apply: Apply, block: Tensor) -> Tensor:
    """What `ritz` needs: XᵀX, XᵀKX and XᵀK²X, (..., 3, b, b) in float64."""
    image, block = apply(block).to(torch.float64), block.to(torch.float64)
    return torch.stack([block.mT @ block, block.mT @ image, image.mT @ image], dim=-3)


def ritz(small: Tensor, count: int) -> Ritz:
    """Leading pairs from `projected`: y = Xw with wᵀ(XᵀX)w = 1, ‖Ky − θy‖² = wᵀ(XᵀK²X)w − θ².

    Columns are brought to length one before XᵀX is decomposed. Directions within its rounding are left out, w = 0 and
    θ = 0: their values would be noise that can be larger than what is looked for. What rounding leaves of the residual
    counts with either sign, for the same reason.

    The formula holds for θ = yᵀKy, which is what a K that is symmetric up to rounding only has both halves for.
    """
    gram, first, second = small.cpu().unbind(-3)
    first = 0.5 * (first + first.mT)
    info = torch.finfo(gram.dtype)
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(info.tiny).sqrt()
    scale = 1.0 / (lengths.unsqueeze(-1) * lengths.unsqueeze(-2))
    sizes, axes = torch.linalg.eigh(gram * scale)
    there = sizes > _ROUNDING * gram.shape[-1] * info.eps
    white = axes * torch.where(there, sizes.clamp_min(info.tiny).rsqrt(), 0.0).unsqueeze(-2)
    values, turned = torch.linalg.eigh(white.mT @ (first * scale) @ white)
    edge = torch.where((values[..., 0] > _STEEP * values[..., -1]) & there.all(-1), values[..., 0], 0.0)
    values, turned = values[..., -count:].flip(-1), turned[..., -count:].flip(-1)
    inner = white @ turned
    square = (inner * ((second * scale) @ inner)).sum(-2) - values.square()
    residual = square.abs().amax(-1).sqrt()
    found = (values.clamp_min(0.0), inner / lengths.unsqueeze(-1), residual, edge)
    return Ritz(*(x.to(small.device) for x in found))
