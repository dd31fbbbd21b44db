"""Drawing weights, and putting the mean back whatever happens."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.optimizer_runs import N, assert_identical, backward, flat, make, model_and_data, train
from slangvi.errors import NumericalError


def test_weights_are_a_draw_inside_and_the_mean_outside():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    mean = flat(model)
    with opt.sampled_params():
        assert not torch.equal(flat(model), mean)
    assert torch.equal(flat(model), mean)
    assert torch.equal(mean, opt.posterior.mean)


def test_weights_tried_while_a_run_is_inspected_leave_it_as_it_was():
    model, x, y = model_and_data()
    other, opt = train(make(copy.deepcopy(model)), x, y), train(make(model), x, y)
    mean, grads = flat(model), [p.grad for p in model.parameters()]
    with opt.inspect() as run:
        assert (run.optimizer, run.name, run.exceeds_num_data) == (opt, "SLANG", False)
        assert torch.equal(run.state.loc, mean)
        assert torch.equal(run.init_precision, torch.ones_like(mean))
        run.write(mean + 1)
        assert torch.equal(flat(model), mean + 1)
        F.cross_entropy(model(x), y).backward()
    assert torch.equal(flat(model), mean)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert_identical(train(opt, x, y), train(other, x, y))
    with opt.sampled_params(), pytest.raises(RuntimeError, match="the weights are a sample"), opt.inspect():
        pass


def test_draws_in_the_model_have_the_posterior_moments():
    model = nn.Linear(2, 1).double()
    opt = make(model, init_precision=4.0)
    x, y = torch.randn(6, 2).double(), torch.randn(6, 1).double()
    for _ in range(3):
        opt.step(lambda: backward(F.mse_loss(model(x), y)))
    draws = []
    for _ in range(8000):
        with opt.sampled_params():
            draws.append(flat(model))
    found = torch.stack(draws)
    q = opt.posterior
    assert float(((found.mean(0) - q.mean) / (q.variance / 8000).sqrt()).abs().max()) < 4
    cov = q.covariance_matrix
    spread = ((cov.diagonal()[:, None] * cov.diagonal() + cov.square()) / 8000).sqrt()
    assert float(((found.T.cov() - cov) / spread).abs().max()) < 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("train_mode", [True, False])
def test_an_exception_inside_restores_the_mean(error, train_mode):
    model, x, y = model_and_data()
    opt = make(model)
    before = flat(model)

    def interrupted():
        with opt.sampled_params(train=train_mode):
            F.cross_entropy(model(x), y).backward()
            raise error

    with pytest.raises(error):
        interrupted()
    assert torch.equal(flat(model), before)
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step()
    train(opt, x, y)


def test_a_generator_leaves_the_global_random_state_alone():
    model, x, y = model_and_data()
    before = torch.get_rng_state()
    train(make(model), x, y)
    assert torch.equal(before, torch.get_rng_state())


def test_flags_grad_mode_and_requires_grad_are_unchanged():
    model, x, y = model_and_data()
    model[1].eval()
    modes = [m.training for m in model.modules()]
    train(make(model), x, y)
    assert torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == modes
    assert all(p.requires_grad for p in model.parameters())


def test_blocks_do_not_nest_and_steps_stay_outside():
    model, _, _ = model_and_data()
    opt = make(model)
    with opt.sampled_params():
        with pytest.raises(RuntimeError, match="cannot be nested"), opt.sampled_params():
            pass
        with pytest.raises(RuntimeError, match="inside sampled_params"):
            opt.step()
        with pytest.raises(RuntimeError, match="weights are a sample"):
            _ = opt.posterior


def test_step_without_gradients_says_what_to_do():
    opt = make(model_and_data()[0])
    with pytest.raises(RuntimeError, match=r"sampled_params\(train=True\)"):
        opt.step()


def test_a_closure_is_sampled_inside_like_the_loop():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    loop, closed = make(first), make(second, mc_samples=2)

    def closure():
        closed.zero_grad()
        return backward(F.cross_entropy(second(x), y))

    train(loop, x, y, steps=3, draws=2)
    for _ in range(3):
        loss = closed.step(closure)
    assert_identical(loop, closed)
    assert math.isclose(closed.info.expected_log_likelihood, -N * float(loss), rel_tol=1e-12)
    assert closed.info.num_rows == 24


def test_a_closure_that_raises_leaves_everything():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    before = copy.deepcopy(opt.state_dict()["slangvi"]["tensors"])

    def closure():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        opt.step(closure)
    assert all(torch.equal(v, before[k]) for k, v in opt.state_dict()["slangvi"]["tensors"].items())


def test_a_loss_that_is_not_a_number_is_refused():
    model, x, y = model_and_data()
    opt = make(model)
    before = flat(model)
    x[3, 1] = math.nan
    with pytest.raises(NumericalError, match="step 1: the loss is nan"):
        opt.step(lambda: backward(F.cross_entropy(model(x), y)))
    assert torch.equal(flat(model), before)


def test_a_closure_that_fails_half_way_leaves_no_rows():
    model, x, y = model_and_data()
    opt = make(model, mc_samples=3)
    runs = []

    def closure():
        runs.append(1)
        if len(runs) == 3:
            raise RuntimeError("third")
        return backward(F.cross_entropy(model(x), y))

    with pytest.raises(RuntimeError, match="third"):
        opt.step(closure)
    opt.step(lambda: backward(F.cross_entropy(model(x), y)))
    assert opt.info.num_rows == 36


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_batch_leaves_state_and_weights_and_training_goes_on(bad):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    before = copy.deepcopy(opt.state_dict()["slangvi"]["tensors"])
    broken = x.clone()
    broken[0, 0] = bad
    with opt.sampled_params(train=True):
        F.cross_entropy(model(broken), y).backward()
    with pytest.raises(NumericalError, match=r"gradient of parameter '0.weight' is not finite.*skip this batch"):
        opt.step()
    after = opt.state_dict()["slangvi"]["tensors"]
    assert all(torch.equal(v, before[k]) for k, v in after.items())
    assert torch.equal(flat(model), after["loc"])
    train(opt, x, y)
    assert opt._state.step == 4 + 2


def test_far_too_large_rates_fail_loudly_and_keep_the_last_good_state():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    opt = make(model, lr=1e30, precision_lr=0.1)
    x, y = torch.randn(5, 2), torch.randn(5, 1)

    def train_on():
        for _ in range(10):
            opt.step(lambda: backward(F.mse_loss(model(x), y)))

    with pytest.raises(NumericalError, match=r"[Ll]ower lr"):
        train_on()
    assert bool(torch.isfinite(flat(model)).all())
