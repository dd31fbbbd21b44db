"""Data sets of the LIBSVM collection, with the conventions behind the paper's tables on logistic regression.

A column of ones comes first, so the first weight is the bias; classes are 0 and 1. Australian, breast cancer and USPS
are halved at random in twenty ways, a1a comes with its own training and test parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slangvi import checks
from slangvi.data.toy import Split
from slangvi_reproduction.data._libsvm_sets import LIBSVM as LIBSVM
from slangvi_reproduction.data._libsvm_sets import Content, Dataset, find_libsvm
from slangvi_reproduction.data._svmlight import Table, read
from slangvi_reproduction.data.remote import Progress
from slangvi_reproduction.data.sets import load_file

__all__ = ["LIBSVM", "Dataset", "find_libsvm", "libsvm_splits", "load_libsvm"]


def load_libsvm(name: str, split: int = 1, *, verify: bool = True, progress: Progress | None = None) -> Split:
    """One split of a data set of the LIBSVM collection, from the cache, or fetched into it.

    Split $s$ puts the $n$ rows in the order `argsort(RandomState(s).rand(n))` and trains on the first ⌊n/2⌋.

    Args:
        name: "australian", "breast_cancer", "a1a" or "usps_3vs5"; names of the files are understood too.
        split: 1 to 20; 1 for a1a, which has one split.
        verify: compare the values in the cache with what they should be. Without it, shape and labels must still fit.
        progress: called with path, bytes so far, bytes in all, when something is fetched.

    Returns:
        x (n, 1 + features), the first column ones, and y (n,), zeros and ones, for training and for testing; float64.

    Raises:
        ValueError: no such data set or split.
        DataError: a file is missing, damaged or could not be fetched.

    Example:
        >>> data = load_libsvm("australian", split=3)  # doctest: +SKIP
        >>> data.x_train.shape, data.x_test.shape  # doctest: +SKIP
        (torch.Size([345, 15]), torch.Size([345, 15]))
    """
    return _split(*_chosen(name, [split]), verify, progress)[0]


def libsvm_splits(
    name: str, splits: Iterable[int] | None = None, *, verify: bool = True, progress: Progress | None = None
) -> Split:
    """Several splits of one data set, stacked for runs in lockstep.

    Args:
        name: as in `load_libsvm`.
        splits: their numbers; None for all: 1 to 20, or 1 alone for a1a.
        verify: as in `load_libsvm`.
        progress: as in `load_libsvm`.

    Returns:
        x (K, n, 1 + features) and y (K, n), for training and for testing; float64.
    """
    dataset = find_libsvm(name)
    numbers = list(range(1, dataset.num_splits + 1) if splits is None else splits)
    if not numbers:
        raise ValueError("splits must name at least one split, got none. Leave it out for all.")
    parts = _split(*_chosen(name, numbers), verify, progress)
    return Split(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))


# ---- from files to tensors ----


def _chosen(name: str, splits: list[int]) -> tuple[Dataset, list[int]]:
    """A data set, and numbers of splits that it has."""
    dataset = find_libsvm(name)
    for split in splits:
        if checks.count("split", split) > dataset.num_splits:
            why = "It comes with its own training and test parts, so" if dataset.num_splits == 1 else "Here"
            allowed = "1" if dataset.num_splits == 1 else f"1 to {dataset.num_splits}"
            raise ValueError(f"{dataset.name} has no split {split}. {why} split must be {allowed}.")
    return dataset, splits


def _split(dataset: Dataset, splits: list[int], verify: bool, progress: Progress | None) -> list[Split]:
    """Read the files once, and take every split from them."""
    checks.flag("verify", verify)
    parts = [
        _coded(load_file(file, partial(_read, content=content), verify, progress), dataset.classes)
        for file, content in zip(dataset.files, dataset.contents, strict=True)
    ]
    if dataset.num_splits == 1:
        (x_train, y_train), (x_test, y_test) = parts
        return [Split(*map(torch.from_numpy, (x_train, y_train, x_test, y_test)))] * len(splits)
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return [_halved(x, y, split) for split in splits]


def _read(path: Path, name: str, content: Content) -> Table:
    table = read(path, content.num_features, name)
    content.check_shape(table, name)
    return table


def _coded(table: Table, classes: Mapping[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of the two classes, ones in front, labels as 0 and 1."""
    x, y = (part[np.isin(table.y, list(classes))] for part in table)
    code = np.isin(y, [label for label, value in classes.items() if value == 1])
    return np.column_stack([np.ones(len(x)), x]), code.astype(np.float64)


def _halved(x: NDArray[np.float64], y: NDArray[np.float64], split: int) -> Split:
    order = np.argsort(np.random.RandomState(split).rand(len(x)), kind="stable")
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    return Split(*map(torch.from_numpy, (x[train], y[train], x[test], y[test])))
