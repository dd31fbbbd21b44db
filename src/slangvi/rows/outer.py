"""Gradients that are outer products: linear and convolution weights. See `base` for the index legend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.rows.base import CACHE_BYTES, CHUNK_BYTES, Block, add_entries, add_product, own_products

__all__ = ["Outer", "Unopened"]


# Entries of a parameter up to which products with several columns are one product.
_FEW = 1 << 14
# Entries of δ in a row from which a GPU is quicker with a product and a sum than with one sum of products for each row,
# which keeps as many of its processors busy as there are rows.
_LONG = 1 << 16
# Largest piece of what is opened to be formed: there may be much else in memory, and little room in one piece.
_OPENED_BYTES = 20 << 20


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

    @property
    def grain(self) -> int:
        """I, or all columns where there are several groups."""
        return self.right.shape[-1] if self.left.shape[1] == 1 else self.num_params

    def narrow(self, start: int, stop: int) -> Outer:
        """Some outputs."""
        if (start, stop) == (0, self.num_params):
            return self
        width = self.right.shape[-1]
        return replace(self, left=self.left[..., start // width : stop // width])

    def select(self, rows: Tensor) -> Outer:
        """Some rows, with inputs of their own."""
        return replace(self, left=self.left[rows], right=self.right[rows % max(1, len(self.right))])

    def to_dtype(self, dtype: torch.dtype) -> Outer:
        """In another dtype."""
        return replace(self, left=self.left.to(dtype), right=self.right.to(dtype))

    def transposed(self) -> Outer | None:
        """Return the gradients of the transposed weight, if there is one group and no sharing of inputs."""
        if self.left.shape[1] != 1 or self.copies != 1:
            return None
        return replace(self, left=self.right, right=self.left)

    def form(self) -> Tensor:
        """(R, p)."""
        whole = self._unshared()
        if self.left.shape[2] == 1:  # nothing to add up: a product of many 1-by-n matrices would be slow
            return (whole.left.mT * whole.right).flatten(1)
        return (whole.left.mT @ whole.right).flatten(1)

    def sum(self) -> Tensor:
        """One product per group over rows and positions together, (p,)."""
        left = self.left.unflatten(0, (self.copies, -1)).sum(0) if self.copies > 1 else self.left
        return (_by_group(left).mT @ _by_group(self.right)).flatten()

    def square_sum(self, squares: Tensor | None = None) -> Tensor:
        """With one position (δ²)ᵀ(a²); otherwise gradients are formed a few rows at a time, (p,)."""
        _, G, T, O, I = self.sizes  # noqa: E741
        if T == 1:
            left = self.left.square() if squares is None else squares.view(self.left.shape)
            return Outer(left, self.right.square()).sum()
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

    @property
    def delta(self) -> Tensor | None:
        """With one group and one position."""
        return self.left if self.simple else None

    def inputs_gram(self) -> Tensor:
        """With one position: aaᵀ in each group, (G, R/S, R/S)."""
        return own_products(_by_group(self.right))

    def gram_with(self, inputs: Tensor, onto: Tensor | None = None) -> Tensor:
        """With one position: Σ_g δδᵀ ∘ inputs, the latter repeated for draws that share them, (R, R).

        With one group it can be added to another matrix, without a pass of its own.
        """
        R, left = self.num_rows, _by_group(self.left)
        product, repeated = self._by_draw(own_products(left), self.copies), self._by_draw(inputs, 1)
        if onto is not None:
            add_entries(self._by_draw(onto[None], self.copies), product, repeated)
            return onto
        product *= repeated
        return (product[0] if len(product) == 1 else product.sum(0)).reshape(R, R)

    @staticmethod
    def _by_draw(table: Tensor, copies: int) -> Tensor:
        """(G, R, R) → (G, S, R/S, S, R/S)."""
        apart: Tensor = table.unflatten(1, (copies, -1)).unflatten(-1, (copies, -1))
        return apart

    def mm(self, rows: Tensor) -> Tensor:
        """Σ_t δ_rtᵀ C_k a_rt: the products C_k a for some k at a time, then their contraction with δ, (R, K)."""
        R, G, _, O, I = self.sizes  # noqa: E741
        if len(rows) == 0:
            return rows.new_zeros(R, 0)
        parts = rows.unflatten(1, (G, O, I)).split(self._columns())
        found = [self._mm_of(part) for part in parts]
        return (found[0] if len(found) == 1 else torch.cat(found)).mT

    def _mm_of(self, table: Tensor) -> Tensor:
        """`mm` of so many columns, (K, G, O, I) → (K, R)."""
        _, G, T, _, _ = self.sizes
        right, left = _by_group(self.right), self.left.unflatten(0, (self.copies, -1))
        # Groups one by one: a batch over groups and columns together would have to be copied first.
        products = (
            _contracted(left[:, :, g], self._seen_by(table[:, g], right[g]).unflatten(1, (-1, T))) for g in range(G)
        )
        return reduce(Tensor.add_, products)

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """Σ_r w_rk Σ_t δ_rt ⊗ a_rt: w δ for some k at a time, then one product with a, (K, p)."""
        _, G, _, O, I = self.sizes  # noqa: E741
        right, left = _by_group(self.right), self.left.unflatten(0, (self.copies, -1))
        table, width = onto.unflatten(1, (G, O, I)), self._columns()
        by_draw = weights.unflatten(0, (self.copies, -1))
        for g in range(G):
            for start in range(0, len(onto), width):
                part = slice(start, start + width)
                mixed = _mixed(by_draw[..., part], left[:, :, g]).flatten(1, 2)
                if self._at_once(len(mixed)):
                    # Not by +=, which would copy the sum onto itself.
                    table[part, g].add_((mixed.transpose(0, 1).flatten(1).mT @ right[g]).unflatten(0, (-1, O)))
                else:
                    add_product(table[part, g], mixed.mT, right[g].expand(len(mixed), -1, -1))

    def _at_once(self, columns: int) -> bool:
        """Whether a GPU is quicker with one product for all columns, copied together, than with one for each."""
        _, _, _, O, I = self.sizes  # noqa: E741
        return columns > 1 and O * I <= _FEW and self.left.device.type != "cpu"

    def _seen_by(self, columns: Tensor, right: Tensor) -> Tensor:
        """C_k a for (K, O, I) and (R·T, I), (K, R·T, O)."""
        if not self._at_once(len(columns)):
            return right @ columns.mT
        seen: Tensor = (right @ columns.flatten(0, 1).mT).unflatten(1, columns.shape[:2])
        return seen.transpose(0, 1)

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


@dataclass(frozen=True)
class Unopened(Block):
    """Outer products with a made from an input when it is needed, since it is many times larger: patches of an image.

    Args:
        left: δ, (R, G, T, O).
        source: x, (R/S, ...).
        width: I.
        open: some rows of x → as many of a, (..., G, T, I).
    """

    left: Tensor
    source: Tensor
    width: int
    open: Callable[[Tensor], Tensor]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.left.shape[0]

    @property
    def num_params(self) -> int:
        """G·O·I."""
        _, G, _, O, I = self.sizes  # noqa: E741
        return G * O * I

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(R, G, T, O, I)."""
        R, G, T, O = self.left.shape  # noqa: E741
        return R, G, T, O, self.width

    @property
    def costs(self) -> tuple[int, int]:
        """Those of the opened block."""
        R, G, T, O, I = self.sizes  # noqa: E741
        rows = len(self.source)
        inputs = rows * rows if T == 1 else R * R
        return G * T * T * (R * R * O + inputs * I), G * T * O * (rows * I + R)

    def opened(self) -> Outer:
        """Return the block with all of a."""
        return Outer(self.left, self.open(self.source))

    def form(self) -> Tensor:
        """The gradients themselves, some rows of x at a time, (R, p)."""
        _, G, T, O, I = self.sizes  # noqa: E741
        left = self.left.unflatten(0, (-1, max(1, len(self.source))))
        count = -(-G * T * max(O, I) * len(self.left) * left.element_size() // _OPENED_BYTES)
        if count <= 1:
            return self.opened().form()
        rows: Tensor = left.new_empty(*left.shape[:2], G * O * I)
        width = -(-len(self.source) // count)
        for start in range(0, len(self.source), width):
            part = slice(start, start + width)
            some = replace(self, left=left[:, part].flatten(0, 1), source=self.source[part])
            rows[:, part] = some.opened().form().view_as(rows[:, part])
        return rows.flatten(0, 1)

    def sum(self) -> Tensor:
        """(p,)."""
        return self.opened().sum()

    def square_sum(self, squares: Tensor | None = None) -> Tensor:
        """(p,)."""
        return self.opened().square_sum(squares)

    def gram(self) -> Tensor:
        """(R, R)."""
        return self.opened().gram()

    def mm(self, rows: Tensor) -> Tensor:
        """(R, K)."""
        return self.opened().mm(rows)

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """(K, p)."""
        self.opened().add_t_mm(weights, onto)

    @property
    def grain(self) -> int:
        """I, or all columns where there are several groups."""
        return self.width if self.left.shape[1] == 1 else self.num_params

    def narrow(self, start: int, stop: int) -> Unopened:
        """Some outputs."""
        if (start, stop) == (0, self.num_params):
            return self
        return replace(self, left=self.left[..., start // self.width : stop // self.width])

    def select(self, rows: Tensor) -> Unopened:
        """Some rows, with inputs of their own."""
        return replace(self, left=self.left[rows], source=self.source[rows % max(1, len(self.source))])

    def to_dtype(self, dtype: torch.dtype) -> Unopened:
        """In another dtype."""
        return replace(self, left=self.left.to(dtype), source=self.source.to(dtype))

    def scaled(self, factor: float) -> Unopened:
        """Times a number."""
        return replace(self, left=self.left * factor)

    def padded(self, before: int, after: int) -> Block:
        """With zero rows around."""
        return self.opened().padded(before, after)


def _contracted(left: Tensor, seen: Tensor) -> Tensor:
    """Σ_to δ_srto · seen_krto for one group, (K, S·R/S)."""
    if left.device.type == "cpu":  # few columns at a time, see `_columns`: plain products beat many tiny matrices
        return torch.stack([(left * column).sum((-2, -1)).flatten() for column in seen])
    watched = any(map(torch._C._functorch.is_functorch_wrapped_tensor, (left, seen)))
    if len(left) == 1 and left.shape[2:].numel() >= _LONG and not watched:
        return seen.mul_(left).sum((-2, -1))
    return torch.einsum("srto,krto->ksr", left, seen).flatten(1)


def _mixed(weights: Tensor, left: Tensor) -> Tensor:
    """Σ_s w_srk δ_srto for one group, (K, R/S, T, O)."""
    if len(left) == 1:
        return weights[0].mT[:, :, None, None] * left
    if left.device.type == "cpu":
        return torch.stack([(w[..., None, None] * left).sum(0) for w in weights.unbind(-1)])
    return torch.einsum("srk,srto->krto", weights, left)


def _by_group(x: Tensor) -> Tensor:
    """(R, G, T, n) → (G, R·T, n)."""
    return x.transpose(0, 1).flatten(1, 2)
