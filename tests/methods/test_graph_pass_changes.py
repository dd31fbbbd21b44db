"""What may change between blocks, and how inputs may lie: replayed passes see it, or are not replayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.captured_steps import Net, problem
from helpers.replayed_passes import (
    Activated,
    assert_both_alike,
    error_of,
    one_pass,
    passes,
    residual,
    seeded,
    twofold,
)

CHANGES = []


def change(make, *marks):
    def note(f):
        CHANGES.append(pytest.param(make, f, marks=marks, id=f.__name__))
        return f

    return note


def buffered():
    model, batch = problem(buffer=True)
    model.shift.copy_(torch.linspace(-1, 1, 16))
    return model, batch


class Shifted(Net):
    """Has settings and a tensor that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.plain, self.scale, self.table, self.steps = torch.zeros(3), 1.0, {"scale": 1.0}, [1.0]
        self.function = torch.tanh

    def forward(self, x):
        scale = self.scale * self.table["scale"] * self.steps[-1]
        return self.function(super().forward(x)) * scale + self.plain


@change(seeded(Activated))
def another_activation(model):
    model.act = nn.ReLU()


@change(seeded(Activated))
def another_setting_of_a_layer(model):
    model.act = nn.Hardtanh(-0.5, 0.5)
    yield
    model.act.max_val = 0.1


@change(seeded(Activated))
def activation_left_out(model):
    model.act = nn.Sequential()
    yield
    model.act = nn.Sequential(nn.Tanh(), nn.Tanh())


@change(buffered)
def buffer_in_place(model):
    model.shift.mul_(2.0)


@change(buffered)
def buffer_replaced(model):
    model.shift = model.shift * 2.0
    yield
    model.shift = model.shift * 2.0


@change(buffered)
def buffer_seen_otherwise(model):
    model.shift = model.shift[:1]


@change(buffered)
def buffer_loaded(model):
    model.load_state_dict({**model.state_dict(), "shift": torch.ones(16)})


@change(problem)
def parameters_loaded(model):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


@change(problem)
def data_replaced(model):
    model.first.weight.data = model.first.weight.data.clone()
    yield
    model.second.bias.data = model.second.bias.data + 1.0


@change(problem)
def data_turned(model):
    model.first.weight.data = model.first.weight.data.T.contiguous().T


@change(lambda: problem(dropout=0.4))
def dropout(model):
    model.dropout = 0.1
    yield
    model.dropout = 0.0


@change(seeded(Shifted))
def setting(model):
    model.scale = 0.5


@change(seeded(Shifted))
def plain_tensor_in_place(model):
    model.plain.add_(1.0)


@change(seeded(Shifted))
def plain_tensor_replaced(model):
    model.plain = torch.ones(3)


@change(seeded(Shifted))
def setting_in_a_container(model):
    model.table["scale"] = 0.5
    yield
    model.steps.append(0.5)


@change(seeded(Shifted))
def function(model):
    model.function = torch.sin


@change(seeded(Activated))
def activation_at_the_same_address(model):
    model.act, there = nn.Sigmoid(), id(model.act)
    model.act = at(there, nn.Softsign)


@change(seeded(Shifted))
def function_at_the_same_address(model):
    model.function = lambda h: h.sin()
    yield from [None] * 3
    model.function, there = torch.sin, id(model.function)
    model.function = at(there, cosine)


def cosine():
    return lambda h: h.cos()


def at(address, build):
    """Something new at an address that was just given up, if that can be had."""
    kept = []
    for _ in range(1000):
        kept.append(build())
        if id(kept[-1]) == address:
            break
    return kept[-1]


@change(seeded(twofold))
def activations_swapped(model):
    model[1], model[2] = model[2], model[1]


@change(problem)
def part_in_eval_mode(model):
    model.second.eval()
    yield
    model.second.train()


@pytest.mark.choreography
@pytest.mark.parametrize(("make", "changed"), CHANGES)
def test_changes_of_the_model_between_blocks_are_seen(replays, make, changed):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        for _ in changed(opt.model) or [None]:
            yield from passes(opt, x, y, 3)
        yield from passes(opt, x, y, 1)

    assert_both_alike(scene, make, own=False)
    assert replays() >= 8 - 4 + 1


def test_a_layer_with_parameters_that_is_replaced_is_refused_as_ever(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        old, opt.model.second = opt.model.second, nn.Linear(16, 3)
        yield error_of(lambda: one_pass(opt, x, y))
        assert "forward" not in vars(opt.model)
        opt.model.second = old
        yield from passes(opt, x, y, 2)

    assert_both_alike(scene)


LAYOUTS = {
    "turned": lambda x: x.T.contiguous().T,
    "with gaps": lambda x: torch.cat([x, x], 1)[:, :10],
    "one for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.choreography
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("first", [True, False], ids=["from the start", "later"])
def test_inputs_may_lie_differently_in_memory(replays, name, first):
    def scene(opt, x, y):
        other = LAYOUTS[name](x)
        yield from passes(opt, other if first else x, y, 4)
        yield from passes(opt, other, y, 2)
        yield from passes(opt, x, y, 3)

    assert_both_alike(scene)
    assert replays() == (1 if first else 3)


@pytest.mark.choreography
def test_channels_may_come_last(replays):
    def scene(opt, x, y):
        for given in (x, x.to(memory_format=torch.channels_last), x):
            yield from passes(opt, given, y, 5)

    assert_both_alike(scene, residual)
    assert replays() == 15 - 4 - 2
