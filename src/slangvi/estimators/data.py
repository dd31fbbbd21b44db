"""Scales of columns and the order of rows, where a row may count for more or less than one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Array", "Scale", "held_out", "is_rounding", "moments", "order_of"]

Array = NDArray[Any]


def is_rounding(spread: Any, mean: Any) -> Any:
    """Return whether values with that standard deviation around that mean differ by rounding alone."""
    return spread <= 2.0 * np.spacing(np.abs(mean))  # steps between neighbouring floating-point numbers


def moments(values: Array, weights: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of columns (n, D), weights (n,) counting as repetitions.

    Where values differ by rounding alone the standard deviation is 0.
    """
    share = weights / weights.sum()
    constant = (values == values[0]).all(0)
    mean = share @ values
    # Sums of many rows are rounded; so is what they leave, but that is small.
    mean = np.where(constant, values[0], mean + share @ (values - mean))
    # Squares of very large or small numbers would overflow or vanish; powers of two change no digit.
    offsets = np.asarray(values - mean, dtype=np.float64)
    power = np.frexp(np.abs(offsets).max(0))[1]
    spread = np.ldexp(np.sqrt(share @ np.ldexp(offsets, -power) ** 2), power)
    mean = mean.astype(values.dtype)
    return mean, np.where(is_rounding(spread, mean), 0.0, spread)


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of every column, (D,) each; 1 where a column is constant up to rounding."""

    mean: Array
    scale: Array

    @classmethod
    def of(cls, values: Array, weights: Array) -> Scale:
        """Return the scale of columns (n, D) with weights (n,)."""
        mean, spread = moments(values, weights)
        return cls(mean, np.where(spread == 0, 1.0, spread).astype(values.dtype))

    @classmethod
    def none(cls, columns: int) -> Scale:
        """Return the scale that leaves values as they are."""
        return cls(np.zeros(columns), np.ones(columns))

    def apply(self, values: Array) -> Array:
        """Return (values − mean) / scale."""
        offsets: Array = values - self.mean
        offsets /= self.scale  # in place: tables may be large
        return offsets


def order_of(cumulative: Tensor, count: int, generator: torch.Generator) -> Tensor:
    r"""Return K row numbers for one pass over the data, each as often as its weight says, in random order.

    Row i comes ⌊K wᵢ/W⌋ or one more time among K, and K wᵢ/W times on average (systematic sampling). With equal
    weights and K = n that is a permutation; with whole weights and K = W, the rows repeated. `cumulative` is
    w₁, w₁ + w₂, …, W, (n,).
    """
    start = torch.rand((), generator=generator, dtype=cumulative.dtype)
    places = (torch.arange(count, dtype=cumulative.dtype) + start) * (cumulative[-1] / count)
    rows = torch.searchsorted(cumulative, places, right=True).clamp_max(len(cumulative) - 1)
    return rows[torch.randperm(count, generator=generator)]


def held_out(rows: int, count: int, labels: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the numbers of `count` rows to hold out; of every class its share, and not all of it if avoidable.

    Fewer than `count` are returned where classes would be lost. Labels are whole numbers from 0, (n,).
    """
    order = torch.randperm(rows, generator=generator)
    if labels is None:
        return order[:count]
    order = order[labels[order].argsort(stable=True)]  # class by class, and at random within each
    start = torch.rand((), generator=generator, dtype=torch.float64)
    picked = order[((torch.arange(count) + start) * (rows / count)).long().clamp_max(rows - 1)]
    left = labels.bincount() - labels[picked].bincount(minlength=int(labels.max()) + 1)
    spared = picked[left[labels[picked]] > 0]
    return spared if len(spared) else picked
