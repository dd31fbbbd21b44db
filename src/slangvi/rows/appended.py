"""Per-example gradients with other rows below them, such as the factor of a prior's precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slangvi.linalg.products import column_squares, gram_float64, rows_dot
from slangvi.rows.operator import GradientOperator, Segment, SegmentRows

__all__ = ["append_rows"]


def append_rows(gradients: GradientOperator, others: Tensor | None, weight: Any) -> GradientOperator:
    """Return gradients with other rows below, for steps in which squared rows have a weight and the others none.

    Args:
        gradients: G, (R, P).
        others: C, (K, P), which is not copied; None for no more rows.
        weight: number w, so that w times the result squared is w GᵀG + CᵀC.
    """
    return gradients if others is None else AppendedGradients(gradients, others, weight**-0.5)


class AppendedGradients:
    """Gradients of all columns; the sum is that of the gradients alone, and so is the number of rows it is of.

    Args:
        gradients: G, (R, P).
        others: C, (K, P).
        factor: number that C is multiplied by.
    """

    def __init__(self, gradients: GradientOperator, others: Tensor, factor: float) -> None:
        self.gradients, self.others, self.factor = gradients, others, factor
        self.num_rows, self.height = gradients.num_rows, gradients.height + len(others)
        self.scale, self.spectrum_route = gradients.scale, gradients.spectrum_route

    def sum(self) -> Tensor:
        """Return Σ_r g_r, (P,)."""
        return self.gradients.sum()

    def square_sum(self) -> Tensor:
        """Return the squares of all rows, added up, (P,)."""
        return torch.add(self.gradients.square_sum(), column_squares(self.others), alpha=self.factor**2)

    def form(self) -> Tensor:
        """Return all rows, (R + K, P)."""
        return torch.cat([self.gradients.form(), self.others * self.factor])

    def segments(self, cuts: Sequence[int] = (), below: Tensor | None = None) -> Iterator[Segment]:
        """Yield all columns in turn, as many at a time as of the gradients alone."""
        for columns, rows in self.gradients.segments(cuts, below):
            yield Segment(columns, AppendedRows(rows, self.others[:, columns], self.factor / self.scale))


class AppendedRows:
    """Rows of some columns, with others below.

    Args:
        rows: G, (R, n).
        others: C, (K, n).
        factor: number that C is multiplied by.
    """

    space = None

    def __init__(self, rows: SegmentRows, others: Tensor, factor: float) -> None:
        self.rows, self.others, self.factor = rows, others, factor

    def square_sum(self) -> Tensor:
        """Return the squares of all rows, added up, (n,)."""
        return torch.add(self.rows.square_sum(), column_squares(self.others), alpha=self.factor**2)

    def gram(self) -> Tensor:
        """Return the inner products of all rows, (R + K, R + K), in float64."""
        cross, own = self.rows.mm(self.others).double() * self.factor, gram_float64(self.others) * self.factor**2
        return torch.cat([torch.cat([self.rows.gram().double(), cross], 1), torch.cat([cross.mT, own], 1)])

    def mm(self, rows: Tensor) -> Tensor:
        """Return the inner products of all rows with U (L, n), (R + K, L), in float64."""
        own = rows_dot(self.others, rows, torch.float64) * self.factor
        return torch.cat([self.rows.mm(rows).double(), own])

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ times all rows for W (R + K, L) to an (L, n) tensor."""
        upper, lower = weights.split([len(weights) - len(self.others), len(self.others)])
        self.rows.add_t_mm(upper, onto)
        onto += (lower * self.factor).mT @ self.others

    def form(self) -> Tensor:
        """Return all rows, (R + K, n)."""
        return torch.cat([self.rows.form(), self.others * self.factor])
