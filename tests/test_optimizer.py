"""The optimizer in a user's loop: sampling, accumulation, closures, schedulers, groups, dtypes, state, failures."""

from __future__ import annotations

import copy
import io
import math
import pickle
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from cases import build, cross_entropy
from slangvi._flat import tensors_of
from slangvi.errors import NumericalError, UnsupportedModuleError

N = 40


def model_and_data(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return model, torch.randn(12, 4, dtype=dtype), torch.arange(12) % 3


def make(model, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    return slangvi.SLANG(model, **({"num_data": N, "rank": 2, "lr": 0.1, "generator": generator} | options))


def train(opt, x, y, steps=3, draws=2, sched=None):
    for _ in range(steps):
        for _ in range(draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(opt.model(x), y).backward()
        opt.step()
        if sched is not None:
            sched.step()
    return opt


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same(a, b, **tolerance):
    options = {"rtol": 1e-10, "atol": 1e-12} | tolerance
    torch.testing.assert_close(a._state.loc, b._state.loc, **options)
    torch.testing.assert_close(a._state.prec_diag, b._state.prec_diag, **options)
    U, V = a._state.prec_factor, b._state.prec_factor
    torch.testing.assert_close(U.T @ U, V.T @ V, rtol=1e-8, atol=1e-9)


def identical(a, b):
    pairs = zip(tensors_of(a._state), tensors_of(b._state), strict=True)
    assert all(torch.equal(x, y) for (_, x), (_, y) in pairs)
    assert torch.equal(flat(a.model), flat(b.model))


# ---- sampling


def test_weights_are_a_draw_inside_and_the_mean_outside():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    mean = flat(model)
    with opt.sampled_params():
        assert not torch.equal(flat(model), mean)
    assert torch.equal(flat(model), mean)
    assert torch.equal(mean, opt.posterior.mean)


def test_draws_in_the_model_have_the_posterior_moments():
    model = nn.Linear(2, 1).double()
    opt = make(model, init_precision=4.0)
    x, y = torch.randn(6, 2).double(), torch.randn(6, 1).double()
    for _ in range(3):
        opt.step(lambda: _backward(F.mse_loss(model(x), y)))
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


def _backward(loss):
    loss.backward()
    return loss


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


# ---- accumulation


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
        same(whole, pieces)


def test_divided_losses_with_accumulation_steps_equal_one_large_batch():
    whole, (model, x, y) = make(model_and_data()[0]), model_and_data()
    pieces = make(model, accumulation_steps=3)
    for _ in range(3):
        with whole.sampled_params(train=True):
            F.cross_entropy(whole.model(x), y).backward()
        whole.step()
        with pieces.sampled_params(train=True):
            for a, b in zip(x.split(4), y.split(4), strict=True):
                (F.cross_entropy(model(a), b) / 3).backward()
        pieces.step()
        same(whole, pieces)


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
    identical(*steps)


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
    same(mean, total)


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
    same(one, two)


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
    identical(plain, reusing)


def test_draws_on_one_batch_share_its_copy():
    model, x, y = model_and_data()
    opt = make(model)
    for _ in range(3):
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
    assert len(opt._capture._snapshots) == 1
    opt.step()
    assert not opt._capture._snapshots


def test_discarded_gradients_leave_no_trace():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    clean, dirty = make(first), make(second)
    with dirty.sampled_params(train=True):
        F.cross_entropy(second(100 * x), y).backward()
    dirty.discard_gradients()
    dirty.generator.manual_seed(1)
    identical(train(clean, x, y), train(dirty, x, y))


# ---- closures


def test_a_closure_is_sampled_inside_like_the_loop():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    loop, closed = make(first), make(second, mc_samples=2)

    def closure():
        closed.zero_grad()
        return _backward(F.cross_entropy(second(x), y))

    train(loop, x, y, steps=3, draws=2)
    for _ in range(3):
        loss = closed.step(closure)
    identical(loop, closed)
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
        opt.step(lambda: _backward(F.cross_entropy(model(x), y)))
    assert torch.equal(flat(model), before)


def test_a_closure_that_fails_half_way_leaves_no_rows():
    model, x, y = model_and_data()
    opt = make(model, mc_samples=3)
    runs = []

    def closure():
        runs.append(1)
        if len(runs) == 3:
            raise RuntimeError("third")
        return _backward(F.cross_entropy(model(x), y))

    with pytest.raises(RuntimeError, match="third"):
        opt.step(closure)
    opt.step(lambda: _backward(F.cross_entropy(model(x), y)))
    assert opt.info.num_rows == 36


# ---- failures are transactions


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
            opt.step(lambda: _backward(F.mse_loss(model(x), y)))

    with pytest.raises(NumericalError, match=r"[Ll]ower lr"):
        train_on()
    assert bool(torch.isfinite(flat(model)).all())


# ---- rates, schedulers, groups


def test_inverse_time_follows_the_papers_schedule_and_beta_follows_lr():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    scheduled, manual = make(first, lr=0.2), make(second, lr=0.2)
    sched = slangvi.inverse_time(scheduled, decay=0.51)
    train(scheduled, x, y, steps=4, sched=sched)
    for t in range(1, 5):
        manual.param_groups[0]["lr"] = 0.2 / (1 + t**0.51)
        train(manual, x, y, steps=1)
    same(scheduled, manual)


SCHEDULERS = {
    "step": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    "cosine to zero": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4),
    "warm-up from zero": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda k: k / 4),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=8),
    "exponential": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_works(name):
    model, x, y = model_and_data()
    opt = make(model)
    train(opt, x, y, steps=6, sched=SCHEDULERS[name](opt))
    assert opt._state.step == 6
    assert bool(torch.isfinite(opt.posterior.variance).all())


def test_reduce_on_plateau_works():
    model, x, y = model_and_data()
    opt = make(model)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for _ in range(4):
        train(opt, x, y, steps=1)
        sched.step(1.0)
    assert opt.param_groups[0]["lr"] < 0.1


def test_a_rate_above_one_needs_its_own_precision_rate():
    model, x, y = model_and_data()
    opt = make(model)
    opt.param_groups[0]["lr"] = 1.5
    with pytest.raises(ValueError, match="give precision_lr if lr must exceed 1"):
        train(opt, x, y, steps=1)
    train(make(model, lr=1.5, precision_lr=0.1), x, y, steps=1)


def test_equal_groups_equal_one_group():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    one = make(first)
    two = make(second, params=[{"params": second[0].parameters()}, {"params": second[2].parameters()}])
    identical(train(one, x, y), train(two, x, y))


def test_groups_have_their_own_rate_and_prior():
    model, x, y = model_and_data()
    opt = make(
        model,
        params=[
            {"params": model[0].parameters(), "lr": 0.05, "prior_precision": 3.0},
            {"params": model[2].parameters(), "precision_lr": 0.2, "prior_precision": {"2.weight": 2.0, "*bias": 1e-6}},
        ],
    )
    train(opt, x, y)
    lam = opt._hyper.prior().precision
    assert lam[:25].unique().tolist() == [3.0]
    assert lam[25:40].unique().tolist() == [2.0]
    assert lam[40:].unique().tolist() == [1e-6]
    assert opt._hyper.precision_lr().per_tensor.tolist() == [0.05, 0.05, 0.2, 0.2]


def test_a_group_with_rate_zero_does_not_move():
    model, x, y = model_and_data()
    opt = make(model, params=[{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    opt.param_groups[0]["lr"] = 0.0
    before = model[0].weight.detach().clone()
    train(opt, x, y)
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[2].weight, before)


def test_priors_changed_between_steps_take_effect():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    opt.param_groups[0]["prior_precision"] = 5.0
    train(opt, x, y, steps=1)
    assert opt._hyper.prior().precision.unique().tolist() == [5.0]


def test_a_group_added_mid_run_starts_at_its_values():
    model, x, y = model_and_data()
    opt = make(model, params=list(model[2].parameters()))
    train(opt, x, y)
    kept, weight = opt.posterior.prec_diag.clone(), model[0].weight.detach().clone()
    opt.add_param_group({"params": model[0].parameters(), "init_precision": 7.0})
    assert torch.equal(opt.posterior.prec_diag[:18], kept)
    assert opt.posterior.prec_diag[18:].unique().tolist() == [7.0]
    assert torch.equal(opt.posterior.mean[18:38], weight.flatten())
    assert opt._state.step == 3
    train(opt, x, y)
    assert not torch.equal(model[0].weight, weight)


def test_a_subset_of_parameters_leaves_the_rest_alone():
    model, x, y = model_and_data()
    before = model[0].weight.detach().clone()
    opt = train(make(model, params=model[2].parameters()), x, y)
    assert torch.equal(model[0].weight, before)
    assert opt.posterior.event_shape == (18,)
    out = slangvi.functional_samples(model, opt.posterior, x, 3, generator=opt.generator)
    assert out.shape == (3, 12, 3)


def test_tied_weights_are_one_parameter():
    case = build("gpt_tied")
    opt = slangvi.SLANG(case.model, num_data=N, rank=1, generator=torch.Generator().manual_seed(0))
    assert opt.posterior.event_shape[0] == sum(p.numel() for p in case.model.parameters())
    opt.step(lambda: _backward(case.losses(case.model(*case.args)).mean()))
    assert case.model.head.weight is case.model.tokens.weight


def test_unused_parameters_relax_to_the_prior():
    model, x, y = model_and_data()
    model.register_parameter("unused", nn.Parameter(torch.full((2,), 4.0, dtype=torch.float64)))
    opt = make(model, prior_precision=2.0, momentum=0.0)
    train(opt, x, y, steps=1, draws=1)
    place = opt._spec.slices["unused"]
    expected = 0.9 * 1.0 + 0.1 * 2.0
    torch.testing.assert_close(opt.posterior.prec_diag[place], torch.full((2,), expected).double())
    torch.testing.assert_close(model.unused.detach(), torch.full((2,), 4.0 * (1 - 0.1 * 2.0 / expected)).double())


# ---- dtypes and devices


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
    identical(outside, inside)


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
    same(plain, scaled, rtol=1e-4, atol=1e-5)
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


# ---- state


def test_state_dict_resumes_bitwise_at_every_step():
    model, x, y = model_and_data()
    whole = train(make(model), x, y, steps=5)
    for k in range(5):
        first, _, _ = model_and_data()
        opt = train(make(first), x, y, steps=k)
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        second, _, _ = model_and_data(seed=9)
        resumed = make(second, seed=123, lr=0.7, prior_precision=9.0)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
        identical(train(resumed, x, y, steps=5 - k), whole)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_go_on_like_the_original(duplicate):
    model, x, y = model_and_data()
    opt = make(model, params=[{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}])
    train(opt, x, y)
    twin = duplicate(opt)
    start = copy.deepcopy(twin._state.loc)
    assert torch.equal(start, opt._state.loc)
    assert twin.param_groups[0]["lr"] == 0.3
    seed = opt.generator.get_state()
    after = train(twin, x, y)._state.loc.clone()
    if twin.model is model:
        opt.load_state_dict(opt.state_dict() | {"slangvi": opt.state_dict()["slangvi"]})
        return
    opt.generator.set_state(seed)
    assert torch.equal(train(opt, x, y)._state.loc, after)


def test_a_state_dict_holds_what_later_steps_do_not_change():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    saved = opt.state_dict()["slangvi"]["tensors"]
    kept = copy.deepcopy(saved)
    train(opt, x, y)
    assert all(torch.equal(saved[k], kept[k]) for k in saved)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop("slangvi"), "was not written by a slangvi optimizer"),
        (lambda s: s["slangvi"].update(method="Other"), "method 'Other'"),
        (lambda s: s["slangvi"].update(names=["x", *s["slangvi"]["names"][1:]]), "expected parameter '0.weight'"),
        (lambda s: s["slangvi"]["names"].pop() and s["slangvi"]["shapes"].pop(), "3 parameters, the optimizer has 4"),
        (lambda s: s["slangvi"]["tensors"].pop("prec_diag"), "prec_diag.*found nothing"),
        (lambda s: s["slangvi"].pop("step"), "has no 'step'"),
        (lambda s: s["slangvi"]["tensors"]["loc"].fill_(math.nan), "'loc'.*damaged"),
        (lambda s: s["slangvi"]["tensors"]["prec_diag"].neg_(), "'prec_diag'.*damaged"),
        (lambda s: s["slangvi"]["tensors"].update(prec_factor=torch.zeros(3, 43).double()), "same rank"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(change, match):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    saved = copy.deepcopy(opt.state_dict())
    change(saved)
    before = flat(model)
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(saved)
    assert torch.equal(flat(model), before)


def test_weights_loaded_from_outside_become_the_mean():
    (model, x, y), (other, _, _) = model_and_data(), model_and_data(seed=5)
    opt = train(make(model), x, y)
    kept = opt.posterior.prec_diag
    model.load_state_dict(other.state_dict())
    assert torch.equal(opt.posterior.mean, flat(other))
    assert torch.equal(opt.posterior.prec_diag, kept)
    model[0].weight.data = torch.zeros_like(model[0].weight)
    assert not opt.posterior.mean[:20].any()


def test_edits_through_data_are_kept():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    model[2].bias.data.fill_(0.25)
    with opt.sampled_params():
        pass
    assert model[2].bias.unique().tolist() == [0.25]
    assert opt.posterior.mean[-3:].tolist() == [0.25] * 3


def test_resuming_with_another_number_of_examples_is_noticed():
    model, x, y = model_and_data()
    saved = train(make(model), x, y).state_dict()
    other = make(model_and_data()[0], num_data=N + 1)
    with pytest.warns(UserWarning, match="num_data=40, this optimizer has num_data=41"):
        other.load_state_dict(saved)


def test_a_saved_half_precision_model_does_not_cost_digits():
    model, x, y = model_and_data(dtype=torch.float32)
    model.bfloat16()
    opt = make(model)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    opt.step()
    mean = opt.posterior.mean
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(opt.posterior.mean, mean)


def test_two_optimizers_on_one_model_do_not_disturb_each_other():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    head = make(first, params=first[2].parameters())
    other = make(first, params=first[0].parameters())
    alone = make(second, params=second[2].parameters())
    identical(train(head, x, y), train(alone, x, y))
    assert other._state.step == 0


def test_elbo_and_kl_in_two_parts():
    model, x, y = model_and_data()
    opt = train(make(model, prior_precision=2.0), x, y)
    elbo = opt.elbo(lambda: F.cross_entropy(model(x), y), mc_samples=5)
    prior = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(43), torch.full((43,), 0.5**0.5)), 1)
    assert math.isclose(elbo.kl, float(torch.distributions.kl_divergence(opt.posterior, prior)), rel_tol=1e-6)
    assert elbo.value == elbo.expected_log_likelihood - elbo.kl
    total = make(model, loss_reduction="sum")
    total.load_state_dict(opt.state_dict())
    total.generator.manual_seed(0)
    opt.generator.manual_seed(0)
    a = opt.elbo(lambda: F.cross_entropy(model(x), y)).expected_log_likelihood
    b = total.elbo(lambda: F.cross_entropy(model(x), y, reduction="sum")).expected_log_likelihood
    assert math.isclose(a / N, b / 12, rel_tol=1e-9)


# ---- bad input

BAD = {
    "rank": [(-1, ValueError), (1.5, TypeError), (True, TypeError)],
    "lr": [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), (math.inf, ValueError), (None, TypeError)],
    "precision_lr": [(0.0, ValueError), (1.01, ValueError), (math.nan, ValueError)],
    "momentum": [(1.0, ValueError), (-0.1, ValueError), ("high", TypeError)],
    "prior_precision": [
        (0.0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        (torch.ones(3), ValueError),
        (torch.zeros(43), ValueError),
        ({"nothing": 1.0, "*": 1.0}, ValueError),
        ({"0.*": 1.0}, ValueError),
        ({"*": -1.0}, ValueError),
        ("strong", TypeError),
    ],
    "prior_mean": [(math.inf, ValueError), (torch.zeros(3), ValueError)],
    "init_precision": [(0.0, ValueError), (math.inf, ValueError)],
    "num_data": [(0, ValueError), (-5, ValueError), (1.5, TypeError), (None, TypeError)],
    "mc_samples": [(0, ValueError), (1.5, TypeError)],
    "temperature": [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError)],
    "loss_reduction": [("none", ValueError)],
    "accumulation_steps": [(0, ValueError), (2.0, TypeError)],
    "curvature": [("hessian", ValueError)],
    "engine": [("magic", ValueError)],
    "verify": [("yes", TypeError)],
    "memory_limit": [(0, ValueError), (1.5, TypeError)],
}


