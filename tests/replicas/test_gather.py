"""Gradients of all replicas at once: by either engine what torch.func gives for one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

from cases import build
from slangvi.replicas._gather import LockstepGatherer
from slangvi.replicas._inputs import Minibatch
from slangvi.types import ParamSpec

READ = [
    "mlp",
    "convnet",
    "conv1d",
    "conv3d",
    "residual_groupnorm",
    "reused_module",
    "dict_input",
    "norms_without_positions",
    "embedding_mlp",
]
NOT_READ = ["raw_parameter", "weight_read_by_hand"]  # no layer with a rule has all their parameters


def gathered(name, engine, draws=2, count=3):
    case = build(name)
    spec = ParamSpec.of_module(case.model)
    source = torch.Generator().manual_seed(0)
    mean = spec.flatten({k: v.detach() for k, v in case.model.named_parameters()})
    thetas = mean + 0.1 * torch.randn(count, draws, len(mean), generator=source, dtype=torch.float64)

    def noisy(x):
        copies = torch.stack([x] * count)
        return copies + torch.randn(copies.shape, generator=source) if x.is_floating_point() else copies

    args = tree_map(lambda x: noisy(x) if isinstance(x, torch.Tensor) else x, case.args)
    weights = torch.ones(count, 5, dtype=torch.float64)
    weights[1, 3:] = 0

    def log_likelihood(params, batch, own):
        outputs = torch.func.functional_call(case.model, dict(params), batch)
        return -outputs.flatten(1).square().sum(1) * own

    gather = LockstepGatherer(log_likelihood, 2, case.model if engine == "factored" else None)
    data = Minibatch(args, torch.arange(1.0, count + 1), weights, 5)
    found = gather(spec, thetas, data)
    rows = [found.operator([x[k] for x in found.tensors], mean).form() for k in range(count)]
    return torch.stack(rows), found.values


@pytest.mark.parametrize("name", READ)
def test_the_engines_agree(name):
    (rows, values), (formed, expected) = gathered(name, "factored"), gathered(name, "dense")
    torch.testing.assert_close(rows, formed, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)
    assert float(rows[1].unflatten(0, (2, 5))[:, 3:].abs().max()) == 0.0
    assert float(rows[1].abs().max()) > 0.0


@pytest.mark.parametrize("name", NOT_READ)
def test_layers_that_cannot_be_read_are_formed(name):
    with pytest.warns(UserWarning, match="cannot be read in lockstep"):
        rows, _ = gathered(name, "factored")
    formed, _ = gathered(name, "dense")
    torch.testing.assert_close(rows, formed)
