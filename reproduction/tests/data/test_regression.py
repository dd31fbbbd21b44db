"""Scales and folds: means and deviations of the training rows alone, and every row tested once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi_reproduction.data import Indices, Regression, folds, standardise


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def made(x: torch.Tensor, y: torch.Tensor, num_train: int) -> tuple[Regression, Indices]:
    order = torch.randperm(len(x))
    split = Indices(order[:num_train], order[num_train:])
    return Regression("made", x, y, (split,)), split


def example(num_rows: int = 40, num_train: int = 30) -> tuple[Regression, Indices]:
    x = 100 * torch.randn(num_rows, 5, dtype=torch.float64) + 7
    return made(x, 3 * torch.randn(num_rows, dtype=torch.float64) - 50, num_train)


# ---- standardise ----


def test_parts_are_scaled_as_written_out_with_numpy():
    data, split = example()
    parts = standardise(data, split)
    x, y, train, test = data.x.numpy(), data.y.numpy(), split.train.numpy(), split.test.numpy()
    mean, scale = x[train].mean(0), x[train].std(0, ddof=1)
    y_mean, y_scale = y[train].mean(), y[train].std(ddof=1)
    for ours, expected in zip(
        parts,
        (
            *((x[train] - mean) / scale, (y[train] - y_mean) / y_scale),
            *((x[test] - mean) / scale, (y[test] - y_mean) / y_scale, y_mean, y_scale),
        ),
        strict=True,
    ):
        assert ours.dtype is torch.float64
        assert ours.shape == np.shape(expected)
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


@given(num_rows=st.integers(4, 12), shift=st.floats(-1e3, 1e3), scale=st.floats(1e-3, 1e3))
def test_units_do_not_matter_and_predictions_go_back(num_rows, shift, scale):
    data, split = example(num_rows, num_rows - 2)
    parts = standardise(data, split)
    other = standardise(Regression("other", data.x * scale + shift, data.y * scale + shift, data.splits), split)
    for a, b in zip(parts[:4], other[:4], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    torch.testing.assert_close(other.y_test * other.y_scale + other.y_mean, data.y[split.test] * scale + shift)


def test_nothing_is_learned_from_rows_outside_the_training_part():
    data, split = example()
    inner = folds(split.train, seed=3)[0]
    before = standardise(data, inner)
    for outside in (inner.test, split.test):
        data.x[outside] += 1e6
        data.y[outside] -= 1e6
    after = standardise(data, inner)
    for name in ("x_train", "y_train", "y_mean", "y_scale"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert not torch.equal(before.x_test, after.x_test)


# 0.998 is what naval has: NumPy and torch give thousands of it a standard deviation of 1e-16, and not zero.
@pytest.mark.parametrize("value", [0.0, 0.998, 0.1, 288.0, -1e9])
@pytest.mark.parametrize("num_train", [2, 10_741])
def test_constant_columns_are_shifted_to_zero_and_keep_their_scale(value, num_train):
    x = torch.full((num_train + 2, 2), value, dtype=torch.float64)
    x[:, 1] = torch.arange(num_train + 2)
    split = Indices(torch.arange(num_train), torch.arange(num_train, num_train + 2))
    x[split.test[1], 0] += 2
    parts = standardise(Regression("flat", x, x[:, 0].clone(), (split,)), split)
    assert not parts.x_train[:, 0].any()
    torch.testing.assert_close(parts.x_test[:, 0], torch.tensor([0.0, 2.0], dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(parts.x_train[:, 1].std(), torch.ones((), dtype=torch.float64))
    assert not parts.y_train.any()
    assert (float(parts.y_mean), float(parts.y_scale)) == (value, 1.0)


@pytest.mark.parametrize("train", [rows(), rows(3)])
def test_a_scale_of_fewer_than_two_rows_is_refused(train):
    data, _ = example()
    with pytest.raises(ValueError, match=f"at least 2 rows to train on, got {len(train)} of made. Take a larger"):
        standardise(data, Indices(train, rows(1, 2)))


# ---- folds ----


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_row_is_tested_once_and_trained_on_otherwise(data, seed):
    given = data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True))
    num_folds = data.draw(st.integers(2, len(given)))
    found = folds(rows(*given), seed, num_folds)
    assert len(found) == num_folds
    assert sorted(row for fold in found for row in fold.test.tolist()) == sorted(given)
    for train, test in found:
        assert sorted([*train.tolist(), *test.tolist()]) == sorted(given)
        assert len(test) in (len(given) // num_folds, -(-len(given) // num_folds))


def test_folds_follow_their_seed_alone(global_rng_untouched):
    given = rows(*range(100, 140))
    first, again, other = (folds(given, seed) for seed in (1, 1, 2))
    assert len(first) == 5
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(first[0].test, other[0].test)
    order = 100 + np.random.RandomState(1).permutation(40)
    assert torch.cat([fold.test for fold in first]).tolist() == order.tolist()
    assert first[1].train.tolist() == [*order[:8], *order[16:]]


def test_folds_can_be_written_to_without_changing_others():
    given = rows(*range(6))
    found = folds(given, 0, 3)
    before = found[1].train.clone()
    found[0].test.fill_(-1)
    assert torch.equal(found[1].train, before)
    assert given.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("given", "seed", "num_folds", "error", "message"),
    [
        (rows(1, 2, 3), 0, 4, ValueError, "num_folds must be at most the number of rows, 3, got 4"),
        (rows(1, 2, 3), 0, 1, ValueError, "num_folds must be ≥ 2, got 1"),
        (rows(1, 2, 3), 0, 2.0, TypeError, "num_folds must be a whole number"),
        (rows(1, 2, 3), -1, 2, ValueError, "seed must be ≥ 0, got -1"),
        (rows(1, 2, 3), 2**32, 2, ValueError, "seed must be below 2³²"),
        (rows(1, 2, 3), None, 2, TypeError, "seed must be a whole number"),
        (rows(1, 2, 3)[None], 0, 2, ValueError, r"rows must be \(n,\) of int64, got shape \(1, 3\)"),
        (torch.ones(3), 0, 2, ValueError, r"got shape \(3,\) of torch.float32"),
    ],
)
def test_folds_that_cannot_be_are_refused(given, seed, num_folds, error, message):
    with pytest.raises(error, match=message):
        folds(given, seed, num_folds)
