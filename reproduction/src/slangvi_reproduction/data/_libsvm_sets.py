"""The table of LIBSVM data sets: files, what they hold, which labels are which class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slangvi.errors import DataError
from slangvi_reproduction.data._svmlight import Table, digest, read
from slangvi_reproduction.data.remote import File
from slangvi_reproduction.data.sets import find

__all__ = ["LIBSVM", "Content", "Dataset", "find_libsvm"]

BASE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"


@dataclass(frozen=True)
class Content:
    """What a file must hold.

    Args:
        num_features: columns, the ones not counted.
        counts: label → rows that have it. No other label is understood.
        digest: of labels and values, as `slangvi_reproduction.data._svmlight.digest` makes it.
    """

    num_features: int
    counts: Mapping[int, int]
    digest: str

    @property
    def num_rows(self) -> int:
        """Rows of all labels."""
        return sum(self.counts.values())

    def check(self, path: Path, name: str) -> None:
        """Raise `DataError` unless a file holds this."""
        table = read(path, self.num_features, name)
        self.check_shape(table, name)
        if digest(table) != self.digest:
            raise DataError(
                f"{name} has the right {self.num_rows} rows, {self.num_features} features and labels, but values, or "
                "their order, differ by more than rounding from those of the LIBSVM collection: it is damaged, or "
                "another version or scaling of the data, and results from it could not be compared. If it is what you "
                "want, pass verify=False."
            )

    def check_shape(self, table: Table, name: str) -> None:
        """Raise `DataError` unless the number of rows with each label is right."""
        labels, rows = np.unique(table.y, return_counts=True)
        found = dict(zip(labels.tolist(), rows.tolist(), strict=True))
        if strange := [label for label in found if label not in self.counts]:
            raise DataError(
                f"{name} has a label {strange[0]:g}, which is not understood: labels are {_listed(self.counts)}."
            )
        if len(table.y) != self.num_rows:
            raise DataError(f"{name} has {len(table.y)} rows, and {self.num_rows} are expected.")
        for label, expected in self.counts.items():
            if found.get(label, 0) != expected:
                raise DataError(f"{name} has label {label} {found.get(label, 0)} times, and {expected} are expected.")


@dataclass(frozen=True)
class Dataset:
    """One row of the table of data sets.

    Args:
        name: as in the paper's tables.
        files: in the order in which their rows are taken.
        contents: of each file.
        classes: label in the files → class, 0 or 1. Rows with other labels are left out.
        num_splits: ways to halve it; 1 where the two files are the training and the test part.
    """

    name: str
    files: tuple[File, ...]
    contents: tuple[Content, ...]
    classes: Mapping[int, int]
    num_splits: int = 20

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names of its files, packed or not."""
        return tuple(Path(path).name for file in self.files for path in (file.path, *file.also))

    @property
    def num_features(self) -> int:
        """Columns, the ones not counted."""
        return self.contents[0].num_features

    @property
    def num_rows(self) -> int:
        """Rows of the two classes, training and test."""
        return sum(self._rows(content) for content in self.contents)

    @property
    def num_train(self) -> int:
        """Rows to train on."""
        return self._rows(self.contents[0]) if self.num_splits == 1 else self.num_rows // 2

    def _rows(self, content: Content) -> int:
        return sum(content.counts[label] for label in self.classes)


def find_libsvm(name: Any) -> Dataset:
    """The row of the table that a name means, be it the paper's or a file's; the nearest is suggested otherwise.

    Example:
        >>> find_libsvm("breast-cancer_scale").name
        'breast_cancer'
        >>> find_libsvm("austrlian")
        Traceback (most recent call last):
        ValueError: there is no data set 'austrlian'. Did you mean 'australian'? There are: australian, ...
    """
    return find(name, LIBSVM)


def _listed(counts: Mapping[int, int]) -> str:
    *most, last = map(str, counts)
    return f"{', '.join(most)} and {last}"


# ---- the table ----


def _file(dataset: str, address: str, content: Content, max_bytes: int, sha256: str | None = None) -> File:
    name = Path(address).name
    also = (f"libsvm/{name.removesuffix('.bz2')}",) if name.endswith(".bz2") else ()
    return File(f"libsvm/{name}", dataset, (f"{BASE}/{address}",), max_bytes, sha256, content.check, also)


def _dataset(
    name: str, classes: Mapping[int, int], *sources: tuple[str, Content, int, str | None], num_splits: int = 20
) -> Dataset:
    files = tuple(_file(name, *source) for source in sources)
    return Dataset(name, files, tuple(content for _, content, _, _ in sources), classes, num_splits)


def _digits(*counts: int) -> dict[int, int]:
    """Labels 1 to 10 stand for the digits 0 to 9."""
    return dict(enumerate(counts, start=1))


_AUSTRALIAN = Content(14, {-1: 383, 1: 307}, "b5a06418d3fafdc2e04490f7a477e953089ce2d923cf00b0ddc8c0b957dc654a")
_BREAST_CANCER = Content(10, {2: 444, 4: 239}, "83eb04102f5ef015dd934b71d0fc7e486ae37e79ea1038cb02f2cf3d66c48cdf")
# Neither file of a1a uses its last features, so they are padded.
_A1A = Content(123, {-1: 1210, 1: 395}, "8ff4ffb7debeab6d116f227b36d6f1677bcfcac8be1e3dfce9d89c311676b77b")
_A1A_TEST = Content(123, {-1: 23510, 1: 7446}, "6dacb7b5e6e48138597829b7cc156db4b654471179269d880d3ffedbcf275434")
_USPS = Content(
    256,
    _digits(1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644),
    "d3b3be177aa8efe5a6a1b53bbb5eff33db35210d4f409aa1d8c427b273bcfac5",
)
_USPS_TEST = Content(
    256,
    _digits(359, 264, 198, 166, 200, 160, 170, 147, 166, 177),
    "8642b24c06e98d5f7aabb2ded9f484e22b4c66df0d91faf14f7284460020e23b",
)

# Copies of the same values go round with other bytes, so the content is compared, and the bytes of a1a as well.
LIBSVM: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        _dataset("australian", {-1: 0, 1: 1}, ("binary/australian_scale", _AUSTRALIAN, 1_000_000, None)),
        _dataset("breast_cancer", {2: 0, 4: 1}, ("binary/breast-cancer_scale", _BREAST_CANCER, 1_000_000, None)),
        _dataset(
            "a1a",
            {-1: 0, 1: 1},
            ("binary/a1a", _A1A, 1_000_000, "eb54c45f1bdb51286f803dd092eb8202b44637a858fc6c4e533a2d64a0d94b4e"),
            ("binary/a1a.t", _A1A_TEST, 10_000_000, "b98244653c31ac5b151097866216831b962cb5a2857c91e8b276cdfcc4c44771"),
            num_splits=1,
        ),
        _dataset(
            "usps_3vs5",
            {4: 0, 6: 1},
            ("multiclass/usps.bz2", _USPS, 10_000_000, None),
            ("multiclass/usps.t.bz2", _USPS_TEST, 10_000_000, None),
        ),
    )
}
