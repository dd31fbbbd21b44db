"""Forward and backward of the user's own loop replayed from graphs: the same numbers, in memory of their own.

Graphs are tapes of operations here (`taping`), so a replay sees no more of Python than one on a device does.
"""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.captured_steps import Net, draw_and_step, problem, words
from helpers.replayed_passes import (
    assert_both_alike,
    assert_same,
    gradients,
    one_pass,
    one_step,
    passes,
    replaying_on,
    residual,
    rows_of,
    seeded,
)
from slangvi.grads import GradientCapture
from slangvi.grads.blocks import cheapest
from slangvi.live_bytes import LiveBytes
from slangvi.methods._graph_loop import LoopStep
from slangvi.methods._graph_pass import _STEPS, CapturedPass
from slangvi.params import ParamSpec


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 6), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))
    model[-1].weight = model[0].weight
    return model, (torch.randint(3, (30, 2)), torch.arange(30) % 3)


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


@pytest.mark.choreography
@pytest.mark.parametrize("name", MAKES)
def test_replayed_passes_equal_eager_ones(replays, name):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        yield from passes(opt, x.roll(1, 0), y, 4)

    opt = assert_both_alike(scene, MAKES[name], False, TOLERANCES.get(name, 1e-6))
    assert replays() == 12 - 4
    if name == "unused":
        assert opt.model.spare.weight.grad is None
        assert opt.model.first.weight.grad is not None


@pytest.mark.choreography
@pytest.mark.parametrize("name", ["dropout", "words", "residual", "unused"])
def test_steps_from_replayed_passes_equal_eager_ones(replays, name):
    def scene(opt, x, y):
        for k in range(7):
            yield from one_step(opt, x.roll(k, 0), y)

    assert_both_alike(scene, MAKES[name], TOLERANCES.get(name, 1e-6))
    assert replays() == 7 - 3


OPTIONS = {
    "sum": {"loss_reduction": "sum", "num_data": 40},
    "rank 0": {"rank": 0},
    "memory_limit": {"memory_limit": 1 << 20},
    "formed": {"routes": slangvi.Routes(layers="form")},
    "factored": {"routes": slangvi.Routes(layers="factor")},
    "temperature": {"temperature": 0.1},
}


@pytest.mark.choreography
@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_passes_equal_eager_ones_whatever_the_options(replays, name):
    assert_both_alike(lambda opt, x, y: [*passes(opt, x, y, 6), *one_step(opt, x, y)], **OPTIONS[name])
    assert replays() == 7 - 3


@pytest.mark.choreography
def test_without_checks_all_passes_but_the_first_two_are_replayed(replays):
    assert_both_alike(lambda opt, x, y: passes(opt, x, y, 9), verify=False)
    assert replays() == 9 - 2


@pytest.mark.choreography
def test_two_shapes_alternate(replays):
    def scene(opt, x, y):
        for k in range(8):
            size = 40 - 7 * (k % 2)
            yield from one_pass(opt, x[:size], y[:size])
            yield from one_pass(opt, x[:size].roll(k, 0), y[:size])

    assert_both_alike(scene)
    assert replays() == 16 - 6  # 1, 2, 4, 8 and 16 are checked; 3 and 4 are the first of the second shape


@pytest.mark.choreography
def test_draws_of_one_step_share_a_batch_or_have_their_own(replays):
    def scene(opt, x, y):
        for k in range(6):
            for given in (x, x, x.roll(k, 0)):
                with opt.sampled_params(train=True):
                    F.cross_entropy(opt.model(given), y).backward()
            opt.step()
            yield opt.info.num_rows

    assert_both_alike(scene)
    assert replays() == 18 - 5


@pytest.mark.choreography
def test_micro_batches_share_a_block(replays):
    def scene(opt, x, y):
        yield from passes(opt, x[:20], y[:20])
        for _ in range(3):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                for part in (slice(20), slice(20, 40)):
                    F.cross_entropy(opt.model(x[part]), y[part]).backward()
            yield from [*gradients(opt.model), *rows_of(opt)]

    assert_both_alike(scene)
    assert replays() == 14 - 4


@pytest.mark.choreography
def test_micro_batches_that_always_share_a_block(replays):
    def scene(opt, x, y):
        for _ in range(8):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                for part in (slice(20), slice(20, 40)):
                    F.cross_entropy(opt.model(x[part]), y[part]).backward()
            yield from [*gradients(opt.model), *rows_of(opt)]

    assert_both_alike(scene)
    # Of 16 passes 1, 2, 4, 8 and 16 are checked; of a block without replays only the first shows what it is, so that
    # it takes two of them before a pass is captured.
    assert replays() == 16 - 6


@pytest.mark.choreography
def test_gradients_accumulate_over_passes(replays):
    def scene(opt, x, y):
        for _ in range(6):
            opt.zero_grad()
            for part in (slice(20), slice(20, 40)):
                with opt.sampled_params(train=True):
                    (F.cross_entropy(opt.model(x[part]), y[part]) / 2).backward()
                yield from gradients(opt.model)
            opt.step()

    assert_both_alike(scene, accumulation_steps=2)
    assert replays() == 12 - 4


@pytest.mark.choreography
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

    assert_both_alike(scene, mc_samples=3)
    assert replays() == 12 - 4


@pytest.mark.choreography
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

    assert_both_alike(scene)
    assert replays() == 8 - 4


