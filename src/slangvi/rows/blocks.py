"""Per-example gradients of one parameter tensor, as rows or as the factors that they are made of.

Index legend: r row (example at a sample) · t position (time, pixel, repeated use) · g group · o output · i input ·
k column of the other operand · p entry of the parameter tensor · v row of an embedding table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.linalg import kernels
from slangvi.linalg.products import column_squares, rows_dot

__all__ = ["Block", "Formed", "Outer", "Patches", "Stacked", "Sum", "TableRows", "add", "stack"]

# Largest temporary of products that work in pieces.
CHUNK_BYTES, GPU_CHUNK_BYTES = 1 << 24, 1 << 27
# Patches of one layer that are kept between the two passes of a step.
KEPT_BYTES = 1 << 24


class Block(ABC):
    """R per-example gradients of one parameter tensor with p entries.

    Products are taken of the formed rows unless a kind of block knows better.
    """

    num_rows: int  # R
    num_params: int  # p
    space: Tensor | None = None  # see `SegmentRows.space`
    is_factored = False  # whether products need no formed rows
    grain = 1  # columns that `narrow` cannot part: it takes multiples of this number

    @abstractmethod
    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients themselves, (R, p), in memory that may be given."""

    def add_to(self, onto: Tensor) -> None:
        """Add the gradients to an (R, p) tensor."""
        onto += self.form()

    def sum(self) -> Tensor:
        """Return Σ_r g_r, (p,)."""
        return self.form().sum(0)

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (p,)."""
        return torch.cat([column_squares(piece.form()) for piece in self.pieces()])

    def gram(self) -> Tensor:
        """Return G Gᵀ, (R, R)."""
        rows = self.form()
        return rows @ rows.mT

    def mm(self, rows: Tensor) -> Tensor:
        """Return G Cᵀ for C (K, p), (R, K)."""
        return self.form() @ rows.mT

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, p) tensor, which may be a slice of a wider one."""
        _add_product(onto, weights.mT, self.form())

    @abstractmethod
    def narrow(self, start: int, stop: int) -> Block:
        """Return the columns from `start` to `stop`, multiples of `grain`."""

    @abstractmethod
    def to_dtype(self, dtype: torch.dtype) -> Block:
        """Return the same gradients in another dtype."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """Return the gradients times a number."""

    def split_draws(self, count: int) -> Block:
        """Return gradients of one draw's tensor, (S·K, p), from those of S tensors that lie side by side, (K, S·p)."""
        return Formed(self.form().unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1))

    def zero_rows(self, count: int, like: Tensor) -> Block:
        """Return zero gradients of the same tensor for other examples, in a form that stacks with this one."""
        return Formed(like.new_zeros(1, 1).expand(count, self.num_params))

    def pieces(self) -> Iterator[Block]:
        """Yield all columns in turn, so few at a time that their rows fit `CHUNK_BYTES`."""
        step = max(1, CHUNK_BYTES // (8 * max(1, self.num_rows) * self.grain)) * self.grain
        for start in range(0, self.num_params, step):
            yield self.narrow(start, min(start + step, self.num_params))


@dataclass(eq=False)
class Formed(Block):
    """Gradients as they are: of small tensors (biases, norms), and of nodes without a rule.

    Args:
        rows: (R, p).
        space: tensor whose first rows they are, and whose others are those of the factor, if they lie so.
    """

    rows: Tensor
    space: Tensor | None = None

    def __post_init__(self) -> None:
        self.num_rows, self.num_params = self.rows.shape

    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the rows."""
        return self.rows if out is None else out.copy_(self.rows)

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (p,)."""
        return column_squares(self.rows)

    def gram(self) -> Tensor:
        """Return G Gᵀ, (R, R)."""
        return rows_dot(self.rows, self.rows)

    def mm(self, rows: Tensor) -> Tensor:
        """Return G Cᵀ for C (K, p), (R, K)."""
        return rows_dot(self.rows, rows)

    def narrow(self, start: int, stop: int) -> Formed:
        """Return some columns, as a view."""
        return Formed(self.rows[:, start:stop])

    def to_dtype(self, dtype: torch.dtype) -> Formed:
        """Return the rows in another dtype."""
        return self if self.rows.dtype is dtype else Formed(self.rows.to(dtype))

    def scaled(self, factor: float) -> Formed:
        """Return the rows times a number."""
        return Formed(self.rows * factor)


@dataclass(eq=False)
class Outer(Block):
    """Sums of outer products, g_r = Σ_t δ_rt ⊗ a_rt: weights of linear layers.

    With one group and one position products need no formed rows. Draws of the weights that saw the same inputs share
    one copy of them: `right` may have R/S rows, row r of `left` then belongs to row r mod R/S of `right`.

    Args:
        left: δ, (R, G, T, O).
        right: a, (R/S, G, T, I).
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        self.num_rows, groups, positions, outputs = self.left.shape
        inputs = self.right.shape[3]
        self.num_params = groups * outputs * inputs
        self.grain = inputs if groups == 1 else self.num_params
        self.is_factored = groups == positions == 1
        self.copies = self.num_rows // max(1, len(self.right))  # S

    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients themselves, (R, p)."""
        left, right = self._matrices()
        if out is None:
            out = left.new_empty(self.num_rows, self.num_params)
        place = out.view(self.num_rows, *left.shape[1:-1], right.shape[-1])
        if left.shape[-1] == 1:  # nothing to add up, and a product of many 1-by-n matrices would be slow
            torch.mul(left, right, out=place)
        elif left.ndim == 3:
            if not kernels.outer_products(left, right, place):
                torch.bmm(left, right, out=place)
        else:
            place.copy_(left @ right)
        return out

    def add_to(self, onto: Tensor) -> None:
        """Add the gradients to an (R, p) tensor."""
        left, right = self._matrices()
        if left.ndim == 3:
            onto.view(self.num_rows, left.shape[1], -1).baddbmm_(left, right)
        else:
            super().add_to(onto)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Return δᵀ (R, G, O, T) and a (R, G, T, I), both without G if it is one."""
        left, right = self.left.mT, self.right
        if self.copies > 1:
            right = right.repeat(self.copies, 1, 1, 1)
        return (left[:, 0], right[:, 0]) if left.shape[1] == 1 else (left, right)

    def sum(self) -> Tensor:
        """Return one product over rows and positions together, (p,)."""
        left = self.left.unflatten(0, (self.copies, -1)).sum(0) if self.copies > 1 else self.left
        left, right = (x.transpose(0, 1).flatten(1, 2) for x in (left, self.right))
        return (left.mT @ right).flatten()

    def square_sum(self) -> Tensor:
        """Return (δ²)ᵀ(a²), (p,)."""
        if not self.is_factored:
            return super().square_sum()
        left, right = self.left[:, 0, 0].square(), self.right[:, 0, 0].square()
        if self.copies > 1:
            left = left.unflatten(0, (self.copies, -1)).sum(0)
        return (left.mT @ right).flatten()

    def gram(self) -> Tensor:
        """Return δδᵀ ∘ aaᵀ, the latter repeated for draws that share their inputs, (R, R)."""
        if not self.is_factored:
            return super().gram()
        left, right = self.left[:, 0, 0], self.right[:, 0, 0]
        found, inputs = left @ left.mT, right @ right.mT
        shape = (self.copies, len(right))
        found.unflatten(0, shape).unflatten(2, shape).mul_(inputs[None, :, None, :])
        return found

    def mm(self, rows: Tensor) -> Tensor:
        """Return δ_rᵀ C_k a_r: the products C_k a first, then their contraction with δ, (R, K)."""
        if not self.is_factored:
            return super().mm(rows)
        left, right = self.left[:, 0, 0].unflatten(0, (self.copies, 1, -1)), self.right[:, 0, 0]
        seen = right @ rows.unflatten(1, (-1, right.shape[1])).mT
        found: Tensor = (left * seen).sum(-1)
        return found.transpose(0, 1).flatten(1).mT

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Σ_r w_rk δ_r ⊗ a_r: w δ first, then one product with a, (K, p)."""
        if not self.is_factored:
            super().add_t_mm(weights, onto)
            return
        left, right = self.left[:, 0, 0], self.right[:, 0, 0]
        mixed = weights.mT.unsqueeze(-1) * left
        if self.copies > 1:
            mixed = mixed.unflatten(1, (self.copies, -1)).sum(1)
        table = onto.unflatten(1, (left.shape[1], -1))
        _add_product(table, mixed.mT, right.expand(len(mixed), -1, -1))

    def narrow(self, start: int, stop: int) -> Outer:
        """Return some outputs."""
        if (start, stop) == (0, self.num_params):
            return self
        width = self.right.shape[3]
        return Outer(self.left[..., start // width : stop // width], self.right)

    def to_dtype(self, dtype: torch.dtype) -> Outer:
        """Return the factors in another dtype."""
        if self.left.dtype is self.right.dtype is dtype:
            return self
        return Outer(self.left.to(dtype), self.right.to(dtype))

    def scaled(self, factor: float) -> Outer:
        """Return the gradients times a number."""
        return Outer(self.left * factor, self.right)

    def zero_rows(self, count: int, like: Tensor) -> Outer:
        """Return zero factors with one position."""
        groups = self.left.shape[1]
        return Outer(*(like.new_zeros(count, groups, 1, x.shape[3]) for x in (self.left, self.right)))

    def split_draws(self, count: int) -> Block:
        """Return gradients of one draw's tensor: draws are groups, or lie side by side among the outputs."""
        left, right = self.left, self.right
        if left.shape[1] % count == 0:
            left, right = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in (left, right))
            return Outer(left.flatten(0, 1), right[0] if right.stride(0) == 0 else right.flatten(0, 1))
        if left.shape[1] == 1 and left.shape[3] % count == 0:
            return Outer(_split_outputs(left, count), right)
        return super().split_draws(count)

    def transposed(self) -> Outer | None:
        """Return the gradients of the weight with inputs and outputs swapped, unless draws share the inputs."""
        return Outer(self.right, self.left) if self.copies == 1 else None


@dataclass(eq=False)
class Patches(Block):
    """Outer products with patches of images, which are many times larger than the images and made when they are needed.

    Args:
        left: δ, (R, G, T, O).
        source: x, (R/S, ...); draws of the weights may share it.
        width: I.
        open: some rows of x → as many of a, (..., G, T, I).
        kept: holds the patches of all rows once they were made, for every part of the tensor.
    """

    left: Tensor
    source: Tensor
    width: int
    open: Callable[[Tensor], Tensor]
    kept: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.num_rows, groups, _, outputs = self.left.shape
        self.num_params = groups * outputs * self.width
        self.grain = self.width if groups == 1 else self.num_params

    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients themselves, some rows of x at a time, (R, p)."""
        left = self.left.unflatten(0, (-1, max(1, len(self.source))))
        copies, count, groups, positions, outputs = left.shape
        bytes_each = groups * positions * max(self.width, copies * outputs) * left.element_size()
        step = max(1, (GPU_CHUNK_BYTES if left.is_cuda else CHUNK_BYTES) // max(1, bytes_each))
        if out is None:
            out = left.new_empty(copies * count, self.num_params)
        rows = out.unflatten(0, (copies, count))
        for start in range(0, count, step):
            part = slice(start, start + step)
            if copies == groups == 1:
                place = rows[0, part].unflatten(1, (outputs, self.width))
                torch.bmm(left[0, part, 0].mT, self._opened(part)[:, 0], out=place)
            else:
                rows[:, part] = (left[:, part].mT @ self._opened(part)).flatten(2)
        return out

    def _opened(self, part: slice) -> Tensor:
        """Return the patches of some rows of x; those of all rows are kept where they are few."""
        groups, positions = self.left.shape[1:3]
        size = len(self.source) * groups * positions * self.width * self.left.element_size()
        if size > KEPT_BYTES:
            return self.open(self.source[part])
        if "patches" not in self.kept:
            self.kept["patches"] = self.open(self.source)
        return self.kept["patches"][part]

    def narrow(self, start: int, stop: int) -> Patches:
        """Return some outputs."""
        if (start, stop) == (0, self.num_params):
            return self
        return self._with_left(self.left[..., start // self.width : stop // self.width])

    def to_dtype(self, dtype: torch.dtype) -> Patches:
        """Return the factors in another dtype."""
        return replace(self, left=self.left.to(dtype), source=self.source.to(dtype))

    def scaled(self, factor: float) -> Patches:
        """Return the gradients times a number."""
        return self._with_left(self.left * factor)

    def split_draws(self, count: int) -> Block:
        """Return gradients of one draw's tensor: draws saw the same images, or are groups of channels."""
        groups, outputs = self.left.shape[1], self.left.shape[3]
        if groups == 1 and outputs % count == 0:
            return self._with_left(_split_outputs(self.left, count))
        if groups % count == 0 and isinstance(self.open, partial):
            left, source = (x.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1) for x in (self.left, self.source))
            return Patches(left, source, self.width, partial(self.open, groups=groups // count))
        return super().split_draws(count)

    def _with_left(self, left: Tensor) -> Patches:
        other = replace(self, left=left)
        other.kept = self.kept
        return other


@dataclass(eq=False)
class TableRows(Block):
    """Gradients that touch few rows of a table: embeddings. Entry (r, t) adds `values[r, t]` to row `index[r, t]`.

    Args:
        index: rows of the table, (R, T) integers.
        values: what is added there, (R, T, D).
        table_rows: number of rows V of the table, p = V·D.
    """

    index: Tensor
    values: Tensor
    table_rows: int

    is_factored = True

    def __post_init__(self) -> None:
        self.num_rows, self.grain = len(self.index), self.values.shape[-1]
        self.num_params = self.table_rows * self.grain

    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients themselves, (R, p)."""
        rows = self.values.new_zeros(self.num_rows, self.num_params) if out is None else out.zero_()
        self.add_to(rows)
        return rows

    def add_to(self, onto: Tensor) -> None:
        """Add the gradients to an (R, p) tensor."""
        table = onto.unflatten(1, (self.table_rows, self.grain))
        table.scatter_add_(1, self.index.unsqueeze(-1).expand_as(self.values), self.values)

    def sum(self) -> Tensor:
        """Return Σ_r g_r, (p,)."""
        table = self.values.new_zeros(self.table_rows, self.values.shape[-1])
        return table.index_add_(0, self.index.flatten(), self.values.flatten(0, 1)).flatten()

    def square_sum(self) -> Tensor:
        """Return Σ_r g_r ∘ g_r, (p,)."""
        _, word, values = self._coalesced()
        table = self.values.new_zeros(self.table_rows, self.values.shape[-1])
        return table.index_add_(0, word, values.square()).flatten()

    def gram(self) -> Tensor:
        """Return the sum over pairs of touched entries that share a table row, (R, R)."""
        row, word, values = self._coalesced()
        result = self.values.new_zeros(self.num_rows, self.num_rows)
        step = max(1, CHUNK_BYTES // max(1, 2 * len(row) * values.element_size()))
        for start in range(0, len(row), step):
            part = slice(start, start + step)
            shared = (values[part] @ values.mT) * (word[part, None] == word)
            by_row = shared.new_zeros(shared.shape[0], self.num_rows).index_add_(1, row, shared)
            result.index_add_(0, row[part], by_row)
        return result

    def mm(self, rows: Tensor) -> Tensor:
        """Return G Cᵀ for C (K, p), (R, K)."""
        seen = (part.unflatten(1, (self.table_rows, self.grain))[:, self.index] for part in self._some_of(rows))
        return torch.cat([part.mul_(self.values).sum((2, 3)) for part in seen]).mT

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, p) tensor."""
        for weight, part in zip(self._some_of(weights.mT), self._some_of(onto), strict=True):
            shares = (weight[..., None, None] * self.values).flatten(1, 2)
            part.unflatten(1, (self.table_rows, self.grain)).index_add_(1, self.index.flatten(), shares)

    def _some_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor in pieces of few rows, for each of which a product holds one number for each value."""
        limit = GPU_CHUNK_BYTES if rows.is_cuda else CHUNK_BYTES
        pieces: tuple[Tensor, ...] = rows.split(max(1, limit // max(1, self.values.nbytes)))
        return pieces

    def narrow(self, start: int, stop: int) -> TableRows:
        """Return some rows of the table; entries of others count zero."""
        if (start, stop) == (0, self.num_params):
            return self
        first, last = start // self.grain, stop // self.grain
        inside = (self.index >= first) & (self.index < last)
        index = torch.where(inside, self.index - first, 0)
        return TableRows(index, self.values * inside.unsqueeze(-1), last - first)

    def to_dtype(self, dtype: torch.dtype) -> TableRows:
        """Return the values in another dtype."""
        return replace(self, values=self.values.to(dtype))

    def scaled(self, factor: float) -> TableRows:
        """Return the gradients times a number."""
        return replace(self, values=self.values * factor)

    def zero_rows(self, count: int, like: Tensor) -> TableRows:
        """Return zeros for the first row of the table."""
        return TableRows(self.index.new_zeros(count, 1), like.new_zeros(count, 1, self.grain), self.table_rows)

    def _coalesced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, table row, value) triples, with entries of one example that touch the same table row added up.

        There are as many triples as entries, and those left over are zero: counting them would wait for the device.
        """
        row = torch.arange(self.num_rows, device=self.index.device).repeat_interleave(self.index.shape[1])
        words, order = self.index.sort(dim=1, stable=True)
        fresh = F.pad(words[:, 1:] != words[:, :-1], (1, 0), value=False)
        slot = fresh.cumsum(1)
        word = torch.zeros_like(words).scatter_(1, slot, words)
        given = self.values.gather(1, order.unsqueeze(-1).expand_as(self.values))
        values = torch.zeros_like(given).scatter_add_(1, slot.unsqueeze(-1).expand_as(given), given)
        return row, word.flatten(), values.flatten(0, 1)


@dataclass(eq=False)
class _Several(Block):
    """Blocks of one tensor that are put together when they are formed.

    Args:
        parts: the blocks.
    """

    parts: tuple[Block, ...]

    def __post_init__(self) -> None:
        self.num_rows, self.num_params = self.parts[0].num_rows, self.parts[0].num_params
        self.grain = math.lcm(*(part.grain for part in self.parts))

    def sum(self) -> Tensor:
        """Return Σ_r g_r, (p,)."""
        return reduce(torch.add, [part.sum() for part in self.parts])

    def narrow(self, start: int, stop: int) -> Self:
        """Return some columns of each part."""
        return type(self)(tuple(part.narrow(start, stop) for part in self.parts))

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """Return the parts in another dtype."""
        return type(self)(tuple(part.to_dtype(dtype) for part in self.parts))

    def scaled(self, factor: float) -> Self:
        """Return the parts times a number."""
        return type(self)(tuple(part.scaled(factor) for part in self.parts))

    def split_draws(self, count: int) -> Self:
        """Return the parts of one draw's tensor."""
        return type(self)(tuple(part.split_draws(count) for part in self.parts))


class Sum(_Several):
    """Gradients of a tensor that is used in several ways, such as a table that is an output layer as well."""

    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients themselves, (R, p)."""
        first, *others = self.parts
        rows = first.form(out)
        if rows is not out and isinstance(first, Formed):  # others may hold them
            rows = rows.clone()
        for part in others:
            part.add_to(rows)
        return rows


class Stacked(_Several):
    """Rows of several passes, one below the other, that have no common factors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_rows = sum(part.num_rows for part in self.parts)

    def form(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients themselves, (R, p)."""
        if out is None:
            return torch.cat([part.form() for part in self.parts])
        for place, part in zip(out.split([part.num_rows for part in self.parts]), self.parts, strict=True):
            part.form(place)
        return out


def add(blocks: Sequence[Block]) -> Block:
    """Return the gradients of one tensor that the same examples used several times."""
    return reduce(_add_two, blocks)


def _add_two(a: Block, b: Block) -> Block:
    if isinstance(a, TableRows) and isinstance(b, TableRows):
        return replace(a, index=torch.cat([a.index, b.index], 1), values=torch.cat([a.values, b.values], 1))
    if isinstance(a, Outer) and isinstance(b, Outer) and _have_same_shape(a, b) and a.copies == b.copies == 1:
        return Outer(torch.cat([a.left, b.left], 2), torch.cat([a.right, b.right], 2))
    if isinstance(a, Formed) and isinstance(b, Formed):
        return Formed(a.rows + b.rows)
    return Sum((*(a.parts if isinstance(a, Sum) else (a,)), b))


def stack(blocks: Sequence[Block]) -> Block:
    """Return the gradients of one tensor for several groups of rows, one below the other."""
    if all(isinstance(block, TableRows) for block in blocks):
        return _stack_tables([block for block in blocks if isinstance(block, TableRows)])
    outers = [block for block in blocks if isinstance(block, Outer)]
    if len(outers) == len(blocks) and all(_have_same_shape(outers[0], block) for block in outers):
        return _stack_outers(outers)
    patches = [block for block in blocks if isinstance(block, Patches)]
    if len(patches) == len(blocks) and all(_share_memory(patches[0].source, block.source) for block in patches):
        return replace(patches[0], left=torch.cat([block.left for block in patches]))
    return Stacked(tuple(blocks))


def _stack_tables(blocks: Sequence[TableRows]) -> TableRows:
    width = max(block.index.shape[1] for block in blocks)
    index = torch.cat([F.pad(block.index, (0, width - block.index.shape[1])) for block in blocks])
    values = [F.pad(block.values, (0, 0, 0, width - block.values.shape[1])) for block in blocks]
    return replace(blocks[0], index=index, values=torch.cat(values))


def _stack_outers(blocks: Sequence[Outer]) -> Outer:
    # Zero positions contribute nothing, so sequences of different length can share one tensor.
    length = max(block.left.shape[2] for block in blocks)

    def padded(x: Tensor) -> Tensor:
        return x if x.shape[2] == length else F.pad(x, (0, 0, 0, length - x.shape[2]))

    left, first = torch.cat([padded(block.left) for block in blocks]), blocks[0].right
    if all(_share_memory(first, block.right) for block in blocks):
        return Outer(left, first)
    inputs = [block.right if block.copies == 1 else block.right.repeat(block.copies, 1, 1, 1) for block in blocks]
    return Outer(left, torch.cat([padded(x) for x in inputs]))


def _split_outputs(left: Tensor, count: int) -> Tensor:
    """Return δ (K, 1, T, S·O) of S draws as that of S·K rows, (S·K, 1, T, O)."""
    split: Tensor = left.unflatten(3, (count, -1))
    return split.movedim(3, 0).flatten(0, 1)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same numbers in the same place: several draws of the weights saw one input."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _have_same_shape(a: Outer, b: Outer) -> bool:
    """Tell whether groups and sizes agree: not so for, say, a linear weight read transposed elsewhere."""
    return a.left.shape[1::2] == b.left.shape[1::2] and a.right.shape[-1] == b.right.shape[-1]


def _add_product(onto: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to matrices or batches of them, in place."""
    # A product with a single row or column in place adds number by number to what is there, and rounds as often: that
    # is then far more than the rounding of the sum.
    if 1 in onto.shape[-2:]:
        onto += a @ b
    elif onto.ndim == 2:
        onto.addmm_(a, b)
    else:
        onto.baddbmm_(a, b)
