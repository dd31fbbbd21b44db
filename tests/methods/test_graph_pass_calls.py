"""Calls of a model that are not replayed because they might differ, and ways back that are refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.captured_steps import problem
from helpers.replayed_passes import (
    ONCE,
    Activated,
    assert_both_alike,
    error_of,
    gradients,
    limit,
    one_pass,
    passes,
    replaying_on,
    rows_of,
    seeded,
    twofold,
)


class Hook:
    """Counts how often it is called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1


HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "before": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "before backward": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.choreography
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("early", [True, False], ids=["before the capture", "after the capture"])
@pytest.mark.parametrize("place", ["", "act"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_others_are_called_and_replays_come_back_without_them(replays, kind, place, early):
    def scene(opt, x, y):
        yield from passes(opt, x, y, 0 if early else 8)
        hook = Hook()
        handle = HOOKS[kind](opt.model.get_submodule(place), hook)
        replays()
        yield from passes(opt, x, y, 3)
        assert replays() == 0
        assert hook.calls >= 3
        handle.remove()
        yield hook.calls
        yield from passes(opt, x, y, 4)
        assert replays() == (2 if early else 4) * opt.settings.compile

    assert_both_alike(scene, seeded(Activated))


@pytest.mark.choreography
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["module_forward_hook", "module_forward_pre_hook", "module_full_backward_hook"])
def test_global_hooks_are_called(replays, kind):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        replays()
        hook = Hook()
        handle = getattr(nn.modules.module, f"register_{kind}")(hook)
        try:
            yield from passes(opt, x, y, 3)
        finally:
            handle.remove()
        assert replays() == 0
        yield hook.calls
        assert hook.calls >= 6
        yield from passes(opt, x, y, 3)
        assert replays() == 3 * opt.settings.compile

    assert_both_alike(scene)


class Named(Tensor):
    """A tensor that operations may be different for."""


CALLS = {
    "keyword": lambda model, x: model(x=x),
    "input with a gradient": lambda model, x: model(x.clone().requires_grad_()),
    "another kind of tensor": lambda model, x: model(x.as_subclass(Named)).as_subclass(Tensor),
    "autocast": lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x),
}


@pytest.mark.choreography
@pytest.mark.parametrize("name", CALLS)
def test_other_calls_run_eagerly(replays, name):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        replays()
        for _ in range(3):
            yield from one_pass(opt, x, y, lambda x: CALLS[name](opt.model, x).float())
        assert replays() == 0
        yield from passes(opt, x, y, 3)
        assert replays() == 3 * opt.settings.compile

    assert_both_alike(scene)


