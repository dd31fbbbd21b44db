"""Checks of replayed passes, and who else has to do with the model: copies, hooks, other optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from helpers.captured_steps import Net, optimizer, pair, problem
from helpers.replayed_passes import (
    assert_both_alike,
    assert_same,
    gradients,
    one_pass,
    one_step,
    passes,
    replaying_on,
    rows_of,
    seeded,
)
from slangvi.grads import GradientCapture
from slangvi.methods import _graph_pass
from slangvi.methods.graph_runner import MOST_GRAPHS


def test_checks_are_made_as_often_as_ever(taped):
    opt, (x, y) = replaying_on(problem)
    eager = []
    for k in range(1, 34):
        done = len(taped.replayed)
        one_pass(opt, x, y)
        if "go_back" not in taped.replayed[done:]:
            eager.append(k)
    assert eager == [1, 2, 4, 8, 16, 32]


class Mixes(Net):
    """Begins to mix examples when told so, on the device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.zeros(()))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden + self.share * hidden.mean(0))


@pytest.mark.choreography
def test_a_model_that_begins_to_mix_examples_is_found_out_at_the_next_check(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y, 9)
        opt.model.share.fill_(1.0)
        yield from passes(opt, x, y, 6)
        assert replays() == (15 - 4) * opt.settings.compile
        assert not any(plan for plan in plans(opt))
        yield from passes(opt, x, y, 4)
        assert replays() == 0
        assert plans(opt) == [{"first.weight", "first.bias"}]

    assert_both_alike(scene, seeded(Mixes))


