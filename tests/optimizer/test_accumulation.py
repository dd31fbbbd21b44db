"""Micro-batches, reductions and buffers: the same step as one large batch."""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F

from helpers.optimizer_runs import N, assert_identical, assert_same, backward, make, model_and_data, train


@pytest.mark.parametrize("parts", [(4, 4, 4), (7, 5), (1, 11)])
def test_micro_batches_in_one_block_equal_one_large_batch(parts):
    whole, (model, x, y) = make(model_and_data()[0]), model_and_data()
    pieces = make(model)
    for _ in range(3):
        with whole.sampled_params(train=True):
            F.cross_entropy(whole.model(x), y).backward()
        whole.step()
        with pieces.sampled_params(train=True):
            for a, b in zip(x.split(list(parts)), y.split(list(parts)), strict=True):
                F.cross_entropy(model(a), b).backward()
        pieces.step()
        assert_same(whole, pieces)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_divided_losses_with_accumulation_steps_equal_one_large_batch(reduction):
    whole, (model, x, y) = make(model_and_data()[0]), model_and_data()
    pieces = make(model, accumulation_steps=3, loss_reduction=reduction)
    for _ in range(3):
        with whole.sampled_params(train=True):
            F.cross_entropy(whole.model(x), y).backward()
        whole.step()
        with pieces.sampled_params(train=True):
            for a, b in zip(x.split(4), y.split(4), strict=True):
                (F.cross_entropy(model(a), b, reduction=reduction) / 3).backward()
        pieces.step()
        assert_same(whole, pieces)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_fit_told_does_not_depend_on_what_the_loss_was_divided_by(reduction):
    fits = []
    for divisor in (1, 3):
        model, x, y = model_and_data()
        opt = make(model, accumulation_steps=divisor, loss_reduction=reduction)
        opt.step(lambda: backward(F.cross_entropy(model(x), y, reduction=reduction) / divisor))  # noqa: B023 - called here
        fits.append(opt.info.expected_log_likelihood)
    assert math.isclose(*fits, rel_tol=1e-12)


def test_trainer_style_accumulation_counts_every_row():
    """One block per micro-batch, gradients zeroed or not in between: the same step."""
    steps = []
    for zero in (True, False):
        model, x, y = model_and_data()
        opt = make(model)
        for a, b in zip(x.split(4), y.split(4), strict=True):
            with opt.sampled_params(train=True):
                if zero:
                    opt.zero_grad()
                F.cross_entropy(model(a), b).backward()
        opt.step()
        assert opt.info.num_rows == 12
        steps.append(opt)
    assert_identical(*steps)


def test_sum_and_mean_losses_are_the_same_model():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    mean, total = make(first), make(second, loss_reduction="sum")
    for _ in range(2):
        with mean.sampled_params(train=True):
            F.cross_entropy(first(x), y).backward()
        with total.sampled_params(train=True):
            F.cross_entropy(second(x), y, reduction="sum").backward()
        mean.step()
        total.step()
    assert_same(mean, total)


def test_a_short_batch_is_scaled_by_its_own_size():
    """A batch of one, seen twice as a batch of two identical examples, is the same gradient and curvature."""
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    one, two = make(first), make(second)
    with one.sampled_params(train=True):
        F.cross_entropy(first(x[:1]), y[:1]).backward()
    with two.sampled_params(train=True):
        F.cross_entropy(second(x[[0, 0]]), y[[0, 0]]).backward()
    one.step()
    two.step()
    assert_same(one, two)


@pytest.mark.parametrize("by", ["torch", "numpy"])
@pytest.mark.parametrize("blocks", ["one block", "a block each"])
def test_a_data_buffer_refilled_between_micro_batches_does_no_harm(blocks, by):
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    plain, reusing = make(first), make(second)
    buffer = torch.empty(4, 4, dtype=torch.float64)

    def refill(part):
        buffer.copy_(part) if by == "torch" else buffer.numpy().__setitem__(slice(None), part.numpy())
        return buffer

    for opt, prepare in ((plain, lambda part: part), (reusing, refill)):
        for _ in range(2):
            with ExitStack() as stack:
                if blocks == "one block":
                    stack.enter_context(opt.sampled_params(train=True))
                for a, b in zip(x.split(4), y.split(4), strict=True):
                    with opt.sampled_params(train=True) if blocks != "one block" else nullcontext():
                        F.cross_entropy(opt.model(prepare(a)), b).backward()
            opt.step()
    assert_identical(plain, reusing)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_fit_told_is_that_of_the_closure_whatever_was_collected_before(reduction):
    model, x, y = model_and_data()
    opt = make(model, loss_reduction=reduction)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x[:8]), y[:8], reduction=reduction).backward()
    loss = opt.step(lambda: backward(F.cross_entropy(model(x[8:]), y[8:], reduction=reduction)))
    each = float(loss) / (4 if reduction == "sum" else 1)
    assert opt.info.num_rows == 12
    assert math.isclose(opt.info.expected_log_likelihood, -N * each, rel_tol=1e-12)


def test_draws_on_one_batch_share_its_copy():
    model, x, y = model_and_data()
    opt = make(model)
    for _ in range(3):
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
    assert len(opt._recorder._data) == 1
    opt.step()
    assert not opt._recorder._data


def test_discarded_gradients_leave_no_trace():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    clean, dirty = make(first), make(second)
    with dirty.sampled_params(train=True):
        F.cross_entropy(second(100 * x), y).backward()
    dirty.discard_gradients()
    dirty.generator.manual_seed(1)
    assert_identical(train(clean, x, y), train(dirty, x, y))