def test_inputs_get_their_gradients(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        given = x.clone().requires_grad_()
        yield from one_pass(opt, given, y)
        yield given.grad

    assert_both_alike(scene)


@pytest.mark.choreography
def test_a_forward_that_the_user_has_put_there_is_called_and_left_there(replays):
    def scene(opt, x, y):
        calls = []

        def twice(x, real=opt.model.forward):
            calls.append(x)
            return 2 * real(x)

        yield from passes(opt, x, y)
        opt.model.forward = twice
        replays()
        yield from passes(opt, x, y, 3)
        assert replays() == 0
        assert len(calls) >= 3
        assert opt.model.__dict__["forward"] is twice
        del opt.model.forward
        yield from passes(opt, x, y, 3)
        assert replays() == 3 * opt.settings.compile

    assert_both_alike(scene)


def test_a_forward_that_the_user_puts_there_inside_a_block_is_left_there(taped):
    def scene(opt, x, y):
        real = opt.model.forward
        yield from passes(opt, x, y)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            opt.model.forward = lambda x: 2 * real(x)
            F.cross_entropy(opt.model(x), y).backward()
        yield from [*gradients(opt.model), *rows_of(opt), opt.model(x).detach()]
        del opt.model.forward
        yield from passes(opt, x, y, 2)

    assert_both_alike(scene)


@pytest.mark.choreography
def test_logging_without_gradients_inside_the_block_is_harmless(replays):
    def scene(opt, x, y):
        for _ in range(12):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                with torch.no_grad():
                    yield opt.model(x)
                output = opt.model(x)
                with torch.no_grad():
                    yield opt.model(x[:7])
                F.cross_entropy(output, y).backward()
                with torch.no_grad():
                    yield opt.model(x)
            yield from [*gradients(opt.model), *rows_of(opt)]

    assert_both_alike(scene)
    assert replays() == 12 - 4


def test_evaluation_outside_blocks_is_not_replayed(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        done = len(taped.replayed)
        opt.zero_grad()
        opt.model.eval()
        yield opt.model(x).detach()
        F.cross_entropy(opt.model(x), y).backward()
        yield from [*gradients(opt.model), *rows_of(opt)]
        with torch.no_grad():
            yield opt.model(x)
        opt.model.train()
        yield opt.model(x).detach()
        with opt.sampled_params():
            assert "forward" not in vars(opt.model)
            yield opt.model(x).detach()
        assert len(taped.replayed) == done
        yield from passes(opt, x, y, 3)

    assert_both_alike(scene, lambda: problem(dropout=0.4))


@pytest.mark.choreography
def test_modes_are_told_apart(replays):
    def scene(opt, x, y):
        for k in range(14):
            opt.model.train(k % 2 == 0)
            yield from one_pass(opt, x, y)

    assert_both_alike(scene, lambda: problem(dropout=0.4))
    assert replays() == 14 - 4 - 1  # 1, 2, 4 and 8 are checked, and 3 is the second of the first kind


@pytest.mark.choreography
def test_a_layer_called_by_itself_is_still_read(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        replays()
        yield from one_pass(opt, x, y, lambda x: opt.model.second(torch.tanh(opt.model.first(x))))
        yield from one_pass(opt, x, y)
        yield from one_pass(opt, x, y, lambda x: opt.model.second(torch.tanh(opt.model.first(x))))
        assert replays() == opt.settings.compile

    assert_both_alike(scene, verify=False)


SIZES = [(33, 40), (40, 33), (40, 40)]


@pytest.mark.choreography
@pytest.mark.parametrize("order", [1, -1], ids=["first back first", "last back first"])
@pytest.mark.parametrize("sizes", SIZES)
def test_of_two_calls_before_backward_both_are_read(replays, sizes, order):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        replays()
        with opt.sampled_params(train=True):
            opt.zero_grad()
            losses = [F.cross_entropy(opt.model(x.roll(size, 1)[:size]), y[:size]) for size in sizes]
            for loss in losses[::order]:
                loss.backward()
        yield from [*gradients(opt.model), *rows_of(opt)]
        assert replays() == opt.settings.compile * (sizes[0] == 40)  # not after one that is still to be read by hooks
        yield from passes(opt, x, y, 2)
        assert replays() == 2 * opt.settings.compile

    assert_both_alike(scene)


@pytest.mark.parametrize("order", [1, -1], ids=["first back first", "last back first"])
def test_of_two_calls_of_known_shapes_before_backward_both_are_read(taped, order):
    def scene(opt, x, y):
        for size in (40, 33):
            yield from passes(opt, x[:size], y[:size], 4)
        for sizes in ((40, 33), (33, 40)):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                losses = [F.cross_entropy(opt.model(x[:size]), y[:size]) for size in sizes]
                for loss in losses[::order]:
                    loss.backward()
            yield from [*gradients(opt.model), *rows_of(opt)]

    assert_both_alike(scene, seeded(twofold))


@pytest.mark.choreography
def test_a_call_that_never_goes_back_does_not_stand_in_the_way(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            opt.model(x)
            F.cross_entropy(opt.model(x), y).backward()
        yield from [*gradients(opt.model), *rows_of(opt)]
        replays()
        yield from passes(opt, x, y, 1)
        assert replays() == opt.settings.compile

    assert_both_alike(scene)


def go_twice(loss, model):
    loss.backward(retain_graph=True)
    loss.backward()


def go_twice_over(loss, model):
    loss.backward(create_graph=True)


def go_along_and_back(loss, model):
    torch.autograd.grad(loss, model.first.weight, retain_graph=True)
    loss.backward()


@pytest.mark.choreography
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("go", [go_twice, go_twice_over, go_along_and_back])
def test_what_needs_more_than_one_way_back_is_refused_and_leaves_everything_working(replays, go):
    def scene(opt, x, y):
        yield from passes(opt, x, y)

        def play():
            with opt.sampled_params(train=True):
                go(F.cross_entropy(opt.model(x), y), opt.model)

        if opt.settings.compile:
            with pytest.raises(RuntimeError, match=ONCE):
                play()
        else:
            play()
            opt.discard_gradients()
        assert not opt._rows
        assert "forward" not in vars(opt.model)
        replays()
        yield from passes(opt, x, y, 2)
        assert replays() == 2 * opt.settings.compile

    assert_both_alike(scene)


@pytest.mark.parametrize("later", ["after the block", "in the next block"])
def test_going_back_later_is_refused(taped, later):
    opt, (x, y) = replaying_on(problem)
    passes(opt, x, y)
    with opt.sampled_params(train=True):
        loss = F.cross_entropy(opt.model(x), y)
    with opt.sampled_params(train=True) if later == "in the next block" else nullcontext():
        opt.model(x)
        with pytest.raises(RuntimeError, match=f"{ONCE}, inside its sampled_params block"):
            loss.backward()
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step()


@pytest.mark.parametrize("sizes", SIZES)
def test_one_way_back_through_two_calls_is_refused_as_ever(taped, sizes):
    def scene(opt, x, y):
        yield from passes(opt, x, y)

        def play():
            with opt.sampled_params(train=True):
                sum(F.cross_entropy(opt.model(x[:size]), y[:size]) for size in sizes).backward()

        yield error_of(play)
        yield rows_of(opt)
        yield from passes(opt, x, y, 2)

    assert_both_alike(scene)


@pytest.mark.parametrize("kept", [False, True], ids=["once", "graph kept"])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["of one", "of all"])
def test_autograd_grad_is_no_training_signal(taped, all_of_them, kept):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        opt.zero_grad()
        wanted = list(opt.model.parameters()) if all_of_them else opt.model.first.weight
        with opt.sampled_params(train=True):
            loss = F.cross_entropy(opt.model(x), y)
            yield from torch.autograd.grad(loss, wanted, retain_graph=kept)
        yield from [*gradients(opt.model), *rows_of(opt)]
        yield error_of(opt.step)
        yield from passes(opt, x, y, 2)

    assert_both_alike(scene)


@pytest.mark.choreography
def test_a_gradient_may_be_taken_down_to_the_output_first(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            output = opt.model(x)
            (delta,) = torch.autograd.grad(F.cross_entropy(output, y), output)
            output.backward(delta)
        yield from [delta, *gradients(opt.model), *rows_of(opt)]

    assert_both_alike(scene)
    assert replays() == 9 - 4


@limit("leaf hooks are gone after a replay, so gradients that by-pass the model are not noticed")
def test_a_penalty_of_its_own_is_refused_as_ever(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)

        def play():
            with opt.sampled_params(train=True):
                F.cross_entropy(opt.model(x), y).backward()
                opt.model.first.weight.square().sum().backward()

        yield error_of(play)
        yield from passes(opt, x, y, 2)

    assert_both_alike(scene)


def test_weights_changed_between_the_ways_are_refused_as_ever(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)

        def play():
            with opt.sampled_params(train=True):
                loss = F.cross_entropy(opt.model(x), y)
                with torch.no_grad():
                    opt.model.second.weight.mul_(2.0)
                loss.backward()

        yield error_of(play)[0]

    assert_both_alike(scene)


@pytest.mark.choreography
@pytest.mark.parametrize("when", ["before forward", "before backward", "after backward"])
def test_an_error_inside_the_block_leaves_the_model_as_it_was(replays, when):
    def scene(opt, x, y):
        def play():
            with opt.sampled_params(train=True):
                opt.zero_grad()
                loss = F.cross_entropy(opt.model(x), y) if when != "before forward" else None
                if when == "after backward":
                    loss.backward()
                raise KeyError("mine")

        yield from passes(opt, x, y)
        yield from [error_of(play), len(opt._rows), opt.model(x).detach()]
        assert "forward" not in vars(opt.model)
        replays()
        yield from passes(opt, x, y, 2)
        assert replays() == 2 * opt.settings.compile

    assert_both_alike(scene)
