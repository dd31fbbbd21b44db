"""BBB in a loop of one's own: the ELBO written out, micro-batches, scales of losses, batch normalisation, options."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

import slangvi
from helpers.adam_oracle import Descent
from helpers.optimizer_runs import N, assert_identical, backward, flat, model_and_data, train
from slangvi.params.state import tensors_of


def make(model, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    return slangvi.BBB(model, **({"num_data": N, "lr": 0.05, "init_precision": 25.0, "generator": generator} | options))


def assert_same(a, b, tolerance=1e-12):
    for (name, x), (_, y) in zip(tensors_of(a._state), tensors_of(b._state), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("scale", ["softplus", "log"])
def test_steps_are_adam_on_the_elbo_written_out(scale):
    model, x, y = model_and_data()
    opt = make(model, scale=scale, prior_precision=2.0, prior_mean=0.1, temperature=0.5, betas=(0.8, 0.99), eps=1e-7)
    spec, source = opt.posterior.param_spec, torch.Generator().manual_seed(1)
    oracle = Descent(opt._state.loc, opt._state.rho, betas=(0.8, 0.99), eps=1e-7)
    twin = copy.deepcopy(model)
    for _ in range(5):
        train(opt, x, y, steps=1, draws=2)
        noise = [torch.randn(43, generator=source, dtype=torch.float64) for _ in range(2)]

        def objective(mu, rho, noise=noise):
            sigma = F.softplus(rho) if scale == "softplus" else rho.exp()
            draws = [spec.unflatten(mu + sigma * e) for e in noise]
            losses = [F.cross_entropy(torch.func.functional_call(twin, draw, (x,)), y) for draw in draws]
            prior = Normal(torch.full_like(mu, 0.1), torch.full_like(mu, 2.0**-0.5))
            return N / 0.5 * sum(losses) / 2 + kl_divergence(Normal(mu, sigma), prior).sum()

        loc, rho = oracle.step(objective)
        torch.testing.assert_close(opt._state.loc, loc, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(opt._state.rho, rho, rtol=1e-10, atol=1e-10)
        assert torch.equal(flat(model), opt._state.loc)
        assert opt.info.num_rows == 24


@pytest.mark.parametrize("parts", [(4, 4, 4), (7, 5)])
def test_micro_batches_in_one_block_equal_one_large_batch(parts):
    whole, (model, x, y) = make(model_and_data()[0]), model_and_data()
    pieces = make(model)
    for _ in range(3):
        train(whole, x, y, steps=1, draws=1)
        with pieces.sampled_params(train=True):
            for a, b in zip(x.split(list(parts)), y.split(list(parts)), strict=True):
                F.cross_entropy(model(a), b).backward()
        pieces.step()
    assert_same(whole, pieces)


def test_losses_may_be_sums_or_divided_by_the_number_of_micro_batches():
    plain = train(make(model_and_data()[0]), *model_and_data()[1:], draws=1)
    for reduction, divisor in (("sum", 1), ("mean", 3), ("sum", 3)):
        options = {"loss_reduction": reduction, "accumulation_steps": divisor}
        model, x, y = model_and_data()
        opt, size = make(model, **options), 12 // divisor
        for _ in range(3):
            with opt.sampled_params(train=True):
                for a, b in zip(x.split(size), y.split(size), strict=True):
                    (F.cross_entropy(model(a), b, reduction=reduction) / divisor).backward()
            opt.step()
        assert_same(plain, opt)


def test_a_grad_scaler_is_divided_out():
    """On a CPU a scaler is told to be one; what matters is the factor it hands over."""
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    plain, scaled = make(first), make(second)
    train(plain, x, y, steps=1, draws=1)
    with scaled.sampled_params(train=True):
        (1024.0 * F.cross_entropy(second(x), y)).backward()
    scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    scaled.step()
    assert_same(plain, scaled)


def test_batch_normalisation_may_stay_in_train_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    _, x, y = model_and_data(dtype=torch.float32)
    opt = make(model, lr=0.02, init_precision=400.0)
    losses = [float(opt.step(lambda: backward(F.cross_entropy(model(x), y)))) for _ in range(60)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert model[1].num_batches_tracked == 60


def test_groups_may_have_adams_numbers_of_their_own():
    (first, x, y), (second, _, _), (third, _, _) = model_and_data(), model_and_data(), model_and_data()
    tail = {"params": third[2].parameters(), "betas": (0.5, 0.9), "eps": 1e-3, "lr": 0.01}
    mixed = train(make(third, params=[{"params": third[0].parameters()}, tail]), x, y, steps=1)
    one, two = (
        train(make(m, **o), x, y, steps=1)
        for m, o in ((first, {}), (second, {k: tail[k] for k in ("betas", "eps", "lr")}))
    )
    for name, value in tensors_of(mixed._state):
        torch.testing.assert_close(value[:25], getattr(one._state, name)[:25], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(value[25:], getattr(two._state, name)[25:], rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="betas must be finite"):
        mixed.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "betas": (0.9, 1.5)})


def test_a_state_is_read_with_the_scale_it_was_made_with():
    model, x, y = model_and_data()
    opt = train(make(model, scale="log"), x, y)
    assert_identical(train(copy.deepcopy(opt), x, y), train(opt, x, y))
    with pytest.raises(ValueError, match=r"made with scale='log', this optimizer has scale='softplus'.*scale='log'"):
        make(model_and_data()[0]).load_state_dict(opt.state_dict())


def test_a_draw_that_is_only_looked_at_is_no_training_signal():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    plain, looked = make(first), make(second)
    for opt in (plain, looked):
        with opt.sampled_params(train=True):
            F.cross_entropy(opt.model(x), y).backward()
    seed = looked.generator.get_state()
    with looked.sampled_params():
        assert not torch.equal(flat(second), looked._state.loc)
    looked.generator.set_state(seed)
    plain.step()
    looked.step()
    assert_identical(plain, looked)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"scale": "exp"}, ValueError, "scale must be one of"),
        ({"betas": 0.9}, TypeError, "betas must be a pair"),
        ({"eps": 0.0}, ValueError, "eps"),
        ({"lr": 0.0}, ValueError, "lr"),
        ({"rank": 2}, TypeError, "rank"),
    ],
)
def test_impossible_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        make(model_and_data()[0], **options)


def test_rates_may_exceed_one():
    """There is no precision that would have to be averaged by them."""
    model, x, y = model_and_data()
    assert math.isfinite(train(make(model, lr=1.5), x, y, steps=1).kl())
