"""The paper's schedule, rates per parameter tensor, and the parts of the evidence lower bound."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn

from slangvi import ELBO, inverse_time, slow_precision
from slangvi.params import ParamSpec
from slangvi.schedules import Rate, rate_at, warmed_up

SPEC = ParamSpec.of({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(())})


@pytest.mark.parametrize("decay", [0.0, 0.51, 0.6, 1.0])
def test_rate_falls_as_the_paper_says(decay):
    schedule = inverse_time(0.05, decay)
    assert [schedule(t) for t in (1, 2, 50)] == pytest.approx([0.05 / (1 + t**decay) for t in (1, 2, 50)], rel=1e-15)


def test_rate_is_constant_without_decay():
    schedule = inverse_time(0.2, 0.0)
    assert {schedule(t) for t in range(1, 100)} == {0.1}


def test_schedule_survives_pickling():
    schedule = pickle.loads(pickle.dumps(inverse_time(0.05, 0.7)))
    assert schedule(3) == inverse_time(0.05, 0.7)(3)


def test_scheduler_of_an_optimizer_gives_the_same_rates():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler = inverse_time(optimizer, 0.51)
    schedule, rates = inverse_time(0.05, 0.51), []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([schedule(t) for t in range(1, 6)], rel=1e-12)


def test_scheduler_can_be_saved_and_loaded():
    def fresh(decay):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
        return optimizer, inverse_time(optimizer, decay)

    first, scheduler = fresh(0.51)
    for _ in range(4):
        first.step()
        scheduler.step()
    second, loaded = fresh(0.9)
    loaded.load_state_dict(pickle.loads(pickle.dumps(scheduler.state_dict())))
    second.step()
    loaded.step()
    assert second.param_groups[0]["lr"] == pytest.approx(inverse_time(0.05, 0.51)(6), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.1, -0.5), ValueError, r"decay must be finite and in \[0, inf\), got -0\.5. The paper uses 0\.51 to 0\.60"),
        ((0.1, math.nan), ValueError, "decay must be .* got nan"),
        ((0.1, "fast"), TypeError, "decay must be a number, got 'fast'"),
        ((0.0, 0.5), ValueError, r"lr must be .* got 0\.0"),
        ((-1.0, 0.5), ValueError, r"lr must be .* got -1\.0"),
        ((True, 0.5), TypeError, "lr must be a number, got True"),
        (("0.1", 0.5), TypeError, r"lr must be a number, got '0\.1'"),
    ],
)
def test_schedules_that_cannot_be_meant_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        inverse_time(*arguments)


@pytest.mark.parametrize("schedule", [0.25, lambda step: 1.0 / (step + 1), lambda step: torch.tensor(0.25)])
def test_rate_at_a_step_takes_numbers_and_functions(schedule):
    assert rate_at("lr", schedule, 3) == 0.25


@pytest.mark.parametrize("schedule", [2.0, lambda step: 2.0])
def test_rate_at_a_step_is_checked(schedule):
    with pytest.raises(ValueError, match=r"precision_lr must be finite and in \(0, 1\], got 2\.0"):
        rate_at("precision_lr", schedule, 1, 1.0)


def test_equal_rates_become_one_number():
    rate = Rate.of([0.1, 0.1, 0.1], SPEC, torch.zeros(0))
    assert rate.value == 0.1
    assert rate.per_tensor is None


def test_different_rates_are_held_per_entry_and_per_tensor():
    rate = Rate.of([1.0, 2.0, 3.0], SPEC, torch.zeros(0, dtype=torch.float64))
    assert rate.value.tolist() == [1, 1, 2, 2, 2, 3]
    assert rate.per_tensor == (1, 2, 3)
    assert rate.value.dtype is torch.float64


def test_elbo_is_the_difference_of_its_parts():
    assert ELBO(expected_log_likelihood=-3.0, kl=2.0).value == -5.0


@pytest.mark.parametrize(
    ("rate", "step", "expected"), [(0.01, 1, 0.5), (0.01, 99, 0.01), (0.01, 200, 0.01), (0.3, 3, 0.3), (0.0, 1, 0.0)]
)
def test_the_precision_averages_what_it_has_seen_until_its_rate_is_reached(rate, step, expected):
    assert warmed_up(rate, step) == pytest.approx(expected)


def test_slow_precisions_are_for_runs_that_exist():
    with pytest.raises(ValueError, match=r"steps must be .*, got 0"):
        slow_precision(100, 0)
    with pytest.raises(ValueError, match=r"curvature must be finite and in \(0, inf\), got 0.0. It is 1/4 for classes"):
        slow_precision(100, 10, curvature=0.0)
    with pytest.raises(ValueError, match="temperature must be finite"):
        slow_precision(100, 10, temperature=-1.0)
    assert slow_precision(100, 3)["precision_lr"] == 0.5
