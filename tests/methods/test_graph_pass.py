"""Forward and backward of the user's own loop replayed from graphs: the same numbers, and eager where they may differ.

Graphs are tapes of operations here (`taping`), so a replay sees no more of Python than one on a device does.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
import replaying
import slangvi
from replaying import Net, assert_agree, draw_and_step, optimizer, pair, problem, relative, words
from slangvi.grads import GradientCapture
from slangvi.methods import _graph_pass
from slangvi.methods._graph_runner import MOST_GRAPHS

ONCE = "backward\\(\\) can be called once for each forward pass"


# Refusing to capture, and saying so, is a way out wherever a graph would not do.
refusable = pytest.mark.filterwarnings("ignore:compile=True replays the step, but not forward and backward")


def limit(reason):
    """A test that shows what compile=True does not promise; it fails as soon as that is put right."""
    return pytest.mark.xfail(strict=True, reason=reason)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def rows_of(opt):
    """The rows collected so far, which are dropped: those of every parameter, one pass after the other."""
    found = []
    for group in opt._rows:
        found += [group.num_rows, *sorted(group.blocks)]
        found += [group.blocks[name].form() * group.scale for name in sorted(group.blocks)]
    opt.discard_gradients()
    return found


def one_pass(opt, x, y, call=None):
    """A pass in a block of its own: what the model said, every p.grad, and the rows."""
    with opt.sampled_params(train=True):
        opt.zero_grad()
        output = (call or opt.model)(x)
        F.cross_entropy(output, y).backward()
    return [output.detach().clone(), *gradients(opt.model), *rows_of(opt)]


def passes(opt, x, y, count=8):
    """Of the first eight 1, 2, 4 and 8 are checked, the third is captured; those up to the 15th are replayed."""
    return [value for _ in range(count) for value in one_pass(opt, x, y)]


def one_step(opt, x, y):
    (drawn,) = draw_and_step(opt, (x, y), draws=1)
    return [drawn, *gradients(opt.model)]


def both(scene, make=problem, own=True, tolerance=1e-6, **options):
    """Play a scene with an eager and a replaying optimizer: all it tells, the states and random numbers agree."""
    *opts, batch = pair(own, make, **options)
    told = []
    for opt in opts:
        torch.manual_seed(5)
        told.append(list(scene(opt, *batch)))
        told[-1].append(torch.get_rng_state() if opt.generator is None else opt.generator.get_state())
    assert_same(*told, tolerance)
    assert_agree(*opts, tolerance)
    return opts[1]


def assert_same(eager, replayed, tolerance=1e-6):
    assert len(eager) == len(replayed)
    for mine, other in zip(eager, replayed, strict=True):
        if isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.is_floating_point():
            assert mine.shape == other.shape
            assert relative(mine.double(), other.double()) <= 10 * tolerance
        elif isinstance(mine, Tensor) and isinstance(other, Tensor):
            assert torch.equal(mine, other)
        else:
            assert type(mine) is type(other)
            assert mine == other


def error_of(play):
    """What is raised, in words."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        play()
    return type(caught.value), str(caught.value)


@pytest.fixture
def replays(taped):
    """How many backward passes have been replayed since it was asked last."""
    asked = [0]

    def count():
        before, asked[0] = asked[0], taped.replayed.count("go_back")
        return asked[0] - before

    return count


# ---- what is replayed equals what is not ----


def seeded(build):
    """A model that is the same whatever was drawn before, and the usual batch."""

    def make():
        torch.manual_seed(0)
        return build(), problem()[1]

    return make


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 6), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))
    model[-1].weight = model[0].weight
    return model, (torch.randint(3, (30, 2)), torch.arange(30) % 3)


def residual():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), cases.Residual(4), cases.Residual(4), nn.Flatten(), nn.Linear(36, 3))
    return net, (torch.randn(12, 1, 5, 5), torch.arange(12) % 3)


