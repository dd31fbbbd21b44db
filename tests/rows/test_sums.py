"""Gradient sums of the user's own passes: what autograd added up, the number of examples, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import CASES, build
from slangvi.errors import UnsupportedModuleError
from slangvi.methods._adam import SumGroup
from slangvi.params import ParamSpec
from slangvi.rows import GradientRecorder


def listening(model):
    spec = ParamSpec.of_module(model)
    recorder = GradientRecorder(model, spec, torch.float64, wants_rows=False)
    return recorder, spec


def summed(group):
    """As optimizers take it of what the recorder returns."""
    return group.total * group.scale


@pytest.mark.parametrize("name", CASES)
def test_sums_are_what_autograd_adds_up(name):
    case = build(name)
    recorder, spec = listening(case.model)
    with recorder.recording():
        case.losses(case.model(*case.args)).sum().backward()
    (group,) = recorder.collect()
    params = dict(case.model.named_parameters())
    grads = {
        name: torch.zeros_like(params[name]) if params[name].grad is None else params[name].grad for name in spec.names
    }
    assert group.num_rows == case.num_examples
    assert torch.equal(summed(group.scaled(2.0)), 2.0 * spec.flatten(grads))


def test_every_backward_is_a_group_and_what_p_grad_holds_does_not_matter():
    model = nn.Linear(2, 1, bias=False).double()
    recorder, _ = listening(model)
    with recorder.recording():
        for x in (torch.ones(3, 2), torch.full((2, 2), 5.0)):
            model(x.double()).sum().backward()
        torch.autograd.grad(model(torch.ones(4, 2).double()).sum(), model.weight)
    first, second = recorder.collect()
    assert (first.num_rows, second.num_rows) == (3, 2)
    assert summed(first).tolist() == [3.0, 3.0]
    assert summed(second).tolist() == [10.0, 10.0]


def test_parameters_that_a_pass_did_not_reach_have_zeros():
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)]).double()
    model.forward = model[0].forward
    recorder, _ = listening(model)
    with recorder.recording():
        model(torch.ones(3, 2).double()).sum().backward()
    (group,) = recorder.collect()
    assert summed(group).tolist() == [3.0, 3.0, 0.0, 0.0, 0.0]


def test_two_losses_on_one_graph_are_one_sum():
    model = nn.Linear(2, 1, bias=False).double()
    recorder, _ = listening(model)
    with recorder.recording():
        out = model(torch.ones(3, 2).double())
        out.sum().backward(retain_graph=True)
        (2 * out).sum().backward()
    (group,) = recorder.collect()
    assert group.num_rows == 3
    assert summed(group).tolist() == [9.0, 9.0]


def test_no_rows_are_made_and_no_graph_is_looked_into():
    """What a penalty adds cannot be told apart by example, but is part of the sum."""
    model = nn.Linear(2, 1, bias=False).double()
    recorder, _ = listening(model)
    with recorder.recording():
        (model(torch.ones(3, 2).double()).sum() + 5 * model.weight.sum()).backward()
    (group,) = recorder.collect()
    assert not group.blocks
    assert len(recorder.plans) == 0
    assert summed(group).tolist() == [8.0, 8.0]


def test_what_was_drawn_stays_with_sums_that_are_scaled():
    drawn = torch.ones(3)
    group = SumGroup(4, {}, torch.tensor([1.0, 2.0, 0.0]), 0.5, drawn=drawn)
    twice = group.scaled(2.0)
    assert twice.drawn is drawn
    assert summed(twice).tolist() == [1.0, 2.0, 0.0]


def test_layers_are_not_listened_to():
    """Whatever is inside: statistics of the batch, modules without a rule, inputs that change in place."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 1)).double()
    recorder, _ = listening(model)
    assert not any(module._forward_hooks for module in list(model.modules())[1:])
    with recorder.recording():
        model(torch.randn(4, 2).double()).sum().backward()
    (group,) = recorder.collect()
    assert torch.equal(summed(group), torch.cat([p.grad.flatten() for p in model.parameters()]))
    recorder.close()
    assert not model._forward_hooks


def test_what_has_no_sum_is_refused():
    table = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Flatten())
    with pytest.raises(UnsupportedModuleError, match="sparse=True"), listening(table)[0].recording():
        pass
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    recorder, _ = listening(parts)
    with recorder.recording():
        parts[1](parts[0](torch.ones(3, 2))).sum().backward()
    with pytest.raises(UnsupportedModuleError, match="not through a recorded call of the model"):
        recorder.collect()
    with recorder.recording():
        (parts(torch.ones(3, 2)).sum() + parts(torch.ones(2, 2)).sum()).backward()
    with pytest.raises(UnsupportedModuleError, match="called 2 times for one backward"):
        recorder.collect()
    with recorder.recording():
        parts(torch.ones(0, 2)).sum().backward()
    with pytest.raises(ValueError, match="batch is empty"):
        recorder.collect()
