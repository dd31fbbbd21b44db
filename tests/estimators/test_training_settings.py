"""What "auto" stands for: a slow precision where the length of a run is known and nothing else was asked for."""

from __future__ import annotations

import pytest

from slangvi import SLANGRegressor
from slangvi.estimators._training import resolve_options

AUTO = SLANGRegressor._rates


def requested(**given):
    nothing = {"lr": None, "precision_lr": None, "init_precision": None}
    return {"rank": 1, "prior_precision": 1.0, "temperature": 1.0, "mc_samples": 1} | nothing | given


def numbers(options):
    return tuple(options[name] for name in ("lr", "precision_lr", "init_precision", "precision_warmup"))


def test_a_planned_run_has_a_slow_precision():
    found = resolve_options(requested(), AUTO, 20.0, steps=100)
    assert numbers(found) == (0.1, 0.1, 20.0, False)
    assert (found["rank"], found["mc_samples"]) == (1, 1)


def test_targets_of_another_scale_have_another_curvature():
    assert resolve_options(requested(), AUTO, 20.0, steps=100, spread=4.0)["init_precision"] == 5.0


def test_at_a_low_temperature_the_precision_starts_higher():
    found = resolve_options(requested(temperature=0.1), AUTO, 20.0, steps=100)
    assert found["init_precision"] == pytest.approx(200.0)


def test_a_run_without_end_has_constant_rates():
    assert numbers(resolve_options(requested(), AUTO, 20.0, None)) == (0.1, 0.05, 10.0, True)


@pytest.mark.parametrize("steps", [100, None], ids=["planned", "endless"])
def test_what_is_given_is_taken(steps):
    given = requested(lr=0.3, precision_lr=0.2, init_precision=7.0)
    assert numbers(resolve_options(given, AUTO, 40.0, steps)) == (0.3, 0.2, 7.0, True)


@pytest.mark.parametrize("steps", [100, None], ids=["planned", "endless"])
def test_from_a_start_that_is_given_the_precision_warms_up(steps):
    """Slow from a low start it would let the mean run away."""
    given = requested(init_precision={"*": 7.0})
    assert numbers(resolve_options(given, AUTO, 40.0, steps)) == (0.1, 0.05, {"*": 7.0}, True)


@pytest.mark.parametrize("given", [None, "slow"])
def test_impossible_starts_are_refused(given):
    with pytest.raises(
        TypeError, match=rf"init_precision must be .* or 'auto', got {given!r}. Leave it out for 'auto'"
    ):
        SLANGRegressor(init_precision=given).fit([[0.0], [1.0]], [0.0, 1.0])