class Unused(Net):
    """Has a layer that forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 2)


def frozen():
    model, batch = problem()
    model.first.bias.requires_grad_(False)
    return model, batch


MAKES = {
    "mlp": problem,
    "layer": seeded(lambda: nn.Linear(10, 3)),
    "float64": lambda: problem(torch.float64),
    "bfloat16": lambda: problem(torch.bfloat16),
    "dropout": lambda: problem(dropout=0.4),
    "buffer": lambda: problem(buffer=True),
    "words": words,
    "tied": tied,
    "residual": residual,
    "unused": seeded(Unused),
    "frozen": frozen,
}
TOLERANCES = {"float64": 1e-12, "bfloat16": 2e-2}


@pytest.mark.parametrize("name", MAKES)
def test_replayed_passes_equal_eager_ones(replays, name):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        yield from passes(opt, x.roll(1, 0), y, 4)

    opt = both(scene, MAKES[name], False, TOLERANCES.get(name, 1e-6))
    assert replays() == 12 - 4
    if name == "unused":
        assert opt.model.spare.weight.grad is None
        assert opt.model.first.weight.grad is not None


@pytest.mark.parametrize("name", ["dropout", "words", "residual", "unused"])
def test_steps_from_replayed_passes_equal_eager_ones(replays, name):
    def scene(opt, x, y):
        for k in range(7):
            yield from one_step(opt, x.roll(k, 0), y)

    both(scene, MAKES[name], TOLERANCES.get(name, 1e-6))
    assert replays() == 7 - 3


OPTIONS = {
    "sum": {"loss_reduction": "sum", "num_data": 40},
    "rank 0": {"rank": 0},
    "memory_limit": {"memory_limit": 1 << 20},
    "formed": {"routes": slangvi.Routes(layers="form")},
    "factored": {"routes": slangvi.Routes(layers="factor")},
    "temperature": {"temperature": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_passes_equal_eager_ones_whatever_the_options(replays, name):
    both(lambda opt, x, y: [*passes(opt, x, y, 6), *one_step(opt, x, y)], **OPTIONS[name])
    assert replays() == 7 - 3


def test_without_checks_all_passes_but_the_first_two_are_replayed(replays):
    both(lambda opt, x, y: passes(opt, x, y, 9), verify=False)
    assert replays() == 9 - 2


def test_two_shapes_alternate(replays):
    def scene(opt, x, y):
        for k in range(8):
            size = 40 - 7 * (k % 2)
            yield from one_pass(opt, x[:size], y[:size])
            yield from one_pass(opt, x[:size].roll(k, 0), y[:size])

    both(scene)
    assert replays() == 16 - 6  # 1, 2, 4, 8 and 16 are checked; 3 and 4 are the first of the second shape


def test_draws_of_one_step_share_a_batch_or_have_their_own(replays):
    def scene(opt, x, y):
        for k in range(6):
            for given in (x, x, x.roll(k, 0)):
                with opt.sampled_params(train=True):
                    F.cross_entropy(opt.model(given), y).backward()
            opt.step()
            yield opt.info.num_rows

    both(scene)
    assert replays() == 18 - 5


def test_micro_batches_share_a_block(replays):
    def scene(opt, x, y):
        yield from passes(opt, x[:20], y[:20])
        for _ in range(3):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                for part in (slice(20), slice(20, 40)):
                    F.cross_entropy(opt.model(x[part]), y[part]).backward()
            yield from [*gradients(opt.model), *rows_of(opt)]

    both(scene)
    assert replays() == 14 - 4


def test_micro_batches_that_always_share_a_block(replays):
    def scene(opt, x, y):
        for _ in range(8):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                for part in (slice(20), slice(20, 40)):
                    F.cross_entropy(opt.model(x[part]), y[part]).backward()
            yield from [*gradients(opt.model), *rows_of(opt)]

    both(scene)
    # Of 16 passes 1, 2, 4, 8 and 16 are checked; of a block without replays only the first shows what it is, so that
    # it takes two of them before a pass is captured.
    assert replays() == 16 - 6


def test_gradients_accumulate_over_passes(replays):
    def scene(opt, x, y):
        for _ in range(6):
            opt.zero_grad()
            for part in (slice(20), slice(20, 40)):
                with opt.sampled_params(train=True):
                    (F.cross_entropy(opt.model(x[part]), y[part]) / 2).backward()
                yield from gradients(opt.model)
            opt.step()

    both(scene, accumulation_steps=2)
    assert replays() == 12 - 4


def test_a_closure_is_replayed_at_every_draw(replays):
    def scene(opt, x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(opt.model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            yield opt.step(closure).detach()
            yield from gradients(opt.model)

    both(scene, mc_samples=3)
    assert replays() == 12 - 4


def test_scaled_losses_are_scaled_back_and_skipped_when_they_overflow(replays):
    def scene(opt, x, y):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for k in range(8):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                scaler.scale(F.cross_entropy(opt.model(x * (1e38 if k == 5 else 1)), y)).backward()
            yield from gradients(opt.model) if k != 5 else []
            scaler.step(opt)
            scaler.update()
            yield (scaler.get_scale(), opt._state.step)

    both(scene)
    assert replays() == 8 - 4


def test_losses_may_use_some_outputs_or_change_them_in_place(replays):
    def scene(opt, x, y):
        for _ in range(7):
            yield from one_pass(opt, x, y[:20], lambda x: opt.model(x)[:20].mul_(0.5))
            yield from one_pass(opt, x, y, lambda x: opt.model(x).add_(1.0))

    both(scene)
    assert replays() == 14 - 4


def test_gradients_are_added_to_what_is_there_and_belong_to_nobody_else(replays):
    def scene(opt, x, y):
        for _ in range(7):
            with opt.sampled_params(train=True):
                F.cross_entropy(opt.model(x), y).backward()
            nn.utils.clip_grad_norm_([opt.model.first.weight], 1e-3)
            yield from gradients(opt.model)

    both(scene)
    assert replays() == 7 - 3


# ---- memory ----


def replaying_on(make, **options):
    model, batch = make()
    return optimizer(model, True, **options), batch


def test_what_earlier_passes_left_is_not_overwritten_by_later_ones(replays):
    opt, (x, y) = replaying_on(problem)
    passes(opt, x, y)
    kept, copies = [], []
    for k in range(4):
        with opt.sampled_params(train=True):
            opt.model.zero_grad(set_to_none=True)
            output = opt.model(x * (1 + k))
            F.cross_entropy(output, y).backward()
        kept += [output.detach(), *(p.grad for p in opt.model.parameters())]
        kept += [block.form() for block in opt._rows[-1].blocks.values()]
        copies += [tensor.clone() for tensor in kept[len(copies) :]]
    assert replays() == 12 - 4
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert len({float(copies[k].norm()) for k in range(0, len(copies), len(copies) // 4)}) == 4


def test_rows_of_earlier_draws_may_be_put_together_after_later_ones(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        for k in range(4):
            with opt.sampled_params(train=True):
                F.cross_entropy(opt.model(x * (1 + k)), y).backward()
        yield from rows_of(opt)

    both(scene)
    assert replays() == 12 - 4


def test_a_batch_may_be_overwritten_between_draws_and_before_the_step(replays):
    def scene(opt, x, y):
        place, noise = torch.empty_like(x), torch.Generator().manual_seed(0)
        for _ in range(6):
            for _ in range(2):
                place.normal_(generator=noise)
                with opt.sampled_params(train=True):
                    F.cross_entropy(opt.model(place), y).backward()
                place.fill_(torch.nan)
            yield from rows_of(opt)

    both(scene)
    assert replays() == 12 - 4


def test_a_batch_may_be_overwritten_between_forward_and_backward(replays):
    """Which autograd itself refuses where it is not replayed."""
    opt, (x, y) = replaying_on(problem)
    passes(opt, x, y)
    found = []
    for spoil in (False, True):
        opt.generator.manual_seed(1)
        with opt.sampled_params(train=True):
            given = x.clone()
            loss = F.cross_entropy(opt.model(given), y)
            if spoil:
                given.zero_()
            loss.backward()
        found.append(rows_of(opt))
    assert_same(*found, 0.0)
    assert replays() == 10 - 4


# ---- calls that are not replayed ----


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def twofold():
    """What comes out of the first activation is needed on the way back, and in no rows."""
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Sigmoid(), nn.Linear(16, 3))


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

    both(scene, seeded(Activated))


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

    both(scene)


class Named(Tensor):
    """A tensor that operations may be different for."""


CALLS = {
    "keyword": lambda model, x: model(x=x),
    "input with a gradient": lambda model, x: model(x.clone().requires_grad_()),
    "another kind of tensor": lambda model, x: model(x.as_subclass(Named)).as_subclass(Tensor),
    "autocast": lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x),
}


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

    both(scene)


def test_inputs_get_their_gradients(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        given = x.clone().requires_grad_()
        yield from one_pass(opt, given, y)
        yield given.grad

    both(scene)


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

    both(scene)


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

    both(scene)


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

    both(scene)
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

    both(scene, lambda: problem(dropout=0.4))


def test_modes_are_told_apart(replays):
    def scene(opt, x, y):
        for k in range(14):
            opt.model.train(k % 2 == 0)
            yield from one_pass(opt, x, y)

    both(scene, lambda: problem(dropout=0.4))
    assert replays() == 14 - 4 - 1  # 1, 2, 4 and 8 are checked, and 3 is the second of the first kind


def test_a_layer_called_by_itself_is_still_read(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        replays()
        yield from one_pass(opt, x, y, lambda x: opt.model.second(torch.tanh(opt.model.first(x))))
        yield from one_pass(opt, x, y)
        yield from one_pass(opt, x, y, lambda x: opt.model.second(torch.tanh(opt.model.first(x))))
        assert replays() == opt.settings.compile

    both(scene, verify=False)


SIZES = [(33, 40), (40, 33), (40, 40)]


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

    both(scene)


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

    both(scene, seeded(twofold))


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

    both(scene)


# ---- what is refused ----


def go_twice(loss, model):
    loss.backward(retain_graph=True)
    loss.backward()


def go_twice_over(loss, model):
    loss.backward(create_graph=True)


def go_along_and_back(loss, model):
    torch.autograd.grad(loss, model.first.weight, retain_graph=True)
    loss.backward()


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

    both(scene)


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

    both(scene)


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

    both(scene)


def test_a_gradient_may_be_taken_down_to_the_output_first(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            output = opt.model(x)
            (delta,) = torch.autograd.grad(F.cross_entropy(output, y), output)
            output.backward(delta)
        yield from [delta, *gradients(opt.model), *rows_of(opt)]

    both(scene)
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

    both(scene)


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

    both(scene)


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

    both(scene)


# ---- what may change between blocks ----


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


@pytest.mark.parametrize(("make", "changed"), CHANGES)
def test_changes_of_the_model_between_blocks_are_seen(replays, make, changed):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        for _ in changed(opt.model) or [None]:
            yield from passes(opt, x, y, 3)
        yield from passes(opt, x, y, 1)

    both(scene, make, own=False)
    assert replays() >= 8 - 4 + 1


def test_a_layer_with_parameters_that_is_replaced_is_refused_as_ever(taped):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        old, opt.model.second = opt.model.second, nn.Linear(16, 3)
        yield error_of(lambda: one_pass(opt, x, y))
        assert "forward" not in vars(opt.model)
        opt.model.second = old
        yield from passes(opt, x, y, 2)

    both(scene)


LAYOUTS = {
    "turned": lambda x: x.T.contiguous().T,
    "with gaps": lambda x: torch.cat([x, x], 1)[:, :10],
    "one for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("first", [True, False], ids=["from the start", "later"])
def test_inputs_may_lie_differently_in_memory(replays, name, first):
    def scene(opt, x, y):
        other = LAYOUTS[name](x)
        yield from passes(opt, other if first else x, y, 4)
        yield from passes(opt, other, y, 2)
        yield from passes(opt, x, y, 3)

    both(scene)
    assert replays() == (1 if first else 3)


def test_channels_may_come_last(replays):
    def scene(opt, x, y):
        for given in (x, x.to(memory_format=torch.channels_last), x):
            yield from passes(opt, given, y, 5)

    both(scene, residual)
    assert replays() == 15 - 4 - 2


# ---- models that are more than a function of their input ----


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
        both(scene, make, own)
    assert all(warning.filename in (__file__, replaying.__file__) for warning in caught)
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

    warnings_of(scene, seeded(Looks))


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

    both(lambda opt, x, y: passes(opt, x, y, 6), make)
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


def test_buffers_that_forward_changes_in_place_go_on(replays):
    def scene(opt, x, y):
        for k in range(12):
            yield from one_pass(opt, x.roll(k, 1), y)
            yield from (opt.model.calls.clone(), opt.model.mean.clone())

    both(scene, seeded(Counts))
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

    both(scene, seeded(lambda: Renews(what)))


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

    both(scene, seeded(Clamps))


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

    both(scene, seeded(Branches))


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

    both(scene, seeded(lambda: Beside(buffer)))


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

    both(scene)


# ---- checks ----


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

    both(scene, seeded(Mixes))


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

    both(scene, seeded(Mixes))


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

    both(scene)


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

    both(scene, seeded(lambda: Elsewhere(settings)))


# ---- who else has to do with the model ----


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

    both(scene)
    assert replays() == 12 - 4


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
    both(lambda opt, x, y: passes(opt, x, y, 4), engine="dense")
    assert "go_forward" not in taped.captured


def test_shapes_that_were_not_seen_for_long_make_room_for_others(taped, monkeypatch):
    monkeypatch.setattr(_graph_pass, "_LONG_AGO", 8)
    opt, (x, y) = replaying_on(problem)
    for size in (*range(40, 40 - MOST_GRAPHS, -1), 20):
        for _ in range(16 if size == 20 else 4):
            one_pass(opt, x[:size], y[:size])
    assert [len(known.x) for known in opt._passes.passes.values()] == [*range(39, 40 - MOST_GRAPHS, -1), 20]
