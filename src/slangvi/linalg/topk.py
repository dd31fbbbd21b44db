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

from slangvi.linalg.lowrank import gram_float64
from slangvi.types import GradientOperator

__all__ = ["TopFactor", "top_factor"]


class TopFactor(NamedTuple):
    """What `top_factor` returns.

    Args:
        factor: U⁺ by rows, (..., L, P).
        spectrum: the L leading eigenvalues, largest first, (..., L).
        total: trace of a·UUᵀ + b·GᵀG, i.e. the sum of all eigenvalues, (...).
    """

    factor: Tensor
    spectrum: Tensor
    total: Tensor


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
    old = _sqrt(keep) * factor
    if size < rank + gradients.num_rows:
        return _through_parameters(old, gradients, _sqrt(gain))
    return _through_rows(old, gradients, gain, gain_per_tensor)


def _through_rows(
    old: Tensor, gradients: GradientOperator, gain: float | Tensor, gain_per_tensor: Tensor | None
) -> TopFactor:
    """By the eigenvectors of the (L+R)×(L+R) Gram."""
    rank, gain_root = old.shape[-2], _sqrt(gain)
    cross = gradients.mm(old * gain_root)
    gram = gradients.gram() * gain if gain_per_tensor is None else gradients.gram(gain_per_tensor)
    values, vectors, total = _leading(_bordered(gram_float64(old), cross, gram), rank)
    weights = vectors.to(old.dtype)
    new = weights[..., :rank, :].mT @ old + gradients.t_mm(weights[..., rank:, :]) * gain_root
    return TopFactor(new, values.to(old.dtype), total.to(old.dtype))


def _through_parameters(old: Tensor, gradients: GradientOperator, gain_root: float | Tensor) -> TopFactor:
    """By the eigenvectors of the P×P matrix itself; ranks beyond P are filled with zeros."""
    rank, size = old.shape[-2:]
    rows = gradients.form() * gain_root
    matrix = gram_float64(old.mT) + gram_float64(rows.mT)
    values, vectors, total = _leading(matrix, min(rank, size))
    new = (vectors * values.sqrt().unsqueeze(-2)).mT.to(old.dtype)
    missing = rank - new.shape[-2]
    values = F.pad(values, (0, missing))
    return TopFactor(F.pad(new, (0, 0, 0, missing)), values.to(old.dtype), total.to(old.dtype))


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest eigenvalues (clamped at 0) and their vectors, largest first, and the sum of all."""
    values, vectors = torch.linalg.eigh(matrix)
    first = values.shape[-1] - rank
    return values[..., first:].flip(-1).clamp_min(0.0), vectors[..., first:].flip(-1), values.sum(-1)


def _bordered(corner: Tensor, cross: Tensor, gram: Tensor) -> Tensor:
    """[[corner, crossᵀ], [cross, gram]] in float64: (..., L+R, L+R)."""
    cross, gram = cross.to(torch.float64), gram.to(torch.float64)
    upper = torch.cat([corner, cross.mT], dim=-1)
    return torch.cat([upper, torch.cat([cross, gram], dim=-1)], dim=-2)


def _sqrt(value: float | Tensor) -> float | Tensor:
    return value.sqrt() if isinstance(value, Tensor) else value**0.5
