"""All rows of a step, parameter by parameter, handed out in segments of the flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.linalg import kernels
from slangvi.params import ParamSpec
from slangvi.rows.blocks import Block, Formed, TableRows, stack
from slangvi.rows.operator import Segment, SegmentRows
from slangvi.types import Routes

__all__ = ["FactoredGradients", "RowGroup"]

# Most columns of a segment, whatever its rows take, and most entries of a temporary as large as the factor there.
MOST_COLUMNS, MOST_ENTRIES = 1 << 24, 1 << 26
# The same on a CPU: temporaries that are used twice in a row should still be in the cache the second time.
CPU_COLUMNS, CPU_ENTRIES = 1 << 17, 1 << 21
# Squared gradients of outputs over the expected ones, from which on rows of the likelihood are enlarged.
MISFIT = 1.5
# Columns up to which a GPU takes runs of different kinds together.
MOST_JOINED = 1 << 22
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
        num_chosen: K, examples that the blocks are of, where these are not all; `total` is of all M examples then, and
            must be there.
        num_columns: Q, rows of each of these examples where they come from the likelihood and not from the loss, whose
            scale they then do not have; None for one row of the loss.
        misfit: squared length of the gradient of an example's outputs, over what the likelihood expects of it; in
            units of the loss, squared.
        most_enlarged: factor by which misfit may enlarge the squares of rows.
        residuals: Σ of squared residuals of the targets at the draw, and how many there are; where noise is learnt.
    """

    num_rows: int
    blocks: Mapping[str, Block]
    total: Tensor | None = None
    scale: float = 1.0
    num_chosen: int | None = None
    num_columns: int | None = None
    misfit: float = 0.0
    most_enlarged: float = 1.0
    residuals: tuple[float, int] | None = None

    @property
    def height(self) -> int:
        """Rows of the blocks."""
        return self._num_examples * (self.num_columns or 1)

    @property
    def _num_examples(self) -> int:
        """Examples that the blocks are of."""
        return self.num_rows if self.num_chosen is None else self.num_chosen

    @property
    def row_scale(self) -> float:
        r"""Factor of the rows, by which those of K examples have the second moments of all M in expectation.

        Rows of the likelihood are enlarged where the model does not fit at all. The squared gradient of the outputs
        has the curvature as its expectation where the likelihood is right; with much more than that, outputs may be
        sure and wrong, where the curvature vanishes and a mean that was thrown there would go on.
        """
        scale = self.scale
        if self.num_columns is not None:
            scale = math.sqrt(min(max(1.0, self.misfit * self.scale**2 / MISFIT), self.most_enlarged))
        return scale * math.sqrt(self.num_rows / max(1, self._num_examples))

    def scaled(self, factor: float) -> RowGroup:
        """Return every gradient times a number; nothing is computed yet."""
        return replace(self, scale=self.scale * factor)


class Run(NamedTuple):
    """Consecutive columns whose rows are held in one way.

    Args:
        columns: place in the flat vector.
        blocks: their rows: those of neighbours that are formed together, or of one tensor that is kept as factors.
        is_formed: whether they are formed.
    """

    columns: slice
    blocks: list[Block]
    is_formed: bool


