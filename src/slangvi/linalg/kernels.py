"""Passes over long rows on a GPU as one kernel each, where torch takes several, and a copy that puts rows together.

They need Triton, which torch brings along where it is built for CUDA; elsewhere, `serves` says no.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["analyse_columns", "gram_of_both", "outer_products", "products_with_scaled", "project_columns", "serves"]


class Columns(Protocol):
    """Some columns of a state, as `slangvi.methods.projection.Part` has them."""

    @property
    def factor(self) -> Tensor:
        """U by rows, (L, n)."""

    @property
    def diag(self) -> Tensor:
        """D, (n,)."""

    @property
    def prior_precision(self) -> Tensor:
        """Λ of the prior, (n,)."""

    @property
    def new_factor(self) -> Tensor:
        """Memory for U⁺."""

    @property
    def new_diag(self) -> Tensor:
        """Memory for d⁺."""


# Columns that one program adds up in float32, and most rows of a Gram matrix and of U.
CHUNK, MOST_ROWS, MOST_RANK = 4096, 128, 32
# Fewest positions and operations from which on products of bfloat16 pieces are faster than float32 ones.
LEAST_POSITIONS, LEAST_WORK = 64, 1 << 31


def serves(factor: Tensor, height: int) -> bool:
    """Tell whether kernels take rows of gradients together with U.

    Args:
        factor: U by rows, (..., L, n).
        height: R, rows of gradients.
    """
    is_fit = factor.is_cuda and factor.ndim == 2 and factor.dtype is torch.float32
    if not is_fit or torch.cuda.is_current_stream_capturing():  # graphs were measured without
        return False
    return 0 < len(factor) <= MOST_RANK and 0 < height <= MOST_ROWS - len(factor) and bool(_programs(factor.device))


def gram_of_both(rows: Tensor, factor: Tensor) -> Tensor:
    """Return [[GGᵀ, GUᵀ], [UGᵀ, UUᵀ]], float64, (R + L, R + L), for G (R, n) and U (L, n)."""
    both = len(rows) + len(factor)
    side, launch = _tile(both)
    sums = rows.new_empty(_ceil_div(rows.shape[1], CHUNK), side, side)
    given = rows, factor, sums, rows.shape[1], len(rows), both, rows.stride(0), factor.stride(0)
    _launch(_programs(rows.device).gram, (len(sums),), *given, CHUNK=CHUNK, SIDE=side, **launch)
    return sums.sum(0, dtype=torch.float64)[:both, :both]


def products_with_scaled(part: Columns, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return GZᵀ, UZᵀ and λZZᵀ one below the other for Z = U/d by rows, and ΣG² and ΣU² by rows, in float64.

    Args:
        part: U, d and λ of some columns.
        rows: G, (R, n).

    Returns:
        (R + 2L, L) and (R + L,).
    """
    (height, size), rank = rows.shape, len(part.factor)
    both, wide = height + rank, max(16, _power_of_two(rank))
    side, launch = _tile(both)
    sums = rows.new_empty(_ceil_div(size, CHUNK), side + wide + side // wide + 1, wide)
    strides = sums.stride(0), rows.stride(0), part.factor.stride(0), part.prior_precision.stride(0)
    tensors, numbers = (rows, part.factor, part.diag, part.prior_precision, sums), (size, height, both, *strides)
    sizes = {"CHUNK": CHUNK, "SIDE": side, "WIDE": wide, **launch}
    _launch(_programs(rows.device).products, (len(sums),), *tensors, *numbers, **sizes)
    total = sums.sum(0, dtype=torch.float64)
    products = torch.cat([total[:both, :rank], total[side : side + rank, :rank]])
    return products, total[side + wide :].flatten()[:both]


def project_columns(part: Columns, rows: Tensor, weights: Tensor) -> Tensor:
    """Write U⁺ and d⁺ as `LeadingEigenvectors` does, and return the sum of what rounding would take from d⁺.

    Args:
        part: U, d and λ of some columns, and memory for U⁺ and d⁺, which may be that of U and d.
        rows: G, (R, n).
        weights: of G and U in each row of U⁺, and β and the weight of G² beside them, (L, R + L + 2).
    """
    return _write(_programs(rows.device).project, part, rows, weights)


def analyse_columns(part: Columns, rows: Tensor, weights: Tensor, least_free: float, least_prior: float) -> Tensor:
    """Write U⁺ and d⁺ as `FactorAnalysis` does, and return the sum of what rounding would take from d⁺.

    Args:
        part: see `project_columns`.
        rows: likewise.
        weights: what G and U, λZ and Z are multiplied by, and β and the weight of G² beside it, (L, R + 3L + 2).
        least_free: least share of a variance that is free of the low-rank part.
        least_prior: share of λ that d does not fall below.
    """
    return _write(_programs(rows.device).analyse, part, rows, weights, least_free, least_prior)


def outer_products(left: Tensor, right: Tensor, out: Tensor) -> bool:
    """Write the product of matrices (R, O, T) and (R, T, I) to `out`, (R, O, I), if that is faster than `torch.bmm`.

    A float32 number is the sum of three in bfloat16, and of the nine products of two such sums rounding leaves six.
    Tensor cores add them up in float32: the error is that of a float32 product, or less.

    Returns:
        Whether it was done.
    """
    (count, outputs, positions), inputs = left.shape, right.shape[2]
    work = 2 * count * outputs * positions * inputs
    is_fit = left.is_cuda and left.dtype is torch.float32 is right.dtype and not (outputs | inputs) % 8
    if not is_fit or positions < LEAST_POSITIONS or work < LEAST_WORK or not _programs(left.device):
        return False
    torch.bmm(_in_pieces(left.mT, True).mT, _in_pieces(right, False), torch.float32, out=out)
    return True


def _in_pieces(x: Tensor, is_left: bool) -> Tensor:
    """Return float32 matrices (R, T, n) in bfloat16, each number in six pieces that meet those of the other side."""
    count, positions, size = x.shape
    out = x.new_empty(count, 6 * positions, size, dtype=torch.bfloat16)
    grid = _ceil_div(positions * size, 1024), count
    _launch(_programs(x.device).split, grid, x, out, positions, size, *x.stride(), IS_LEFT=is_left, BLOCK=1024)
    return out


def _tile(side: int) -> tuple[int, dict[str, int]]:
    """Return the power of two for so many rows, and how to launch a program that multiplies them."""
    side = max(16, _power_of_two(side))
    warps, tile = {16: (2, 32), 32: (1, 32), 64: (4, 64), 128: (8, 64)}[side]
    return side, {"TILE": tile, "num_warps": warps}


def _write(kernel: Any, part: Columns, rows: Tensor, weights: Tensor, *more: float) -> Tensor:
    """Run a kernel that writes U⁺ and d⁺, and return the sum of what it clipped."""
    (height, size), rank = rows.shape, len(part.factor)
    wide = _power_of_two(rank)
    block, warps = (256, 2) if wide <= 16 else (128, 1)
    clipped = rows.new_empty(_ceil_div(size, block))
    strides = rows.stride(0), part.factor.stride(0), part.new_factor.stride(0), part.prior_precision.stride(0)
    tensors = rows, part.factor, part.diag, part.prior_precision, weights, part.new_factor, part.new_diag, clipped
    numbers, sizes = (size, height, *strides, *more), {"RANK": rank, "WIDE": wide, "BLOCK": block, "num_warps": warps}
    _launch(kernel, (len(clipped),), *tensors, *numbers, **sizes)
    return clipped.sum()


def _launch(program: Any, grid: tuple[int, ...], *given: Any, **sizes: int) -> None:
    """Run a program where its tensors are, which need not be the current device."""
    with torch.cuda.device_of(given[0]):
        program[grid](*given, **sizes)


@cache
def _programs(device: torch.device) -> Any:
    """Return the module of programs; None without Triton, and where there are no tensor cores for what they do."""
    has_cores = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return import_module("slangvi.linalg._programs") if has_cores and find_spec("triton") else None


def _power_of_two(number: int) -> int:
    """Return the smallest power of two from a number on."""
    return 1 << (number - 1).bit_length()


def _ceil_div(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)
