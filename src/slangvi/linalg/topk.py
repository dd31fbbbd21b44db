r"""Best rank-L factor of a·UUᵀ + b·GᵀG, where G is seen only as an operator.

With C = [√a U, √b G] stacked by rows, the nonzero spectrum of CᵀC (P×P) is that of the small Gram CCᵀ ((L+R)×(L+R)).
Its leading eigenvectors W give the new factor directly as WᵀC: no division by eigenvalues, so zero and repeated
directions need no care. With few parameters, P < L+R, the P×P matrix is the smaller one and is used instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.linalg.krylov import Eigenpairs, leading_eigenpairs
from slangvi.linalg.lowrank import gram_float64
from slangvi.types import GradientOperator

__all__ = ["TopFactor", "top_factor"]

# Residual allowed relative to the largest eigenvalue: far below the 1e-4 that float32 promises, far above its rounding.
# In float64 the full decomposition keeps the last digits.
_TOLERANCE = {torch.float32: 1e-6}


class TopFactor(NamedTuple):
    """What `top_factor` returns.

    Args:
        factor: U⁺ by rows, (..., L, P).
        spectrum: the L leading eigenvalues, largest first, (..., L).
        total: trace of a·UUᵀ + b·GᵀG, i.e. the sum of all eigenvalues, (...).
        residual: bound on the error of the leading pairs relative to the largest eigenvalue; 0 when the full
            decomposition was used, (...).
    """

    factor: Tensor
    spectrum: Tensor
    total: Tensor
    residual: Tensor


def top_factor(
    factor: Tensor,
    gradients: GradientOperator,
    keep: float | Tensor,
    gain: float | Tensor,
    gain_per_tensor: Tensor | None = None,
) -> TopFactor:
    r"""Leading L eigenpairs of A = a·UUᵀ + b·GᵀG as a factor, U⁺U⁺ᵀ = best rank-L approximation of A.

    Args:
        factor: U by rows, (..., L, P).
        gradients: operator G with R rows.
        keep: a ≥ 0; a (P,) tensor weighs columns, A = √a UUᵀ √a + …
        gain: b ≥ 0; likewise.
        gain_per_tensor: the same b with one number per parameter tensor, needed when `gain` is a tensor.

    Example:
        >>> from slangvi.grads.dense import DenseGradients
        >>> rows = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> top = top_factor(torch.zeros(1, 2), DenseGradients.from_rows(rows), keep=0.5, gain=1.0)
        >>> top.factor.abs(), top.spectrum, top.total
        (tensor([[2., 0.]]), tensor([4.]), tensor(5.))
    """
    rank, size = factor.shape[-2:]
    if size < rank + gradients.num_rows:
        return _through_parameters(_sqrt(keep) * factor, gradients, _sqrt(gain))
    return _through_rows(factor, gradients, keep, gain, gain_per_tensor)


def _through_rows(
    factor: Tensor,
    gradients: GradientOperator,
    keep: float | Tensor,
    gain: float | Tensor,
    gain_per_tensor: Tensor | None,
) -> TopFactor:
    """By the eigenvectors of the (L+R)×(L+R) Gram. Numbers scale the small matrices, vectors the columns."""
    if isinstance(keep, Tensor):
        factor, keep = keep.sqrt() * factor, 1.0
    columns, gain = (gain.sqrt(), 1.0) if isinstance(gain, Tensor) else (1.0, gain)
    rank, a, b = factor.shape[-2], keep**0.5, gain**0.5
    cross = gradients.mm(factor * columns if isinstance(columns, Tensor) else factor) * (a * b)
    gram = gradients.gram() * gain if gain_per_tensor is None else gradients.gram(gain_per_tensor)
    small = _bordered(gram_float64(factor) * keep, cross, gram)
    pairs = leading_eigenpairs(small, rank, _TOLERANCE.get(factor.dtype, 0.0), start=rank)
    weights = pairs.vectors.to(factor.dtype)
    new = gradients.t_mm(weights[..., rank:, :] * b)
    if isinstance(columns, Tensor):
        new = new * columns
    return _top(new + (weights[..., :rank, :] * a).mT @ factor, pairs, small)


def _through_parameters(old: Tensor, gradients: GradientOperator, gain_root: float | Tensor) -> TopFactor:
    """By the eigenvectors of the P×P matrix itself; ranks beyond P are filled with zeros."""
    rank, size = old.shape[-2:]
    rows = gradients.form() * gain_root
    matrix = gram_float64(old.mT) + gram_float64(rows.mT)
    pairs = leading_eigenpairs(matrix, min(rank, size))
    new = (pairs.vectors * pairs.values.sqrt().unsqueeze(-2)).mT.to(old.dtype)
    missing = rank - new.shape[-2]
    pairs = pairs._replace(values=F.pad(pairs.values, (0, missing)))
    return _top(F.pad(new, (0, 0, 0, missing)), pairs, matrix)


def _top(factor: Tensor, pairs: Eigenpairs, matrix: Tensor) -> TopFactor:
    """Results in the factor's dtype."""
    total = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    largest = pairs.values.amax(-1) if pairs.values.shape[-1] else torch.ones_like(total)
    residual = pairs.residual / largest.clamp_min(torch.finfo(largest.dtype).tiny)
    return TopFactor(factor, *(x.to(factor.dtype) for x in (pairs.values, total, residual)))


def _bordered(corner: Tensor, cross: Tensor, gram: Tensor) -> Tensor:
    """[[corner, crossᵀ], [cross, gram]] in float64: (..., L+R, L+R)."""
    cross, gram = cross.to(torch.float64), gram.to(torch.float64)
    upper = torch.cat([corner, cross.mT], dim=-1)
    return torch.cat([upper, torch.cat([cross, gram], dim=-1)], dim=-2)


def _sqrt(value: float | Tensor) -> float | Tensor:
    return value.sqrt() if isinstance(value, Tensor) else value**0.5
