"""The plan of a prediction against every byte that torch's CPU allocator gave out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slangvi
from helpers.allocated_bytes import allocated
from helpers.posteriors import posterior_of


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(64, 64)


def convnet() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)]
    return nn.Sequential(*layers), torch.randn(6, 3, 8, 8)


CASES = [
    (convnet, slangvi.linearised_predictive, {"memory_limit": 1}),
    (mlp, slangvi.linearised_predictive, {"memory_limit": 20_000_000}),
    (convnet, slangvi.linearised_predictive, {"link": "mc", "n_samples": 2, "memory_limit": 5_000_000}),
    (mlp, slangvi.functional_samples, {"n_samples": 5, "batch_size": 4}),
    (convnet, slangvi.predictive_samples, {"n_samples": 2}),
]


@pytest.mark.parametrize(("build", "predict", "options"), CASES)
def test_the_plan_is_what_the_prediction_takes(build, predict, options):
    model, x = build()
    q = posterior_of(model)

    def run() -> object:
        return predict(*copy.deepcopy((model, q, x)), **options)

    plan = slangvi.estimate_prediction_memory(predict, model, q, x, **options)
    assert 0.99 <= plan.peak / allocated(run) <= 1.01
    limit = options.get("memory_limit", 0)
    if limit > 1:  # and the chunk is as large as it may be, or nearly
        assert 0.6 * limit < plan.working <= limit


def test_planning_touches_nothing(global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model, x = mlp()
    q = posterior_of(model)
    before = [p.clone() for p in model.parameters()]
    options = {"n_samples": 2, "generator": torch.Generator().manual_seed(0)}
    plan = slangvi.estimate_prediction_memory(slangvi.functional_samples, model, q, x, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert type(next(model.parameters()).data) is torch.Tensor
    assert plan.result == 2 * 64 * 10 * 4
    assert "at its peak" in str(plan)
    assert plan.guesses == 0


class Asking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.sum())


def test_values_that_had_to_be_made_up_are_told():
    model = Asking(3, 2)
    plan = slangvi.estimate_prediction_memory(slangvi.functional_samples, model, posterior_of(model), torch.ones(2, 3))
    assert plan.guesses > 0
    assert "another path" in str(plan)


def test_what_is_no_model_posterior_or_prediction_is_named():
    model = nn.Linear(2, 1)
    q, x = posterior_of(model), torch.zeros(3, 2)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        slangvi.estimate_prediction_memory(slangvi.predictive_samples, 3, q, x)
    with pytest.raises(TypeError, match="posterior must be that of an optimizer or a method, got NoneType"):
        slangvi.estimate_prediction_memory(slangvi.predictive_samples, model, None, x)
    with pytest.raises(TypeError, match="predict must be a function such as"):
        slangvi.estimate_prediction_memory("predict", model, q, x)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got NoneType"):
        slangvi.linearised_predictive(None, q, x)
