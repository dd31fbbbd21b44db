"""Vectors of all parameters in parts that a CPU's cache holds.

What lies between two operations is then neither written to memory and read back, nor fresh memory in every step: the
system hands that out page by page, which takes longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slangvi.linalg.products import is_plain

__all__ = ["by_columns", "in_parts", "over_columns", "sliced"]

# Fewer columns are in the cache anyway, and are not split.
_MANY = 1_000_000
# Columns of a part; more where there would be too many parts.
_PART = 128_000
_MOST_PARTS = 64


def in_parts(*columns: Any) -> list[slice]:
    """Parts to work on one after the other.

    Args:
        columns: (P,), or (..., P) after a first one of (P,); what is no tensor, or has other lengths, is not split.

    Returns:
        Slices of the columns; none where all are to be worked on at once, as for batches, on a GPU, or where autograd
        or vmap watches.

    Example:
        >>> len(in_parts(torch.ones(1_000_000), 0.5)), in_parts(torch.ones(500_000), 0.5)
        (8, [])
    """
    first: Tensor = columns[0]
    size = first.shape[-1] if first.ndim else 0
    if size < _MANY or first.ndim > 1 or first.device.type != "cpu":
        return []
    if not all(is_plain(column) for column in columns if isinstance(column, Tensor)):
        return []
    width = max(_PART, -(-size // _MOST_PARTS))
    return [slice(start, start + width) for start in range(0, size, width)]


def sliced(parts: list[slice], *columns: Any) -> Iterator[tuple[Any, ...]]:
    """The columns of one part after the other.

    Args:
        parts: as `in_parts` returns them.
        columns: as given to it.

    Returns:
        For each part a tuple of views; what is not split comes as it is.
    """
    size = columns[0].shape[-1]
    split = [isinstance(column, Tensor) and column.ndim > 0 and column.shape[-1] == size for column in columns]
    for part in parts:
        yield tuple(column[..., part] if cut else column for column, cut in zip(columns, split, strict=True))


def by_columns(work: Callable[..., tuple[Tensor, ...]], *columns: Any) -> tuple[Tensor, ...]:
    """What a function that treats every column alike makes of them, on a CPU part by part.

    Args:
        work: takes the columns and returns vectors as long as they are, (..., P), or numbers.
        columns: as in `in_parts`.

    Returns:
        The vectors joined, and one number for each part, (K,), in place of a number.

    Example:
        >>> squares, sums = by_columns(lambda x: (x.square(), x.sum()), torch.full((1_000_000,), 2.0))
        >>> squares.shape, squares.max(), sums.shape, sums.sum()
        (torch.Size([1000000]), tensor(4.), torch.Size([8]), tensor(2000000.))
    """
    parts = in_parts(*columns)
    if not parts:
        return work(*columns)
    size, numbers, vectors = columns[0].shape[-1], list[list[Tensor]](), dict[int, Tensor]()
    for part, some in zip(parts, sliced(parts, *columns), strict=True):
        found = work(*some)
        numbers.append([value for value in found if not value.ndim])
        for index, value in enumerate(found):
            if value.ndim:
                if index not in vectors:
                    vectors[index] = value.new_empty(*value.shape[:-1], size)
                vectors[index][..., part] = value
    told = iter(torch.stack(each) for each in zip(*numbers, strict=True))
    return tuple(vectors[index] if index in vectors else next(told) for index in range(len(found)))


def over_columns(work: Callable[..., Tensor], *columns: Any) -> Tensor:
    """The sum over all columns that a function returns, on a CPU as the sum of those of all parts.

    Args:
        work: takes the columns and returns a tensor in which they are summed up.
        columns: as in `in_parts`.

    Example:
        >>> over_columns(lambda x: x.sum(), torch.ones(1_000_000))
        tensor(1000000.)
    """
    parts = in_parts(*columns)
    return torch.stack([work(*some) for some in sliced(parts, *columns)]).sum(0) if parts else work(*columns)
