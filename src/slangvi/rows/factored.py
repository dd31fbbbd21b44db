"""All rows of a step, parameter by parameter, handed out in segments of the flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.params import ParamSpec
from slangvi.rows.blocks import Block, Formed, stack
from slangvi.types import Routes

__all__ = ["FactoredGradients", "Joined", "RowGroup", "Segment"]

# Most columns of a segment, whatever its rows take.
MOST_COLUMNS = 1 << 24
# On a CPU, temporaries that are used twice in a row should still be in its cache the second time.
CACHE_BYTES = 1 << 21


@dataclass(frozen=True)
class RowGroup:
    """Rows that came from one backward pass: M examples at one sample of the weights.

    Args:
        num_rows: M.
        blocks: canonical parameter name → its gradients; a parameter that is not listed has zero gradient.
        totals: canonical parameter name → Σ_r g_r as autograd computed it, same shape as the parameter; may be empty,
            the blocks are then summed.
        scale: what all of them are to be multiplied by.
        num_chosen: K, rows of the blocks where they are of some examples only; `totals` are of all M examples then, and
            must be there.
    """

    num_rows: int
    blocks: Mapping[str, Block]
    totals: Mapping[str, Tensor]
    scale: float = 1.0
    num_chosen: int | None = None

    @property
    def height(self) -> int:
        """Rows of the blocks."""
        return self.num_rows if self.num_chosen is None else self.num_chosen

    @property
    def row_scale(self) -> float:
        """What rows are to be multiplied by, so that K of them have the second moments of all M in expectation."""
        return self.scale * math.sqrt(self.num_rows / max(1, self.height))

    def scaled(self, factor: float) -> RowGroup:
        """Return every gradient times a number; nothing is computed yet."""
        return replace(self, scale=self.scale * factor)


class Joined:
    """Rows of several parameters side by side, with the products that a step takes of them.

    Args:
        parts: place of each parameter in the columns, and its rows; columns without a parameter are zero.
        height: R.
        width: number of columns.
        like: tensor whose dtype and device the results have.
        chunk_bytes: largest temporary of a product.
    """

    def __init__(
        self, parts: Sequence[tuple[slice, Block]], height: int, width: int, like: Tensor, chunk_bytes: int = 1 << 26
    ) -> None:
        self.parts, self.height, self.width, self.like, self.chunk_bytes = parts, height, width, like, chunk_bytes

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (n,)."""
        found = self.like.new_zeros(self.width)
        for columns, block in self.parts:
            found[columns] = block.square_sum()
        return found

    def gram(self) -> Tensor:
        """Return G Gᵀ, (R, R)."""
        found = self.like.new_zeros(self.height, self.height)
        for _, block in self.parts:
            found += block.gram()
        return found

    def mm(self, rows: Tensor) -> Tensor:
        """Return G Cᵀ, (K, n) → (R, K)."""
        found = self.like.new_zeros(self.height, len(rows))
        for columns, block in self.parts:
            for some in self._columns_at_once(block, len(rows)):
                found[:, some] += block.mm(rows[some, columns])
        return found

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, n) tensor."""
        for columns, block in self.parts:
            for some in self._columns_at_once(block, len(onto)):
                block.add_t_mm(weights[:, some], onto[some, columns])

    def _columns_at_once(self, block: Block, count: int) -> list[slice]:
        """Return slices of the other operand's columns whose temporaries are as small as they have to be."""
        limit = min(CACHE_BYTES, self.chunk_bytes) if self.like.device.type == "cpu" else self.chunk_bytes
        step = max(1, limit // max(1, block.temporary * self.like.element_size()))
        return [slice(start, start + step) for start in range(0, count, step)]

    def form(self) -> Tensor:
        """Return G itself, (R, n)."""
        if len(self.parts) == 1 and self.parts[0][0] == slice(0, self.width):
            return self.parts[0][1].form()
        rows = self.like.new_zeros(self.height, self.width)
        for columns, block in self.parts:
            rows[:, columns] = block.form()
        return rows

    def pieces(self, most: int) -> Iterator[tuple[slice, Joined]]:
        """Yield all columns in turn, about `most` at a time, as the blocks can be parted.

        Args:
            most: columns of a piece.
        """
        ends = {self.width}
        for columns, block in self.parts:
            step = max(1, most // block.grain) * block.grain
            ends |= {columns.start, *range(columns.start + step, columns.stop, step)}
        start, ordered = 0, sorted(ends - {0})
        for end, following in zip(ordered, [*ordered[1:], math.inf], strict=True):
            if following - start > most:  # small parameters stay together
                yield slice(start, end), self.narrow(start, end)
                start = end

    def narrow(self, start: int, stop: int) -> Joined:
        """Return some columns; blocks are cut at multiples of their `grain`."""
        parts = []
        for columns, block in self.parts:
            first, last = max(columns.start, start), min(columns.stop, stop)
            if first < last:
                piece = block.narrow(first - columns.start, last - columns.start)
                parts.append((slice(first - start, last - start), piece))
        return Joined(parts, self.height, stop - start, self.like, self.chunk_bytes)


class Segment(NamedTuple):
    """Consecutive columns of all rows.

    Args:
        columns: place in the flat vector.
        rows: their rows.
    """

    columns: slice
    rows: Joined


class FactoredGradients:
    """Per-example gradients G of a step, (R, P), kept parameter by parameter.

    Args:
        spec: layout of the flat vector.
        groups: rows, one group per backward pass.
        like: tensor whose dtype and device the results have.
        routes: what to form and how large temporaries may be; None leaves all as factors that can be.
    """

    def __init__(self, spec: ParamSpec, groups: Sequence[RowGroup], like: Tensor, routes: Routes | None = None) -> None:
        self.spec, self.like, self.routes = spec, like, routes or Routes()
        self.groups = groups
        self.num_rows = sum(group.num_rows for group in groups)
        self.height = sum(group.height for group in groups)
        scales = {group.row_scale for group in groups}
        # One scale for all rows goes to the results, which are small; different ones must go to the rows.
        self.scale = scales.pop() if len(scales) == 1 else 1.0
        stacked = ((name, _stack_named(name, groups, bool(scales), like)) for name in spec.names)
        self.blocks = {name: block for name, block in stacked if block is not None}
        self._kept: dict[tuple[int, ...], list[Segment]] = {}

    @property
    def spectrum_route(self) -> str:
        """The route wished for, see `Routes.spectrum`."""
        return self.routes.spectrum

    def is_formed(self, name: str) -> bool:
        """Tell whether the rows of a parameter are formed, because they have to be or `routes` says so."""
        return not self.blocks[name].is_factored or self.routes.layer(name) == "form"

    @property
    def costs(self) -> tuple[int, int]:
        """Counted multiplications of the Gram, and of a product with one column."""
        counts = [
            (self.height**2 * block.num_params, self.height * block.num_params) if self.is_formed(name) else block.costs
            for name, block in self.blocks.items()
        ]
        return sum(gram for gram, _ in counts), sum(column for _, column in counts)

    def sum(self) -> Tensor:
        """Return Σ_r g_r of all examples, (P,)."""
        found = self.like.new_zeros(self.spec.num_params)
        known = all(group.totals for group in self.groups)
        for group in self.groups if known else ():
            for name, total in group.totals.items():
                found[self.spec.slices[name]].add_(total.reshape(-1), alpha=group.scale)
        for name, block in self.blocks.items():
            if not known or all(name not in group.totals for group in self.groups):
                found[self.spec.slices[name]] = block.sum() * self.scale
        return found

    def segments(self, cuts: Sequence[int] = ()) -> Iterator[Segment]:
        """Yield all columns in turn, some at a time; rows that are formed for it are kept only if all of them are few.

        Args:
            cuts: columns, ends of parameter tensors, at which a segment has to end.
        """
        if (kept := self._kept.get(tuple(cuts))) is not None:
            yield from kept
            return
        formed = sum(block.num_params for name, block in self.blocks.items() if self.is_formed(name))
        keeps, found = formed * self._column_bytes <= self.routes.form_bytes, []
        for columns, parts, forms in self._plan(set(cuts)):
            segment = Segment(columns, self._join(parts, forms, columns.stop - columns.start))
            if keeps:
                found.append(segment)
            yield segment
        if keeps:
            self._kept[tuple(cuts)] = found

    def _join(self, parts: Sequence[tuple[slice, Block]], forms: Sequence[bool], width: int) -> Joined:
        """Return the rows of a segment; those that are to be formed in one tensor, where all are."""
        covered = sum(columns.stop - columns.start for columns, _ in parts)
        if len(parts) > 1 and all(forms) and covered == width:
            whole = Joined(parts, self.height, width, self.like).form()
            parts = [(slice(0, width), Formed(whole))]
        else:
            pairs = zip(parts, forms, strict=True)
            parts = [(columns, Formed(block.form()) if form else block) for (columns, block), form in pairs]
        return Joined(parts, self.height, width, self.like, self.routes.chunk_bytes)

    @property
    def _column_bytes(self) -> int:
        return max(1, self.height) * self.like.element_size()

    def _plan(self, cuts: set[int]) -> Iterator[tuple[slice, list[tuple[slice, Block]], list[bool]]]:
        """Yield the columns of each segment, its parts, and whether each is to be formed."""
        most = max(1, min(MOST_COLUMNS, self.routes.form_bytes // self._column_bytes))
        start, parts, forms, formed = 0, list[tuple[slice, Block]](), list[bool](), 0
        for name in self.spec.names:
            columns, block = self.spec.slices[name], self.blocks.get(name)
            forms_it = block is not None and self.is_formed(name)
            grain = 1 if block is None else block.grain
            step = max(1, (most if forms_it else MOST_COLUMNS) // grain) * grain
            for at in range(columns.start, columns.stop, step):
                end = min(at + step, columns.stop)
                full = end - start > MOST_COLUMNS or (forms_it and formed + end - at > most)
                if at > start and (full or at in cuts):
                    yield slice(start, at), parts, forms
                    start, parts, forms, formed = at, [], [], 0
                if block is not None:
                    parts.append(
                        (slice(at - start, end - start), block.narrow(at - columns.start, end - columns.start))
                    )
                    forms.append(forms_it)
                    formed += end - at if forms_it else 0
        if self.spec.num_params > start:
            yield slice(start, self.spec.num_params), parts, forms

    # ---- products with all columns, for methods that need no more

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (P,)."""
        return torch.cat([segment.rows.square_sum() for segment in self.segments()]).mul_(self.scale**2)

    def form(self) -> Tensor:
        """Return G itself, (R, P); only for few parameters."""
        return torch.cat([segment.rows.form() for segment in self.segments()], 1) * self.scale


def _stack_named(name: str, groups: Sequence[RowGroup], scales: bool, like: Tensor) -> Block | None:
    """Return all rows of one parameter, scaled if scales differ; groups that did not use it have zero rows."""
    first = next((group.blocks[name] for group in groups if name in group.blocks), None)
    if first is None:
        return None
    parts = [group.blocks.get(name) or first.zero_rows(group.height, like) for group in groups]
    if scales:
        parts = [part.scaled(group.row_scale) for part, group in zip(parts, groups, strict=True)]
    return stack(parts)