@pytest.mark.parametrize(("name", "value", "error"), [(n, v, e) for n, rows in BAD.items() for v, e in rows])
def test_impossible_arguments_are_named(name, value, error):
    model, _, _ = model_and_data()
    with pytest.raises(error, match=name):
        make(model, **{name: value})


def test_num_data_is_required():
    with pytest.raises(TypeError, match="num_data"):
        slangvi.SLANG(nn.Linear(1, 1), rank=1)


def test_models_that_cannot_be_inferred_are_refused():
    with pytest.raises(TypeError, match="not model"):
        slangvi.SLANG(nn.Linear(1, 1).parameters(), num_data=1)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        slangvi.SLANG(frozen, num_data=1)
    with pytest.raises(ValueError, match="requires_grad=False"):
        slangvi.SLANG(frozen, list(frozen.parameters()), num_data=1)
    with pytest.raises(ValueError, match="not parameters of the model"):
        slangvi.SLANG(nn.Linear(1, 1), nn.Linear(1, 1).parameters(), num_data=1)
    with pytest.raises(UnsupportedModuleError, match="lazy"):
        slangvi.SLANG(nn.LazyLinear(1), num_data=1)
    with pytest.raises(UnsupportedModuleError, match="complex"):
        slangvi.SLANG(nn.Linear(1, 1, dtype=torch.complex64), num_data=1)
    broken = nn.Linear(1, 1)
    nn.init.constant_(broken.bias, math.nan)
    with pytest.raises(ValueError, match="params must be finite"):
        slangvi.SLANG(broken, num_data=1)


