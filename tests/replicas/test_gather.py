"""Gradients of all replicas at once: by either engine what torch.func gives for one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

import slangvi
from cases import build
from slangvi import replicas
from slangvi.params import ParamSpec
from slangvi.replicas._gather import LockstepGatherer
from slangvi.replicas._inputs import Minibatch

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


# ---- who is served by which engine ----


class Centred(torch.nn.Module):
    """Mixes examples, so that layers do not tell the gradient of one."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.inner(x - x.mean(0, keepdim=True))


class Unruly(torch.nn.Module):
    """Has no rule."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("model", "reason"), [(Centred(), "not those of single examples"), (Unruly(), "has no rule")], ids=str
)
def test_models_that_cannot_be_read_are_served_by_the_dense_engine(model, reason):
    model = model.double()
    log_likelihood = slangvi.Gaussian().of(model)
    batch = (torch.randn(2, 5, 2).double(), torch.randn(2, 5, 1).double())
    options = {"num_replicas": 2, "num_data": 5, "rank": 1, "lr": 0.1}
    found = {}
    for seen in (model, None):
        runs = replicas.build(log_likelihood, model=seen, **options)
        state, generators = runs.init(dict(model.named_parameters())), replicas.streams(range(2))
        if seen is not None:
            with pytest.warns(UserWarning, match=reason):
                state, _ = runs.update(state, batch, generators)
        else:
            state, _ = runs.update(state, batch, generators)
        found[seen], _ = runs.update(state, batch, generators)
    torch.testing.assert_close(found[model].loc, found[None].loc)


def test_mistakes_of_the_caller_are_not_blamed_on_the_layers():
    model = torch.nn.Linear(2, 1)
    runs = replicas.build(slangvi.Gaussian().of(model), model=model, num_replicas=2, num_data=5, rank=1, lr=0.1)
    with pytest.raises(ValueError, match="targets must have shape"):
        runs.update(runs.init(dict(model.named_parameters())), (torch.zeros(2, 5, 2), torch.zeros(2, 5)))
    runs = replicas.build(lambda p, b: b.sum(), num_replicas=2, num_data=5, rank=1, lr=0.1)
    with pytest.raises(ValueError, match=r"one value per example, shape \(1,\)"):
        runs.update(runs.init({"w": torch.zeros(2)}), torch.zeros(2, 5))
