"""The table of image sets in idx files: sizes, and checksums of what is in them, however it is packed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slangvi.errors import DataError
from slangvi_reproduction.data._idx import Bytes, parse_idx, unpack
from slangvi_reproduction.data.remote import File
from slangvi_reproduction.data.sets import find

__all__ = ["CLASSES", "IMAGES", "Content", "Dataset", "find_images"]

CLASSES = 10
SIDE = 28
# Packed files are smaller than what is in them; this leaves room for any way of packing.
_MAX_BYTES = 60_000_000
# Of the file names: the parts are called so in both sets.
_PREFIX = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class Content:
    """What a file must hold.

    Args:
        shape: (n,) for labels, (n, 28, 28) for images.
        md5: of the unpacked file, header included.
    """

    shape: tuple[int, ...]
    md5: str

    def read(self, path: Path, name: str) -> Bytes:
        """Bytes of this shape, whichever they are, but labels of ten classes only."""
        return self._read(unpack(path, self.num_bytes, name), name)

    @property
    def num_bytes(self) -> int:
        """Of the unpacked file."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)

    def _read(self, data: bytes, name: str) -> Bytes:
        values = parse_idx(data, self.shape, name)
        if len(self.shape) == 1 and (strange := values[values >= CLASSES]).size:
            raise DataError(f"{name} has a label {strange[0]}, and labels are 0 to {CLASSES - 1}.")
        return values

    def check(self, path: Path, name: str) -> None:
        """Raise `DataError` unless a file holds these bytes."""
        data = unpack(path, self.num_bytes, name)
        self._read(data, name)
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != self.md5:
            raise DataError(
                f"{name} has the right size, but what is in it has MD5 {found}, not {self.md5}: it is damaged, or "
                "another version of the data, and results from it could not be compared. If it is what you want, pass "
                "verify=False."
            )


@dataclass(frozen=True)
class Dataset:
    """One row of the table of data sets.

    Args:
        name: of the data set.
        folder: in the cache.
        bases: addresses of the folders that have its files, tried in this order.
        md5: of the unpacked files: images and labels to train on, images and labels to test on.
        sizes: examples to train on and to test on.
        side: pixels of an image in each direction.
        aliases: other names it is known by.
        num_splits: ways to part it: the one its files are.
    """

    name: str
    folder: str
    bases: tuple[str, ...]
    md5: tuple[str, str, str, str]
    sizes: tuple[int, int] = (60_000, 10_000)
    side: int = SIDE
    aliases: tuple[str, ...] = ()
    num_splits: int = 1

    @property
    def num_train(self) -> int:
        """Images to train on."""
        return self.sizes[0]

    @property
    def num_rows(self) -> int:
        """Images in all."""
        return sum(self.sizes)

    @property
    def num_features(self) -> int:
        """Pixels."""
        return self.side * self.side

    @cached_property
    def contents(self) -> dict[tuple[str, str], Content]:
        """By part and kind: ("train", "images"), ("train", "labels"), ("test", "images"), ("test", "labels")."""
        n, m = self.sizes
        image = (self.side, self.side)
        shapes = ((n, *image), (n,), (m, *image), (m,))
        keys = [(part, kind) for part in _PREFIX for kind in ("images", "labels")]
        return {key: Content(shape, md5) for key, shape, md5 in zip(keys, shapes, self.md5, strict=True)}

    @cached_property
    def file(self) -> dict[tuple[str, str], File]:
        """By part and kind, as `contents`; each may also lie unpacked in the cache."""
        return {key: self._file(f"{_PREFIX[key[0]]}-{key[1]}", content) for key, content in self.contents.items()}

    def _file(self, stem: str, content: Content) -> File:
        name = f"{stem}-idx{len(content.shape)}-ubyte"
        urls = tuple(f"{base}/{name}.gz" for base in self.bases)
        path = f"{self.folder}/{name}"
        return File(f"{path}.gz", self.name, urls, _MAX_BYTES, check=content.check, also=(path,))

    @property
    def files(self) -> tuple[File, ...]:
        """Images and labels to train on, then those to test on."""
        return tuple(self.file.values())


def find_images(name: Any) -> Dataset:
    """The row of the table that a name means; the nearest is suggested otherwise.

    Example:
        >>> find_images("fashion-mnist").name
        'fashion_mnist'
        >>> find_images("mnits")
        Traceback (most recent call last):
        ValueError: there is no data set 'mnits'. Did you mean 'mnist'? There are: mnist, fashion_mnist.
    """
    return find(name, IMAGES)


# ---- the table ----

IMAGES: dict[str, Dataset] = {
    "mnist": Dataset(
        "mnist",
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion_mnist": Dataset(
        "fashion_mnist",
        "fashion-mnist",
        ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",),
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ),
}
