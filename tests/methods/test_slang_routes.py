"""Routes and memory limits, through both interfaces: accepted, obeyed, and without influence on the result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import assert_same
from slangvi.grads import FactoredGradients
from slangvi.types import Routes

CHOICES = {
    "form": {"routes": Routes(layers="form")},
    "factor": {"routes": Routes(layers="factor")},
    "globs": {"routes": Routes(layers={"0.*": "form", "*": "factor"})},
    "gram": {"routes": Routes(spectrum="gram")},
    "randomized": {"routes": Routes(spectrum="randomized")},
    "tiny pieces": {"routes": Routes(layers="factor", chunk_bytes=0)},
    "nothing formed": {"routes": Routes(form_bytes=0)},
    "little memory": {"memory_limit": 1},
    "both": {"routes": Routes(layers="factor", spectrum="gram"), "memory_limit": 4096},
}


def problem():
    """Convolutions, so that forming and factoring differ; more parameters than rows, so that all routes are open."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(24, 3)
    ).double()
    return model, torch.randn(18, 2, 8).double(), torch.arange(18) % 3


@pytest.fixture
def seen(monkeypatch):
    """The routes every operator was built with."""
    found, build = [], FactoredGradients.__init__

    def spy(self, spec, groups, rank, like, routes=None):
        found.append(routes)
        build(self, spec, groups, rank, like, routes)

    monkeypatch.setattr(FactoredGradients, "__init__", spy)
    return found


def functional(options):
    model, x, y = problem()
    vi = slangvi.slang.build(
        slangvi.Categorical().of(model), num_data=50, rank=3, lr=0.1, mc_samples=2, model=model, **options
    )
    state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
    for _ in range(4):
        state, _ = vi.update(state, (x, y), generator=generator)
    return state


def optimizer(options):
    model, x, y = problem()
    opt = slangvi.SLANG(model, num_data=50, rank=3, lr=0.1, generator=torch.Generator().manual_seed(0), **options)
    for _ in range(4):
        for _ in range(2):
            with opt.sampled_params(train=True):
                F.cross_entropy(model(x), y).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("choice", CHOICES)
def test_routes_and_limits_do_not_change_the_functional_result(choice, seen):
    options = CHOICES[choice]
    plain, chosen = functional({}), functional(options)
    for name in ("loc", "prec_diag", "momentum"):
        torch.testing.assert_close(getattr(chosen, name), getattr(plain, name), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        chosen.prec_factor.T @ chosen.prec_factor, plain.prec_factor.T @ plain.prec_factor, rtol=1e-8, atol=1e-9
    )
    expected = options.get("routes", Routes()).within(options.get("memory_limit"))
    assert seen[:4] == [Routes()] * 4
    assert seen[4:] == [expected] * 4


@pytest.mark.parametrize("choice", CHOICES)
def test_routes_and_limits_do_not_change_the_optimizers_result(choice, seen):
    options = CHOICES[choice]
    plain, chosen = optimizer({}), optimizer(options)
    assert_same(plain, chosen)
    expected = options.get("routes", Routes()).within(options.get("memory_limit"))
    assert seen == [Routes()] * 4 + [expected] * 4


def test_the_dense_engine_has_memory_limits_of_its_own():
    model, x, y = problem()
    states = []
    for limit in (None, 1, 100_000):
        vi = slangvi.slang.build(
            slangvi.Categorical().of(model),
            num_data=50,
            rank=3,
            lr=0.1,
            model=model,
            engine="dense",
            memory_limit=limit,
        )
        state, _ = vi.update(
            vi.init(dict(model.named_parameters())), (x, y), generator=torch.Generator().manual_seed(0)
        )
        states.append(state)
    for state in states[1:]:
        torch.testing.assert_close(state.loc, states[0].loc, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.prec_diag, states[0].prec_diag, rtol=1e-10, atol=1e-10)
