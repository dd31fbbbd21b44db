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

from slangvi.types import Routes

__all__ = ["Block", "Formed", "Memo", "Outer", "Rows", "add", "cheapest", "stack"]

# Largest temporary a chunked product may take, where nothing else is said.
CHUNK_BYTES = Routes().chunk_bytes
# On a CPU, temporaries that are used twice in a row should still be in its cache the second time.
CACHE_BYTES = 1 << 21


class Block(ABC):
    """R per-example gradients of one parameter tensor with p entries: the five products of the operator."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """R."""

    @property
    @abstractmethod
    def costs(self) -> tuple[int, int]:
        """Counted multiplications of `gram`, and of `mm` or `t_mm` for one column."""

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
    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Add Wᵀ G for W (R, K) to a (K, p) tensor, which may be a slice of a wider one."""

    def t_mm(self, weights: Tensor) -> Tensor:
        """Wᵀ G for W (R, K), (K, p)."""
        result = weights.new_zeros(weights.shape[1], self.num_params)
        self.add_t_mm(weights, result)
        return result

    @property
    @abstractmethod
    def num_params(self) -> int:
        """Entries of the parameter tensor, p."""

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

    @property
    def costs(self) -> tuple[int, int]:
        """R²p and Rp."""
        R, p = self.rows.shape
        return R * R * p, R * p

    def form(self) -> Tensor:
        """(R, p)."""
        return self.rows

    def sum(self) -> Tensor:
        """(p,)."""
        return _column_sums(self.rows)

    def square_sum(self) -> Tensor:
        """(p,)."""
        return _column_sums(self.rows.square())

    def gram(self) -> Tensor:
        """(R, R)."""
        return self.rows @ self.rows.mT

    def mm(self, rows: Tensor) -> Tensor:
        """(R, K)."""
        return self.rows @ rows.mT

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """(K, p)."""
        _add_product(onto, weights.mT, self.rows)

    @property
    def num_params(self) -> int:
        """Columns of the rows, p."""
        return self.rows.shape[1]

    def scaled(self, factor: float) -> Formed:
        """Times a number."""
        return Formed(self.rows * factor)

    def padded(self, before: int, after: int) -> Formed:
        """With zero rows around."""
        return Formed(F.pad(self.rows, (0, 0, before, after)))


