"""The engine that reads gradients off autograd's graph: the same steps as the factored one, and the same refusals."""

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
def test_steps_are_those_of_the_factored_engine(name):
    found = []
    for engine in ("factored", "graph"):
        torch.manual_seed(0)
        found.append(trained(CASES[name]().double(), engine, generator=torch.Generator().manual_seed(1)).posterior)
    factored, graph = found
    torch.testing.assert_close(graph.mean, factored.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(graph.variance, factored.variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("seen", [0, 2])
def test_batches_that_are_not_finite_are_refused_before_and_after_a_graph_was_seen(bad, seen):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3), torch.arange(5) % 2
    opt = slangvi.SLANG(model, num_data=20, engine="graph")

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
    opt = slangvi.SLANG(model, num_data=20, engine="graph")
    with (
        pytest.raises(slangvi.UnsupportedModuleError, match="parameter\\(s\\) 'weight' does not come from the outputs"),
        opt.sampled_params(train=True),
    ):
        (model(x).square().mean() + model.weight.square().sum()).backward()


def test_batch_normalisation_in_train_mode_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opt = slangvi.SLANG(model, num_data=20, engine="graph")
    with (
        pytest.raises(slangvi.UnsupportedModuleError, match=r"module '1' \(BatchNorm1d\)"),
        opt.sampled_params(train=True),
    ):
        model(torch.randn(4, 3)).sum().backward()


def test_graphs_of_the_step_need_the_factored_engine():
    with pytest.raises(ValueError, match='compile=True needs engine="factored", got "graph"'):
        slangvi.SLANG(nn.Linear(2, 1), num_data=3, engine="graph", compile=True)
