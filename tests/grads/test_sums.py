"""Gradient sums of the user's own passes: what autograd added up, the number of examples, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import CASES, build
from slangvi.errors import UnsupportedModuleError
from slangvi.grads import SumCapture
from slangvi.params import ParamSpec


def listening(model):
    spec = ParamSpec.of_module(model)
    return SumCapture(model, spec, torch.float64), spec, torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_what_autograd_adds_up(name):
    case = build(name)
    capture, spec, like = listening(case.model)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
    (group,) = capture.collect({})
    params = dict(case.model.named_parameters())
    grads = {
        name: torch.zeros_like(params[name]) if params[name].grad is None else params[name].grad for name in spec.names
    }
    assert group.num_rows == case.num_examples
    assert torch.equal(group.scaled(2.0).sum(spec, like), 2.0 * spec.flatten(grads))


def test_every_backward_is_a_group_and_what_p_grad_holds_does_not_matter():
    model = nn.Linear(2, 1, bias=False).double()
    capture, spec, like = listening(model)
    with capture.recording():
        for x in (torch.ones(3, 2), torch.full((2, 2), 5.0)):
            model(x.double()).sum().backward()
        torch.autograd.grad(model(torch.ones(4, 2).double()).sum(), model.weight)
    first, second = capture.collect({})
    assert (first.num_rows, second.num_rows) == (3, 2)
    assert first.sum(spec, like).tolist() == [3.0, 3.0]
    assert second.sum(spec, like).tolist() == [10.0, 10.0]


def test_parameters_that_a_pass_did_not_reach_have_zeros():
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)]).double()
    model.forward = model[0].forward
    capture, spec, like = listening(model)
    with capture.recording():
        model(torch.ones(3, 2).double()).sum().backward()
    (group,) = capture.collect({})
    assert group.sum(spec, like).tolist() == [3.0, 3.0, 0.0, 0.0, 0.0]


def test_layers_are_not_listened_to():
    """Whatever is inside: statistics of the batch, modules without a rule, inputs that change in place."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 1)).double()
    capture, spec, like = listening(model)
    assert not any(module._forward_hooks for module in list(model.modules())[1:])
    with capture.recording():
        model(torch.randn(4, 2).double()).sum().backward()
    (group,) = capture.collect({})
    assert torch.equal(group.sum(spec, like), torch.cat([p.grad.flatten() for p in model.parameters()]))
    capture.close()
    assert not model._forward_hooks


def test_what_has_no_sum_is_refused():
    table = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Flatten())
    with pytest.raises(UnsupportedModuleError, match="sparse=True"), listening(table)[0].recording():
        pass
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    capture, _, _ = listening(parts)
    with capture.recording():
        parts[1](parts[0](torch.ones(3, 2))).sum().backward()
    with pytest.raises(UnsupportedModuleError, match="not through a recorded call of the model"):
        capture.collect({})
    with capture.recording():
        (parts(torch.ones(3, 2)).sum() + parts(torch.ones(2, 2)).sum()).backward()
    with pytest.raises(UnsupportedModuleError, match="called 2 times for one backward"):
        capture.collect({})
    with capture.recording():
        parts(torch.ones(0, 2)).sum().backward()
    with pytest.raises(ValueError, match="batch is empty"):
        capture.collect({})
