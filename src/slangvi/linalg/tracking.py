r"""The leading eigenspace of matrices that have moved a little, with a proof that it is the leading one.

For K symmetric positive semi-definite and X (n×L) orthonormal, Y = KX and S = XᵀY, the matrix in the basis [X, X⊥] is

    K = [ S  Eᵀ ]        ‖E‖ = ‖Y − XS‖ = ρ,
        [ E  B  ]        ‖B‖² = ‖K‖² − ‖S‖² − 2ρ²   (Frobenius),

and YS⁻¹Yᵀ has all of it but B − ES⁻¹Eᵀ. With r = ‖B‖/λ_min(S) < 1 nothing outside of X is among the leading L, whose
span is that of [X, X⊥]·[I; Z] with ‖Z‖ ≤ ρ/(λ_min(S) − ‖B‖) up to terms in ρ². The best approximation differs from
YS⁻¹Yᵀ by BZ in the two corners, at most √2·ρ·r/(1−r). A product X ← orthonormalise(KX) shrinks ρ by r. One step of
SLANG moves K by a share β only, so that r and the first ρ are of that size: two to four products give twelve digits.

Several matrices go through together. Those that are not done when the others are (the gap is small, S is singular, the
start was zero) are left to be decomposed in full. Nothing random is involved.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.linalg.products import product

__all__ = ["Tracked", "first_rounds", "tracked", "tracking_pays"]

# Products before the first look and until the second, at most.
_MOST_FIRST = 5
_MOST_ROUNDS = 12
# Entries of all matrices together, and rows of one, from which a decomposition in full takes longer than a few dozen
# small operations; a single vector needs fewer of these.
_FEW = 2000
_SHORT = 32
# What is below the rounding of ‖K‖² the difference ‖K‖² − ‖S‖² has lost.
_LOST = 8 * sys.float_info.epsilon
# Below this norm the squares of residuals at the tolerance are subnormal or zero, and lengths made of them too short.
_TINY = math.sqrt(sys.float_info.min) / sys.float_info.epsilon


class Tracked(NamedTuple):
    """What `tracked` returns.

    Args:
        rows: TYᵀ, (..., L, n): a factor, rowsᵀ rows = YS⁻¹Yᵀ, or orthonormal rows with the same span.
        small: S, whose eigenvalues are the leading ones of K, (..., L, L).
        errors: bound on the error of rowsᵀ rows relative to the largest eigenvalue, Inf without one; one for each
            matrix, in order. Where it is above the tolerance, rows and S are not to be used.
    """

    rows: Tensor
    small: Tensor
    errors: list[float]


def tracking_pays(lanes: int, size: int, count: int) -> bool:
    """Whether a few products with L columns take less time than decomposing so many n×n matrices in full."""
    return 0 < 4 * count < size and lanes * size * size >= _FEW and (count == 1 or size >= _SHORT)


def first_rounds(tolerance: float, share: float) -> int:
    """Products before the first look, when K has moved by a share: each gains about a factor of that size.

    Example:
        >>> first_rounds(1e-12, 1e-5), first_rounds(1e-12, 1.5e-3), first_rounds(1e-12, 0.5)
        (2, 4, 5)
    """
    if not 0.0 < share < 1.0:
        return _MOST_FIRST
    return min(max(math.ceil(math.log(tolerance) / math.log(share)) - 1, 1), _MOST_FIRST)


def tracked(matrix: Tensor, image: Tensor, tolerance: float, rounds: int, orthonormal: bool = False) -> Tracked:
    """A factor of the best rank-L approximation of K, from a start that is close.

    Args:
        matrix: K, float64, (..., n, n).
        image: KX for columns X that nearly span the leading space, (..., n, L).
        tolerance: wanted error relative to the largest eigenvalue.
        rounds: products before the first look, at least 1.
        orthonormal: return orthonormal rows that span the leading space, instead of the factor.

    Example:
        >>> K = torch.diag(torch.tensor([4.0, 0.1, 0.0], dtype=torch.float64))
        >>> found = tracked(K, K @ torch.tensor([[1.0], [0.1], [0.0]], dtype=torch.float64), 1e-12, 2)
        >>> found.errors[0] <= 1e-12, torch.round(found.rows.abs(), decimals=9)
        (True, tensor([[2., 0., 0.]], dtype=torch.float64))
    """
    whole = _norm(matrix)
    for look in range(2):
        for _ in range(rounds):
            basis = _straightened(image)
            image = product(matrix, basis)
        found, bounds = _look(whole, basis, image, orthonormal)
        rounds = 0 if look else _missing(bounds, tolerance)
        if rounds == 0:
            break
    return found


class _Bound(NamedTuple):
    """Bound on the relative error of a factor, and the share r of it that the next product leaves."""

    error: float
    slowness: float


_NONE = _Bound(math.inf, math.inf)


def _missing(bounds: list[_Bound], tolerance: float) -> int:
    """Products that the slowest still needs of those that will come to an end soon; 0 when there are none."""
    needed = [
        math.ceil(math.log(tolerance / error) / math.log(slowness))
        for error, slowness in bounds
        if tolerance < error < math.inf
    ]
    return max((n for n in needed if n <= _MOST_ROUNDS), default=0)


def _look(whole: Tensor, basis: Tensor, image: Tensor, orthonormal: bool) -> tuple[Tracked, list[_Bound]]:
    """What has been found, and how good it is; the only time that numbers are looked at."""
    small = product(basis.mT, image)
    left = torch.baddbmm(image, basis, small, alpha=-1) if image.ndim == 3 else image - basis @ small
    triangle, flaws = _inverse_root(product(image.mT, image) if orthonormal else small)
    rows = product(triangle, image.mT)
    if orthonormal:
        flaws.append(_norm(product(rows, rows.mT) - _eye(small)))
    lengths = [whole, _norm(small), _norm(left), _norm(triangle), *flaws]
    table = torch.stack(lengths, -1).view(-1, len(lengths)).tolist()
    bounds = [_bound(numbers, small.shape[-1], orthonormal) for numbers in table]
    return Tracked(rows, small, [bound.error for bound in bounds]), bounds


def _bound(numbers: list[float], count: int, orthonormal: bool) -> _Bound:
    """From ‖K‖, ‖S‖, ρ, ‖T‖ and what else may be wrong.

    ‖T‖² is at least 1/λ_min(S). Where T comes from YᵀY = S² + EᵀE, ‖T‖² is at least 1/(λ_min(S)² + ρ²), which serves
    as well, since 2ρ² is left in what is outside. ‖S‖/√L is at most the largest eigenvalue.
    """
    whole, size, left, inverse, *flaws = numbers
    outside = math.sqrt(max(whole * whole - size * size, 0.0) + _LOST * whole * whole)
    slowness, flaw = outside * (inverse if orthonormal else inverse * inverse), sum(flaws)
    if not (0.0 < slowness < 1.0 and size > _TINY and flaw < 1.0):
        return _NONE
    error = slowness / (1.0 - slowness) * left * math.sqrt(2 * count) / size + flaw
    return _Bound(error, slowness) if error >= 0.0 else _NONE


def _norm(matrix: Tensor) -> Tensor:
    """‖·‖ of matrices (..., m, n), (...)."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1))
    return norm


def _straightened(block: Tensor) -> Tensor:
    """Orthonormal columns with the same span. Where they are dependent the result is garbage, which the look tells."""
    if block.shape[-1] == 1:
        return block / _norm(block)[..., None, None]
    factor = torch.linalg.cholesky_ex(product(block.mT, block)).L
    straight: Tensor = torch.linalg.solve_triangular(factor.mT, block, upper=True, left=False)
    return straight


def _inverse_root(matrix: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Lower T with TᵀT = M⁻¹, and 1 or more where there is none, (...); a single number is not finite then."""
    if matrix.shape[-1] == 1:
        return matrix.rsqrt(), []
    factor, failed = torch.linalg.cholesky_ex(matrix)
    inverse = torch.linalg.solve_triangular(factor, _eye(matrix).expand_as(factor), upper=False)
    return inverse, [failed.to(matrix.dtype)]


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
