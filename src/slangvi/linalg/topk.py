r"""Best rank-L factor of a·UUᵀ + b·GᵀG, where G is seen only as an operator.

With C = [√a U, √b G] stacked by rows, the nonzero spectrum of CᵀC (P×P) is that of the small Gram CCᵀ ((L+R)×(L+R)).
Its leading eigenvectors W give the new factor directly as WᵀC: no division by eigenvalues, so zero and repeated
directions need no care.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
    rank = factor.shape[-2]
    old = _sqrt(keep) * factor
    gain_root = _sqrt(gain)
    cross = gradients.mm(old * gain_root)
    gram = gradients.gram() * gain if gain_per_tensor is None else gradients.gram(gain_per_tensor)
    small = _bordered(gram_float64(old), cross, gram)
    values, vectors = torch.linalg.eigh(small)
    total = values.sum(-1)
    values = values[..., -rank:].flip(-1) if rank else values[..., :0]
    vectors = vectors[..., -rank:].flip(-1) if rank else vectors[..., :0]
    weights = vectors.to(factor.dtype)
    new = weights[..., :rank, :].mT @ old + gradients.t_mm(weights[..., rank:, :]) * gain_root
    return TopFactor(new, values.clamp_min(0.0).to(factor.dtype), total.to(factor.dtype))


def _bordered(corner: Tensor, cross: Tensor, gram: Tensor) -> Tensor:
    """[[corner, crossᵀ], [cross, gram]] in float64: (..., L+R, L+R)."""
    cross, gram = cross.to(torch.float64), gram.to(torch.float64)
    upper = torch.cat([corner, cross.mT], dim=-1)
    return torch.cat([upper, torch.cat([cross, gram], dim=-1)], dim=-2)


def _sqrt(value: float | Tensor) -> float | Tensor:
    return value.sqrt() if isinstance(value, Tensor) else value**0.5
