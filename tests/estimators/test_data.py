"""Weighted rows against repeated ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.estimators.data import Scale, held_out, order_of

counts = st.lists(st.integers(0, 4), min_size=2, max_size=8).filter(any)


@given(counts, st.integers(0, 1000))
def test_weighted_moments_are_those_of_repeated_rows(weights, seed):
    values = np.random.RandomState(seed).randn(len(weights), 3) * [1.0, 1e3, 1e-3] + [0.0, 1e5, 7.0]
    repeated = values.repeat(weights, axis=0)
    picked = np.array(weights) > 0
    mine = Scale.of(values[picked], np.array(weights, dtype=float)[picked])
    np.testing.assert_allclose(mine.mean, repeated.mean(0), rtol=1e-12)
    if picked.sum() > 1:
        np.testing.assert_allclose(mine.scale, repeated.std(0), rtol=1e-6)


def test_constant_columns_keep_their_scale():
    values = np.array([[0.1, 5.0], [0.1, 7.0], [0.1, 6.0]])
    scale = Scale.of(values, np.array([0.3, 0.3, 0.1]))
    assert scale.mean[0] == 0.1
    assert scale.scale[0] == 1.0
    assert (scale.apply(values)[:, 0] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_columns_constant_up_to_rounding_keep_their_scale(dtype):
    """Their standard deviation of 1e-17 would turn the next digit of an input into a number of any size."""
    third = dtype(0.3)
    values = np.array([[third], [np.nextafter(third, dtype(1.0))]] * 50_000)
    assert Scale.of(values, np.ones(len(values))).scale == 1.0
    apart = np.array([[third], [third + 100 * np.spacing(third)]] * 50)
    assert Scale.of(apart, np.ones(len(apart))).scale == pytest.approx(50 * np.spacing(third), rel=1e-3)


def test_large_numbers_that_differ_keep_their_spread():
    times = 1.7e18 + np.random.RandomState(0).uniform(0, 1e6, (1000, 1))  # nanoseconds
    assert Scale.of(times, np.ones(1000)).scale == pytest.approx(1e6 / 12**0.5, rel=0.05)


@pytest.mark.parametrize("unit", [1e200, 1e-200])
def test_scales_of_very_large_and_very_small_numbers_are_found(unit):
    """Their squares would be inf or 0, and the scale useless."""
    values, weights = np.array([[-1.0], [1.0], [3.0]]), np.array([1.0, 2.0, 1.0])
    scale = Scale.of(unit * values, weights)
    np.testing.assert_allclose(scale.apply(unit * values), Scale.of(values, weights).apply(values), rtol=1e-12)


@given(counts, st.integers(0, 1000), st.integers(1, 3))
def test_whole_weights_give_the_rows_repeated(weights, seed, times):
    cumulative = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    rows = order_of(cumulative, times * sum(weights), torch.Generator().manual_seed(seed))
    found = torch.bincount(rows, minlength=len(weights))
    assert (found - times * torch.tensor(weights)).abs().max() <= 1  # one for rounding where two rows meet
    assert set(rows.tolist()) <= {k for k, w in enumerate(weights) if w}


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.integers(1, 40), st.integers(0, 1000))
def test_rows_come_as_often_as_their_weight_says_or_once_more_or_less(weights, count, seed):
    share = count * torch.tensor(weights, dtype=torch.float64) / sum(weights)
    cumulative = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    found = torch.bincount(order_of(cumulative, count, torch.Generator().manual_seed(seed)), minlength=len(weights))
    assert int(found.sum()) == count
    assert bool((found >= share.floor() - 1e-9).all() or (found - share).abs().max() <= 1 + 1e-9)
    assert bool(((found - share).abs() <= 1 + 1e-9).all())


def test_expected_counts_are_the_weights(within_sigmas, generator):
    cumulative = torch.tensor([0.5, 1.7, 2.0, 5.0], dtype=torch.float64)
    passes = [torch.bincount(order_of(cumulative, 7, generator), minlength=4) for _ in range(2000)]
    expected = 7 * torch.tensor([0.5, 1.2, 0.3, 3.0], dtype=torch.float64) / 5
    assert within_sigmas(torch.stack(passes).double(), expected)


def test_equal_weights_give_permutations_in_random_order(generator):
    cumulative = torch.ones(50, dtype=torch.float64).cumsum(0)
    first, second = (order_of(cumulative, 50, generator) for _ in range(2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(50))
    assert first.tolist() != second.tolist()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0.01, 0.99), st.integers(0, 1000))
def test_of_every_class_a_share_is_held_out_and_never_all(sizes, share, seed):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    count = max(1, round(share * len(labels)))
    if count >= len(labels):
        return
    held = held_out(len(labels), count, labels, torch.Generator().manual_seed(seed))
    found = labels[held].bincount(minlength=len(sizes))
    assert 1 <= len(held.unique()) == len(held) <= count
    if max(sizes) > 1 and share < 0.5 and len(held) < count:
        assert bool((found < torch.tensor(sizes)).all())
    expected = torch.tensor(sizes) * count / len(labels)
    assert bool(((found - expected).abs() < 1 + 1e-9).logical_or(found == 0).all())


def test_rows_without_classes_are_held_out_at_random(generator):
    first, second = (held_out(50, 10, None, generator) for _ in range(2))
    assert len(first.unique()) == 10
    assert set(first.tolist()) != set(second.tolist())
