"""Per-example gradients of one parameter tensor, in whichever form is cheapest to hold.

Index legend: r row (example at a sample) · t position (time, pixel, repeated use) · g group · o output · i input ·
k column of the other operand · p entry of the parameter tensor · v row of an embedding table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Block", "Formed", "Outer", "Rows", "add", "cheapest", "stack"]

# Largest temporary a chunked product may take, and largest tensor of formed gradients kept for one parameter.
CHUNK_BYTES = 1 << 26
FORM_BYTES = 1 << 28


class Block(ABC):
    """R per-example gradients of one parameter tensor with p entries: the five products of the operator."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """R."""

    @abstractmethod
    def form(self) -> Tensor:
        """The gradients themselves, (R, p)."""

    @abstractmethod
    def sum(self) -> Tensor:
        """Σ_r g_r, (p,)."""

    @abstractmethod
    def square_sum(self) -> Tensor:
        """Σ_r g_r ∘ g_r, (p,)."""

    @abstractmethod
    def gram(self) -> Tensor:
        """G Gᵀ, (R, R)."""

    @abstractmethod
    def mm(self, rows: Tensor) -> Tensor:
        """G Cᵀ for C (K, p), (R, K)."""

    @abstractmethod
    def t_mm(self, weights: Tensor) -> Tensor:
        """Wᵀ G for W (R, K), (K, p)."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """The same gradients times a number."""

    @abstractmethod
    def padded(self, before: int, after: int) -> Block:
        """The same gradients with zero rows added in front and behind."""


@dataclass(frozen=True)
class Formed(Block):
    """Gradients held as they are: small tensors (biases, norms) and modules without a rule.

    Args:
        rows: (R, p).
    """

    rows: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return self.rows.shape[0]

    def form(self) -> Tensor:
        """(R, p)."""
        return self.rows

    def sum(self) -> Tensor:
        """(p,)."""
        return self.rows.sum(0)

    def square_sum(self) -> Tensor:
        """(p,)."""
        return self.rows.square().sum(0)

    def gram(self) -> Tensor:
        """(R, R)."""
        return self.rows @ self.rows.mT

    def mm(self, rows: Tensor) -> Tensor:
        """(R, K)."""
        return self.rows @ rows.mT

    def t_mm(self, weights: Tensor) -> Tensor:
        """(K, p)."""
        return weights.mT @ self.rows

    def scaled(self, factor: float) -> Formed:
        """Times a number."""
        return Formed(self.rows * factor)

    def padded(self, before: int, after: int) -> Formed:
        """With zero rows around."""
        return Formed(F.pad(self.rows, (0, 0, before, after)))


@dataclass(frozen=True)
class Outer(Block):
    """Sums of outer products, g_r = Σ_t δ_rt ⊗ a_rt, never formed: linear and convolution weights.

    Args:
        left: δ, (R, G, T, O).
        right: a, (R, G, T, I).
    """

    left: Tensor
    right: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return self.left.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(R, G, T, O, I)."""
        R, G, T, O = self.left.shape  # noqa: E741
        return R, G, T, O, self.right.shape[-1]

    def form(self) -> Tensor:
        """(R, p)."""
        return (self.left.mT @ self.right).flatten(1)

    def sum(self) -> Tensor:
        """One product per group over rows and positions together, (p,)."""
        left, right = (x.transpose(0, 1).flatten(1, 2) for x in (self.left, self.right))
        return (left.mT @ right).flatten()

    def square_sum(self) -> Tensor:
        """With one position (δ²)ᵀ(a²); otherwise gradients are formed a few rows at a time, (p,)."""
        _, G, T, O, I = self.sizes  # noqa: E741
        if T == 1:
            return Outer(self.left.square(), self.right.square()).sum()
        total = self.left.new_zeros(G * O * I)
        for piece in self._split(G * O * I):
            total += piece.form().square().sum(0)
        return total

    def gram(self) -> Tensor:
        """Σ_g Σ_tt' (δ_rt·δ_r't')(a_rt·a_r't'), (R, R)."""
        R, G, T, _, _ = self.sizes
        left, right = (x.transpose(0, 1).flatten(1, 2) for x in (self.left, self.right))
        if T == 1:
            return ((left @ left.mT) * (right @ right.mT)).sum(0)
        strips = [
            ((a.transpose(0, 1).flatten(1, 2) @ left.mT) * (b.transpose(0, 1).flatten(1, 2) @ right.mT))
            .reshape(G, a.shape[0], T, R, T)
            .sum((0, 2, 4))
            for a, b in ((piece.left, piece.right) for piece in self._split(2 * G * T * R * T))
        ]
        return torch.cat(strips)

    def mm(self, rows: Tensor) -> Tensor:
        """Σ_t δ_rtᵀ C_k a_rt, one column of the result at a time, (R, K)."""
        _, G, _, O, I = self.sizes  # noqa: E741
        columns = [(self.right @ c.view(G, O, I).mT).mul_(self.left).sum((1, 2, 3)) for c in rows]
        return torch.stack(columns, dim=-1) if columns else self.left.new_zeros(self.num_rows, 0)

    def t_mm(self, weights: Tensor) -> Tensor:
        """Σ_r w_rk Σ_t δ_rt ⊗ a_rt, (K, p)."""
        rows = [Outer(self.left * w.view(-1, 1, 1, 1), self.right).sum() for w in weights.mT]
        _, G, _, O, I = self.sizes  # noqa: E741
        return torch.stack(rows) if rows else self.left.new_zeros(0, G * O * I)

    def scaled(self, factor: float) -> Outer:
        """Times a number."""
        return replace(self, left=self.left * factor)

    def padded(self, before: int, after: int) -> Outer:
        """With zero rows around."""
        around = (0, 0, 0, 0, 0, 0, before, after)
        return Outer(F.pad(self.left, around), F.pad(self.right, around))

    def _split(self, entries_per_row: int) -> list[Outer]:
        """Pieces whose temporaries stay within CHUNK_BYTES."""
        per_row = max(1, entries_per_row * self.left.element_size())
        rows = max(1, CHUNK_BYTES // per_row)
        pairs = zip(self.left.split(rows), self.right.split(rows), strict=True)
        return [Outer(left, right) for left, right in pairs]


@dataclass(frozen=True)
class Rows(Block):
    """Gradients that touch few rows of a table: embeddings. Entry (r, t) adds `values[r, t]` to row `index[r, t]`.

    Args:
        index: rows of the table, (R, T) integers.
        values: what is added there, (R, T, D).
        table_rows: number of rows V of the table, p = V·D.
    """

    index: Tensor
    values: Tensor
    table_rows: int

    @property
    def num_rows(self) -> int:
        """R."""
        return self.index.shape[0]

    def form(self) -> Tensor:
        """(R, p)."""
        dense = self.values.new_zeros(self.num_rows, self.table_rows, self.values.shape[-1])
        place = self.index.unsqueeze(-1).expand_as(self.values)
        return dense.scatter_add_(1, place, self.values).flatten(1)

    def sum(self) -> Tensor:
        """(p,)."""
        table = self.values.new_zeros(self.table_rows, self.values.shape[-1])
        return table.index_add_(0, self.index.flatten(), self.values.flatten(0, 1)).flatten()

    def square_sum(self) -> Tensor:
        """(p,)."""
        _, word, values = self._coalesced()
        table = self.values.new_zeros(self.table_rows, self.values.shape[-1])
        return table.index_add_(0, word, values.square()).flatten()

    def gram(self) -> Tensor:
        """Σ over pairs of touched entries that share a table row, (R, R)."""
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
        """(R, K)."""
        table = rows.view(-1, self.table_rows, self.values.shape[-1])
        columns = [(c[self.index] * self.values).sum((1, 2)) for c in table]
        return torch.stack(columns, dim=-1) if columns else self.values.new_zeros(self.num_rows, 0)

    def t_mm(self, weights: Tensor) -> Tensor:
        """(K, p)."""
        rows = [replace(self, values=self.values * w.view(-1, 1, 1)).sum() for w in weights.mT]
        size = self.table_rows * self.values.shape[-1]
        return torch.stack(rows) if rows else self.values.new_zeros(0, size)

    def scaled(self, factor: float) -> Rows:
        """Times a number."""
        return replace(self, values=self.values * factor)

    def padded(self, before: int, after: int) -> Rows:
        """With zero rows around."""
        index = F.pad(self.index, (0, 0, before, after))
        return replace(self, index=index, values=F.pad(self.values, (0, 0, 0, 0, before, after)))

    def as_outer(self) -> Outer:
        """The same as outer products with one-hot vectors, to be added to a tied output layer."""
        hot = F.one_hot(self.index, self.table_rows).to(self.values.dtype)
        return Outer(hot.unsqueeze(1), self.values.unsqueeze(1))

    def _coalesced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entries of one example that touch the same table row, added up: (row, table row, value) triples."""
        row = torch.arange(self.num_rows, device=self.index.device).unsqueeze(1).expand_as(self.index)
        keys, place = torch.unique(row * self.table_rows + self.index, return_inverse=True)
        values = self.values.new_zeros(len(keys), self.values.shape[-1])
        values.index_add_(0, place.flatten(), self.values.flatten(0, 1))
        return keys // self.table_rows, keys % self.table_rows, values


def add(blocks: Sequence[Block]) -> Block:
    """Gradients of one tensor used several times by the same examples: uses are added, row by row."""
    return reduce(_add_two, blocks)


def _add_two(a: Block, b: Block) -> Block:
    if isinstance(a, Rows) and isinstance(b, Rows):
        return replace(a, index=torch.cat([a.index, b.index], 1), values=torch.cat([a.values, b.values], 1))
    a, b = (x.as_outer() if isinstance(x, Rows) else x for x in (a, b))
    if isinstance(a, Outer) and isinstance(b, Outer) and _alike(a, b):
        return Outer(torch.cat([a.left, b.left], 2), torch.cat([a.right, b.right], 2))
    return Formed(a.form() + b.form())


def stack(blocks: Sequence[Block]) -> Block:
    """Rows of different examples or samples, one below the other."""
    if len(blocks) == 1:
        return blocks[0]
    if all(isinstance(block, Rows) for block in blocks):
        tables = [block for block in blocks if isinstance(block, Rows)]
        width = max(block.index.shape[1] for block in tables)
        index = torch.cat([F.pad(block.index, (0, width - block.index.shape[1])) for block in tables])
        values = [F.pad(block.values, (0, 0, 0, width - block.values.shape[1])) for block in tables]
        return replace(tables[0], index=index, values=torch.cat(values))
    outers = [block for block in blocks if isinstance(block, Outer)]
    if len(outers) == len(blocks) and all(_alike(outers[0], block) for block in outers):
        # Zero positions contribute nothing, so sequences of different length can share one tensor.
        length = max(block.left.shape[2] for block in outers)
        left, right = (
            torch.cat([F.pad(x, (0, 0, 0, length - x.shape[2])) for x in side])
            for side in ([block.left for block in outers], [block.right for block in outers])
        )
        return Outer(left, right)
    return Formed(torch.cat([block.form() for block in blocks]))


def _alike(a: Outer, b: Outer) -> bool:
    """Same grouping and sizes: not so for, say, a linear weight read transposed elsewhere."""
    return a.left.shape[1::2] == b.left.shape[1::2] and a.right.shape[-1] == b.right.shape[-1]


def cheapest(block: Block, rank: int, form_bytes: int = FORM_BYTES) -> Block:
    """Form outer products when counted multiplications say so and the result fits `form_bytes`.

    Per step, with K = rank products on either side:
    factored  R²T²(O+I) + (2K+1)·R·T·O·I   (T > 1: the squares need forming in pieces)
    formed    R·T·O·I + R²·O·I + (2K+1)·R·O·I
    """
    if not isinstance(block, Outer):
        return block
    R, G, T, O, I = block.sizes  # noqa: E741
    if R * G * O * I * block.left.element_size() > form_bytes:
        return block
    products = 2 * rank + 1
    factored = R * R * T * T * (O + I) + products * R * T * O * I
    formed = R * T * O * I + R * R * O * I + products * R * O * I
    return Formed(block.form()) if formed < factored else block