@pytest.mark.choreography
def test_losses_may_use_some_outputs_or_change_them_in_place(replays):
    def scene(opt, x, y):
        for _ in range(7):
            yield from one_pass(opt, x, y[:20], lambda x: opt.model(x)[:20].mul_(0.5))
            yield from one_pass(opt, x, y, lambda x: opt.model(x).add_(1.0))

    assert_both_alike(scene)
    assert replays() == 14 - 4


@pytest.mark.choreography
def test_gradients_are_added_to_what_is_there_and_belong_to_nobody_else(replays):
    def scene(opt, x, y):
        for _ in range(7):
            with opt.sampled_params(train=True):
                F.cross_entropy(opt.model(x), y).backward()
            nn.utils.clip_grad_norm_([opt.model.first.weight], 1e-3)
            yield from gradients(opt.model)

    assert_both_alike(scene)
    assert replays() == 7 - 3


@pytest.mark.choreography
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


@pytest.mark.choreography
def test_rows_of_earlier_draws_may_be_put_together_after_later_ones(replays):
    def scene(opt, x, y):
        yield from passes(opt, x, y)
        for k in range(4):
            with opt.sampled_params(train=True):
                F.cross_entropy(opt.model(x * (1 + k)), y).backward()
        yield from rows_of(opt)

    assert_both_alike(scene)
    assert replays() == 12 - 4


@pytest.mark.choreography
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

    assert_both_alike(scene)
    assert replays() == 12 - 4


@pytest.mark.choreography
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


def test_backward_stays_in_its_thread_once_a_pass_is_captured(replays):
    opt, (x, y) = replaying_on(problem)
    modes = []
    for _ in range(6):
        with opt.sampled_params(train=True):
            modes.append(torch._C._is_multithreading_enabled())
            F.cross_entropy(opt.model(x), y).backward()
        opt.discard_gradients()
    assert modes == [True, True, True, False, False, False]
    assert torch._C._is_multithreading_enabled()


def test_blocks_that_overlap_leave_autograd_with_its_threads(replays):
    pairs = [replaying_on(problem) for _ in range(2)]
    for opt, (x, y) in pairs:
        for _ in range(5):
            one_pass(opt, x, y)
    (a, _), (b, _) = pairs
    a.train()
    b.train()
    a.eval()
    assert not torch._C._is_multithreading_enabled()
    b.eval()
    assert torch._C._is_multithreading_enabled()


def test_one_who_wants_no_threads_is_left_without_them(replays):
    opt, (x, y) = replaying_on(problem)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(5):
            with opt.sampled_params(train=True):
                assert not torch._C._is_multithreading_enabled()
                F.cross_entropy(opt.model(x), y).backward()
            assert not torch._C._is_multithreading_enabled()
            opt.discard_gradients()
    assert torch._C._is_multithreading_enabled()


def captured_pass():
    """A pass through a convolution, whose rows are formed and far smaller than what it is given."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 2)),
        torch.randn(30, 1, 8, 8),
    )
    spec = ParamSpec.of_module(model)
    settle = partial(settled, rank=1)
    recorder = GradientCapture(model, spec, torch.float32, "factored", False, False, None, settle, replayable=False)
    return CapturedPass(model, dict(model.named_parameters()), recorder, x, ()), x


def settled(name, block, rank):
    return cheapest(block, rank, slangvi.Routes(layers="form"), name)


def test_a_captured_pass_holds_its_results_and_nothing_of_what_lies_between(cuda):
    with LiveBytes() as memory:
        known, x = captured_pass()
        gc.collect()
        params = sum(p.nbytes for p in known.params.values())
        rows = sum(flat.nbytes for flat in known.flats)
        assert rows == 30 * params  # no row is there twice
        results = known.output.nbytes + known.cotangent.nbytes + known.gradient.nbytes + rows
        assert memory.live == 2 * x.nbytes + params + results
        assert memory.peak > memory.live + 30 * 4 * 36 * 4  # the input of the last layer was there


def test_rows_lie_where_those_lay_that_are_gone(cuda):
    known, x = captured_pass()

    def place(rows):
        return rows.blocks.flats[0].data_ptr()

    first, second, third = (known.rows(x) for _ in range(3))
    places = [place(rows) for rows in (first, second, third)]
    assert len(set(places)) == 3
    del first, third
    found = [known.rows(x) for _ in range(3)]
    assert [place(rows) for rows in found[:2]] == [places[0], places[2]]
    assert place(found[2]) not in places
    assert all(torch.equal(rows.blocks["0.weight"].form(), found[0].blocks["0.weight"].form()) for rows in found)


def test_memory_that_several_steps_did_not_need_is_given_up(cuda):
    known, x = captured_pass()
    many = [known.rows(x) for _ in range(5)]
    del many
    sizes = []
    for _ in range(_STEPS + 3):
        rows = [known.rows(x) for _ in range(2)]
        sizes.append(len(known._lent))
        del rows
    assert sizes == [5] * _STEPS + [2] * 3


def test_a_captured_step_reads_rows_where_replayed_passes_leave_them(taped, monkeypatch):
    """What is copied for it at every step is the input alone, which belongs to the user."""
    opt, (x, y) = replaying_on(problem)
    copied, feed = [], LoopStep.feed

    def watched(self, leaves):
        pairs = zip(self.places, leaves, strict=True)
        copied.append([b.shape for a, b in pairs if a.data_ptr() != b.data_ptr()])
        feed(self, leaves)

    monkeypatch.setattr(LoopStep, "feed", watched)
    for k in range(7):
        draw_and_step(opt, (x.roll(k, 0), y), draws=3)
    assert copied[1:]
    assert all(shapes == [x.shape] for shapes in copied[1:])
