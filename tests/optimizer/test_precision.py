"""Half precision, autocast and GradScaler."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import slangvi
from helpers.optimizer_runs import CLASSES, N, assert_identical, assert_same, flat, make, model_and_data, train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_float32_state(dtype):
    model, x, y = model_and_data(dtype=torch.float32)
    model.to(dtype)
    opt = make(model)
    assert opt._state.loc.dtype is torch.float32
    for _ in range(3):
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        opt.step()
    assert model[0].weight.dtype is dtype
    # The float32 mean keeps digits that the weights cannot show.
    assert not torch.equal(opt.posterior.mean, flat(model).float())
    torch.testing.assert_close(opt.posterior.mean, flat(model).float(), rtol=1e-2, atol=1e-2)


def test_autocast_is_close_to_float32():
    (first, x, y), (second, _, _) = model_and_data(dtype=torch.float32), model_and_data(dtype=torch.float32)
    full, half = make(first), make(second)
    for opt, enabled in ((full, False), (half, True)):
        with opt.sampled_params(train=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(opt.model(x), y)
            loss.backward()
        opt.step()
    assert half._state.prec_factor.dtype is torch.float32
    torch.testing.assert_close(full.posterior.prec_diag, half.posterior.prec_diag, rtol=0.05, atol=0.05)


def test_autocast_around_everything_does_not_touch_the_state():
    (first, x, y), (second, _, _) = model_and_data(dtype=torch.float32), model_and_data(dtype=torch.float32)
    outside, inside = make(first), make(second)
    for opt, enabled in ((outside, False), (inside, True)):
        for _ in range(2):
            around, block = torch.autocast("cpu", torch.bfloat16, enabled=enabled), opt.sampled_params(train=True)
            with around, block, torch.autocast("cpu", enabled=False):
                F.cross_entropy(opt.model(x), y).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                opt.step()
    assert_identical(outside, inside)


def test_every_draw_inside_one_autocast_block_is_its_own():
    """Torch keeps half-precision copies of the weights until the block ends; they must not outlive the draw."""
    (first, x, y), (second, _, _) = model_and_data(dtype=torch.float32), model_and_data(dtype=torch.float32)
    apart, together = make(first), make(second)
    for _ in range(3):
        for _ in range(2):
            with apart.sampled_params(train=True), torch.autocast("cpu", torch.bfloat16):
                F.cross_entropy(first(x), y).backward()
        apart.step()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            for _ in range(2):
                with together.sampled_params(train=True):
                    F.cross_entropy(second(x), y).backward()
            together.step()
    assert_identical(apart, together)


def test_the_mean_is_back_inside_one_autocast_block():
    model, x, _ = model_and_data(dtype=torch.float32)
    opt = make(model)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        with opt.sampled_params():
            assert not torch.equal(model(x), before)
        assert torch.equal(model(x), before)


def test_grad_scaler_scales_nothing_twice():
    (first, x, y), (second, _, _) = model_and_data(dtype=torch.float32), model_and_data(dtype=torch.float32)
    plain, scaled = make(first), make(second)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with plain.sampled_params(train=True):
        F.cross_entropy(first(x), y).backward()
    plain.step()
    with scaled.sampled_params(train=True):
        scaler.scale(F.cross_entropy(second(x), y)).backward()
    scaler.step(scaled)
    scaler.update()
    assert_same(plain, scaled, rtol=1e-4, atol=1e-5)
    with scaled.sampled_params(train=True):
        scaler.scale(F.cross_entropy(second(x), y)).backward()
    scaler.unscale_(scaled)
    with pytest.raises(RuntimeError, match=r"without it"):
        scaler.step(scaled)


def test_a_failed_step_leaves_no_scale_behind():
    model, x, y = model_and_data(dtype=torch.float32)
    opt = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with opt.sampled_params(train=True):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    opt.discard_gradients()
    with pytest.raises(RuntimeError, match="found no gradients"):
        scaler.step(opt)
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")


def test_grad_scaler_skips_a_step_that_overflowed():
    model, x, y = model_and_data(dtype=torch.float32)
    opt = make(model)
    before = flat(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with opt.sampled_params(train=True):
        scaler.scale(F.cross_entropy(model(x), y) * math.inf).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(flat(model), before)
    assert scaler.get_scale() < 1024.0


@pytest.mark.parametrize("name", ["SLANG", "VOGN", "OnlineEig", "FullGaussian"])
def test_a_model_made_float64_later_is_checked_as_closely_as_its_float32_state_allows(name):
    kind, options = CLASSES[name]
    for seed in range(5):
        model, x, y = model_and_data(seed, torch.float32)
        opt = kind(model, num_data=N, generator=torch.Generator().manual_seed(seed), **options)
        model.double()
        train(opt, x.double(), y)
        assert opt.posterior.loc.dtype is torch.float32
        assert not opt._recorder.plans.latest().by_definition  # nothing was taken for wrong


def test_a_mean_does_not_run_away_where_a_few_rows_are_all_there_is():
    """Four examples at rank 4: what U does not hold of the curvature is the prior alone."""
    losses = {}
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, 5000, generator=generator).to(dtype)
        y = torch.randn(4, generator=generator).to(dtype)
        model = torch.nn.Linear(5000, 1, bias=False, dtype=dtype)
        torch.nn.init.zeros_(model.weight)
        opt = slangvi.SLANG(model, num_data=10_000, rank=4, lr=0.1, generator=torch.Generator().manual_seed(1))
        for _ in range(5):
            with opt.sampled_params(train=True):
                (0.5 * (model(x)[:, 0] - y).square()).mean().backward()
            opt.step()
        losses[dtype] = float((0.5 * (model(x)[:, 0] - y).square()).mean().detach())
    assert losses[torch.float32] < 2 * losses[torch.float64] + 0.5
