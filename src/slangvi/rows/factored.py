"""All rows of a step, parameter by parameter, handed out in segments of the flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.params import ParamSpec
from slangvi.rows.blocks import Block, Formed, Memo, Outer, TableRows, Unopened, is_formed, place, stack
from slangvi.types import Routes

__all__ = ["FactoredGradients", "Joined", "RowGroup", "Segment"]

# A GPU adds more small matrices than so many by putting them side by side first: two kernels.
_SEVERAL = 3
_SMALL = 1 << 18
# Most columns of a segment, whatever its rows take.
MOST_COLUMNS = 1 << 24


@dataclass(frozen=True)
class RowGroup:
    """Rows that came from one backward pass: M examples at one sample of the weights.

    Args:
        num_rows: M.
        blocks: canonical parameter name → its gradients; a parameter that is not listed has zero gradient.
        totals: canonical parameter name → Σ_r g_r as autograd computed it, same shape as the parameter; may be empty,
            the blocks are then summed.
        scale: what all of them are to be multiplied by.
        num_chosen: rows of the blocks where they are of some examples only, weighted to stand for all M; `totals` are
            of all examples then, and must be there.
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

    def scaled(self, factor: float) -> RowGroup:
        """Return every gradient times a number; nothing is computed yet."""
        return replace(self, scale=self.scale * factor)

    def applied(self) -> RowGroup:
        """Return the gradients with the scale worked in."""
        blocks = {name: block.scaled(self.scale) for name, block in self.blocks.items()}
        totals = {name: total * self.scale for name, total in self.totals.items()}
        return RowGroup(self.num_rows, blocks, totals, num_chosen=self.num_chosen)


class Joined:
    """Rows of several parameters side by side, with the products that a step takes of them.

    Args:
        parts: place of each parameter in the columns, and its rows; columns without a parameter are zero.
        height: R.
        like: tensor whose dtype and device the results have.
    """

    def __init__(self, parts: Sequence[tuple[slice, Block]], height: int, width: int, like: Tensor) -> None:
        self.parts, self.height, self.width, self.like = parts, height, width, like

    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (n,)."""
        if len(self.parts) == 1 and self.parts[0][0] == slice(0, self.width):
            return self.parts[0][1].square_sum()
        found = self.like.new_zeros(self.width)
        latest: tuple[tuple[int, ...], Tensor] | None = None
        for columns, block in self.parts:
            # A bias follows the weight with the same δ, whose squares are there.
            if block.delta is not None and (latest is None or latest[0] != place(block.delta)):
                latest = place(block.delta), block.delta.square()
            found[columns] = block.square_sum(None if block.delta is None or latest is None else latest[1])
        return found

    def gram(self) -> Tensor:
        """G Gᵀ, (R, R)."""
        parts: list[Tensor] = []
        # δδᵀ ∘ aaᵀ for a weight, δδᵀ for its bias: blocks that hold the same δ take one product δδᵀ.
        inputs: dict[tuple[int, ...], tuple[Outer, Tensor]] = {}
        for _, block in self.parts:
            if isinstance(block, Outer) and block.simple:
                kept, part = inputs.get(place(block.left)), block.inputs_gram()
                if kept is not None and kept[1].shape == part.shape:
                    part += kept[1]
                elif kept is not None:
                    parts.append(kept[0].gram_with(kept[1]))
                inputs[place(block.left)] = (block, part)
        for _, block in self.parts:
            if isinstance(block, Formed) and place(block.rows) in inputs:
                inputs[place(block.rows)][1].add_(1.0)
            elif not (isinstance(block, Outer) and block.simple):
                parts.append(block.gram())
        total = _add_up(parts, self.like, self.height) if parts or not inputs else None
        for owner, part in inputs.values():
            total = owner.gram_with(part, onto=total)
        assert total is not None
        return total

    def mm(self, rows: Tensor) -> Tensor:
        """G Cᵀ, (K, n) → (R, K)."""
        parts = [block.mm(rows[:, columns]) for columns, block in self.parts]
        return _add_up(parts, self.like, self.height, rows.shape[0])

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, n) tensor."""
        for columns, block in self.parts:
            block.add_t_mm(weights, onto[:, columns])

    def form(self) -> Tensor:
        """G itself, (R, n)."""
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
        return Joined(parts, self.height, stop - start, self.like)

    def settled(self, forms: Sequence[bool], chunk_bytes: int) -> Joined:
        """Return the same with some of the parts formed; all of them together, where all are to be.

        Args:
            forms: whether each part is to be formed.
            chunk_bytes: largest temporary of products with factors.
        """
        covered = sum(columns.stop - columns.start for columns, _ in self.parts)
        if all(forms) and len(self.parts) > 1 and covered == self.width:
            return Joined([(slice(0, self.width), Formed(self.form()))], self.height, self.width, self.like)
        pairs = zip(self.parts, forms, strict=True)
        parts = [(columns, _settled(block, form, chunk_bytes)) for (columns, block), form in pairs]
        return Joined(parts, self.height, self.width, self.like)


