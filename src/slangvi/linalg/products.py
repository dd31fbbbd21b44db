"""Products of few rows that may be very long: by blocks on a GPU, in float64 where digits would be lost."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "LONG",
    "batch_matmul",
    "cache_slices",
    "column_squares",
    "combine_rows",
    "gram_float64",
    "is_long",
    "is_plain",
    "mix_rows",
    "rows_dot",
    "rows_dot_vector",
]

# Rows from this length on are long. So many of their columns are summed in float32, as BLAS pleases, and these sums in
# float64. A CPU takes so many of them at once, or more where there would be more parts than this. Not a power of two,
# since rows that far apart would compete for the same lines of its cache.
LONG = 1 << 16
_BLOCK = 1000
_BLOCKS_AT_ONCE = 64
_MOST_PARTS = 128
# Entries of a vector that a CPU works on at once where there are several temporaries of its size.
_CACHED = 1 << 18
# From this length on rows are squared one after the other.
_WIDE = 8000
# Entries of long rows that one block of a GPU multiplies, and how many blocks it takes at once.
_CHUNK = 1 << 10
_GPU_BLOCKS = 1 << 12
# Columns of a product of few long rows that are made at once.
_STRIP = 1 << 14
_GPU_STRIP = 1 << 22


def gram_float64(rows: Tensor, diag: Tensor | None = None) -> Tensor:
    """Return rows times their transpose, in float64.

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
    return batch_matmul(double, double.mT)


def is_long(rows: Tensor) -> bool:
    """Tell whether float64 products of some rows would take too long."""
    return rows.ndim == 2 and rows.dtype is torch.float32 and rows.shape[-1] >= LONG