@dataclass(frozen=True)
class Outer(Block):
    """Sums of outer products, g_r = Σ_t δ_rt ⊗ a_rt, never formed: linear and convolution weights.

    Draws of the weights that saw the same inputs share one copy of them: `right` may have R/S rows, row r of `left`
    then belongs to row r mod R/S of `right`. Work on the inputs is done once instead of S times.

    Args:
        left: δ, (R, G, T, O).
        right: a, (R/S, G, T, I).
        chunk_bytes: largest temporary of a product.
    """

    left: Tensor
    right: Tensor
    chunk_bytes: int = CHUNK_BYTES

    @property
    def num_rows(self) -> int:
        """R."""
        return self.left.shape[0]

    @property
    def copies(self) -> int:
        """S, how often each row of `right` is used."""
        return self.left.shape[0] // max(1, self.right.shape[0])

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(R, G, T, O, I)."""
        R, G, T, O = self.left.shape  # noqa: E741
        return R, G, T, O, self.right.shape[-1]

    @property
    def costs(self) -> tuple[int, int]:
        """δδᵀ ∘ aaᵀ over all pairs of positions, and C_k a for one k; inputs shared by S draws count once."""
        R, G, T, O, I = self.sizes  # noqa: E741
        rows = self.right.shape[0]
        inputs = rows * rows if T == 1 else R * R
        return G * T * T * (R * R * O + inputs * I), G * T * O * (rows * I + R)

    def form(self) -> Tensor:
        """(R, p)."""
        whole = self._unshared()
        return (whole.left.mT @ whole.right).flatten(1)

    def sum(self) -> Tensor:
        """One product per group over rows and positions together, (p,)."""
        left = self.left.unflatten(0, (self.copies, -1)).sum(0) if self.copies > 1 else self.left
        return (_by_group(left).mT @ _by_group(self.right)).flatten()

    def square_sum(self) -> Tensor:
        """With one position (δ²)ᵀ(a²); otherwise gradients are formed a few rows at a time, (p,)."""
        _, G, T, O, I = self.sizes  # noqa: E741
        if T == 1:
            return Outer(self.left.square(), self.right.square()).sum()
        total = self.left.new_zeros(G * O * I)
        for piece in self._unshared()._split(G * O * I):
            total += piece.form().square().sum(0)
        return total

    def gram(self) -> Tensor:
        """Σ_g Σ_tt' (δ_rt·δ_r't')(a_rt·a_r't'), (R, R)."""
        R, G, T, _, _ = self.sizes
        if T == 1:
            return self.gram_with(self.inputs_gram())
        whole = self._unshared()
        left, right = _by_group(whole.left), _by_group(whole.right)
        strips = [
            ((_by_group(piece.left) @ left.mT) * (_by_group(piece.right) @ right.mT))
            .reshape(G, piece.num_rows, T, R, T)
            .sum((0, 2, 4))
            for piece in whole._split(2 * G * T * R * T)
        ]
        return torch.cat(strips)

    @property
    def simple(self) -> bool:
        """One group and one position: the Gram is δδᵀ ∘ aaᵀ."""
        return self.left.shape[1] == self.left.shape[2] == 1

    def inputs_gram(self) -> Tensor:
        """With one position: aaᵀ in each group, (G, R/S, R/S)."""
        right = _by_group(self.right)
        return right @ right.mT

    def gram_with(self, inputs: Tensor) -> Tensor:
        """With one position: Σ_g δδᵀ ∘ inputs, the latter repeated for draws that share them, (R, R)."""
        R, left = self.num_rows, _by_group(self.left)
        product: Tensor = (left @ left.mT).unflatten(1, (self.copies, -1)).unflatten(-1, (self.copies, -1))
        product *= inputs.unflatten(1, (1, -1)).unflatten(-1, (1, -1))
        return (product[0] if len(product) == 1 else product.sum(0)).reshape(R, R)

    def mm(self, rows: Tensor) -> Tensor:
        """Σ_t δ_rtᵀ C_k a_rt: the products C_k a for some k at a time, then their contraction with δ, (R, K)."""
        R, G, T, O, I = self.sizes  # noqa: E741
        right, left = _by_group(self.right), self.left.unflatten(0, (self.copies, -1)).movedim(2, 1)
        parts = []
        for piece in rows.split(self._columns()):
            table = piece.unflatten(1, (G, O, I))
            # Groups one by one: a batch over groups and columns together would have to be copied first.
            seen = ((right[g] @ table[:, g].mT).unflatten(1, (-1, T)) for g in range(G))
            parts.append(reduce(torch.add, (_contracted(left[:, g], x) for g, x in enumerate(seen))))
        return torch.cat(parts, dim=-1).reshape(R, -1) if parts else rows.new_zeros(R, 0)

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Σ_r w_rk Σ_t δ_rt ⊗ a_rt: w δ for some k at a time, then one product with a, (K, p)."""
        _, G, _, O, I = self.sizes  # noqa: E741
        right, left = _by_group(self.right), self.left.unflatten(0, (self.copies, -1)).movedim(2, 1)
        width = self._columns()
        for piece, place in zip(weights.split(width, dim=1), onto.split(width), strict=True):
            w = piece.unflatten(0, (self.copies, -1))
            table = place.unflatten(1, (G, O, I))
            for g in range(G):
                mixed = _mixed(w, left[:, g]).flatten(1, 2)
                _add_product(table[:, g], mixed.mT, right[g].expand(len(mixed), -1, -1))

    @property
    def num_params(self) -> int:
        """G·O·I."""
        _, G, _, O, I = self.sizes  # noqa: E741
        return G * O * I

    def scaled(self, factor: float) -> Outer:
        """Times a number."""
        return replace(self, left=self.left * factor)

    def padded(self, before: int, after: int) -> Outer:
        """With zero rows around."""
        around, whole = (0, 0, 0, 0, 0, 0, before, after), self._unshared()
        return Outer(F.pad(whole.left, around), F.pad(whole.right, around))

    def _unshared(self) -> Outer:
        """The same with a copy of the inputs for every row."""
        return replace(self, right=self.right.repeat(self.copies, 1, 1, 1)) if self.copies > 1 else self

    def _columns(self) -> int:
        """How many columns of the other operand to take at once: on a CPU as many as its cache holds."""
        limit = min(CACHE_BYTES, self.chunk_bytes) if self.left.device.type == "cpu" else self.chunk_bytes
        R, _, T, O, _ = self.sizes  # noqa: E741
        return max(1, limit // max(1, R * T * O * self.left.element_size()))

    def _split(self, entries_per_row: int) -> list[Outer]:
        """Pieces whose temporaries stay within CHUNK_BYTES."""
        per_row = max(1, entries_per_row * self.left.element_size())
        # A CPU gains nothing from large pieces.
        limit = min(4 * CACHE_BYTES, self.chunk_bytes) if self.left.device.type == "cpu" else self.chunk_bytes
        rows = max(1, limit // per_row)
        pairs = zip(self.left.split(rows), self.right.split(rows), strict=True)
        return [replace(self, left=left, right=right) for left, right in pairs]


def _add_product(onto: Tensor, a: Tensor, b: Tensor) -> None:
    """Onto += a b, matrices or batches of them; vmap has no product in place and would go one by one."""
    if torch._C._functorch.is_functorch_wrapped_tensor(onto):
        onto += a @ b
    elif onto.ndim == 2:
        onto.addmm_(a, b)
    else:
        onto.baddbmm_(a, b)


def _column_sums(rows: Tensor) -> Tensor:
    """Σ_r over (R, p); as a product with ones, which a GPU does several times faster than a sum over rows."""
    if rows.device.type == "cuda":
        return rows.mT @ rows.new_ones(len(rows))
    return rows.sum(0)


def _contracted(left: Tensor, seen: Tensor) -> Tensor:
    """Σ_to δ_srto · seen_krto for one group, (S, R/S, K)."""
    if len(left) == 1:
        return seen.mul_(left).sum((-2, -1)).mT.unsqueeze(0)
    return torch.einsum("srto,krto->srk", left, seen)


def _mixed(weights: Tensor, left: Tensor) -> Tensor:
    """Σ_s w_srk δ_srto for one group, (K, R/S, T, O)."""
    if len(left) == 1:
        return weights[0].mT[:, :, None, None] * left
    return torch.einsum("srk,srto->krto", weights, left)


def _by_group(x: Tensor) -> Tensor:
    """(R, G, T, n) → (G, R·T, n)."""
    return x.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class Rows(Block):
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

    def square_sum(self) -> Tensor:
        """(p,)."""
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
        a, b = a._unshared(), b._unshared()
        return Outer(torch.cat([a.left, b.left], 2), torch.cat([a.right, b.right], 2))
    return Formed(a.form() + b.form())


# What was already put together, by the places of the parts: tensors that shared memory share it again. The parts are
# held as well, since a place that is given up may be given to other numbers.
Memo = dict[tuple[tuple[int, ...], ...], tuple[list[Tensor], Tensor]]


def stack(blocks: Sequence[Block], memo: Memo | None = None) -> Block:
    """Rows of different examples or samples, one below the other."""
    memo = {} if memo is None else memo
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
        return _stack_outers(outers, memo)
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


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place: several draws of the weights saw one input."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _alike(a: Outer, b: Outer) -> bool:
    """Same grouping and sizes: not so for, say, a linear weight read transposed elsewhere."""
    return a.left.shape[1::2] == b.left.shape[1::2] and a.right.shape[-1] == b.right.shape[-1]


def cheapest(block: Block, rank: int, routes: Routes | None = None, name: str = "") -> Block:
    """Form outer products when counted multiplications say so and the result fits `form_bytes`, or as `routes` insist.

    Per step, with K = rank products on either side:
    factored  R²T²(O+I) + (2K+1)·R·T·O·I   (T > 1: the squares need forming in pieces)
    formed    R·T·O·I + R²·O·I + (2K+1)·R·O·I
    """
    routes = routes or Routes()
    if isinstance(block, Rows):
        return replace(block, chunk_bytes=routes.chunk_bytes)
    if not isinstance(block, Outer):
        return block
    wish, chunked = routes.layer(name), replace(block, chunk_bytes=routes.chunk_bytes)
    if wish == "form":
        return Formed(block.form())
    R, G, T, O, I = block.sizes  # noqa: E741
    if wish == "factor" or R * G * O * I * block.left.element_size() > routes.form_bytes:
        return chunked
    products = 2 * rank + 1
    factored = R * R * T * T * (O + I) + products * R * T * O * I
    formed = R * T * O * I + R * R * O * I + products * R * O * I
    return Formed(block.form()) if formed < factored else chunked
