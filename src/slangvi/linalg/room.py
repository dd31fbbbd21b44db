"""Large pieces of memory that are used again.

A CPU's allocator gives what is larger than some 32 MB back to the system at once, and gets it anew page by page, empty:
for a factor that every step writes anew this takes several times as long as the writing.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["room"]

# From this size on the C library asks the system for every piece, whatever it has learnt from earlier ones.
_LARGE = 32 << 20


def room(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor with any values, as `like.new_empty(shape)` makes; large ones are made in memory that was used before.

    Memory of a tensor that is gone waits for the next one of its size as long as there is another of that size: the
    factor before a step waits while the one after it lives. One piece of each size waits at most.

    Args:
        shape: of the tensor.
        like: tensor whose dtype and device it has.

    Returns:
        A tensor of that shape. Unlike torch's own its storage cannot be resized.

    Example:
        >>> room((2, 3), torch.zeros(1)).shape
        torch.Size([2, 3])
    """
    size = math.prod(shape) * like.element_size()
    if size < _LARGE or like.device.type != "cpu" or type(like) is not Tensor or _is_watched():
        return like.new_empty(shape)
    return torch.frombuffer(_shelf.lent(size), dtype=like.dtype).view(shape)


def _is_watched() -> bool:
    """Whether somebody writes operations down, who would take the memory for a constant."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


class _Shelf:
    """Pieces that wait, by size.

    There is no lock, which a process that is forked might find locked: every line that changes something does so in one
    go. Where two tensors go at the same time the last piece may wait for nobody, until one of its size comes again.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Tensor] = {}
        self.used: dict[object, int] = {}  # size of every piece that is in use

    def lent(self, size: int) -> memoryview:
        """So many bytes, given back when the view is gone; a tensor made from it keeps it."""
        piece = self.waiting.pop(size, None)
        if piece is None:
            piece = torch.empty(size, dtype=torch.uint8, device="cpu")
        array: Any = piece.numpy()
        loan, key = memoryview(array), object()
        self.used[key] = size
        weakref.finalize(loan, self._give_back, key, size, piece).atexit = False
        return loan

    def _give_back(self, key: object, size: int, piece: Tensor) -> None:
        del self.used[key]
        if size in list(self.used.values()):
            self.waiting[size] = piece
        else:
            self.waiting.pop(size, None)


_shelf = _Shelf()
