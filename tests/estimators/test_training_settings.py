"""What "auto" stands for: a slow precision where the length of a run is known and nothing else was asked for."""

from __future__ import annotations

import pytest

from slangvi import SLANGRegressor
from slangvi.estimators._training_settings import RequestedSettings

AUTO = SLANGRegressor._rates


def requested(**given) -> RequestedSettings:
    nothing = {"lr": None, "precision_lr": None, "init_precision": None, "batch_size": 10}
    others = {"rank": 1, "prior_precision": 1.0, "temperature": 1.0, "mc_samples": 1}
    return RequestedSettings(**(others | nothing | given))


def numbers(settings):
    return settings.lr, settings.precision_lr, settings.init_precision, settings.precision_warmup


def test_a_planned_run_has_a_slow_precision():
    found = requested().resolve(AUTO, 40, total=20.0, epochs=25)
    assert numbers(found) == (0.1, 0.1, 20.0, False)  # 100 steps; rows count for half
    assert (found.rank, found.mc_samples, found.batch_size) == (1, 1, 10)


def test_targets_of_another_scale_have_another_curvature():
    assert requested().resolve(AUTO, 40, total=20.0, epochs=25, spread=4.0).init_precision == 5.0


def test_at_a_low_temperature_the_precision_starts_higher():
    assert requested(temperature=0.1).resolve(AUTO, 40, total=20.0, epochs=25).init_precision == pytest.approx(200.0)


def test_a_run_without_end_has_constant_rates():
    assert numbers(requested().resolve_endless(AUTO)) == (0.1, 0.05, 10.0, True)


PLANS = {
    "planned": lambda given: given.resolve(AUTO, 40, 40.0, 25),
    "endless": lambda given: given.resolve_endless(AUTO),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_is_given_is_taken(plan):
    assert numbers(plan(requested(lr=0.3, precision_lr=0.2, init_precision=7.0))) == (0.3, 0.2, 7.0, True)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_from_a_start_that_is_given_the_precision_warms_up(plan):
    """Slow from a low start it would let the mean run away."""
    assert numbers(plan(requested(init_precision={"*": 7.0}))) == (0.1, 0.05, {"*": 7.0}, True)


@pytest.mark.parametrize("given", [None, "slow"])
def test_impossible_starts_are_refused(given):
    with pytest.raises(
        TypeError, match=rf"init_precision must be .* or 'auto', got {given!r}. Leave it out for 'auto'"
    ):
        SLANGRegressor(init_precision=given).fit([[0.0], [1.0]], [0.0, 1.0])
