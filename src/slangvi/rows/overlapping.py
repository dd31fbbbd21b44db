"""Settings of torch that several open blocks share, whatever the order in which they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

__all__ = ["Overlapping"]


class Overlapping:
    """Blocks that want the same setting: the first to begin sets it, the last to end sets it back.

    Args:
        setting: makes what sets it when entered.

    Example:
        >>> import torch
        >>> quiet = Overlapping(torch.no_grad)
        >>> a, b = quiet.block(), quiet.block()
        >>> _ = a.__enter__(), b.__enter__()
        >>> _ = a.__exit__(None, None, None)
        >>> torch.is_grad_enabled()
        False
        >>> _ = b.__exit__(None, None, None)
        >>> torch.is_grad_enabled()
        True
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._count = 0
        self._set: AbstractContextManager[Any] | None = None
        self._lock = Lock()

    def enter(self) -> None:
        """A block begins."""
        with self._lock:
            if self._count == 0:
                self._set = self._setting()
                self._set.__enter__()
            self._count += 1

    def leave(self) -> None:
        """A block ends."""
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._set is not None:
                self._set.__exit__(None, None, None)
                self._set = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """One of the blocks."""
        self.enter()
        try:
            yield
        finally:
            self.leave()
