"""Per-example gradients of one parameter tensor, in whichever form is cheapest to hold. See `base` for the legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.rows.base import CHUNK_BYTES, Block, Formed
from slangvi.rows.outer import Outer, Unopened
from slangvi.types import Routes

__all__ = ["Block", "Formed", "Memo", "Outer", "Sum", "TableRows", "Unopened", "add", "is_formed", "place", "stack"]


@dataclass(frozen=True)
class TableRows(Block):
    """Gradients that touch few rows of a table: embeddings. Entry (r, t) adds `values[r, t]` to row `index[r, t]`.

    Args:
        index: rows of the table, (R, T) integers.
        values: what is added there, (R, T, D).
        table_rows: number of rows V of the table, p = V·D.
        chunk_bytes: largest temporary of a product.
    """

    index: Tensor
    values: Tensor
    table_rows: int
    chunk_bytes: int = CHUNK_BYTES

    @property
    def num_rows(self) -> int:
        """R."""
        return self.index.shape[0]

    @property
    def costs(self) -> tuple[int, int]:
        """All pairs of entries, and every entry once."""
        entries = self.index.numel()
        return entries * entries * self.values.shape[-1], self.values.numel()

    def form(self) -> Tensor:
        """(R, p)."""
        dense = self.values.new_zeros(self.num_rows, self.table_rows, self.values.shape[-1])
        place = self.index.unsqueeze(-1).expand_as(self.values)
        return dense.scatter_add_(1, place, self.values).flatten(1)

    def sum(self) -> Tensor:
        """(p,)."""
        table = self.values.new_zeros(self.table_rows, self.values.shape[-1])
        return table.index_add_(0, self.index.flatten(), self.values.flatten(0, 1)).flatten()

    def square_sum(self, squares: Tensor | None = None) -> Tensor:
        """(p,); there is no δ whose squares could be given."""
        _, word, values = self._coalesced()
        table = self.values.new_zeros(self.table_rows, self.values.shape[-1])
        return table.index_add_(0, word, values.square()).flatten()

    def gram(self) -> Tensor:
        """Σ over pairs of touched entries that share a table row, (R, R)."""
        row, word, values = self._coalesced()
        result = self.values.new_zeros(self.num_rows, self.num_rows)
        step = max(1, self.chunk_bytes // max(1, 2 * len(row) * values.element_size()))
        for start in range(0, len(row), step):
            part = slice(start, start + step)
            shared = (values[part] @ values.mT) * (word[part, None] == word)
            by_row = shared.new_zeros(shared.shape[0], self.num_rows).index_add_(1, row, shared)
            result.index_add_(0, row[part], by_row)
        return result

    def mm(self, rows: Tensor) -> Tensor:
        """(R, K)."""
        table = rows.view(-1, self.table_rows, self.values.shape[-1])
        columns = [(c[self.index] * self.values).sum((1, 2)) for c in table]
        return torch.stack(columns, dim=-1) if columns else self.values.new_zeros(self.num_rows, 0)

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """(K, p)."""
        index, values = self.index.flatten(), self.values.flatten(0, 1)
        for k, place in enumerate(onto):
            share = weights[:, k].repeat_interleave(self.index.shape[1]).unsqueeze(1)
            place.view(self.table_rows, -1).index_add_(0, index, values * share)

    @property
    def num_params(self) -> int:
        """V·D."""
        return self.table_rows * self.values.shape[-1]

    @property
    def grain(self) -> int:
        """D."""
        return self.values.shape[-1]

    def narrow(self, start: int, stop: int) -> TableRows:
        """Some rows of the table; entries of others count zero."""
        if (start, stop) == (0, self.num_params):
            return self
        first, last = start // self.grain, stop // self.grain
        inside = (self.index >= first) & (self.index < last)
        index = torch.where(inside, self.index - first, 0)
        return replace(self, index=index, values=self.values * inside.unsqueeze(-1), table_rows=last - first)

    def select(self, rows: Tensor) -> TableRows:
        """Some rows."""
        return replace(self, index=self.index[rows], values=self.values[rows])

    def to_dtype(self, dtype: torch.dtype) -> TableRows:
        """In another dtype."""
        return replace(self, values=self.values.to(dtype))

    def scaled(self, factor: float) -> TableRows:
        """Times a number."""
        return replace(self, values=self.values * factor)

    def padded(self, before: int, after: int) -> TableRows:
        """With zero rows around."""
        index = F.pad(self.index, (0, 0, before, after))
        return replace(self, index=index, values=F.pad(self.values, (0, 0, 0, 0, before, after)))

    def _coalesced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entries of one example that touch the same table row, added up: (row, table row, value) triples.

        There are as many triples as entries, and what is left over is zero: to count them would be to wait for the
        device.
        """
        row = torch.arange(self.num_rows, device=self.index.device).repeat_interleave(self.index.shape[1])
        words, order = self.index.sort(dim=1, stable=True)
        fresh = F.pad(words[:, 1:] != words[:, :-1], (1, 0), value=False)
        slot = fresh.cumsum(1)
        word = torch.zeros_like(words).scatter_(1, slot, words)
        size = self.values.shape[-1]
        given = self.values.gather(1, order.unsqueeze(-1).expand(-1, -1, size))
        values = torch.zeros_like(given).scatter_add_(1, slot.unsqueeze(-1).expand_as(given), given)
        return row, word.flatten(), values.flatten(0, 1)


