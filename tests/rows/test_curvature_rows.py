"""Steps from rows that are read off autograd's graph: those of the definition, its refusals, and a budget of rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from cases import CASES, Case


def trained(case: Case, engine: str, **options) -> slangvi.SLANG:
    """An optimizer after three steps of two draws each, at the mean, so that engines see the same weights."""
    opt = slangvi.SLANG(case.model, num_data=40, rank=2, lr=0.05, engine=engine, init_precision=1e12, **options)
    for _ in range(3):
        for _ in range(2):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                case.losses(case.model(*case.args)).mean().backward()
        opt.step()
    return opt


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_definition(name):
    found = []
    for engine in ("factored", "dense"):
        torch.manual_seed(0)
        found.append(trained(CASES[name]().double(), engine, generator=torch.Generator().manual_seed(1)).posterior)
    factored, dense = found
    torch.testing.assert_close(factored.mean, dense.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(factored.variance, dense.variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("seen", [0, 2])
def test_batches_that_are_not_finite_are_refused_before_and_after_a_graph_was_seen(bad, seen):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3), torch.arange(5) % 2
    opt = slangvi.SLANG(model, num_data=20)

    def step(x):
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
        opt.step()

    for _ in range(seen):
        step(x)
    before = opt.posterior.mean.clone()
    with pytest.raises(slangvi.NumericalError, match="gradient of parameter"):
        step(torch.full_like(x, bad))
    assert torch.equal(opt.posterior.mean, before)
    step(x)
    assert not torch.equal(opt.posterior.mean, before)


def test_a_penalty_on_the_weights_is_refused_by_name():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    opt = slangvi.SLANG(model, num_data=20)
    with (
        pytest.raises(slangvi.UnsupportedModuleError, match="parameter\\(s\\) 'weight' does not come from the outputs"),
        opt.sampled_params(train=True),
    ):
        (model(x).square().mean() + model.weight.square().sum()).backward()


def test_batch_normalisation_in_train_mode_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opt = slangvi.SLANG(model, num_data=20)
    with (
        pytest.raises(slangvi.UnsupportedModuleError, match=r"module '1' \(BatchNorm1d\)"),
        opt.sampled_params(train=True),
    ):
        model(torch.randn(4, 3)).sum().backward()


# ---- a budget of rows


def net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(8, 3).double(), torch.arange(8) % 2


def stepped(rows: int | None, seed: int = 0, kind=slangvi.FullGaussian, steps: int = 1, **options):
    """One step from the mean, with all of the new precision taken from the batch."""
    model, x, y = net()
    generator = torch.Generator().manual_seed(seed)
    opt = kind(
        model, num_data=40, lr=0.5, precision_lr=1.0, init_precision=1e14, curvature_rows=rows,
        generator=generator, **options,
    )  # fmt: skip
    for _ in range(steps):
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("kind", [slangvi.SLANG, slangvi.VOGN, slangvi.FullGaussian, slangvi.OnlineEig])
@pytest.mark.parametrize("rows", [8, 20])
def test_a_budget_that_is_not_reached_changes_nothing(kind, rows):
    all_rows, budget = stepped(None, kind=kind), stepped(rows, kind=kind)
    assert torch.equal(all_rows.posterior.mean, budget.posterior.mean)
    assert torch.equal(all_rows.posterior.variance, budget.posterior.variance)


def test_the_curvature_of_some_examples_has_the_expectation_of_all():
    whole = stepped(None).posterior.precision_matrix
    draws = torch.stack([stepped(3, seed).posterior.precision_matrix for seed in range(400)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert float(error.max()) > 0
    assert bool(((draws.mean(0) - whole).abs() <= 5 * error + 1e-6 * whole.abs().max()).all())


def test_the_gradient_of_the_mean_is_that_of_all_examples():
    momenta = [stepped(rows, kind=slangvi.SLANG, rank=2)._state.momentum for rows in (None, 3)]
    torch.testing.assert_close(momenta[1], momenta[0], rtol=1e-6, atol=1e-9)


def test_the_choice_follows_the_generator_and_a_resumed_run_makes_the_same():
    once, again = (stepped(3, seed=5, kind=slangvi.SLANG, steps=4) for _ in range(2))
    assert torch.equal(once.posterior.mean, again.posterior.mean)
    first = stepped(3, seed=5, kind=slangvi.SLANG, steps=2)
    model, x, y = net()
    resumed = slangvi.SLANG(model, num_data=40, lr=0.5, precision_lr=1.0, curvature_rows=3, generator=torch.Generator())
    resumed.load_state_dict(first.state_dict())
    for _ in range(2):
        with resumed.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
        resumed.step()
    assert torch.equal(resumed.posterior.mean, once.posterior.mean)
    assert torch.equal(resumed.posterior.variance, once.posterior.variance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curvature_rows": 0}, "curvature_rows must be ≥ 1, got 0"),
        ({"curvature_rows": 2.5}, "curvature_rows must be a whole number ≥ 1, got 2.5"),
        ({"curvature_rows": "most"}, "got 'most'. None takes all examples of a batch, \"auto\" chooses"),
    ],
)
def test_impossible_budgets_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        slangvi.SLANG(nn.Linear(2, 1), num_data=3, **options)


@pytest.mark.parametrize(("kind", "options", "width", "expected"), [
    (slangvi.SLANG, {"rank": 3}, 70_000, 16),
    (slangvi.SLANG, {"rank": 20}, 70_000, 40),
    (slangvi.VOGN, {}, 70_000, 16),
    (slangvi.VOGN, {}, 35_000, 29),
    (slangvi.VOGN, {}, 3, 50),
])  # fmt: skip
def test_auto_takes_few_rows_of_large_models_where_they_need_a_pass(kind, options, width, expected):
    torch.manual_seed(0)
    model, x = nn.Linear(width, 1), torch.randn(50, width)
    for likelihood, count in ((None, 50), ("gaussian", expected)):
        opt = kind(model, num_data=50, likelihood=likelihood, **options)
        with opt.sampled_params(train=True):
            model(x).square().mean().backward()
        (group,) = opt._rows
        assert (group.num_chosen or group.num_rows) == count
        assert group.num_rows == 50
    opt.step()
