"""Protocols of per-example gradients, for steps that need not know how they are held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["GradientOperator", "Segment", "SegmentRows"]


class SegmentRows(Protocol):
    """Rows G (R, n) of some columns; those of a batch of problems have its dimensions in front of every result."""

    @property
    def space(self) -> Tensor | None:
        """G and below it the factor's rows in one tensor, (R + L, n), if they are."""

    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (n,)."""

    def gram(self) -> Tensor:
        """G Gᵀ, (R, R)."""

    def mm(self, rows: Tensor) -> Tensor:
        """G Cᵀ for C given by its K rows, (K, n) → (R, K)."""

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, n) tensor."""

    def form(self) -> Tensor:
        """G itself, (R, n)."""


class Segment(NamedTuple):
    """Consecutive columns of all rows.

    Args:
        columns: place in the flat vector.
        rows: their rows.
    """

    columns: slice
    rows: SegmentRows


class GradientOperator(Protocol):
    """Per-example gradients G of a step, (R, P), handed out in segments of the flat vector.

    Rows are gradients of the *negative* log-likelihood of one example at one sample of the weights.
    """

    @property
    def num_rows(self) -> int:
        """Examples at samples that the gradients are of."""

    @property
    def height(self) -> int:
        """R, rows that are there: fewer where some stand for all. GᵀG has the same expectation, or is the same."""

    @property
    def scale(self) -> float:
        """Number that rows of segments are to be multiplied by."""

    @property
    def spectrum_route(self) -> str:
        """The route wished for, see `Routes.spectrum`."""

    def sum(self) -> Tensor:
        """Σ_r g_r of all examples, (P,), in memory that is the caller's."""

    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (P,)."""

    def form(self) -> Tensor:
        """G itself, (R, P); only for few parameters."""

    def segments(self, cuts: Sequence[int] = (), below: Tensor | None = None) -> Iterable[Segment]:
        """Return all columns in turn, some at a time.

        Args:
            cuts: columns at which a segment has to end.
            below: the factor by rows, (L, P), for `SegmentRows.space`.
        """
