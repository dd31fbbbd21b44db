"""What goes wrong half way: passes that fail, scales that stay, gradients that are not wanted, blocks that overlap."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import CLASSES, N, assert_identical, make, model_and_data, train


class Fragile(torch.autograd.Function):
    """The same tensor; its backward fails while `broken` says so."""

    broken = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Fragile.broken:
            raise torch.OutOfMemoryError("no memory is left")
        return grad


class Breaking(nn.Module):
    def forward(self, x):
        return Fragile.apply(x)


@pytest.fixture
def fragile():
    """A model whose second layer gets its gradient, and whose first does not."""
    model, x, y = model_and_data()
    model.insert(1, Breaking())
    yield model, x, y
    Fragile.broken = False


def fail(model, x, y):
    Fragile.broken = True
    with pytest.raises(torch.OutOfMemoryError):
        F.cross_entropy(model(x), y).backward()
    Fragile.broken = False


@pytest.mark.parametrize("name", CLASSES)
def test_a_pass_that_failed_half_way_is_no_gradient(name, fragile):
    model, x, y = fragile
    kind, own = CLASSES[name]
    opt = kind(model, num_data=N, lr=0.1, **own)
    opt.train()
    fail(model, x, y)
    assert not opt.has_gradients
    opt.eval()
    assert not opt.has_gradients
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step()


@pytest.mark.parametrize("way", ["train", "block"])
def test_what_comes_after_a_failed_pass_counts_alone(way, fragile):
    model, x, y = fragile
    opt = make(model)
    if way == "train":
        opt.train()
        fail(model, x, y)
        opt.train()
        F.cross_entropy(model(x), y).backward()
    else:
        with opt.sampled_params(train=True):
            fail(model, x[:5], y[:5])
            F.cross_entropy(model(x), y).backward()
    assert opt.has_gradients
    opt.step()
    assert opt.info.num_rows == 12


# ---- GradScaler ----


def scaled(opt, scaler, x, y):
    opt.train()
    scaler.scale(F.cross_entropy(opt.model(x), y)).backward()


@pytest.mark.parametrize("where", ["collecting", "in a block"])
def test_a_step_that_fails_early_leaves_no_scale_behind(where, monkeypatch):
    model, x, y = model_and_data(dtype=torch.float32)
    opt, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    if where == "collecting":
        scaled(opt, scaler, x, y)
        with monkeypatch.context() as patch:
            patch.setattr(opt, "_collected", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("gone")))
            with pytest.raises(torch.OutOfMemoryError):
                scaler.step(opt)
    else:
        with opt.sampled_params(train=True):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            with pytest.raises(RuntimeError, match="inside sampled_params"):
                scaler.step(opt)
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")


def test_the_scaler_goes_on_after_a_bad_batch_was_passed_over():
    model, x, y = model_and_data(dtype=torch.float32)
    opt, scaler = make(model, max_bad_batches=2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (math.nan, 1.0):
        opt.zero_grad()  # what the scaler looks at is fine, what was collected before is not
        scaled(opt, scaler, x * factor, y)
    scaler.step(opt)
    scaler.update()
    assert (opt.num_skipped, opt._state.step) == (1, 0)
    scaled(opt, scaler, x, y)
    scaler.step(opt)
    assert opt._state.step == 1


# ---- gradients that are not wanted ----


def test_discarding_inside_a_block_leaves_what_comes_after():
    model, x, y = model_and_data()
    opt = make(model)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x[:7]), y[:7]).backward()
        assert opt.has_gradients
        opt.discard_gradients()
        assert not opt.has_gradients
        F.cross_entropy(model(x[7:]), y[7:]).backward()
    opt.step()
    assert opt.info.num_rows == 5


def test_discarding_does_not_collect_first(monkeypatch):
    model, x, y = model_and_data()
    opt = make(model)
    opt.train()
    F.cross_entropy(model(x), y).backward()
    monkeypatch.setattr(opt._recorder, "_group", lambda *args: pytest.fail("was collected"))
    opt.discard_gradients()
    assert not opt.has_gradients
    assert not opt._sampling


# ---- blocks that overlap ----


def test_blocks_that_end_in_the_order_they_began_give_the_compiler_back():
    import torch._dynamo

    stance = lambda: torch._dynamo.eval_frame._stance.stance  # noqa: E731
    before = stance()
    first, second = make(model_and_data()[0]), make(model_and_data(seed=1)[0])
    _, x, y = model_and_data()
    first.train()
    second.train()
    for opt in (first, second):
        F.cross_entropy(opt.model(x), y).backward()
    assert stance() == "force_eager"
    first.step()
    assert stance() == "force_eager"  # the other one still listens
    second.step()
    assert stance() == before


# ---- states of another time ----


def test_loading_forgets_what_is_known_of_the_last_step():
    model, x, y = model_and_data()
    opt = train(make(model), x, y, steps=1)
    saved = opt.state_dict()
    train(opt, x, y, steps=2)
    opt.load_state_dict(saved)
    assert opt.info is None


def test_loading_inside_a_block_is_refused():
    model, _, _ = model_and_data()
    opt = make(model)
    saved = opt.state_dict()
    with opt.sampled_params(), pytest.raises(RuntimeError, match=r"load_state_dict.* inside sampled_params"):
        opt.load_state_dict(saved)
    opt.train()
    opt.load_state_dict(saved)
    assert not opt._sampling


def test_a_state_with_more_than_a_state_is_refused_before_anything_changes():
    model, x, y = model_and_data()
    opt = train(make(model), x, y, steps=1)
    saved = opt.state_dict()
    saved["slangvi"]["tensors"] = saved["slangvi"]["tensors"] | {"extra": torch.ones(1)}
    saved["param_groups"] = [saved["param_groups"][0] | {"lr": 9.0}]
    with pytest.raises(ValueError, match="has a tensor 'extra' that this method does not know"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.1


def test_a_prior_that_is_changed_in_place_counts_at_once():
    model, x, y = model_and_data()
    number, tensor = {"*": 1.0}, torch.ones(43, dtype=torch.float64)
    for prior, change in ((number, lambda: number.update({"*": 100.0})), (tensor, lambda: tensor.mul_(100.0))):
        opt = make(model, prior_precision=prior)
        small = opt.kl()
        change()
        assert opt.kl() > 2 * small
        resumed = make(model_and_data(seed=5)[0], prior_precision=prior)
        resumed.load_state_dict(opt.state_dict())
        assert_identical(train(opt, x, y), train(resumed, x, y))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_step_that_is_too_large_leaves_the_state_as_it_was_at_any_rank(rank):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    opt = slangvi.SLANG(model, num_data=8, rank=rank, lr=0.5)
    for scale in (1.0, 1e18):
        before = {name: value.clone() for name, value in vars(opt._state).items() if isinstance(value, torch.Tensor)}
        with opt.sampled_params(train=True):
            opt.zero_grad()
            (scale * model(scale * x)).mean().backward()
        if scale == 1.0:
            opt.step()
            continue
        with pytest.raises(slangvi.NumericalError, match="The state is unchanged"):
            opt.step()
        for name, value in before.items():
            assert torch.equal(getattr(opt._state, name), value), name
