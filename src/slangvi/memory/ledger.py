"""Allocations in their order: what was alive when, and what for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Ledger", "Record"]


@dataclass(slots=True)
class Record:
    """One allocation.

    Args:
        nbytes: its size.
        part: what it is for.
        born: index of the event that allocated it.
        died: index of the event that freed it; None while it lives.
    """

    nbytes: int
    part: str
    born: int
    died: int | None = None


class Ledger:
    """Allocations in their order, and the bytes alive after each event.

    Example:
        >>> import torch
        >>> ledger, x = Ledger(), torch.zeros(1000)
        >>> ledger.label([x, x[2:]], "data")
        >>> ledger.live
        [0, 4000]
        >>> del x
        >>> ledger.live
        [0, 4000, 0]
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.live = [0]
        self._known: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()

    def enter(self, tensor: Tensor, part: Callable[[], str]) -> None:
        """Write a tensor's memory down unless it is known."""
        storage = tensor.untyped_storage()
        if storage not in self._known:
            record = self._known[storage] = self._new(storage.nbytes(), part())
            weakref.finalize(storage, self._freed, record).atexit = False

    def label(self, tensors: Iterable[Tensor], part: str) -> None:
        """Say what the memory of tensors is for, known or not."""
        for tensor in tensors:
            self.enter(tensor, lambda: part)
            self._known[tensor.untyped_storage()].part = part

    def relabel_all(self, part: str, but: tuple[str, ...]) -> None:
        """Say of everything alive that it is for `part`, unless it is for one of some others."""
        for record in self.at(len(self.live)):
            if record.part not in but:
                record.part = part

    def inside(self, nbytes: int, part: Callable[[], str]) -> None:
        """Memory that a kernel takes and gives back before it returns."""
        if nbytes:
            self._freed(self._new(nbytes, part()))

    def at(self, event: int) -> list[Record]:
        """What is alive after an event."""
        return [r for r in self.records if r.born <= event and (r.died is None or r.died > event)]

    def _new(self, nbytes: int, part: str) -> Record:
        record = Record(nbytes, part, len(self.live))
        self.records.append(record)
        self.live.append(self.live[-1] + nbytes)
        return record

    def _freed(self, record: Record) -> None:
        record.died = len(self.live)
        self.live.append(self.live[-1] - record.nbytes)
