"""What cannot be is refused by name; what can be, learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import slangvi
from cases import build, cross_entropy
from helpers.optimizer_runs import N, assert_same, backward, flat, make, model_and_data, train
from slangvi.errors import UnsupportedModuleError

BAD = {
    "rank": [(-1, ValueError), (1.5, TypeError), (True, TypeError)],
    "lr": [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), (math.inf, ValueError), (None, TypeError)],
    "precision_lr": [(0.0, ValueError), (1.01, ValueError), (math.nan, ValueError)],
    "momentum": [(1.0, ValueError), (-0.1, ValueError), ("high", TypeError)],
    "prior_precision": [
        (0.0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        (torch.ones(3), ValueError),
        (torch.zeros(43), ValueError),
        ({"nothing": 1.0, "*": 1.0}, ValueError),
        ({"0.*": 1.0}, ValueError),
        ({"*": -1.0}, ValueError),
        ("strong", TypeError),
    ],
    "prior_mean": [(math.inf, ValueError), (torch.zeros(3), ValueError)],
    "init_precision": [(0.0, ValueError), (math.inf, ValueError)],
    "num_data": [(0, ValueError), (-5, ValueError), (1.5, TypeError), (None, TypeError)],
    "mc_samples": [(0, ValueError), (1.5, TypeError)],
    "temperature": [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError)],
    "loss_reduction": [("none", ValueError)],
    "accumulation_steps": [(0, ValueError), (2.0, TypeError)],
    "curvature": [("hessian", ValueError)],
    "engine": [("magic", ValueError)],
    "verify": [("yes", TypeError)],
    "memory_limit": [(0, ValueError), (1.5, TypeError)],
}


@pytest.mark.parametrize(("name", "value", "error"), [(n, v, e) for n, rows in BAD.items() for v, e in rows])
def test_impossible_arguments_are_named(name, value, error):
    model, _, _ = model_and_data()
    with pytest.raises(error, match=name):
        make(model, **{name: value})


def test_num_data_is_required():
    with pytest.raises(TypeError, match="num_data"):
        slangvi.SLANG(nn.Linear(1, 1), rank=1)


def test_models_that_cannot_be_inferred_are_refused():
    with pytest.raises(TypeError, match="not model"):
        slangvi.SLANG(nn.Linear(1, 1).parameters(), num_data=1)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        slangvi.SLANG(frozen, num_data=1)
    with pytest.raises(ValueError, match="requires_grad=False"):
        slangvi.SLANG(frozen, list(frozen.parameters()), num_data=1)
    with pytest.raises(ValueError, match="not parameters of the model"):
        slangvi.SLANG(nn.Linear(1, 1), nn.Linear(1, 1).parameters(), num_data=1)
    with pytest.raises(UnsupportedModuleError, match="lazy"):
        slangvi.SLANG(nn.LazyLinear(1), num_data=1)
    with pytest.raises(UnsupportedModuleError, match="complex"):
        slangvi.SLANG(nn.Linear(1, 1, dtype=torch.complex64), num_data=1)
    broken = nn.Linear(1, 1)
    nn.init.constant_(broken.bias, math.nan)
    with pytest.raises(ValueError, match="params must be finite"):
        slangvi.SLANG(broken, num_data=1)


def test_batch_statistics_are_refused_when_training_starts():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    opt = slangvi.SLANG(model, num_data=4)
    before = flat(model)
    with pytest.raises(UnsupportedModuleError, match=r"'1' .BatchNorm1d"), opt.sampled_params(train=True):
        pass
    assert torch.equal(flat(model), before)


def test_a_generator_on_another_device_is_named():
    opt = make(nn.Linear(1, 1))

    class Elsewhere:
        device = torch.device("cuda")

    opt.generator = Elsewhere()
    with pytest.raises(ValueError, match="generator is on cuda"), opt.sampled_params():
        pass


def test_parameters_frozen_or_replaced_later_are_named():
    model, _, _ = model_and_data()
    opt = make(model)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0.weight' was frozen"), opt.sampled_params(train=True):
        pass
    model[0].weight.requires_grad_(True)
    model[2] = nn.Linear(5, 3).double()
    with pytest.raises(ValueError, match=r"'2.weight' was replaced"), opt.sampled_params(train=True):
        pass


def test_parameters_that_share_memory_only_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share their memory"):
        make(model)


def test_a_single_tensor_and_a_seed_are_no_parameters_and_no_generator():
    model, _, _ = model_and_data()
    with pytest.raises(TypeError, match="Put it in a list"):
        make(model, params=model[0].weight)
    with pytest.raises(TypeError, match=r"torch.Generator"):
        make(model, generator=3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_models_with_time_first_are_refused(kind):
    with pytest.raises(UnsupportedModuleError, match="batch_first=True"):
        make(kind(3, 4))


def test_a_batch_larger_than_the_data_is_noticed_once():
    model, x, y = model_and_data()
    opt = make(model, num_data=5)
    with pytest.warns(UserWarning, match="batch of 12 examples is larger than num_data=5") as caught:
        train(opt, x, y, steps=1)
    assert caught[0].filename == train.__code__.co_filename  # the line that took the step
    train(opt, x, y, steps=1)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    model, x, y = model_and_data()
    opt = make(model, params=list(model[2].parameters()))
    with pytest.raises(ValueError, match="lr must be"):
        opt.add_param_group({"params": model[0].parameters(), "lr": 7.0})
    with pytest.raises(ValueError, match="init_precision"):
        opt.add_param_group({"params": model[0].parameters(), "init_precision": -1.0})
    assert len(opt.param_groups) == 1
    assert math.isfinite(opt.kl())
    train(opt, x, y)


def test_an_empty_batch_is_refused():
    model, x, _ = model_and_data()
    opt = make(model)
    with pytest.raises(ValueError, match="batch is empty"), opt.sampled_params(train=True):
        model(x[:0]).sum().backward()


@pytest.mark.parametrize("name", ["lstm", "raw_parameter", "convnet", "gpt_functional_head"])
@pytest.mark.parametrize("engine", ["factored", "dense"])
def test_a_memory_limit_changes_nothing_but_the_chunks(name, engine):
    states = []
    for limit in (None, 1):
        case = build(name)
        options = {"engine": engine, "memory_limit": limit, "generator": torch.Generator().manual_seed(0)}
        opt = slangvi.SLANG(case.model, num_data=N, rank=2, lr=0.1, **options)
        for _ in range(2):
            opt.step(lambda case=case: backward(case.losses(case.model(*case.args)).mean()))
        states.append(opt)
    assert_same(*states)


@pytest.mark.parametrize("name", ["convnet", "gru", "transformer_encoder", "gpt_tied", "raw_parameter", "weight_norm"])
def test_losses_fall_on_other_architectures(name):
    case = build(name)
    opt = slangvi.SLANG(
        case.model, num_data=500, rank=2, lr=0.1, precision_lr=0.05, init_precision=500.0, mc_samples=2,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    losses = [float(opt.step(lambda: backward(case.losses(case.model(*case.args)).mean()))) for _ in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_integer_labels_out_of_range_are_named_by_the_likelihoods():
    with pytest.raises(ValueError, match=r"labels 0…2 .*got values from 0 to 5"):
        slangvi.Categorical().log_prob(torch.zeros(2, 3), torch.tensor([0, 5]))
    assert callable(cross_entropy(torch.tensor([0])))


@pytest.mark.parametrize("method", [slangvi.SLANG, slangvi.BBB])
def test_parameters_are_not_added_between_backward_and_step(method):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    opt = method(model, model[0].parameters(), num_data=8, lr=0.01)
    with opt.sampled_params(train=True):
        model(torch.randn(4, 2)).mean().backward()
    with pytest.raises(RuntimeError, match=r"between backward and step.*Call step\(\) or discard_gradients\(\) first"):
        opt.add_param_group({"params": model[1].parameters()})
    assert len(opt.param_groups) == 1
    opt.discard_gradients()
    opt.add_param_group({"params": model[1].parameters()})
    assert len(opt.param_groups) == 2
