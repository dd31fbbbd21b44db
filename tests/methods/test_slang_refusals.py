"""What SLANG refuses: impossible arguments, batches and steps; by name, and without touching the state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import slangvi
from slangvi import slang
from slangvi.errors import NumericalError
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

BAD = {
    "num_data": [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)],
    "rank": [(-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
    "lr": [(0.0, ValueError), (-0.1, ValueError), (math.nan, ValueError), (1.5, ValueError), ("a", TypeError)],
    "precision_lr": [(0.0, ValueError), (1.5, ValueError), (math.inf, ValueError)],
    "momentum": [(1.0, ValueError), (-0.1, ValueError), (math.nan, ValueError)],
    "mc_samples": [(0, ValueError), (1.0, TypeError)],
    "temperature": [(0.0, ValueError), (math.inf, ValueError)],
    "engine": [("sparse", ValueError)],
    "memory_limit": [(0, ValueError), ("1 GB", TypeError)],
    "compile": [(1, TypeError), ("yes", TypeError)],
}


@pytest.mark.parametrize(("name", "value", "error"), [(n, v, e) for n, rows in BAD.items() for v, e in rows])
def test_impossible_arguments_are_named(name, value, error):
    options = {"num_data": 10, "rank": 1, "lr": 0.1} | {name: value}
    with pytest.raises(error, match=name):
        slang.build(lambda params, batch: batch, **options)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("prior_precision", 0.0, ValueError),
        ("prior_precision", torch.ones(7), ValueError),
        ("prior_precision", {"v": 1.0}, ValueError),
        ("prior_precision", {"nothing": 1.0, "*": 1.0}, ValueError),
        ("prior_mean", math.inf, ValueError),
        ("init_precision", -1.0, ValueError),
        ("init_precision", "one", TypeError),
    ],
)
def test_impossible_priors_are_named_at_init(option, value, error):
    vi = slang.build(lambda params, batch: batch, num_data=10, rank=1, lr=0.1, **{option: value})
    with pytest.raises(error, match=option):
        vi.init({"w": torch.zeros(2)})


def test_parameters_that_are_not_the_models_are_named():
    model = nn.Linear(1, 1)
    vi = slang.build(slangvi.Gaussian(2.0).of(model), num_data=1, rank=1, lr=0.1, model=model)
    state = vi.init({"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="'other', which is no parameter"):
        vi.update(state, (torch.zeros(1, 1), torch.zeros(1, 1)))


def test_a_schedule_that_leaves_its_range_is_named_at_the_step():
    vi = slang.build(lambda p, b: -(b - p["w"]).square().sum(1), num_data=2, rank=1, lr=lambda t: 2.0 - t)
    state = vi.init({"w": torch.zeros(1)})
    state, _ = vi.update(state, torch.zeros(2, 1))
    with pytest.raises(ValueError, match="lr must be"):
        vi.update(state, torch.zeros(2, 1))


@pytest.mark.parametrize("engine", ["dense", "factored"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_inputs_leave_the_state_and_name_the_trouble(engine, bad):
    model = nn.Linear(2, 1)
    vi = slang.build(slangvi.Gaussian(2.0).of(model), num_data=5, rank=1, lr=0.1, engine=engine, curvature="ef")
    state = vi.init(dict(model.named_parameters()))
    batch = (torch.tensor([[1.0, bad], [0.0, 1.0]]), torch.zeros(2, 1))
    with pytest.raises(NumericalError, match="not finite for 1 of 2 examples"):
        vi.update(state, batch)
    assert state.step == 0
    assert bool(torch.isfinite(state.loc).all())


def test_gradients_that_overflow_are_named_by_parameter():
    state = slang.init({"a": torch.zeros(1), "b": torch.zeros(2)}, 1)
    prior = Prior(torch.ones(3), torch.zeros(3))
    rows = torch.tensor([[1.0, 1e30, 0.0]])
    with pytest.raises(NumericalError, match=r"step 1: the gradient of parameter 'b' .*1 of 2"):
        slang.update(state, DenseGradients.from_rows(rows), num_data=1, prior=prior, lr=Rate(0.1))


def test_a_mean_that_overflows_is_refused():
    state = slang.init({"a": torch.zeros(1)}, 0, init_precision=1e-30)
    prior = Prior(torch.full((1,), 1e-30), torch.zeros(1))
    rows = torch.tensor([[1e12]])
    lr, tiny = Rate(1e38), Rate(1e-30)
    with pytest.raises(NumericalError, match="the new mean of parameter 'a'"):
        slang.update(state, DenseGradients.from_rows(rows), num_data=1e3, prior=prior, lr=lr, precision_lr=tiny)


def test_a_precision_that_overflows_is_refused():
    state = slang.init({"a": torch.zeros(1)}, 0)
    prior = Prior(torch.ones(1), torch.zeros(1))
    with pytest.raises(NumericalError, match="the new precision of parameter 'a'"):
        slang.update(state, DenseGradients.from_rows(torch.tensor([[1e18]])), num_data=1e10, prior=prior, lr=Rate(0.5))


@pytest.mark.parametrize("values", [torch.zeros(3, 1), torch.zeros(()), [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("engine", ["dense", "factored"])
def test_log_likelihoods_of_the_wrong_shape_are_refused(values, engine):
    model = nn.Linear(1, 1)
    vi = slang.build(lambda p, b: values, num_data=3, rank=1, lr=0.1, engine=engine, curvature="ef")
    with pytest.raises(ValueError, match=r"one value per example, shape \(3,\)"):
        vi.update(vi.init(dict(model.named_parameters())), torch.zeros(3, 1))


def test_empty_batches_and_bad_params_are_refused():
    vi = slang.build(lambda p, b: b.sum(1), num_data=3, rank=1, lr=0.1)
    with pytest.raises(ValueError, match="M ≥ 1"):
        vi.update(vi.init({"w": torch.zeros(1)}), torch.zeros(0, 1))
    with pytest.raises(ValueError, match="params must be finite"):
        vi.init({"w": torch.tensor([math.nan])})


def test_a_likelihood_need_not_call_the_model_it_names():
    model = nn.Linear(2, 1)
    by_hand = lambda p, b: -(b[0] @ p["weight"].T + p["bias"] - b[1]).square().sum(1)  # noqa: E731
    batch = (torch.randn(3, 2), torch.zeros(3, 1))
    found = []
    for engine in ("factored", "dense"):
        vi = slang.build(by_hand, num_data=3, rank=1, lr=0.1, engine=engine, curvature="ef")
        state, _ = vi.update(vi.init(dict(model.named_parameters())), batch, torch.Generator().manual_seed(0))
        found.append(state.loc)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rank", [1, 3])
def test_curvature_that_overflows_only_as_a_whole_is_refused(rank):
    rows = torch.full((40, 64), 1e18)
    state = slang.init({"w": torch.zeros(64)}, rank)
    rate = Rate(0.5)
    prior = Prior(torch.ones(64), torch.zeros(64))
    with pytest.raises(NumericalError, match="not finite"):
        slang.update(state, DenseGradients.from_rows(rows), num_data=1000, prior=prior, lr=rate)
