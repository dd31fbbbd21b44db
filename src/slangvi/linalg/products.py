"""Products of few rows that may be very long: by blocks on a GPU, in float64 where digits would be lost."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from slangvi.linalg.room import room

__all__ = [
    "LONG",
    "against",
    "column_squares",
    "contract",
    "even_block",
    "gram_float64",
    "is_long",
    "is_plain",
    "less",
    "lift",
    "mix",
    "product",
    "sums",
    "times",
]

# Rows from this length on are long. So many of their columns are summed in float32, as BLAS pleases, and these sums in
# float64. A CPU takes so many of them at once, or more where there would be more parts than this. Not a power of two,
# since rows that far apart would compete for the same lines of its cache.
LONG = 1 << 16
_BLOCK = 1000
_BLOCKS_AT_ONCE = 64
_MOST_PARTS = 128
# From this length on rows are squared one after the other.
_WIDE = 8000
# Entries of long rows that one block of a GPU multiplies.
_CHUNK = 1 << 10


def gram_float64(rows: Tensor, diag: Tensor | None = None) -> Tensor:
    """Rows times their transpose, in float64.

    Long float32 rows are multiplied in float32, some thousand columns at a time, and the products are added in float64:
    the rounding of many short sums averages out (to about 1e-7, tested), and float64 products would take several times
    as long.

    Args:
        rows: (..., K, P).
        diag: columns are divided by its square root first, (..., P).

    Returns:
        (..., K, K).
    """
    plain = rows.is_cuda or (is_plain(rows) and (diag is None or is_plain(diag)))
    if is_long(rows) and plain:
        return _gram_of_long_rows(rows, diag)
    weights = None if diag is None else diag.to(torch.float64).rsqrt().unsqueeze(-2)
    double = rows.to(torch.float64) if weights is None else rows * weights
    return product(double, double.mT)


def is_long(rows: Tensor) -> bool:
    """Whether float64 products of them would take too long."""
    return rows.ndim == 2 and rows.dtype is torch.float32 and rows.shape[-1] >= LONG


def _gram_of_long_rows(rows: Tensor, diag: Tensor | None) -> Tensor:
    if rows.device.type == "cuda":
        scaled = rows if diag is None else rows * diag.rsqrt()
        return contract(scaled, scaled, torch.float64)
    rank, size = rows.shape
    width = max(_BLOCKS_AT_ONCE, -(-size // (_MOST_PARTS * _BLOCK))) * _BLOCK
    total = rows.new_zeros(rank, rank, dtype=torch.float64)
    scratch = rows.new_empty(0 if diag is None else rank * min(width, size))
    for start in range(0, size, width):
        part = rows[:, start : start + width]
        if diag is not None:
            space = scratch[: part.numel()].view(part.shape)
            part = torch.mul(part, diag[start : start + width].rsqrt(), out=space)
        total += _in_blocks(part, part, _BLOCK)
    return total


def is_plain(x: Tensor) -> bool:
    """Neither autograd nor vmap watches, so that results may be written in place."""
    if x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None


def column_squares(rows: Tensor) -> Tensor:
    """Diagonal of UUᵀ for U by rows, (..., L, P) → (..., P)."""
    if rows.device.type == "cpu" and rows.ndim == 2 and len(rows) and rows.shape[1] >= _WIDE and is_plain(rows):
        total = rows[0].square()
        for row in rows[1:]:
            total.addcmul_(row, row)  # one row after the other stays in the cache, all squares together do not
        return total
    if rows.device.type == "cuda":
        lengths: Tensor = torch.linalg.vector_norm(rows, dim=rows.ndim - 2)  # one pass, without the squares in between
        return lengths.square_() if is_plain(lengths) else lengths.square()
    return rows.square().sum(-2)


def contract(rows: Tensor, others: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Inner products over long rows, (L, P) and (K, P) → (L, K), in the rows' dtype or another.

    A GPU has no good kernel for matrices this thin; on many chunks at once it does well. The sums of the chunks are
    added in float64. A CPU does so where float64 is asked for.
    """
    size, on_gpu = rows.shape[-1], rows.device.type == "cuda"
    exact = dtype is torch.float64 and rows.dtype is not torch.float64
    if size < 2 * (_CHUNK if on_gpu else _BLOCK) or not (exact or on_gpu):
        found = rows @ others.mT
    else:
        found = _in_blocks(rows, others, even_block(size, _CHUNK) if on_gpu else _BLOCK)
    return found.to(dtype or rows.dtype)


