"""Replayed steps are waited for when they are looked at: nothing is given out unchecked, and nothing is lost."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch

import slangvi
from helpers.captured_steps import assert_same_state, functional, problem, steps
from slangvi.linalg import topk
from slangvi.methods._awaited import Awaited, awaiting, settle

GENTLE = {"rank": 2, "lr": lambda step: 0.3 if step <= 8 else 1e-4}


def source(seed=1):
    return torch.Generator().manual_seed(seed)


def running(cuda, buffer=False, **options):
    """A method whose next steps are replayed in one go, an eager twin, a state and a batch."""
    model, batch = problem(buffer=buffer)
    (vi, state), (eager, _) = functional(model, compile=True, **GENTLE), functional(model, **GENTLE)
    state, _ = steps(eager, state, [batch] * 8, source())
    state, _ = steps(vi, state, [batch] * 4, source())
    settle(state)
    cuda.replayed.clear()
    return vi, eager, state, batch


def spoilt(batch):
    x = batch[0].clone()
    x[3, 1] = math.nan
    return x, batch[1]


def open_questions(made):
    return "_fill" in vars(made)


def test_a_step_is_waited_for_when_a_field_is_looked_at(cuda):
    vi, eager, state, batch = running(cuda)
    after, info = vi.update(state, batch, generator=source())
    assert (after.step, info.step, info.num_rows) == (13, 13, 80)
    assert open_questions(after)
    assert open_questions(info)
    expected, told = eager.update(state, batch, generator=source())
    assert info.expected_log_likelihood == pytest.approx(told.expected_log_likelihood, rel=1e-6)
    assert not open_questions(info)
    assert_same_state(expected, after)
    assert not open_questions(after)
    assert cuda.replayed == ["whole"]


def test_what_a_model_reads_besides_its_parameters_may_change_so_nothing_is_put_off(cuda):
    vi, _, state, batch = running(cuda, buffer=True)
    after, _ = vi.update(state, batch, generator=source())
    assert vi.update(after, batch, generator=source())[0].loc.isfinite().all()
    assert cuda.replayed == ["whole", "whole"]


def test_a_run_that_is_never_looked_at_equals_an_eager_one(cuda):
    vi, eager, state, batch = running(cuda)
    ends = [steps(method, state, [batch] * 3, source())[0] for method in (eager, vi)]
    assert_same_state(*ends)
    assert cuda.replayed == ["whole"] * 3


def test_copies_and_pickles_are_made_of_what_is_known(cuda):
    vi, _, state, batch = running(cuda)
    for make in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        after, _ = vi.update(state, batch, generator=source())
        twin = make(after)
        assert not open_questions(twin)
        assert torch.equal(twin.loc, after.loc)
        assert twin.step == after.step


def test_a_state_left_unread_is_kept_when_its_graph_goes_on(cuda):
    vi, eager, state, batch = running(cuda)
    first, _ = vi.update(state, batch, generator=source(1))
    second, _ = vi.update(state, batch, generator=source(2))
    for seed, made in ((1, first), (2, second)):
        assert_same_state(eager.update(state, batch, generator=source(seed))[0], made)


def test_a_repeated_step_leaves_the_stream_where_others_have_taken_it(cuda, monkeypatch):
    vi, eager, state, batch = running(cuda)
    monkeypatch.setitem(topk.TOLERANCE, torch.float32, 1e-30)
    ends = []
    for method in (eager, vi):
        generator = source()
        after, _ = method.update(state, batch, generator=generator)
        drawn = torch.randn(5, generator=generator)
        settle(after)
        ends.append((after, drawn, generator.get_state()))
    assert_same_state(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])
    assert "watch" in cuda.replayed


def test_a_failed_step_raises_in_the_next_and_its_state_is_the_one_before(cuda):
    vi, eager, state, batch = running(cuda)
    broken, info = vi.update(state, spoilt(batch), generator=source())
    with pytest.raises(slangvi.NumericalError, match="log_likelihood is not finite for 1 of 40"):
        vi.update(broken, batch, generator=source(2))
    assert broken.step == state.step
    assert torch.equal(broken.loc, state.loc)
    with pytest.raises(slangvi.NumericalError, match="not finite"):
        _ = info.total
    with pytest.raises(slangvi.NumericalError, match="not finite"):
        _ = info.residual
    ends = [method.update(broken, batch, generator=source(3))[0] for method in (eager, vi)]
    assert_same_state(*ends)


def test_a_failed_step_raises_when_it_is_looked_at(cuda):
    vi, _, state, batch = running(cuda)
    broken, _ = vi.update(state, spoilt(batch), generator=source())
    with pytest.raises(slangvi.NumericalError, match="not finite"):
        vi.posterior(broken)
    assert torch.equal(vi.posterior(broken).loc, state.loc)


def test_only_missing_fields_are_asked_for():
    made = awaiting(Awaited, lambda made: made.__dict__.update(later=2), now=1)
    assert made.now == 1
    assert open_questions(made)
    with pytest.raises(AttributeError, match="'Awaited' object has no attribute '__wrapped__'"):
        _ = made.__wrapped__
    assert open_questions(made)
    assert made.later == 2
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        _ = made.never


def test_a_long_run_holds_no_states_but_the_last(cuda):
    vi, _, state, batch = running(cuda)
    made = []
    gc.collect()
    gc.disable()  # what is held by a cycle alone would be held until Python looks for cycles
    try:
        for _ in range(4):
            state, info = vi.update(state, batch, generator=source())
            made.append((weakref.ref(state), weakref.ref(info)))
            del info
        states, infos = ([ref() for ref in kind] for kind in zip(*made, strict=True))
        assert [found is None for found in states] == [True, True, True, False]
        assert infos == [None] * 4
    finally:
        gc.enable()
