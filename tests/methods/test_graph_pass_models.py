"""Models that are more than a function of their input, in a loop whose passes are replayed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
from helpers import captured_steps, replayed_passes
from helpers.captured_steps import Net, optimizer
from helpers.replayed_passes import (
    assert_both_alike,
    assert_same,
    gradients,
    one_pass,
    one_step,
    passes,
    refusable,
    rows_of,
    seeded,
)


class Looks(Net):
    """Reads a number, which a capture does not allow, after it has counted its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = F.dropout(x, 0.1, self.training)
        return super().forward(x) * (1.0 if x.abs().sum().item() > 0 else 2.0)


class Several(Net):
    def forward(self, x):
        return {"scores": super().forward(x)}


def warnings_of(scene, make, own=True):
    """The texts of the warnings when a scene is played, which point at the loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_both_alike(scene, make, own)
    assert all(warning.filename in (__file__, replayed_passes.__file__, captured_steps.__file__) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_a_model_that_cannot_be_captured_is_named_once_and_goes_on_eagerly(taped, own):
    (text,) = warnings_of(lambda opt, x, y: passes(opt, x, y, 9), seeded(Looks), own)
    assert text.startswith("compile=True replays the step, but not forward and backward: the step could not be")
    assert "not permitted when stream is capturing" in text
    assert not {"go_forward", "go_back"} & set(taped.replayed)


def test_steps_are_replayed_though_passes_cannot_be(taped):
    (text,) = warnings_of(lambda opt, x, y: [one_step(opt, x, y)[0] for _ in range(5)], seeded(Looks))
    assert "but not forward and backward" in text
    assert "write_draw" in taped.replayed


def test_a_capture_that_fails_leaves_buffers_alone(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        yield opt.model.calls

    (text,) = warnings_of(scene, seeded(Looks))  # which compares all that the scene yields
    assert "not permitted when stream is capturing" in text


def test_a_model_with_several_outputs_is_named_once_and_goes_on_eagerly(taped):
    def scene(opt, x, y):
        for _ in range(9):
            yield from one_pass(opt, x, y, lambda x: opt.model(x)["scores"])

    (text,) = warnings_of(scene, seeded(Several))
    assert "TypeError: the model's output is no tensor with the batch as first dimension" in text
    assert "go_back" not in taped.replayed


def test_layers_without_a_rule_are_not_captured(taped):
    def make():
        torch.manual_seed(0)
        return cases.Recurrent(nn.LSTM), (torch.randn(12, 4, 3), torch.arange(12) % 3)

    assert_both_alike(lambda opt, x, y: passes(opt, x, y, 6), make)
    assert not {"go_forward", "go_back"} & set(taped.captured)


class Counts(Net):
    """Changes buffers in place in every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


@pytest.mark.choreography
def test_buffers_that_forward_changes_in_place_go_on(replays):
    def scene(opt, x, y):
        for k in range(12):
            yield from one_pass(opt, x.roll(k, 1), y)
            yield from (opt.model.calls.clone(), opt.model.mean.clone())

    assert_both_alike(scene, seeded(Counts))
    assert replays() == 12 - 4


class Renews(Net):
    """Puts something else on itself in every call: a number, or by turns a flag or a buffer."""

    def __init__(self, what):
        super().__init__()
        self.what, self.number, self.flag = what, 0, False
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("spare", torch.zeros(()))

    def forward(self, x):
        output = super().forward(x)
        if self.what == "number":
            self.number += 1
        if self.what == "flag":
            self.flag = not self.flag
        if self.what == "calls":
            self.spare.copy_(self.calls + 1)
            self.calls, self.spare = self.spare, self.calls
        return output


@refusable
@pytest.mark.parametrize("what", ["number", "flag", "calls"])
def test_what_forward_puts_on_the_model_is_there_after_every_call(taped, what):
    def scene(opt, x, y):
        for k in range(12):
            yield from one_pass(opt, x.roll(k, 1), y)
            found = getattr(opt.model, what)
            yield found.clone() if isinstance(found, Tensor) else found

    assert_both_alike(scene, seeded(lambda: Renews(what)))


class Clamps(Net):
    """Changes its input in place, in a way that is done with after one time."""

    def forward(self, x):
        return super().forward(x.clamp_(-0.5, 0.5))


@refusable
def test_inputs_that_forward_changes_in_place_are_read_as_the_layers_saw_them(taped):
    def scene(opt, x, y):
        for _ in range(7):
            given = x.clone()
            yield from one_pass(opt, given, y)
            yield given

    assert_both_alike(scene, seeded(Clamps))


class Branches(Net):
    """Leaves a layer out when Python says so."""

    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(16, 16)
        self.deep = True

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(torch.tanh(self.middle(hidden)) if self.deep else hidden)


@pytest.mark.parametrize("period", [2, 5])
def test_models_may_take_another_path_by_turns(taped, period):
    def scene(opt, x, y):
        for k in range(14):
            opt.model.deep = k % period != 0
            yield from one_pass(opt, x, y)

    assert_both_alike(scene, seeded(Branches))


class Partly(Net):
    """With a parameter that somebody else trains."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.gain


def test_parameters_that_are_not_inferred_get_their_gradients(taped):
    told = []
    for compiled in (False, True):
        model, (x, y) = seeded(Partly)()
        opt = optimizer(model, compiled, params=[p for n, p in model.named_parameters() if n != "gain"])
        told.append([])
        for _ in range(7):
            model.gain.grad = None
            told[-1] += one_pass(opt, x, y)
    assert_same(*told)


class Beside(Net):
    """Adds a tensor that is neither a parameter nor a buffer, or a buffer that needs a gradient."""

    def __init__(self, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("beside", torch.zeros(3).requires_grad_())
        else:
            self.beside = torch.zeros(3).requires_grad_()

    def forward(self, x):
        return super().forward(x) + self.beside


@refusable
@pytest.mark.parametrize("buffer", [False, True], ids=["plain", "buffer"])
def test_tensors_beside_the_parameters_get_their_gradients(taped, buffer):
    def scene(opt, x, y):
        for _ in range(7):
            opt.model.beside.grad = None
            yield from one_pass(opt, x, y)
            yield opt.model.beside.grad

    assert_both_alike(scene, seeded(lambda: Beside(buffer)))


def test_a_call_with_other_values_of_the_parameters_is_not_replayed(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        for values in ({"first.bias": torch.zeros(16)}, {n: p.detach() for n, p in opt.model.named_parameters()}):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                teacher = torch.func.functional_call(opt.model, values, (x,))
                yield from (teacher.requires_grad, teacher.detach())
                F.cross_entropy(opt.model(x) + teacher.detach(), y).backward()
            yield from [*gradients(opt.model), *rows_of(opt)]

    assert_both_alike(scene)