@lru_cache(maxsize=256)
def even_block(size: int, block: int) -> int:
    """The length nearest to `block`, between its half and its double, of which `size` is a multiple; else `block`.

    What is left over by blocks costs a GPU two more kernels.

    Example:
        >>> even_block(478_410, 1024), even_block(61_706, 1024)
        (1110, 1024)
    """
    even = (length for length in range(block // 2, 2 * block + 1) if size % length == 0)
    return min(even, key=lambda length: abs(math.log(length / block)), default=block)


def _in_blocks(rows: Tensor, others: Tensor, block: int) -> Tensor:
    """Inner products, (L, P) and (K, P) → (L, K), float64: within blocks of columns in the rows' dtype, then added."""
    count = rows.shape[-1] // block
    left, right = (x[:, : count * block].unflatten(-1, (count, block)).transpose(0, 1) for x in (rows, others))
    total: Tensor = torch.bmm(left, right.mT).sum(0, dtype=torch.float64)
    if rows.shape[-1] > count * block:
        total = total + rows[:, count * block :] @ others[:, count * block :].mT
    return total


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrices or batches of them multiplied, without the reshaping that matmul does to a batch first."""
    return torch.bmm(a, b) if a.ndim == 3 == b.ndim and len(a) == len(b) else a @ b


def against(rows: Tensor, vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows (..., L, P) against x (..., P) → (..., L), in x's dtype or another; further dimensions of x are samples."""
    if rows.ndim == 2 and vector.ndim <= 2:
        return contract(vector, rows, dtype) if vector.ndim == 2 else contract(vector[None], rows, dtype)[0]
    if rows.ndim == 2:
        found = vector @ rows.mT
    elif vector.ndim == rows.ndim:  # samples go through one product for each member of the batch
        found = product(vector.movedim(0, -2), rows.mT).movedim(-2, 0)
    else:
        found = product(rows, vector.unsqueeze(-1)).squeeze(-1)
    return found.to(dtype or vector.dtype)


def sums(*vectors: Tensor) -> Tensor:
    """The sum of each vector (..., P), (..., K); short ones that are alike are added in one go, and so does a GPU."""
    first = vectors[0]
    alike = all(vector.dtype == first.dtype and vector.shape == first.shape for vector in vectors)
    if alike and (first.device.type == "cuda" or first.numel() < LONG):
        return torch.stack(vectors, -2).sum(-1)
    return torch.stack([vector.sum(-1) for vector in vectors], -1)


def mix(weights: Tensor, rows: Tensor) -> Tensor:
    """Rows combined with weights, (..., K, L) and (..., L, P) → (..., K, P); an outer product is no work for a GEMM."""
    if rows.shape[-2] == 1:
        return weights * rows
    if rows.ndim == weights.ndim == 2 and is_plain(rows) and is_plain(weights):
        return torch.mm(weights, rows, out=room((len(weights), rows.shape[1]), rows))
    return product(weights, rows)


def times(x: Tensor, weight: float | Tensor, dtype: torch.dtype, onto: Tensor | None = None) -> Tensor:
    """(x · weight).to(dtype), in one pass where nobody watches; written onto a tensor of that dtype if one is given."""
    if not (is_plain(x) and (not isinstance(weight, Tensor) or is_plain(weight))):
        found = (x * weight).to(dtype)
        return found if onto is None else onto.copy_(found)
    found = torch.empty_like(x, dtype=dtype) if onto is None else onto
    return torch.mul(x, weight, out=found)


def less(vector: Tensor, rows: Tensor, inner: Tensor) -> Tensor:
    """The vector x − Σ_l y_l u_l, (..., P)."""
    if rows.ndim == 2 and len(rows) == 1 and inner.ndim == 1:
        return torch.addcmul(vector, inner, rows[0], value=-1)
    return vector - lift(rows, inner)


def lift(rows: Tensor, inner: Tensor) -> Tensor:
    """Rows (..., L, P) combined with the weights y (..., L) → (..., P)."""
    if rows.ndim == 2 and inner.ndim > 1:
        return mix(inner, rows)
    if rows.ndim == 2:
        return inner * rows[0] if len(rows) == 1 else inner @ rows
    if inner.ndim == rows.ndim:
        return mix(inner.movedim(0, -2), rows).movedim(-2, 0)
    return product(inner.unsqueeze(-2), rows).squeeze(-2)
