"""What per-example gradients of one parameter tensor must be able to do, and the plainest way to hold them.

Index legend: r row (example at a sample) · t position (time, pixel, repeated use) · g group · o output · i input ·
k column of the other operand · p entry of the parameter tensor · v row of an embedding table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.types import Routes

__all__ = ["CACHE_BYTES", "CHUNK_BYTES", "Block", "Formed", "add_entries", "add_product", "own_products"]

# Largest temporary a chunked product may take, where nothing else is said.
CHUNK_BYTES = Routes().chunk_bytes
# On a CPU, temporaries that are used twice in a row should still be in its cache the second time.
CACHE_BYTES = 1 << 21
# So many rows from which on a CPU multiplies them with each other in halves.
_MANY = 256


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

    @property
    def delta(self) -> Tensor | None:
        """The output's gradient δ, where it is all that `square_sum` squares of it; a weight and its bias share it."""
        return None

    @abstractmethod
    def square_sum(self, squares: Tensor | None = None) -> Tensor:
        """Σ_r g_r ∘ g_r, (p,); the squares of `delta` can be given where they are known, in any shape."""

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

    @property
    def grain(self) -> int:
        """Columns that `narrow` cannot part: it takes multiples of this number."""
        return 1

    @abstractmethod
    def narrow(self, start: int, stop: int) -> Block:
        """Return the columns from `start` to `stop`, multiples of `grain`."""

    @abstractmethod
    def select(self, rows: Tensor) -> Block:
        """Return the rows of some examples, given by their indices (K,)."""

    @abstractmethod
    def to_dtype(self, dtype: torch.dtype) -> Block:
        """Return the same gradients in another dtype."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """Return the gradients times a number."""

    @abstractmethod
    def padded(self, before: int, after: int) -> Block:
        """Return the gradients with zero rows added in front and behind."""


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

    @property
    def delta(self) -> Tensor:
        """The rows themselves."""
        return self.rows

    def square_sum(self, squares: Tensor | None = None) -> Tensor:
        """(p,)."""
        return _column_sums(self.rows.square() if squares is None else squares.view(self.rows.shape))

    def gram(self) -> Tensor:
        """(R, R)."""
        return own_products(self.rows)

    def mm(self, rows: Tensor) -> Tensor:
        """(R, K)."""
        return self.rows @ rows.mT

    def add_t_mm(self, weights: Tensor, onto: Tensor) -> None:
        """(K, p)."""
        add_product(onto, weights.mT, self.rows)

    @property
    def num_params(self) -> int:
        """Columns of the rows, p."""
        return self.rows.shape[1]

    def narrow(self, start: int, stop: int) -> Formed:
        """Some columns, as a view."""
        return Formed(self.rows[:, start:stop])

    def select(self, rows: Tensor) -> Formed:
        """Some rows."""
        return Formed(self.rows.index_select(0, rows))

    def to_dtype(self, dtype: torch.dtype) -> Formed:
        """In another dtype."""
        return Formed(self.rows.to(dtype))

    def scaled(self, factor: float) -> Formed:
        """Times a number."""
        return Formed(self.rows * factor)

    def padded(self, before: int, after: int) -> Formed:
        """With zero rows around."""
        return Formed(F.pad(self.rows, (0, 0, before, after)))


def _column_sums(rows: Tensor) -> Tensor:
    """Σ_r over (R, p); as a product with ones, which a GPU does several times faster than a sum over rows."""
    if rows.device.type == "cuda":
        return rows.mT @ rows.new_ones(len(rows))
    return rows.sum(0)


def add_entries(onto: Tensor, a: Tensor, b: Tensor) -> None:
    """Onto += a ∘ b; vmap has no product in place here either."""
    if torch._C._functorch.is_functorch_wrapped_tensor(onto):
        onto += a * b
    else:
        onto.addcmul_(a, b)


def add_product(onto: Tensor, a: Tensor, b: Tensor) -> None:
    """Onto += a b, matrices or batches of them."""
    # vmap has no product in place and would go one by one. A product with a single row or column in place adds number
    # by number to what is there, and rounds as often: that is then far more than the rounding of the sum.
    if torch._C._functorch.is_functorch_wrapped_tensor(onto) or 1 in onto.shape[-2:]:
        onto += a @ b
    elif onto.ndim == 2:
        onto.addmm_(a, b)
    else:
        onto.baddbmm_(a, b)


def own_products(rows: Tensor) -> Tensor:
    """Inner products of rows with each other, (..., K, n) → (..., K, K); a CPU copies a quarter of them."""
    count, single = rows.shape[-2], rows.shape[:-2].numel() == 1
    watched = rows.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(rows)
    if rows.device.type != "cpu" or watched or not single or count < _MANY:
        return rows @ rows.mT
    matrix, half = rows.flatten(0, -2), count // 2
    found = rows.new_empty(count, count)
    torch.mm(matrix, matrix[:half].mT, out=found[:, :half])
    torch.mm(matrix[half:], matrix[half:].mT, out=found[half:, half:])
    found[:half, half:] = found[half:, :half].mT
    return found.view(*rows.shape[:-1], count)