@pytest.mark.choreography
def test_micro_batches_in_one_block_do_not_hide_what_a_check_has_found(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        opt.model.share.fill_(1.0)
        for _ in range(5):
            with opt.sampled_params(train=True):
                for part in (x, x.roll(1, 0)):
                    opt.zero_grad()
                    F.cross_entropy(opt.model(part), y).backward()
                    yield from gradients(opt.model)
            yield from rows_of(opt)
        assert plans(opt) == [{"first.weight", "first.bias"}]
        replays()
        yield from passes(opt, x, y, 2)
        assert replays() == 0

    assert_both_alike(scene, seeded(Mixes))


def plans(opt):
    """What checks have found, for every pattern of calls."""
    assembler = opt._capture.assembler
    return [set(plan) for plan in assembler._plans.values()]


@pytest.mark.parametrize("late", [False, True], ids=["before the capture", "after it"])
def test_hooks_of_others_on_parameters_are_called_after_ours_as_ever(taped, late):
    def scene(opt, x, y):
        yield from passes(opt, x, y, 3 * late)
        opt.model.first.weight.register_hook(lambda grad: 0.5 * grad)
        yield from passes(opt, x, y)

    assert_both_alike(scene)


class Elsewhere(Net):
    """Reads a setting that is not its own."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def forward(self, x):
        return super().forward(x) * self.settings.scale


def test_what_python_changes_elsewhere_is_found_out_at_the_next_check(replays):
    settings = SimpleNamespace(scale=1.0)

    def scene(opt, x, y):
        settings.scale = 1.0
        passes(opt, x, y, 9)
        settings.scale = 0.5
        passes(opt, x, y, 7)
        yield from passes(opt, x, y, 3)

    assert_both_alike(scene, seeded(lambda: Elsewhere(settings)))


def has_hooks(model):
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) or any(
        p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()
    )


@pytest.mark.parametrize("steps", [3, 4], ids=["after a replay", "after a check"])
def test_a_deleted_optimizer_leaves_nothing_on_the_model(taped, steps):
    opt, (x, y) = replaying_on(problem)
    for _ in range(steps):
        one_step(opt, x, y)
    model, gone = opt.model, [weakref.ref(opt), weakref.ref(opt._capture), weakref.ref(opt._passes)]
    assert has_hooks(model)
    del opt
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert not has_hooks(model)
    assert "forward" not in vars(model)


DUPLICATES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


INSIDE = [(how, inside) for how in DUPLICATES for inside in (False, True)]


@pytest.mark.choreography
@pytest.mark.parametrize(("how", "inside"), list(INSIDE))
def test_copies_of_the_model_are_models_of_their_own(replays, how, inside):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            twin = DUPLICATES[how](opt.model) if inside else None
            F.cross_entropy(opt.model(x), y).backward()
        yield from rows_of(opt)
        twin = DUPLICATES[how](opt.model) if twin is None else twin
        with torch.no_grad():
            twin.first.weight.mul_(2.0)
        twin.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        yield from gradients(twin)
        yield from passes(opt, x, y, 3)

    assert_both_alike(scene)
    assert replays() == 12 - 4


@pytest.mark.choreography
def test_copies_made_inside_a_block_can_be_replayed_themselves(replays):
    opt, (x, y) = replaying_on(problem)
    with opt.sampled_params(train=True):
        twin = optimizer(copy.deepcopy(opt.model), True)
    passes(twin, x, y, 3)
    assert replays() == 1


@pytest.mark.parametrize("how", DUPLICATES)
def test_copies_of_the_optimizer_replay_by_themselves(taped, how):
    opts = *_, (x, y) = pair()
    for opt in opts[:2]:
        passes(opt, x, y)
    eager, replayed = opts[:2]
    twin, done = DUPLICATES[how](replayed), taped.captured.count("go_back")
    told = [passes(opt, x, y, 6) for opt in (eager, replayed, twin)]
    assert taped.captured.count("go_back") == done + 1
    assert_same(told[0], told[1])
    assert_same(told[0], told[2])


@pytest.mark.choreography
def test_parameters_added_later_are_replayed_with_the_others(replays):
    told = []
    for compiled in (False, True):
        model, (x, y) = problem()
        model.second.requires_grad_(False)
        opt = optimizer(model, compiled)
        told.append(passes(opt, x, y, 6))
        model.second.requires_grad_(True)
        opt.add_param_group({"params": list(model.second.parameters())})
        told[-1] += passes(opt, x, y, 6)
    assert_same(*told)
    assert replays() == 12 - 3 - 3


def test_parameters_added_later_leave_no_hooks_behind(taped):
    model, (x, y) = problem()
    model.second.requires_grad_(False)
    opt, counts = optimizer(model, True), []
    for _ in range(2):
        for _ in range(5):
            one_step(opt, x, y)
        gc.collect()
        counts.append(len(model.first._forward_hooks))
        model.second.requires_grad_(True)
        if len(opt.param_groups) == 1:
            opt.add_param_group({"params": list(model.second.parameters())})
    assert counts == [2, 2]


@pytest.mark.parametrize("shared", [True, False], ids=["all parameters", "a part each"])
def test_two_optimizers_of_one_model_take_turns(taped, shared):
    told = []
    for compiled in (False, True):
        model, (x, y) = problem()
        parts = [None, None] if shared else [list(part.parameters()) for part in (model.first, model.second)]
        opts = [optimizer(model, compiled, params=part) for part in parts]
        told.append([value for _ in range(7) for opt in opts for value in one_pass(opt, x, y)])
    assert_same(*told)
    assert taped.captured.count("go_back") == 2 * shared  # a replay brings no gradient to parameters of others


def test_two_optimizers_of_one_model_are_nested(taped, monkeypatch):
    """The weights are the inner one's, and both read the pass."""
    # On a device it is not looked at whether data has changed, so that is not what keeps the capture from going well.
    monkeypatch.setattr(GradientCapture, "snapshot", lambda self, x: x.detach().clone() if x.is_leaf else x)
    told = []
    for compiled in (False, True):
        model, (x, y) = problem()
        opts = [optimizer(model, compiled, verify=False), optimizer(model, compiled, verify=False)]
        told.append([])
        for _ in range(5):
            with opts[0].sampled_params(train=True), opts[1].sampled_params(train=True):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
            told[-1] += [*gradients(model), *rows_of(opts[0]), *rows_of(opts[1])]
        assert "forward" not in vars(model)
    assert_same(*told)
    assert taped.replayed.count("go_back") == 3


def test_the_dense_engine_is_left_alone(taped):
    assert_both_alike(lambda opt, x, y: passes(opt, x, y, 4), engine="dense")
    assert "go_forward" not in taped.captured


@pytest.mark.choreography
def test_shapes_that_were_not_seen_for_long_make_room_for_others(taped, monkeypatch):
    monkeypatch.setattr(_graph_pass, "_LONG_AGO", 8)
    opt, (x, y) = replaying_on(problem)
    for size in (*range(40, 40 - MOST_GRAPHS, -1), 20):
        for _ in range(16 if size == 20 else 4):
            one_pass(opt, x[:size], y[:size])
    assert [len(known.x) for known in opt._passes.passes.values()] == [*range(39, 40 - MOST_GRAPHS, -1), 20]
