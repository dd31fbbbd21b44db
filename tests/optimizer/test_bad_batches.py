"""Batches with NaN or Inf: passed over without a trace, counted, and too many of them are an error."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import slangvi
from helpers.optimizer_runs import CLASSES, N, assert_identical, backward, flat, model_and_data
from slangvi.errors import NumericalError


@pytest.fixture(params=CLASSES)
def make(request):
    kind, options = CLASSES[request.param]
    return lambda model, **more: kind(
        model, **({"num_data": N, "lr": 0.1, "generator": torch.Generator(), "max_bad_batches": 2} | options | more)
    )


def spoilt(x, value=math.nan):
    broken = x.clone()
    broken[3, 1] = value
    return broken


def loop(opt, x, y):
    for _ in range(2):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(opt.model(x), y).backward()
    return opt.step()


def closure(opt, x, y):
    return opt.step(lambda: backward(F.cross_entropy(opt.model(x), y)))


@pytest.mark.parametrize("step", [loop, closure])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_batch_leaves_no_trace(make, step, bad):
    """Whatever was skipped, and when, the good batches do what they do without it."""
    states = []
    for worse in (False, True):
        model, x, y = model_and_data()
        opt = make(model)
        for k in range(4):
            if worse and k != 1:
                result = step(opt, spoilt(x, bad), y)
                assert result is None if step is loop else math.isnan(result)
                assert not opt.has_gradients
            opt.generator.manual_seed(k)
            step(opt, x, y)
        states.append(opt)
    assert_identical(*states)
    assert states[0].info.skipped == states[0].num_skipped == 0
    assert states[1].info.skipped == states[1].num_skipped == 3


def test_one_too_many_in_a_row_is_an_error(make):
    model, x, y = model_and_data()
    opt = make(model)
    for _ in range(2):
        loop(opt, spoilt(x), y)
    assert opt.num_skipped == 2
    assert opt.info is None
    before = flat(model)
    with pytest.raises(NumericalError) as caught:
        loop(opt, spoilt(x), y)
    message = str(caught.value)
    for part in (
        *("step 1: the gradient of parameter '0.weight' is not finite", "The state is unchanged", "skip this batch"),
        *("bad batch number 3 in a row", "max_bad_batches=2 allows for 2"),
    ):
        assert part in message
    assert torch.equal(flat(model), before)
    loop(opt, x, y)  # a good one is a new start
    assert opt.info.skipped == 2
    loop(opt, spoilt(x), y)
    assert opt.info.skipped == opt.num_skipped == 3
    assert opt.info.step == 1


def test_the_count_is_saved(make, tmp_path):
    model, x, y = model_and_data()
    opt = make(model)
    loop(opt, spoilt(x), y)
    loop(opt, spoilt(x), y)
    slangvi.save(tmp_path / "run", opt)
    for other in (slangvi.load(tmp_path / "run", make(model_and_data(9)[0])), copy.deepcopy(opt)):
        assert other.num_skipped == 2
        with pytest.raises(NumericalError, match="number 3 in a row"):
            loop(other, spoilt(x), y)


def test_a_state_dict_of_before_the_count_is_taken(make):
    model, _, _ = model_and_data()
    opt = make(model)
    saved = opt.state_dict()
    del saved["slangvi"]["bad_batches"]
    opt.load_state_dict(saved)
    assert opt.num_skipped == 0


def test_nothing_is_skipped_unless_asked_for(make):
    model, x, y = model_and_data()
    opt = make(model, max_bad_batches=0)
    with pytest.raises(NumericalError, match="step 1: the loss is nan") as caught:
        closure(opt, spoilt(x), y)
    assert "in a row" not in str(caught.value)
    assert opt.num_skipped == 0


def test_impossible_numbers_are_refused():
    model, _, _ = model_and_data()
    with pytest.raises(ValueError, match=r"max_bad_batches must be ≥ 0, got -1. 0 raises at the first"):
        slangvi.SLANG(model, num_data=N, max_bad_batches=-1)


def test_other_errors_are_not_skipped(make):
    opt = make(model_and_data()[0])
    with pytest.raises(RuntimeError, match="mine"):
        opt.step(lambda: (_ for _ in ()).throw(RuntimeError("mine")))
    assert opt.num_skipped == 0
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step()