def test_batch_statistics_are_refused_when_training_starts():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    opt = slangvi.SLANG(model, num_data=4)
    before = flat(model)
    with pytest.raises(UnsupportedModuleError, match=r"'1' .BatchNorm1d"), opt.sampled_params(train=True):
        pass
    assert torch.equal(flat(model), before)


def test_a_generator_on_another_device_is_named():
    opt = make(nn.Linear(1, 1))

    class Elsewhere:
        device = torch.device("cuda")

    opt.generator = Elsewhere()
    with pytest.raises(ValueError, match="generator is on cuda"), opt.sampled_params():
        pass


def test_parameters_frozen_or_replaced_later_are_named():
    model, _, _ = model_and_data()
    opt = make(model)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0.weight' was frozen"), opt.sampled_params(train=True):
        pass
    model[0].weight.requires_grad_(True)
    model[2] = nn.Linear(5, 3).double()
    with pytest.raises(ValueError, match=r"'2.weight' was replaced"), opt.sampled_params(train=True):
        pass


def test_parameters_that_share_memory_only_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share their memory"):
        make(model)


def test_a_single_tensor_and_a_seed_are_no_parameters_and_no_generator():
    model, _, _ = model_and_data()
    with pytest.raises(TypeError, match="Put it in a list"):
        make(model, params=model[0].weight)
    with pytest.raises(TypeError, match=r"torch.Generator"):
        make(model, generator=3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_models_with_time_first_are_refused(kind):
    with pytest.raises(UnsupportedModuleError, match="batch_first=True"):
        make(kind(3, 4))


def test_a_batch_larger_than_the_data_is_noticed_once():
    model, x, y = model_and_data()
    opt = make(model, num_data=5)
    with pytest.warns(UserWarning, match="batch of 12 examples is larger than num_data=5"):
        train(opt, x, y, steps=1)
    train(opt, x, y, steps=1)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    model, x, y = model_and_data()
    opt = make(model, params=list(model[2].parameters()))
    with pytest.raises(ValueError, match="lr must be"):
        opt.add_param_group({"params": model[0].parameters(), "lr": 7.0})
    with pytest.raises(ValueError, match="init_precision"):
        opt.add_param_group({"params": model[0].parameters(), "init_precision": -1.0})
    assert len(opt.param_groups) == 1
    assert math.isfinite(opt.kl())
    train(opt, x, y)


def test_an_empty_batch_is_refused():
    model, x, _ = model_and_data()
    opt = make(model)
    with pytest.raises(ValueError, match="batch is empty"), opt.sampled_params(train=True):
        model(x[:0]).sum().backward()


@pytest.mark.parametrize("name", ["lstm", "raw_parameter", "convnet", "gpt_functional_head"])
@pytest.mark.parametrize("engine", ["factored", "dense"])
def test_a_memory_limit_changes_nothing_but_the_chunks(name, engine):
    states = []
    for limit in (None, 1):
        case = build(name)
        options = {"engine": engine, "memory_limit": limit, "generator": torch.Generator().manual_seed(0)}
        opt = slangvi.SLANG(case.model, num_data=N, rank=2, lr=0.1, **options)
        for _ in range(2):
            opt.step(lambda case=case: _backward(case.losses(case.model(*case.args)).mean()))
        states.append(opt)
    same(*states)


@pytest.mark.parametrize("name", ["convnet", "gru", "transformer_encoder", "gpt_tied", "raw_parameter", "weight_norm"])
def test_losses_fall_on_other_architectures(name):
    case = build(name)
    opt = slangvi.SLANG(
        case.model, num_data=500, rank=2, lr=0.1, precision_lr=0.05, init_precision=500.0, mc_samples=2,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    losses = [float(opt.step(lambda: _backward(case.losses(case.model(*case.args)).mean()))) for _ in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_integer_labels_out_of_range_are_named_by_the_likelihoods():
    with pytest.raises(ValueError, match=r"labels 0…2 .*got values from 0 to 5"):
        slangvi.Categorical().log_prob(torch.zeros(2, 3), torch.tensor([0, 5]))
    assert callable(cross_entropy(torch.tensor([0])))
