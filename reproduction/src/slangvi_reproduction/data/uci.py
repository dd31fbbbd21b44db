"""The eight UCI regression data sets that papers on Bayesian networks compare on, with the twenty splits they share.

The files are those of Gal's experiments on dropout. Split k puts the n rows in the order of the k-th permutation drawn
from `RandomState(1)`, trains on the first nine tenths, and tests on the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from slangvi import checks
from slangvi.errors import DataError
from slangvi_reproduction.data._numbers import Array, parse_table
from slangvi_reproduction.data._uci_sets import UCI as UCI
from slangvi_reproduction.data._uci_sets import Dataset, Index, Numbers, find_uci
from slangvi_reproduction.data.regression import Indices, Regression
from slangvi_reproduction.data.remote import Progress
from slangvi_reproduction.data.sets import load_file

__all__ = ["UCI", "Dataset", "find_uci", "load_uci"]

How = tuple[bool, Progress | None]  # verify and progress, as `load_file` takes them


def load_uci(name: str, *, verify: bool = True, progress: Progress | None = None) -> Regression:
    """A UCI regression data set and its twenty splits, from the cache, or fetched into it.

    Nothing is scaled yet: `standardise` does it, by the training rows of a split or of a fold.

    Args:
        name: "boston", "concrete", "energy", "kin8nm", "naval", "power", "wine" or "yacht"; names of the collection,
            such as "bostonHousing", are understood too.
        verify: compare what is in the cache with what it should be. Without it, sizes must still fit, and the parts of
            every split must be all rows once.
        progress: called with path, bytes so far, bytes in all, when something is fetched.

    Returns:
        x (n, D) and y (n,), float64, and the rows of splits 0 to 19.

    Raises:
        ValueError: no such data set.
        DataError: a file is missing, damaged or could not be fetched.

    Example:
        >>> data = load_uci("boston")  # doctest: +SKIP
        >>> data.x.shape, len(data.splits), data.splits[0].train.shape  # doctest: +SKIP
        (torch.Size([506, 13]), 20, torch.Size([455]))
    """
    dataset = find_uci(name)
    how = (checks.flag("verify", verify), progress)
    features, target = (_index(dataset, stem, how) for stem in ("index_features", "index_target"))
    read = partial(_read_table, num_rows=dataset.num_rows, columns=[*features.tolist(), *target.tolist()])
    table = load_file(dataset.file["data"], read, *how)
    x, y = torch.from_numpy(table[:, features]), torch.from_numpy(table[:, target].ravel())
    return Regression(dataset.name, x, y, tuple(_split(dataset, k, how) for k in range(dataset.num_splits)))


# ---- from files to tensors ----


def _index(dataset: Dataset, stem: str, how: How) -> Numbers:
    return load_file(dataset.file[stem], dataset.indices[stem].read, *how)


def _split(dataset: Dataset, k: int, how: How) -> Indices:
    train, test = f"index_train_{k}", f"index_test_{k}"
    rows = _index(dataset, train, how)
    read = partial(_read_rest, index=dataset.indices[test], train=rows, beside=f"{train}.txt")
    return Indices(torch.from_numpy(rows), torch.from_numpy(load_file(dataset.file[test], read, *how)))


def _read_table(path: Path, name: str, num_rows: int, columns: list[int]) -> Array:
    """All of data.txt (n, columns of the file)."""
    table = parse_table(path.read_bytes(), name)
    rows, width = table.shape
    if rows != num_rows:
        raise DataError(f"{name} has {rows} rows, and {num_rows} are expected.")
    if len(set(columns) & set(range(width))) != len(columns):
        raise DataError(
            f"{name} has columns 0 to {width - 1}, and index_features.txt and index_target.txt name {columns}, which "
            "are not different ones of them."
        )
    return table


def _read_rest(path: Path, name: str, index: Index, train: Numbers, beside: str) -> Numbers:
    """The test rows (m,): all that are not for training."""
    test = index.read(path, name)
    together = np.sort(np.concatenate([train, test]))
    if not np.array_equal(together, np.arange(len(together))):
        raise DataError(f"{name} and {beside} must name every row from 0 to {len(together) - 1} once, and do not.")
    return test
