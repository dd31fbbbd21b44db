"""The network behind an estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from slangvi.estimators.network import ACTIVATIONS, check_outputs, input_dtype, layer_sizes, made_module, mlp


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("given", "sizes"), [(5, (5,)), ((), ()), ([3, 4], (3, 4)), ((7,), (7,)), (np.array([3, 4]), (3, 4))]
)
def test_layer_sizes_are_numbers_or_sequences(given, sizes):
    assert layer_sizes(given) == sizes


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_networks_have_the_sizes_and_start_within_bounds(activation, global_rng_untouched):
    model = mlp([9, 5, 4, 2], activation, torch.float64, seeded())
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 9), (5,), (4, 5), (4,), (2, 4), (2,)]
    assert 0.3 < float(model[0].weight.detach().abs().max()) <= 1 / 3
    assert model(torch.zeros(3, 9, dtype=torch.float64)).shape == (3, 2)
    again, other = (mlp([9, 5, 4, 2], activation, torch.float64, seeded(k)) for k in (0, 1))
    assert torch.equal(again[0].weight, model[0].weight)
    assert not torch.equal(other[0].weight, model[0].weight)


def test_modules_are_copied_and_functions_are_called_with_a_seed(global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        given = nn.Linear(3, 2)
    copied = made_module(given, 3, 2, seeded())
    assert copied is not given
    assert torch.equal(copied.weight, given.weight)
    first, second = (made_module(nn.Linear, 3, 2, seeded()) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, made_module(nn.Linear, 3, 2, seeded(1)).weight)


def test_inputs_take_the_dtype_of_the_module():
    assert input_dtype(nn.Linear(2, 1).double()) is torch.float64
    assert input_dtype(nn.ReLU()) is torch.float32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layer_sizes("50"), TypeError, "hidden_layer_sizes must be a sequence"),
        (lambda: layer_sizes((50, 0)), ValueError, "hidden_layer_sizes must be ≥ 1, got 0"),
        (lambda: layer_sizes(np.array([2.5])), TypeError, "hidden_layer_sizes must be a whole number"),
        (lambda: layer_sizes(2.5), TypeError, "hidden_layer_sizes must be a sequence"),
        (lambda: made_module("net", 1, 1, seeded()), TypeError, "module must be a torch.nn.Module, or a function"),
        (lambda: made_module(lambda a, b: 3, 1, 1, seeded()), TypeError, "must make a torch.nn.Module, got int"),
        (lambda: check_outputs(torch.zeros(2), 2, 3), ValueError, r"shape \(2, 3\) for 2 rows, got \(2,\)"),
        (lambda: check_outputs({}, 2, 3), ValueError, "got dict"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