@dataclass(frozen=True)
class Sum(Block):
    """Gradients of a tensor that is used in several ways, such as a table that is an output layer as well.

    Args:
        parts: what each use adds, for the same rows.
    """

    parts: tuple[Block, ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.parts[0].num_rows

    @property
    def num_params(self) -> int:
        """Entries of the tensor, p."""
        return self.parts[0].num_params

    @property
    def costs(self) -> tuple[int, int]:
        """R²p and Rp, since products are taken of formed rows."""
        return self.num_rows**2 * self.num_params, self.num_rows * self.num_params

    def form(self) -> Tensor:
        """(R, p)."""
        total = self.parts[0].form()
        for part in self.parts[1:]:
            total = total + part.form()
        return total

    def sum(self) -> Tensor:
        """(p,)."""
        return reduce(torch.add, [part.sum() for part in self.parts])

    def square_sum(self, squares: Tensor | None = None) -> Tensor:
        """(p,)."""
        return Formed(self.form()).square_sum(squares)

    def gram(self) -> Tensor:
        """(R, R)."""
        return Formed(self.form()).gram()

    def mm(self, rows: Tensor) -> Tensor:
        """(R, K)."""
        return reduce(torch.add, [part.mm(rows) for part in self.parts])

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """(K, p)."""
        for part in self.parts:
            part.add_t_mm(weights, onto)

    @property
    def grain(self) -> int:
        """Smallest number of columns that no part has to cut."""
        return math.lcm(*(part.grain for part in self.parts))

    def narrow(self, start: int, stop: int) -> Sum:
        """Some columns of each part."""
        return Sum(tuple(part.narrow(start, stop) for part in self.parts))

    def select(self, rows: Tensor) -> Sum:
        """Some rows."""
        return Sum(tuple(part.select(rows) for part in self.parts))

    def to_dtype(self, dtype: torch.dtype) -> Sum:
        """In another dtype."""
        return Sum(tuple(part.to_dtype(dtype) for part in self.parts))

    def scaled(self, factor: float) -> Sum:
        """Times a number."""
        return Sum(tuple(part.scaled(factor) for part in self.parts))

    def padded(self, before: int, after: int) -> Sum:
        """With zero rows around."""
        return Sum(tuple(part.padded(before, after) for part in self.parts))


def add(blocks: Sequence[Block]) -> Block:
    """Return the gradients of one tensor that the same examples used several times."""
    return reduce(_add_two, blocks)


def _add_two(a: Block, b: Block) -> Block:
    if isinstance(a, TableRows) and isinstance(b, TableRows):
        return replace(a, index=torch.cat([a.index, b.index], 1), values=torch.cat([a.values, b.values], 1))
    if isinstance(a, Outer) and isinstance(b, Outer) and _alike(a, b):
        a, b = a._unshared(), b._unshared()
        return Outer(torch.cat([a.left, b.left], 2), torch.cat([a.right, b.right], 2))
    if isinstance(a, Formed) and isinstance(b, Formed):
        return Formed(a.rows + b.rows)
    return Sum((*(a.parts if isinstance(a, Sum) else (a,)), b))


# What was already put together, by the places of the parts: tensors that shared memory share it again. The parts are
# held as well, since a place that is given up may be given to other numbers.
Memo = dict[tuple[tuple[int, ...], ...], tuple[list[Tensor], Tensor]]


def stack(blocks: Sequence[Block], memo: Memo | None = None) -> Block:
    """TableRows of different examples or samples, one below the other."""
    memo = {} if memo is None else memo
    if len(blocks) == 1:
        return blocks[0]
    if all(isinstance(block, TableRows) for block in blocks):
        tables = [block for block in blocks if isinstance(block, TableRows)]
        width = max(block.index.shape[1] for block in tables)
        index = torch.cat([F.pad(block.index, (0, width - block.index.shape[1])) for block in tables])
        values = [F.pad(block.values, (0, 0, 0, width - block.values.shape[1])) for block in tables]
        return replace(tables[0], index=index, values=torch.cat(values))
    if all(isinstance(block, Unopened) for block in blocks):
        return _stack_unopened([block for block in blocks if isinstance(block, Unopened)], memo)
    if any(isinstance(block, Unopened) for block in blocks):
        return stack([block.opened() if isinstance(block, Unopened) else block for block in blocks], memo)
    outers = [block for block in blocks if isinstance(block, Outer)]
    if len(outers) == len(blocks) and all(_alike(outers[0], block) for block in outers):
        return _stack_outers(outers, memo)
    if all(isinstance(block, Sum) and _same_parts(block, blocks[0]) for block in blocks):
        parts = zip(*(block.parts for block in blocks if isinstance(block, Sum)), strict=True)
        return Sum(tuple(stack(each, memo) for each in parts))
    return Formed(_joined([block.form() for block in blocks], memo))


def _joined(parts: list[Tensor], memo: Memo) -> Tensor:
    """Parts (r, ...) one below the other, or what they were joined to before."""
    key = tuple(place(part) for part in parts)
    if key not in memo:
        memo[key] = (parts, torch.cat([part.reshape(part.shape[0], -1) for part in parts]))
    return memo[key][1].view(-1, *parts[0].shape[1:])


def place(x: Tensor) -> tuple[int, ...]:
    """What decides the numbers of a (R, ...) tensor seen as (R, p): where it lies, its sizes and its layout."""
    layout = () if x.is_contiguous() else (*x.shape, *x.stride())
    inner = x
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):  # under vmap only the whole batch has an address
        inner = torch._C._functorch.get_unwrapped(inner)
    return inner.data_ptr(), x.shape[0], x.numel(), *layout


