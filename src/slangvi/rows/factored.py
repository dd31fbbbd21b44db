"""All rows of a step, parameter by parameter, handed out in segments of the flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.params import ParamSpec
from slangvi.rows.blocks import Block, Formed, TableRows, stack
from slangvi.types import Routes

__all__ = ["FactoredGradients", "Joined", "RowGroup", "Segment"]

# Most columns of a segment, whatever its rows take.
MOST_COLUMNS = 1 << 24
# On a CPU, temporaries that are used twice in a row should still be in its cache the second time.
CACHE_BYTES = 1 << 21
# Bytes of formed rows that are always allowed.
LEAST_FORMED = 1 << 28
# It takes less time to form rows than to work with factors where there are so few entries, or on a GPU so few rows.
FEW_ENTRIES, FEW_ENTRIES_GPU, FEW_ROWS = 1 << 13, 1 << 20, 64


@dataclass(frozen=True)
class RowGroup:
    """Rows that came from one backward pass: M examples at one sample of the weights.

    Args:
        num_rows: M.
        blocks: canonical parameter name → its gradients; a parameter that is not listed has zero gradient.
        total: Σ_r g_r as autograd computed it, (P,); None if the blocks are to be summed.
        scale: what all of them are to be multiplied by.
        num_chosen: K, rows of the blocks where they are of some examples only; `total` is of all M examples then, and
            must be there.
    """

    num_rows: int
    blocks: Mapping[str, Block]
    total: Tensor | None = None
    scale: float = 1.0
    num_chosen: int | None = None

    @property
    def height(self) -> int:
        """Rows of the blocks."""
        return self.num_rows if self.num_chosen is None else self.num_chosen

    @property
    def row_scale(self) -> float:
        """Factor of the rows, by which K of them have the second moments of all M in expectation."""
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
        space: rows of the only part and below them those of the factor, in one tensor (R + L, n), if they are.
    """

    def __init__(
        self,
        parts: Sequence[tuple[slice, Block]],
        height: int,
        width: int,
        like: Tensor,
        chunk_bytes: int = 1 << 26,
        space: Tensor | None = None,
    ) -> None:
        self.parts, self.height, self.width, self.like, self.chunk_bytes = parts, height, width, like, chunk_bytes
        self.space = space

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
        space = None if self.space is None else self.space[:, start:stop]
        return Joined(parts, self.height, stop - start, self.like, self.chunk_bytes, space)


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
        self.is_formed = {name: self._forms(name) for name in self.blocks}
        self._memory: Tensor | None = None
        self._copied: tuple[Tensor | None, int | None] = (None, None)  # whose rows lie below those that are kept
        self._kept: dict[tuple[int, ...], list[Segment]] = {}
        self._plans: dict[tuple[int, ...], list[tuple[slice, list[tuple[slice, Block]], list[bool]]]] = {}

    @property
    def spectrum_route(self) -> str:
        """The route wished for, see `Routes.spectrum`."""
        return self.routes.spectrum

    def _forms(self, name: str) -> bool:
        """Tell whether the rows of a parameter are formed: they have to be, `routes` says so, or it is less work."""
        block, word = self.blocks[name], self.routes.layer(name)
        if word != "auto" or not block.is_factored:
            return word == "form" or not block.is_factored
        on_gpu, entries = self.like.is_cuda, block.num_rows * block.num_params
        is_low = on_gpu and block.num_rows <= FEW_ROWS and not isinstance(block, TableRows)
        return is_low or entries <= (FEW_ENTRIES_GPU if on_gpu else FEW_ENTRIES)

    @property
    def costs(self) -> tuple[int, int]:
        """Counted multiplications of the Gram, and of a product with one column."""
        counts = [
            (self.height**2 * block.num_params, self.height * block.num_params) if self.is_formed[name] else block.costs
            for name, block in self.blocks.items()
        ]
        return sum(gram for gram, _ in counts), sum(column for _, column in counts)

    def sum(self) -> Tensor:
        """Return Σ_r g_r of all examples, (P,)."""
        totals = [(group.total, group.scale) for group in self.groups if group.total is not None]
        if len(totals) == len(self.groups):
            (first, scale), *others = totals
            found = first * scale
            for total, scale in others:
                found.add_(total, alpha=scale)
            return found
        found = self.like.new_zeros(self.spec.num_params)
        for name, block in self.blocks.items():
            found[self.spec.slices[name]] = block.sum() * self.scale
        return found

    def segments(self, cuts: Sequence[int] = (), below: Tensor | None = None) -> Iterator[Segment]:
        """Yield all columns in turn, some at a time; rows that are formed for it are kept only if all of them are few.

        Others are in memory that the next segment takes.

        Args:
            cuts: columns, ends of parameter tensors, at which a segment has to end.
            below: rows (L, P) that are copied below formed ones, see `Joined.space`.
        """
        key = (*cuts, -1 if below is None else len(below))
        copied = below, None if below is None or below.is_inference() else below._version
        if self._copied[0] is not copied[0] or self._copied[1] != copied[1]:
            self._kept, self._copied = {}, copied
        if (kept := self._kept.get(key)) is not None:
            yield from kept
            return
        most, column_bytes, found = self._form_bytes(below), self._column_bytes(below), []
        if key not in self._plans:
            self._plans[key] = list(self._plan(set(cuts), most // column_bytes))
        formed = sum(block.num_params for name, block in self.blocks.items() if self.is_formed[name])
        keeps = formed * column_bytes <= most
        if not keeps and self._memory is None:
            self._memory = self.like.new_empty(most // self.like.element_size())
        for columns, parts, forms in self._plans[key]:
            segment = Segment(columns, self._join(columns, parts, forms, below, keeps))
            if keeps:
                found.append(segment)
            yield segment
        if keeps:
            self._kept[key] = found

    def _join(
        self,
        columns: slice,
        parts: Sequence[tuple[slice, Block]],
        forms: Sequence[bool],
        below: Tensor | None,
        keeps: bool,
    ) -> Joined:
        """Return the rows of a segment; neighbours that are to be formed are in one tensor."""
        width, space, taken = columns.stop - columns.start, None, 0
        found: list[tuple[slice, Block]] = []
        for is_formed, run in groupby(_runs(parts, forms), key=lambda entry: entry[0]):
            entries = [entry[1:] for entry in run]
            if is_formed < 0:
                found += entries
                continue
            start, stop = entries[0][0].start, entries[-1][0].stop
            count = 0 if below is None or stop - start < width else len(below)
            shape = (self.height + count, stop - start)
            whole = self.like.new_empty(shape) if keeps else self._reused(taken, shape)
            taken += whole.numel()
            rows = whole[: self.height]
            if count and below is not None:
                space, whole[self.height :] = whole, below[:, columns]
            places = [(rows[:, place.start - start : place.stop - start], block) for place, block in entries]
            given = [(place, block.rows) for place, block in places if isinstance(block, Formed)]
            if given:  # small ones, in one call
                torch._foreach_copy_([place for place, _ in given], [own for _, own in given])
            for place, block in places:
                if not isinstance(block, Formed):
                    block.form(place)
            found.append((slice(start, stop), Formed(rows)))
        return Joined(found, self.height, width, self.like, self.routes.chunk_bytes, space)

    def _reused(self, start: int, shape: tuple[int, int]) -> Tensor:
        """Return memory that all segments share, from an entry on."""
        size = start + shape[0] * shape[1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = self.like.new_empty(size)
        return self._memory[start:size].view(shape)

    def _column_bytes(self, below: Tensor | None) -> int:
        """Return the bytes of a column of formed rows."""
        return max(1, self.height + (0 if below is None else len(below))) * self.like.element_size()

    def _form_bytes(self, below: Tensor | None) -> int:
        """Return the bytes that formed rows may take: as `routes` says, or a share of what the state takes."""
        if self.routes.form_bytes is not None:
            return self.routes.form_bytes
        state = (0 if below is None else below.numel()) + 3 * self.spec.num_params
        return max(LEAST_FORMED, state * self.like.element_size() // 4)

    def _plan(self, cuts: set[int], most: int) -> Iterator[tuple[slice, list[tuple[slice, Block]], list[bool]]]:
        """Yield the columns of each segment, its parts, and whether each is to be formed.

        Args:
            cuts: see `segments`.
            most: columns that may be formed at once.
        """
        most = max(1, min(MOST_COLUMNS, most))
        start, parts, forms, formed = 0, list[tuple[slice, Block]](), list[bool](), 0
        for name in self.spec.names:
            columns, block = self.spec.slices[name], self.blocks.get(name)
            forms_it = block is not None and self.is_formed[name]
            grain = 1 if block is None else block.grain
            at = columns.start
            while at < columns.stop:
                # What is left of a segment is filled, unless that would part a tensor that fits into the next one.
                left = (most - formed if forms_it else MOST_COLUMNS - (at - start)) // grain * grain
                limit = (most if forms_it else MOST_COLUMNS) // grain * grain
                end = min(columns.stop, at + max(grain, left if columns.stop - at > limit else limit))
                full = end - start > MOST_COLUMNS or (forms_it and formed + end - at > most)
                if at > start and (full or at in cuts):
                    yield slice(start, at), parts, forms
                    start, parts, forms, formed = at, [], [], 0
                    continue
                if block is not None:
                    piece = block.narrow(at - columns.start, end - columns.start)
                    parts.append((slice(at - start, end - start), piece))
                    forms.append(forms_it)
                    formed += end - at if forms_it else 0
                at = end
        if self.spec.num_params > start:
            yield slice(start, self.spec.num_params), parts, forms

    def kept_rows(self) -> list[Joined]:
        """Return rows that were formed once for all passes of the step."""
        return [segment.rows for segments in self._kept.values() for segment in segments]

    # ---- products with all columns, for methods that need no more

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (P,)."""
        return torch.cat([segment.rows.square_sum() for segment in self.segments()]).mul_(self.scale**2)

    def form(self) -> Tensor:
        """Return G itself, (R, P); only for few parameters."""
        rows = self.like.new_empty(self.height, self.spec.num_params)
        for columns, segment in self.segments():
            rows[:, columns] = segment.form()
        return rows.mul_(self.scale)


def _runs(parts: Sequence[tuple[slice, Block]], forms: Sequence[bool]) -> Iterator[tuple[int, slice, Block]]:
    """Yield parts with a number for each run of neighbours that are to be formed, and −1 for others."""
    number, end = 0, -1
    for (place, block), form in zip(parts, forms, strict=True):
        number += not form or place.start != end
        yield (number if form else -1), place, block
        end = place.stop


def _stack_named(name: str, groups: Sequence[RowGroup], scales: bool, like: Tensor) -> Block | None:
    """Return all rows of one parameter, scaled if scales differ; groups that did not use it have zero rows."""
    first = next((group.blocks[name] for group in groups if name in group.blocks), None)
    if first is None:
        return None
    parts = [group.blocks.get(name) or first.zero_rows(group.height, like) for group in groups]
    if scales:
        parts = [part.scaled(group.row_scale) for part, group in zip(parts, groups, strict=True)]
    return stack(parts)
