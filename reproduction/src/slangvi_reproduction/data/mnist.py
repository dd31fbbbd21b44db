"""MNIST's handwritten digits, and Fashion-MNIST's pieces of clothing: 28 × 28 grey images of ten classes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slangvi import checks
from slangvi_reproduction.data._image_sets import IMAGES as IMAGES
from slangvi_reproduction.data._image_sets import Dataset
from slangvi_reproduction.data.remote import Progress
from slangvi_reproduction.data.sets import load_file

__all__ = ["IMAGES", "PARTS", "Images", "load_fashion_mnist", "load_mnist"]

# Part → the files it comes from, and which share of them: of the training images the last sixth validates.
PARTS = {
    "train": ("train", (0, 6)),
    "tuning": ("train", (0, 5)),
    "validation": ("train", (5, 6)),
    "test": ("test", (0, 6)),
}


class Images(NamedTuple):
    """Images and their classes.

    Args:
        x: (n, 28, 28) float32, pixels / 255, 0 is the background.
        y: (n,) int64, 0 to 9.
    """

    x: Tensor
    y: Tensor


def load_mnist(part: str = "train", *, verify: bool = True, progress: Progress | None = None) -> Images:
    """Handwritten digits, from the cache, or fetched into it.

    Args:
        part: "train", all 60,000 images to train on; "tuning", the first 50,000 of them; "validation", the last
            10,000 of them; "test", the 10,000 images to test on. Only the files of the part are needed.
        verify: compare what is in the files with what it should be, by its MD5, however they are packed. Without it,
            sizes and labels must still fit.
        progress: called with path, bytes so far, bytes in all, when something is fetched.

    Returns:
        x (n, 28, 28), pixels between 0 and 1, and y (n,), the digits.

    Raises:
        ValueError: no such part.
        DataError: a file is missing, damaged or could not be fetched.

    Example:
        >>> images = load_mnist("validation")  # doctest: +SKIP
        >>> images.x.shape, images.y[:5]  # doctest: +SKIP
        (torch.Size([10000, 28, 28]), tensor([3, 8, 6, 9, 6]))
    """
    return _load(IMAGES["mnist"], part, verify, progress)


def load_fashion_mnist(part: str = "train", *, verify: bool = True, progress: Progress | None = None) -> Images:
    """Pieces of clothing, in the same form as `load_mnist`, with the same arguments.

    The classes are 0 T-shirt, 1 trouser, 2 pullover, 3 dress, 4 coat, 5 sandal, 6 shirt, 7 sneaker, 8 bag, 9 boot.

    Example:
        >>> load_fashion_mnist("test").x.shape  # doctest: +SKIP
        torch.Size([10000, 28, 28])
    """
    return _load(IMAGES["fashion_mnist"], part, verify, progress)


def _load(dataset: Dataset, part: str, verify: bool, progress: Progress | None) -> Images:
    source, (first, last) = PARTS[checks.choice("part", part, tuple(PARTS))]
    checks.flag("verify", verify)
    pixels, labels = (
        load_file(dataset.file[source, kind], dataset.contents[source, kind].read, verify, progress)
        for kind in ("images", "labels")
    )
    rows = slice(first * len(labels) // 6, last * len(labels) // 6)
    x = torch.from_numpy(pixels[rows].astype(np.float32)) / 255
    return Images(x, torch.from_numpy(labels[rows].astype(np.int64)))
