"""Tensors that depend on sizes alone: made once, and noted by whoever has to hold on to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import ParamSpec

from torch import Tensor

__all__ = ["constant", "handed_out"]

Given = ParamSpec("Given")
_noting: list[list[Tensor]] = []


def constant(make: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
    """A function whose latest results are kept for the same arguments.

    Example:
        >>> import torch
        >>> @constant
        ... def ones(size):
        ...     return torch.ones(size)
        >>> ones(3) is ones(3)
        True
    """
    kept = lru_cache(maxsize=16)(make)

    @wraps(make)
    def found(*args: Given.args, **kwargs: Given.kwargs) -> Tensor:
        result = kept(*args, **kwargs)  # type: ignore[arg-type]  # what a cache wants is hashable
        for notes in _noting:
            notes.append(result)
        return result

    found.cache_clear = kept.cache_clear  # type: ignore[attr-defined]  # as of any other cache
    return found


@contextmanager
def handed_out() -> Iterator[list[Tensor]]:
    """All constants that are handed out inside the block.

    A captured graph reads memory where it lay: it has to hold on to them, since the cache lets go of old ones.
    """
    notes: list[Tensor] = []
    _noting.append(notes)
    try:
        yield notes
    finally:
        _noting[:] = [each for each in _noting if each is not notes]  # lists of tensors cannot be compared
