"""Draws that share a vmapped pass have the rows, sums and values of draws that are taken one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import cases
from rows.models import MODELS
from slangvi.methods import gather
from slangvi.methods.gather import RowGatherer
from slangvi.params import ParamSpec
from slangvi.settings import FunctionalSettings

S = 3
# Models whose outputs have time first are called with log-likelihoods of another batch size.
NAMES = [name for name in cases.CASES | MODELS if not name.startswith("time_first")]
# vmap cannot follow recurrent kernels and functions of one's own, and takes attention draw by draw.
SHARED = {"mlp", "convnet", "residual_groupnorm", "sequence_norms", "embedding_mlp", "low_rank_adapter"}
APART = {"lstm", "bidirectional", "transformer_encoder", "function_of_ones_own"}


def gatherer(name: str, **options) -> tuple[RowGatherer, ParamSpec, torch.Tensor, tuple]:
    torch.manual_seed(0)
    case = (cases.CASES | MODELS)[name]().double()

    def log_likelihood(params, batch):
        return -case.losses(functional_call(case.model, params, batch))

    spec = ParamSpec.of_module(case.model)
    mean = spec.flatten(dict(case.model.named_parameters())).detach()
    settings = FunctionalSettings(num_data=20, lr=0.1, model=case.model, **options)
    thetas = mean + 0.1 * torch.randn(S, len(mean), dtype=torch.float64)
    return RowGatherer(log_likelihood, settings), spec, thetas, case.args


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_pass_gives_what_separate_passes_give(monkeypatch, name):
    together, spec, thetas, batch = gatherer(name)
    shared, value = together(spec, thetas, batch)
    if name in SHARED | APART:
        assert together.together.possible is (name in SHARED)
    monkeypatch.setattr(gather, "SHARED_BYTES", 0)
    apart, spec, thetas, batch = gatherer(name)
    separate, expected = apart(spec, thetas, batch)
    assert apart.together.possible is None
    assert abs(value - expected) <= 1e-12 * max(1.0, abs(expected))
    torch.testing.assert_close(shared.form(), separate.form(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(shared.sum(), separate.sum(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{"curvature_rows": 2}, {"memory_limit": 1000}], ids=str)
def test_a_budget_of_rows_or_memory_keeps_draws_apart(options):
    single, spec, thetas, batch = gatherer("mlp", **options)
    operator, _ = single(spec, thetas, batch)
    assert single.together.possible is None
    assert operator.height == S * options.get("curvature_rows", cases.M)


def test_one_draw_has_a_pass_of_its_own():
    single, spec, thetas, batch = gatherer("mlp")
    single(spec, thetas[:1], batch)
    assert single.together.possible is None


def test_as_many_draws_as_examples_have_passes_of_their_own():
    single, spec, thetas, batch = gatherer("mlp")
    single(spec, thetas[:1].repeat(cases.M, 1), batch)
    assert single.together.possible is None


def test_a_shared_pass_names_draws_that_are_not_finite():
    single, spec, thetas, (x,) = gatherer("mlp")
    x[1, 0] = torch.nan
    with pytest.raises(ArithmeticError, match="not finite for 1 of 5 examples"):
        single(spec, thetas, (x,))


def test_random_layers_draw_anew_for_each_draw_of_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 50, bias=False), nn.Dropout(0.5)).double()
    spec = ParamSpec.of_module(model)
    settings = FunctionalSettings(num_data=20, lr=0.1, model=model)
    single = RowGatherer(lambda params, x: functional_call(model, params, (x,)).sum(1), settings)
    thetas = torch.ones(S, spec.num_params, dtype=torch.float64)
    operator, _ = single(spec, thetas, torch.ones(4, 3, dtype=torch.float64))
    assert single.together.possible
    assert len(operator.form().unique(dim=0)) == S * 4