def _gram_of_long_rows(rows: Tensor, diag: Tensor | None) -> Tensor:
    rank, size = rows.shape
    block, blocks = (even_block(size, _CHUNK), _GPU_BLOCKS) if rows.is_cuda else (_BLOCK, _BLOCKS_AT_ONCE)
    width = blocks * block if rows.is_cuda else max(blocks, -(-size // (_MOST_PARTS * block))) * block
    total: Tensor | None = None
    scratch = rows.new_empty(0 if diag is None else rank * min(width, size))
    for start in range(0, size, width):
        part = rows[:, start : start + width]
        if diag is not None:
            space = scratch[: part.numel()].view(part.shape)
            part = torch.mul(part, diag[start : start + width].rsqrt(), out=space)
        found = _dot_in_blocks(part, part, block)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def is_plain(x: Tensor) -> bool:
    """Tell whether neither autograd nor vmap watches a tensor, so that results may be written in place."""
    if x.requires_grad:
        return False
    if torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return True
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and forward_ad.unpack_dual(x).tangent is None


def column_squares(rows: Tensor) -> Tensor:
    """Return the diagonal of UUᵀ for U by rows, (..., L, P) → (..., P)."""
    if rows.device.type == "cpu" and rows.ndim == 2 and len(rows) and rows.shape[1] >= _WIDE and is_plain(rows):
        total = rows[0].square()
        for row in rows[1:]:
            total.addcmul_(row, row)  # one row after the other stays in the cache, all squares together do not
        return total
    if rows.device.type == "cuda":
        lengths: Tensor = torch.linalg.vector_norm(rows, dim=rows.ndim - 2)  # one pass, without the squares in between
        return lengths.square_() if is_plain(lengths) else lengths.square()
    return rows.square().sum(-2)


def rows_dot(rows: Tensor, others: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the inner products of long rows, (L, P) and (K, P) → (L, K), in the rows' dtype or another.

    A GPU has no good kernel for matrices this thin; on many chunks at once it does well. The sums of the chunks are
    added in float64. A CPU does so where float64 is asked for.
    """
    size, on_gpu = rows.shape[-1], rows.device.type == "cuda"
    exact = dtype is torch.float64 and rows.dtype is not torch.float64
    if size < 2 * (_CHUNK if on_gpu else _BLOCK) or not (exact or on_gpu):
        found = rows @ others.mT
    else:
        found = _dot_in_blocks(rows, others, even_block(size, _CHUNK) if on_gpu else _BLOCK)
    return found.to(dtype or rows.dtype)


@lru_cache(maxsize=256)
def even_block(size: int, block: int) -> int:
    """Return the length nearest to `block`, between its half and its double, that divides `size`; else `block`.

    What is left over by blocks costs a GPU two more kernels.

    Example:
        >>> even_block(478_410, 1024), even_block(61_706, 1024)
        (1110, 1024)
    """
    even = (length for length in range(block // 2, 2 * block + 1) if size % length == 0)
    return min(even, key=lambda length: abs(math.log(length / block)), default=block)


def _dot_in_blocks(rows: Tensor, others: Tensor, block: int) -> Tensor:
    """Return inner products, (L, P) and (K, P) → (L, K), float64: within blocks in the rows' dtype, then added."""
    count, rest = divmod(rows.shape[-1], block)
    left, right = (
        (x[:, : count * block] if rest else x).view(len(x), count, block).transpose(0, 1) for x in (rows, others)
    )
    total: Tensor = torch.bmm(left, right.mT).sum(0, dtype=torch.float64)
    return total + rows[:, -rest:] @ others[:, -rest:].mT if rest else total


def cache_slices(vector: Tensor) -> list[slice]:
    """Return slices of the last dimension of (..., P) that a CPU's cache holds; one slice on other devices.

    Temporaries of elementwise work are then neither written to memory nor fresh memory, which the system hands out page
    by page.

    Example:
        >>> len(cache_slices(torch.zeros(500_000))), cache_slices(torch.zeros(5))
        (2, [slice(0, 5, None)])
    """
    size = vector.shape[-1]
    width = max(1, _CACHED // max(1, vector.shape[:-1].numel())) if vector.device.type == "cpu" else size
    return [slice(start, min(start + width, size)) for start in range(0, size, max(1, width))]


def batch_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices or batches of them, without the reshaping that matmul does to a batch first."""
    return torch.bmm(a, b) if a.ndim == 3 == b.ndim and len(a) == len(b) else a @ b


def mix_rows(weights: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write W U for W (..., K, L) and U (..., L, P) to `out`, (..., K, P), which may be U itself.

    Few long rows are taken in strips: one product with a matrix this wide takes a CPU up to twice as long.
    """
    if rows.ndim > 2 or 0 in (*rows.shape, *weights.shape):
        out.copy_(batch_matmul(weights, rows))
        return
    count, size, on_cpu = len(weights), rows.shape[1], rows.device.type == "cpu"
    if not on_cpu and out.data_ptr() != rows.data_ptr():
        torch.mm(weights, rows, out=out)
        return
    strip = min(size, _STRIP if on_cpu else _GPU_STRIP)
    scratch = rows.new_empty(count * strip)
    for start in range(0, size, max(1, strip)):
        part = rows[:, start : start + strip]
        made = torch.mm(weights, part, out=scratch[: count * part.shape[1]].view(count, -1))
        out[:, start : start + strip] = made


def rows_dot_vector(rows: Tensor, vector: Tensor, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """Return the inner products of rows (..., L, P) with x (..., P), (..., L), in float64 or another dtype.

    Further dimensions in front of x are samples. `None` stands for the dtype of x.
    """
    if rows.ndim == 2 and vector.ndim <= 2:
        return rows_dot(vector, rows, dtype) if vector.ndim == 2 else rows_dot(vector[None], rows, dtype)[0]
    if rows.ndim == 2:
        found = vector @ rows.mT
    elif vector.ndim == rows.ndim:  # samples go through one product for each member of the batch
        found = batch_matmul(vector.movedim(0, -2), rows.mT).movedim(-2, 0)
    else:
        found = batch_matmul(rows, vector.unsqueeze(-1)).squeeze(-1)
    return found.to(dtype or vector.dtype)


def combine_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_l y_l u_l for rows (..., L, P) and weights y (..., L), (..., P); further dimensions of y are samples."""
    if rows.ndim == 2:
        if len(rows) == 1:  # an outer product is no work for a matrix product
            return weights * rows[0]
        return weights @ rows
    if weights.ndim == rows.ndim:
        return batch_matmul(weights.movedim(0, -2), rows).movedim(-2, 0)
    return batch_matmul(weights.unsqueeze(-2), rows).squeeze(-2)
