"""Large pieces of memory that are used again.

A CPU's allocator gives what is larger than some 32 MB back to the system at once, and gets it anew page by page, empty:
for a factor that every step writes anew this takes several times as long as the writing.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from threading import RLock
from typing import Any

import torch
from torch import Tensor

__all__ = ["room"]

# From this size on the C library asks the system for every piece, whatever it has learnt from earlier ones.
_LARGE = 32 << 20


def room(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor with any values, as `like.new_empty(shape)` makes; large ones are made in memory that was used before.

    Memory of a tensor that is gone waits for the next one of its size as long as there is another of that size: the
    factor before a step waits while the one after it lives. With the last of them all of it goes back to the system.

    Args:
        shape: of the tensor.
        like: tensor whose dtype and device it has.

    Example:
        >>> room((2, 3), torch.zeros(1)).shape
        torch.Size([2, 3])
    """
    size = math.prod(shape) * like.element_size()
    if size < _LARGE or like.device.type != "cpu" or type(like) is not Tensor:
        return like.new_empty(shape)
    return torch.frombuffer(_shelf.lent(size), dtype=like.dtype).view(shape)


class _Shelf:
    """Pieces that wait, by size, and how many of each size are in use."""

    def __init__(self) -> None:
        self._lock = RLock()  # a collection of garbage in between may give something back
        self.waiting: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.used: Counter[int] = Counter()

    def lent(self, size: int) -> memoryview:
        """So many bytes, given back when the view is gone; a tensor made from it keeps it."""
        with self._lock:
            self.used[size] += 1
            waiting = self.waiting[size]
            piece = waiting.pop() if waiting else torch.empty(size, dtype=torch.uint8, device="cpu")
        array: Any = piece.numpy()
        loan = memoryview(array)
        weakref.finalize(loan, self._give_back, size, piece).atexit = False
        return loan

    def _give_back(self, size: int, piece: Tensor) -> None:
        with self._lock:
            self.used[size] -= 1
            if self.used[size]:
                self.waiting[size].append(piece)
            else:
                del self.used[size]
                self.waiting.pop(size, None)


_shelf = _Shelf()
