"""What tables of data sets have in common: finding a row by its name, and reading its files through the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slangvi_reproduction.data.remote import File, Progress, explained, fetch

__all__ = ["Row", "find", "load_file"]


class Row(Protocol):
    """What a row says of a data set, whichever table it stands in."""

    @property
    def name(self) -> str:
        """As in the paper's tables."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names it is known by."""

    @property
    def files(self) -> tuple[File, ...]:
        """All it needs."""

    @property
    def num_rows(self) -> int:
        """Rows, training and test."""

    @property
    def num_train(self) -> int:
        """Rows to train on."""

    @property
    def num_features(self) -> int:
        """Columns of features in the files."""

    @property
    def num_splits(self) -> int:
        """Ways to part it."""


RowT = TypeVar("RowT", bound=Row)
T = TypeVar("T")


def find(name: Any, table: Mapping[str, RowT]) -> RowT:
    """The row that a name or an alias means; the nearest is suggested otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a data set must be a string, got {name!r}.")
    known = {_plain(alias): row for row in table.values() for alias in (row.name, *row.aliases)}
    if _plain(name) in known:
        return known[_plain(name)]
    near = get_close_matches(_plain(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {known[near[0]].name!r}?" if near else ""
    raise ValueError(f"there is no data set {name!r}.{hint} There are: {', '.join(table)}.")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def load_file(file: File, read: Callable[[Path, str], T], verify: bool, progress: Progress | None) -> T:
    """What a file says, fetched where it is missing.

    Args:
        file: which.
        read: called with its path and the name to use in messages. It must refuse what it cannot use, as without
            verification nobody looked at the file before.
        verify: as in `slangvi_reproduction.data.remote.fetch`.
        progress: as in `slangvi_reproduction.data.remote.fetch`.

    Returns:
        What `read` returns.

    Raises:
        DataError: missing, damaged or refused, with what to do.
    """
    path = fetch(file, verify=verify, progress=progress)
    with explained(file, path):
        return read(path, str(path))