class Joined:
    """Rows of consecutive columns that are held in several ways, so that what follows is done once for all of them.

    Args:
        parts: the rows, from left to right.
    """

    space = None

    def __init__(self, parts: Sequence[Block]) -> None:
        self.parts, self.columns, start = parts, list[slice](), 0
        for part in parts:
            self.columns.append(slice(start, start + part.num_params))
            start += part.num_params

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (n,)."""
        return torch.cat([part.square_sum() for part in self.parts])

    def gram(self) -> Tensor:
        """Return G Gᵀ, (R, R), in float64."""
        found = self.parts[0].gram().double()
        for part in self.parts[1:]:
            found.add_(part.gram())
        return found

    def mm(self, rows: Tensor) -> Tensor:
        """Return G Cᵀ for C (K, n), (R, K), in float64."""
        found: Tensor | None = None
        for part, columns in zip(self.parts, self.columns, strict=True):
            product = part.mm(rows[:, columns])
            found = product.double() if found is None else found.add_(product)
        assert found is not None
        return found

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, n) tensor."""
        for part, columns in zip(self.parts, self.columns, strict=True):
            part.add_t_mm(weights, onto[:, columns])

    def form(self) -> Tensor:
        """Return G itself, (R, n)."""
        return torch.cat([part.form() for part in self.parts], 1)


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
        self.spectrum_route = self.routes.spectrum
        self.num_rows = sum(group.num_rows for group in groups)
        self.height = sum(group.height for group in groups)
        scales = {group.row_scale for group in groups}
        # One scale for all rows goes to the results, which are small; different ones must go to the rows.
        self.scale = scales.pop() if len(scales) == 1 else 1.0
        self.blocks: dict[str, Block] = {}
        self.is_formed: dict[str, bool] = {}
        for name in spec.names:
            first = next((group.blocks[name] for group in groups if name in group.blocks), None)
            if first is None:
                continue
            parts = [group.blocks.get(name) or first.zero_rows(group.height, like) for group in groups]
            if scales:
                parts = [part.scaled(group.row_scale) for part, group in zip(parts, groups, strict=True)]
            block = self.blocks[name] = parts[0] if len(parts) == 1 else stack(parts)
            self.is_formed[name] = self._forms(name, block)
        self.joins_runs = like.device.type != "cpu"
        self._memory = like.new_empty(0)  # formed rows of one segment, where not all are kept
        self._request: tuple[Any, ...] | None = None
        self._below: Tensor | None = None
        self._plan: list[list[Run]] = []  # one list for each segment
        self._kept: dict[int, Tensor] = {}  # first column of a segment → its formed rows

    def _forms(self, name: str, block: Block) -> bool:
        """Tell whether the rows of a parameter are formed: they have to be, `routes` says so, or it is less work."""
        if not block.is_factored:
            return True
        word = "auto" if self.routes.layers == "auto" else self.routes.layer(name)
        if word != "auto":
            return word == "form"
        on_gpu, entries = self.like.is_cuda, block.num_rows * block.num_params
        is_low = on_gpu and block.num_rows <= FEW_ROWS and not isinstance(block, TableRows)
        return is_low or entries <= (FEW_ENTRIES_GPU if on_gpu else FEW_ENTRIES)

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
        """Yield all columns in turn, some at a time.

        On a CPU a segment is one tensor as factors, or neighbours whose rows are formed. A GPU takes longer to begin an
        operation than to do a small one, so there a segment goes on through several of these.
        Formed rows are kept for the next time if all of them are few. Others are in memory that the next segment takes.

        Args:
            cuts: columns, ends of parameter tensors, at which a segment has to end.
            below: rows (L, P) that are copied below formed ones, see `SegmentRows.space`; or not, where `kernels` do
                without.
        """
        rank, version = (0, None) if below is None else (len(below), None if below.is_inference() else below._version)
        if below is not None and kernels.serves(below, self.height):
            below = version = None  # they are taken from where they are
        column_bytes = max(1, self.height + (0 if below is None else rank)) * self.like.element_size()
        most = self._form_bytes(rank)
        factored = sum(block.num_params for name, block in self.blocks.items() if not self.is_formed[name])
        keeps = (self.spec.num_params - factored) * column_bytes <= most
        request = (*cuts, version)
        if self._request != request or self._below is not below:
            self._request, self._below, self._kept = request, below, {}
            self._plan = list(self._joined(self._runs(cuts, most // column_bytes, rank), cuts, most // column_bytes))
        for runs in self._plan:
            first, last = runs[0].columns, runs[-1].columns
            if len(runs) == 1:
                yield Segment(first, self._rows_of(runs[0], below, keeps))
            else:
                rows: SegmentRows = Joined([self._rows_of(run, None, keeps, is_alone=False) for run in runs])
                yield Segment(slice(first.start, last.stop), rows)

    def _rows_of(self, run: Run, below: Tensor | None, keeps: bool, is_alone: bool = True) -> Block:
        """Return the rows of a run, formed if they are to be.

        Args:
            run: see `_runs`.
            below: see `segments`.
            keeps: whether to keep formed rows for the next time.
            is_alone: whether they are all there is in a segment, and may take the memory of the last one.
        """
        if not run.is_formed:
            return run.blocks[0]
        space = self._kept.get(run.columns.start)
        if space is None:
            space = self._form(run, below, is_alone and not keeps)
            if keeps:
                self._kept[run.columns.start] = space
        return Formed(space[: self.height], space if below is not None and len(below) else None)

    def _form_bytes(self, rank: int) -> int:
        """Return the bytes that formed rows may take: as `routes` says, or a share of what the state takes."""
        if self.routes.form_bytes is not None:
            return self.routes.form_bytes
        return max(LEAST_FORMED, (rank + 3) * self.spec.num_params * self.like.element_size() // 4)

    def _joined(self, runs: Iterator[Run], cuts: Sequence[int], most: int) -> Iterator[list[Run]]:
        """Yield the runs of each segment.

        Args:
            runs: all of them, from left to right.
            cuts: see `segments`.
            most: columns that may be formed at once; runs that share a segment are there at once.
        """
        if not self.joins_runs:
            yield from ([run] for run in runs)
            return
        some, formed = list[Run](), 0
        for run in runs:
            size = run.columns.stop - run.columns.start
            formed += size if run.is_formed else 0
            is_full = some and (run.columns.stop - some[0].columns.start > MOST_JOINED or formed > most)
            if some and (is_full or run.columns.start in cuts):
                yield some
                some, formed = [], size if run.is_formed else 0
            some.append(run)
        if some:
            yield some

    def _runs(self, cuts: Sequence[int], most: int, rank: int) -> Iterator[Run]:
        """Yield the columns that are held in one way, few enough for a segment.

        Args:
            cuts: see `segments`.
            most: columns that may be formed at once.
            rank: L.
        """
        most_factored = min(MOST_COLUMNS, MOST_ENTRIES // max(1, rank))
        most_formed = min(most, most_factored)
        if self.like.device.type == "cpu":
            most_formed = min(most_formed, CPU_ENTRIES // max(1, self.height + rank))
            most_factored = min(most_factored, CPU_COLUMNS, CPU_ENTRIES // max(1, rank))
        # A product of factors with the L rows of U holds R·L numbers for each output.
        outputs = self.routes.chunk_bytes // (max(1, self.height * rank) * self.like.element_size())
        start, run = 0, list[Block]()
        for name in self.spec.names:
            columns, block = self.spec.slices[name], self.blocks.get(name)
            if block is None:
                block = Formed(self.like.new_zeros(1, 1).expand(self.height, columns.stop - columns.start))
            is_formed = self.is_formed.get(name, True)
            limit = most_formed if is_formed else min(most_factored, outputs * block.grain)
            step = max(1, limit // block.grain) * block.grain
            for first in range(0, block.num_params, step):
                piece, place = block.narrow(first, min(first + step, block.num_params)), columns.start + first
                is_full = place + piece.num_params - start > most_formed
                if run and (is_full or not is_formed or place in cuts):
                    yield Run(slice(start, place), run, True)
                    start, run = place, []
                run = [*run, piece]
                if not is_formed:
                    yield Run(slice(place, place + piece.num_params), run, False)
                    start, run = place + piece.num_params, []
        if run:
            yield Run(slice(start, self.spec.num_params), run, True)

    def _form(self, run: Run, below: Tensor | None, is_lent: bool) -> Tensor:
        """Return the rows of neighbouring blocks in one tensor, and below them others that may be given.

        Args:
            run: see `_runs`.
            below: see `segments`.
            is_lent: whether the tensor is in memory that the next one takes.
        """
        columns, blocks, _ = run
        shape = self.height + (0 if below is None else len(below)), columns.stop - columns.start
        size = math.prod(shape)
        if is_lent:
            if len(self._memory) < size:
                self._memory = self.like.new_empty(size)
            space = self._memory[:size].view(shape)
        else:
            space = self.like.new_empty(shape)
        places = space[: self.height].split([block.num_params for block in blocks], 1)
        pairs = [(place, block.rows) for place, block in zip(places, blocks, strict=True) if isinstance(block, Formed)]
        if pairs:  # small ones, in one call
            torch._foreach_copy_([place for place, _ in pairs], [rows for _, rows in pairs])
        for place, block in zip(places, blocks, strict=True):
            if not isinstance(block, Formed):
                block.form(place)
        if below is not None:
            space[self.height :] = below[:, columns]
        return space

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