def _stack_outers(blocks: list[Outer], memo: Memo) -> Outer:
    first = blocks[0].right
    if all(_same_memory(first, block.right) for block in blocks):
        return Outer(_joined([block.left for block in blocks], memo), first)
    blocks = [block._unshared() for block in blocks]
    # Zero positions contribute nothing, so sequences of different length can share one tensor.
    length = max(block.left.shape[2] for block in blocks)
    if length == 1:
        return Outer(_joined([b.left for b in blocks], memo), _joined([b.right for b in blocks], memo))
    left = torch.cat([F.pad(block.left, (0, 0, 0, length - block.left.shape[2])) for block in blocks])
    right = torch.cat([F.pad(block.right, (0, 0, 0, length - block.right.shape[2])) for block in blocks])
    return Outer(left, right)


def _stack_unopened(blocks: list[Unopened], memo: Memo) -> Block:
    first = blocks[0]
    left = [block.left for block in blocks]
    if all(_same_memory(first.source, block.source) for block in blocks):
        return replace(first, left=_joined(left, memo))
    if all(block.source.shape[1:] == first.source.shape[1:] for block in blocks):
        each = [len(block.left) // max(1, len(block.source)) for block in blocks]
        if all(count == 1 for count in each):
            return replace(first, left=_joined(left, memo), source=torch.cat([block.source for block in blocks]))
    return stack([block.opened() for block in blocks], memo)


def _same_parts(a: Block, b: Block) -> bool:
    """Tell whether two sums are made of the same kinds of block."""
    if not (isinstance(a, Sum) and isinstance(b, Sum) and len(a.parts) == len(b.parts)):
        return False
    return all(type(x) is type(y) for x, y in zip(a.parts, b.parts, strict=True))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place: several draws of the weights saw one input."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _alike(a: Outer, b: Outer) -> bool:
    """Same grouping and sizes: not so for, say, a linear weight read transposed elsewhere."""
    return a.left.shape[1::2] == b.left.shape[1::2] and a.right.shape[-1] == b.right.shape[-1]


def is_formed(block: Block, rank: int, routes: Routes, name: str = "") -> bool:
    """Tell whether the rows of a block are to be formed, because that counts fewer multiplications or `routes` says so.

    Per step, with L = rank products on either side:
    factored  R²T²(O+I) + (2L+1)·R·T·O·I   (T > 1: the squares need forming in pieces)
    formed    R·T·O·I + R²·O·I + (2L+1)·R·O·I
    """
    if isinstance(block, TableRows):
        return routes.layer(name) == "form"
    if not isinstance(block, Outer | Unopened):
        return True
    wish = routes.layer(name)
    if wish in ("form", "factor"):
        return wish == "form"
    R, _, T, O, I = block.sizes  # noqa: E741
    products = 2 * rank + 1
    factored = R * R * T * T * (O + I) + products * R * T * O * I
    formed = R * T * O * I + R * R * O * I + products * R * O * I
    return formed < factored
