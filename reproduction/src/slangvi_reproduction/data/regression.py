"""Data for regression: rows, which of them train and which test, and a scale on which networks learn well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slangvi import checks

__all__ = ["Indices", "Regression", "Standardised", "folds", "standardise"]


class Indices(NamedTuple):
    """Rows to train on and rows to test on.

    Args:
        train: (n,) int64, counted from 0.
        test: (m,) int64.
    """

    train: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Regression:
    """A data set as it was measured.

    Args:
        name: of the data set.
        x: (n, D) features.
        y: (n,) targets.
        splits: ways to part the rows, numbered from 0.
    """

    name: str
    x: Tensor
    y: Tensor
    splits: tuple[Indices, ...]


class Standardised(NamedTuple):
    """Training and test parts on the scale of the training part.

    A prediction f for a standardised target means f · y_scale + y_mean, and a standard deviation s means s · y_scale. A
    log-density on the original scale is less by log y_scale.

    Args:
        x_train: (n, D).
        y_train: (n,).
        x_test: (m, D).
        y_test: (m,).
        y_mean: () of the training targets.
        y_scale: () their standard deviation.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    y_mean: Tensor
    y_scale: Tensor


def standardise(data: Regression, indices: Indices) -> Standardised:
    """Parts of a data set, with means 0 and standard deviations 1 over the rows to train on.

    Standard deviations divide by n − 1. What is constant over the training rows is shifted to 0, and keeps its scale.
    Nothing is learned from the test rows, so give each fold of a cross-validation as it is.

    Args:
        data: with n rows.
        indices: one of `data.splits`, or one of its `folds`.

    Example:
        >>> x, y = torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 8.0]]), torch.tensor([10.0, 30.0, 20.0])
        >>> split = Indices(torch.tensor([0, 1]), torch.tensor([2]))
        >>> parts = standardise(Regression("three", x, y, (split,)), split)
        >>> parts.x_train, parts.x_test
        (tensor([[-0.7071,  0.0000], [ 0.7071,  0.0000]]), tensor([[2.1213, 1.0000]]))
        >>> parts.y_test * parts.y_scale + parts.y_mean
        tensor([20.])
    """
    if len(indices.train) < 2:
        raise ValueError(
            f"a scale needs at least 2 rows to train on, got {len(indices.train)} of {data.name}. "
            "Take a larger training part, or fewer folds."
        )
    x_mean, x_scale = _moments(data.x[indices.train])
    y_mean, y_scale = _moments(data.y[indices.train])
    x, y = (data.x - x_mean) / x_scale, (data.y - y_mean) / y_scale
    return Standardised(x[indices.train], y[indices.train], x[indices.test], y[indices.test], y_mean, y_scale)


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column.

    A constant is known by its values: the rounded mean of equal numbers can differ from them, and dividing by a
    standard deviation of 1e-16 would make that a feature.
    """
    constant = (values == values[0]).all(0)
    mean = torch.where(constant, values[0], values.mean(0))
    return mean, values.std(0).masked_fill(constant, 1.0)


def folds(rows: Tensor, seed: int, num_folds: int = 5) -> tuple[Indices, ...]:
    """Rows parted for cross-validation: each is in the test part of one fold and in the training parts of all others.

    The rows are put in the order `RandomState(seed).permutation(n)` and cut into pieces whose sizes differ by one at
    most, larger ones first.

    Args:
        rows: (n,) numbers of rows, all different, such as `data.splits[0].train`.
        seed: of the order, 0 to 2³² − 1; the same seed gives the same folds, with any version of torch.
        num_folds: 2 to n.

    Returns:
        One pair for each fold, of numbers out of `rows`.

    Example:
        >>> [fold.test.tolist() for fold in folds(torch.tensor([3, 5, 7, 9, 11]), seed=0, num_folds=2)]
        [[7, 3, 5], [9, 11]]
    """
    checks.tensors(rows=rows)
    if rows.ndim != 1 or rows.dtype is not torch.int64:
        raise ValueError(f"rows must be (n,) of int64, got shape {tuple(rows.shape)} of {rows.dtype}.")
    if checks.count("num_folds", num_folds, 2) > len(rows):
        raise ValueError(f"num_folds must be at most the number of rows, {len(rows)}, got {num_folds}.")
    if checks.count("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed must be below 2³², as NumPy's RandomState takes no other, got {seed}.")
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(rows))).to(rows.device)
    pieces = rows[order].tensor_split(num_folds)
    return tuple(Indices(torch.cat([*pieces[:k], *pieces[k + 1 :]]), piece.clone()) for k, piece in enumerate(pieces))
