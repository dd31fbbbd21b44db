"""The record of steps, and trends of its curves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import slangvi
from helpers.optimizer_runs import backward, make, model_and_data
from slangvi.diagnosis import trend_of
from slangvi.diagnosis.history import FEWEST


def noisy(values, sigma=1.0, seed=0):
    noise = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [value + sigma * float(e) for value, e in zip(values, noise, strict=True)]


SERIES = {
    "settled": [
        noisy([5.0] * 90),
        noisy([5.0 + 50 * 0.8**k for k in range(90)]),
        [1.0] * 40,
        [math.nan, *[2.0] * 40],
    ],
    "falling": [noisy([20.0 - 0.2 * k for k in range(90)]), [10.0 / (1 + k) ** 0.2 for k in range(60)]],
    "rising": [noisy([0.2 * k for k in range(90)]), [*[1.0] * 10, *[math.inf] * 10]],
    "short": [[], [1.0], [float(k) for k in range(FEWEST - 1)]],
}


@pytest.mark.parametrize(("direction", "values"), [(name, v) for name, many in SERIES.items() for v in many])
def test_direction_of_a_series(direction, values):
    assert trend_of(values).direction == direction


def test_single_jumps_are_not_a_trend():
    values = noisy([5.0] * 90)
    for place in (3, 70, 80, 88):
        values[place] = 1e6
    assert trend_of(values).direction == "settled"


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_settled_and_measured(seed):
    found = trend_of(noisy([0.0] * 300, sigma=2.0, seed=seed))
    assert found.direction == "settled"
    assert found.noise == pytest.approx(2.0, rel=0.3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=FEWEST, max_size=60), st.floats(0.1, 10.0), st.floats(-1e3, 1e3))
def test_scale_and_shift_do_not_change_the_direction_and_mirrors_turn_it(values, scale, shift):
    plain, limit = trend_of(values), 1e-6 * (1 + max(map(abs, values)))
    if abs(plain.change) < limit:
        return  # rounding decides
    moved = trend_of([scale * value + shift for value in values])
    mirrored = trend_of([-value for value in values])
    assert moved.noise == pytest.approx(scale * plain.noise, rel=1e-3, abs=limit)
    assert mirrored.change == pytest.approx(-plain.change)
    turned = {"falling": "rising", "rising": "falling", "settled": "settled"}
    assert mirrored.direction == turned[plain.direction]


@given(st.integers(2, 12), st.integers(0, 200))
def test_memory_is_bounded_and_spans_the_run_evenly(capacity, steps):
    history = slangvi.History(capacity)
    for step in range(1, steps + 1):
        history.add(step, loss=float(step))
    assert len(history) <= capacity
    assert history["loss"] == [float(step) for step in history.steps]
    gaps = {b - a for a, b in zip(history.steps, history.steps[1:], strict=False)}
    assert len(gaps) <= 1
    if steps:
        assert history.steps[0] == 1
        assert steps - history.steps[-1] < max(gaps, default=capacity)
        assert len(history) >= min(steps, capacity // 2)


def test_track_fills_it_and_your_own_loss_joins_the_step():
    model, x, y = model_and_data()
    opt, history = make(model), slangvi.History()
    handle = slangvi.track(opt, history)
    for step in (1, 2, 3):
        with opt.sampled_params(train=True):
            loss = backward(F.cross_entropy(model(x), y))
        opt.step()
        if step > 1:
            history.add(opt.info.step, loss=loss)
    handle.remove()
    assert history.steps == [1, 2, 3]
    assert math.isnan(history["loss"][0])
    assert history["loss"][2] == loss.item()
    assert history["kl"][2] == pytest.approx(opt.kl())
    assert {"lr", "captured", "rank_used", "skipped"} <= set(history.names)
    assert history.curves["step"] == [1.0, 2.0, 3.0]


def test_of_several_groups_the_first_counts():
    history = slangvi.History()
    history({"slangvi/lr/0": 0.1, "slangvi/lr/1": 0.2, "slangvi/kl": 3.0}, 1)
    assert (history["lr"], history["kl"]) == ([0.1], [3.0])


def test_a_dropped_step_stays_dropped_when_numbers_join_it():
    history = slangvi.History(capacity=2)
    for step in range(1, 5):
        history.add(step, kl=1.0)
        history.add(step, loss=2.0)
    assert history.steps == [1, 3]
    assert history["loss"] == [2.0, 2.0]


def test_impossible_arguments_are_named():
    with pytest.raises(ValueError, match="capacity must be ≥ 2, got 1"):
        slangvi.History(1)
    with pytest.raises(TypeError, match="step must be a whole number"):
        slangvi.History().add(1.5, loss=1.0)