class Segment(NamedTuple):
    """Consecutive columns of all rows.

    Args:
        columns: place in the flat vector.
        rows: their rows, which may have to be formed first.
    """

    columns: slice
    rows: Joined


class FactoredGradients:
    """Per-example gradients G of a step, (R, P), kept parameter by parameter.

    Args:
        spec: layout of the flat vector.
        groups: rows, one group per backward pass.
        rank: L, so that forming and factoring can be compared by counted cost.
        like: tensor whose dtype and device the results have.
        routes: what to form and how large temporaries may be; None leaves it to counting.
    """

    def __init__(
        self,
        spec: ParamSpec,
        groups: Sequence[RowGroup],
        rank: int,
        like: Tensor,
        routes: Routes | None = None,
    ) -> None:
        self.spec = spec
        self.like = like
        self.routes = routes or Routes()
        self.num_rows = sum(group.num_rows for group in groups)
        self.height = sum(group.height for group in groups)
        scales = {group.scale for group in groups}
        # One scale for all rows goes to the results, which are small; different ones must go to the rows.
        self.scale = scales.pop() if len(scales) == 1 else 1.0
        if scales:
            groups = [group.applied() for group in groups]
        memo: Memo = {}
        stacked = ((name, _stack_named(name, groups, memo)) for name in spec.names)
        self.blocks = {name: block for name, block in stacked if block is not None}
        self._forms = {name: is_formed(block, rank, self.routes, name) for name, block in self.blocks.items()}
        self._totals = _sum_totals(groups)
        self._kept: dict[tuple[int, int], Joined] = {}

    @property
    def spectrum_route(self) -> str:
        """The route wished for, see `Routes.spectrum`."""
        return self.routes.spectrum

    @property
    def costs(self) -> tuple[int, int]:
        """Counted multiplications of the Gram, and of a product with one column."""
        counts = [
            (self.height**2 * b.num_params, self.height * b.num_params) if self._forms[name] else b.costs
            for name, b in self.blocks.items()
        ]
        return sum(gram for gram, _ in counts), sum(column for _, column in counts)

    def sum(self) -> Tensor:
        """Σ_r g_r, (P,)."""
        found = self.like.new_zeros(self.spec.num_params)
        for name in self.spec.names:
            if name in self._totals:
                found[self.spec.slices[name]] = self._totals[name].flatten()
            elif name in self.blocks:
                found[self.spec.slices[name]] = self.blocks[name].sum()
        return found if self.scale == 1.0 else found.mul_(self.scale)

    def segments(self, cuts: Sequence[int] = ()) -> Iterator[Segment]:
        """Yield all columns in turn, some at a time; rows that are formed for it are kept only if all of them are few.

        Args:
            cuts: columns, ends of parameter tensors, at which a segment has to end.
        """
        whole = sum(self.blocks[name].num_params for name, forms in self._forms.items() if forms)
        keeps = whole * self._column_bytes <= self.routes.form_bytes
        for columns, parts, forms in self._plan(set(cuts)):
            key = (columns.start, columns.stop)
            rows = self._kept.get(key)
            if rows is None:
                whole_rows = Joined(parts, self.height, columns.stop - columns.start, self.like)
                rows = whole_rows.settled(forms, self.routes.chunk_bytes)
                # What is opened is larger than what it was made from.
                opens = any(isinstance(block, Unopened) and not f for (_, block), f in zip(parts, forms, strict=True))
                if keeps and not opens:
                    self._kept[key] = rows
            yield Segment(columns, rows)

    @property
    def _column_bytes(self) -> int:
        return max(1, self.height) * self.like.element_size()

    def _plan(self, cuts: set[int]) -> Iterator[tuple[slice, list[tuple[slice, Block]], list[bool]]]:
        """Yield the columns of each segment, its parts, and whether each is to be formed."""
        most = max(1, min(MOST_COLUMNS, self.routes.form_bytes // self._column_bytes))
        start, parts, forms, formed = 0, list[tuple[slice, Block]](), list[bool](), 0
        for name in self.spec.names:
            columns, block = self.spec.slices[name], self.blocks.get(name)
            forms_it = block is not None and self._forms[name]
            size = columns.stop - columns.start
            pieces = list(_pieces(block, size, most if forms_it else MOST_COLUMNS))
            for first, last in pieces:
                at, end = columns.start + first, columns.start + last
                full = at - start + last - first > MOST_COLUMNS or (forms_it and formed + last - first > most)
                if at > start and (full or at in cuts):
                    yield slice(start, at), parts, forms
                    start, parts, forms, formed = at, [], [], 0
                if block is not None:
                    piece = block if len(pieces) == 1 else block.narrow(first, last)
                    parts.append((slice(at - start, end - start), piece))
                    forms.append(forms_it)
                    formed += last - first if forms_it else 0
        if self.spec.num_params > start:
            yield slice(start, self.spec.num_params), parts, forms

    # ---- products with all columns, for methods that need no more and for tests

    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (P,)."""
        found = torch.cat([segment.rows.square_sum() for segment in self.segments()])
        return found if self.scale == 1.0 else found.mul_(self.scale**2)

    def gram(self) -> Tensor:
        """G Gᵀ, (R, R)."""
        return reduce(torch.add, [segment.rows.gram() for segment in self.segments()]) * self.scale**2

    def mm(self, rows: Tensor) -> Tensor:
        """G Cᵀ, (K, P) → (R, K)."""
        parts = [segment.rows.mm(rows[:, segment.columns]) for segment in self.segments()]
        return reduce(torch.add, parts) * self.scale

    def t_mm(self, weights: Tensor) -> Tensor:
        """Wᵀ G, (R, K) → (K, P)."""
        result = self.like.new_zeros(weights.shape[1], self.spec.num_params)
        for segment in self.segments():
            segment.rows.add_t_mm(weights * self.scale, result[:, segment.columns])
        return result

    def form(self) -> Tensor:
        """G itself, (R, P); only for few parameters."""
        return torch.cat([segment.rows.form() for segment in self.segments()], 1) * self.scale


def _pieces(block: Block | None, size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the columns of a parameter in pieces of about `most`, as its block can be parted."""
    grain = 1 if block is None else block.grain
    step = max(1, most // grain) * grain
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _settled(block: Block, form: bool, chunk_bytes: int) -> Block:
    """Return a block as it is to be used: formed, or as factors whose temporaries stay within a number of bytes."""
    if form:
        return block if isinstance(block, Formed) else Formed(block.form())
    factors = block.opened() if isinstance(block, Unopened) else block
    return replace(factors, chunk_bytes=chunk_bytes) if isinstance(factors, Outer | TableRows) else factors


def _add_up(parts: list[Tensor], like: Tensor, *lengths: int) -> Tensor:
    """Return the sum of the parts, in memory that may be the first one's; zeros when there are none."""
    if not parts:
        return like.new_zeros(lengths[0], lengths[-1])
    if like.device.type == "cuda" and len(parts) > _SEVERAL and parts[0].numel() <= _SMALL:
        return torch.stack(parts).sum(0)
    return reduce(torch.Tensor.add_, parts[1:], parts[0].contiguous())


def _stack_named(name: str, groups: Sequence[RowGroup], memo: Memo) -> Block | None:
    """Return all rows of one parameter; groups that did not use it count as zero rows."""
    parts, missing = [], 0
    for group in groups:
        block = group.blocks.get(name)
        if block is None:
            missing += group.height
        else:
            parts.append(block.padded(missing, 0) if missing else block)
            missing = 0
    if not parts:
        return None
    if missing:
        parts[-1] = parts[-1].padded(0, missing)
    return stack(parts, memo)


def _sum_totals(groups: Sequence[RowGroup]) -> dict[str, Tensor]:
    """Return what autograd added up; nothing when some group does not know."""
    if not all(group.totals for group in groups):
        return {}
    totals: dict[str, Tensor] = {}
    for group in groups:
        for name, total in group.totals.items():
            totals[name] = totals[name] + total if name in totals else total
    return totals
