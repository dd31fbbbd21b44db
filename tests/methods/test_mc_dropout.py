"""MC dropout: autograd and torch's Adam on a network with masked inputs; Gal's decay; moments; predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.adam_oracle import Descent, replayed
from helpers.logistic_runs import assert_close, member, tensors
from helpers.optimizer_runs import backward
from slangvi import mc_dropout
from slangvi.errors import NumericalError
from slangvi.params import ParamSpec
from slangvi.schedules import Rate

N, M, S, P = 60, 7, 3, 16
RATES = {"0.weight": 0.4, "2.weight": 0.2}
LIKELIHOOD = slangvi.Gaussian(2.0)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1), nn.Flatten(0)).double()


def data():
    return torch.randn(M, 3).double(), torch.randn(M).double()


def masked(model, masks, x):
    """The network with its inputs and activations multiplied by what `draw_masks` gives."""
    hidden = model[1](model[0](x * masks["0.weight"]))
    return model[3](model[2](hidden * masks["2.weight"]))


def start(batch=(), dtype=torch.float64):
    """A state whose tensors differ everywhere, with leading dimensions."""
    state = mc_dropout.init({name: p.to(dtype) for name, p in network().named_parameters()}, RATES)
    changed = {name: torch.randn(*batch, P, dtype=dtype) for name in ("loc", "momentum", "square")}
    changed["rates"] = torch.rand(*batch, 1, dtype=dtype) * (state.rates > 0)
    return replace(state, **changed | {"square": changed["square"].abs()})


# ---- the network written out


@pytest.mark.parametrize("masks", ["example", "draw"])
@pytest.mark.parametrize("decay", ["gal", "kl"])
def test_whole_runs_are_adam_on_a_network_with_masked_inputs(masks, decay, global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model, batch = network(), data()
    lam, temperature, power = {"*.bias": 0.5, "*": 2.0}, 2.0, {"gal": 1, "kl": -1}[decay]
    decays = {name: 2.0 * (1 - RATES[name]) ** power if name in RATES else 0.5 for name, _ in model.named_parameters()}
    vi = mc_dropout.build(
        LIKELIHOOD.of(model),
        num_data=N,
        lr=lambda t: 0.1 / t,
        rates=RATES,
        prior_precision=lam,
        mc_samples=S,
        temperature=temperature,
        masks=masks,
        decay=decay,
    )
    state = vi.init(dict(model.named_parameters()))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    mine, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for t in range(20):
        drawn = mc_dropout.draw_masks(state, (S, M) if masks == "example" else (S, 1), theirs)
        outputs = [masked(model, {name: mask[s] for name, mask in drawn.items()}, batch[0]) for s in range(S)]
        values = torch.stack([LIKELIHOOD.log_prob(output, batch[1]) for output in outputs])
        penalty = sum(0.5 * decays[name] * p.square().sum() for name, p in model.named_parameters())
        adam.zero_grad()
        (-N / temperature * values.mean() + penalty).backward()
        adam.param_groups[0]["lr"] = 0.1 / (t + 1)
        adam.step()
        state, info = vi.update(state, batch, generator=mine)
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(state.loc, expected, rtol=1e-10, atol=1e-10)
        assert math.isclose(info.loss, -N * float(values.detach().mean()), rel_tol=1e-9)
        assert (info.step, info.num_rows) == (t + 1, S * M)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_updates_are_adam_for_every_member_of_a_batch(batch):
    state = start(batch)
    state = replace(state, momentum=torch.zeros_like(state.loc), square=torch.zeros_like(state.loc))
    lam = torch.rand(*batch, P).double() + 0.5
    oracle = Descent(state.loc, betas=(0.8, 0.95), eps=1e-6)
    sizes = torch.tensor(state.spec.numels)
    keep = 1 - state.rates.repeat_interleave(sizes, -1)
    for _ in range(20):
        slope = torch.randn(*batch, P).double()
        (loc,) = oracle.step(lambda x, g=slope: N / 6 * g * x + 0.5 * lam * keep * x.square())
        options = {"num_rows": 6, "num_data": N, "betas": (0.8, 0.95), "eps": 1e-6}
        state, _ = mc_dropout.update(state, slope, prior_precision=lam, lr=0.05, **options)
        torch.testing.assert_close(state.loc, loc, rtol=1e-10, atol=1e-10)


def test_a_batch_equals_its_members_with_rates_of_their_own():
    state, gradient, lam = start((3,)), torch.randn(3, P).double(), torch.rand(3, P).double()
    rates, sizes = torch.tensor([[0.1], [0.01], [0.3]]).double(), torch.tensor([[10.0], [20.0], [30.0]]).double()
    options = {"num_rows": 6, "decay": "kl"}
    together, info = mc_dropout.update(state, gradient, num_data=sizes, prior_precision=lam, lr=rates, **options)
    for k in range(3):
        numbers = {"num_data": float(sizes[k]), "lr": Rate(float(rates[k]))}
        alone, told = mc_dropout.update(member(state, k), gradient[k], prior_precision=lam[k], **numbers, **options)
        assert_close(member(together, k), alone, 1e-13)
        assert math.isclose(float(info.penalty[k]), told.penalty, rel_tol=1e-12)


def test_the_arithmetic_can_be_captured_and_replayed():
    """Step, rates, state and gradient are memory that is filled anew; no number is looked at."""
    fixed = start((2,))

    def numbers():
        state = start((2,))
        rates, lam = torch.rand(2, 1).double(), torch.rand(2, P).double()
        return [*state.moving, state.rates, torch.randn(2, P).double(), rates, lam]

    def function(value, momentum, square, rates, gradient, lr, lam, step):
        state = replace(fixed, rates=rates)
        weights = mc_dropout.Moving(value, momentum, square)
        return mc_dropout.advanced(weights, gradient, weight=3.0, decay=mc_dropout.decays(state, lam), lr=lr, step=step)

    later = numbers()
    found = replayed(function, [*numbers(), torch.tensor(1)], [*later, torch.tensor(7)])
    for a, b in zip(found, function(*later, 7), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_masks_can_be_drawn_inside_a_capture():
    state = start((2,))
    half = torch.full_like(state.rates, 0.5)

    def draw(rates):
        return mc_dropout.draw_masks(replace(state, rates=rates), (500,))

    found = replayed(draw, [state.rates.clone()], [half])
    assert all(set(mask.unique().tolist()) == {0.0, 2.0} for mask in found.values())


# ---- Gal's decay


def test_the_objective_is_gals_with_his_weight_decay():
    """Nτ times (half the mean squared error + l²(1−p)/(2Nτ)‖M‖²) is our loss plus our penalty, up to log τ."""
    model, (x, y), p, length_scale, tau = network(), data(), 0.3, 0.7, 2.0
    lam = mc_dropout.prior_precision_of(length_scale)
    vi = mc_dropout.build(LIKELIHOOD.of(model), num_data=M, rates=p, prior_precision={"*.bias": 1e-30, "*": lam})
    state = vi.init(dict(model.named_parameters()))
    before = mc_dropout.draw_masks(state, (1, M), torch.Generator().manual_seed(0))
    error = (y - masked(model, {name: mask[0] for name, mask in before.items()}, x)).square()
    after, info = vi.update(state, (x, y), generator=torch.Generator().manual_seed(0))
    weights = [value.square().sum() for name, value in state.spec.unflatten(after.loc).items() if "weight" in name]
    decay = length_scale**2 * (1 - p) / (2 * M * tau)
    gal = 0.5 * float(error.detach().mean()) + decay * float(sum(weights))
    constant = 0.5 * M * (math.log(2 * math.pi) - math.log(tau))
    assert math.isclose(M * tau * gal, info.loss + info.penalty - constant, rel_tol=1e-10)


@pytest.mark.parametrize("decay", ["gal", "kl"])
def test_penalties_are_expected_energies_of_the_prior(decay, within_sigmas, generator):
    """`kl` for weights as they are drawn; `gal` for weights that are not scaled up when others are dropped."""
    state = replace(start(), rates=torch.tensor([0.4, 0.0, 0.2, 0.0]).double())
    lam = torch.rand(P).double()
    _, info = mc_dropout.update(
        state, torch.zeros(P).double(), num_rows=1, num_data=1, prior_precision=lam, lr=1e-30, decay=decay
    )
    factors = mc_dropout.multipliers(mc_dropout.draw_masks(state, (20000,), generator), state.spec)
    factors = (factors > 0).double() if decay == "gal" else factors
    energies = 0.5 * (lam * (factors * state.loc).square()).sum(-1)
    assert within_sigmas(energies, torch.tensor(info.penalty, dtype=torch.float64))


def test_weight_decay_of_a_plain_torch_loop_is_the_same_model():
    """`nn.Dropout`, a mean loss, and Adam with weight_decay λ(1−p)/N."""
    model, (x, y), p, lam = network(), data(), 0.25, 3.0
    state = mc_dropout.init(dict(model.named_parameters()), p)
    groups = [{"params": [q], "weight_decay": lam * (1 - p) / N if q.ndim > 1 else lam / N} for q in model.parameters()]
    adam, drop = torch.optim.Adam(groups, lr=0.01, eps=1e-30), nn.Dropout(p)
    for step in range(5):
        torch.manual_seed(step)
        adam.zero_grad()
        hidden = model[1](model[0](drop(x)))
        (-LIKELIHOOD.log_prob(model[3](model[2](drop(hidden))), y).mean()).backward()
        gradient = torch.cat([q.grad.flatten() for q in model.parameters()]) * M
        adam.step()
        lams = torch.full((P,), lam, dtype=torch.float64)
        state, _ = mc_dropout.update(state, gradient, num_rows=M, num_data=N, prior_precision=lams, lr=0.01, eps=1e-30)
        expected = torch.cat([q.detach().flatten() for q in model.parameters()])
        torch.testing.assert_close(state.loc, expected, rtol=1e-10, atol=1e-10)


# ---- draws and moments


def test_columns_are_dropped_together_and_biases_never(generator):
    spec = ParamSpec.of({"conv": torch.ones(4, 3, 2, 2), "bias": torch.ones(4), "head": torch.ones(2, 5)})
    state = mc_dropout.init(spec.unflatten(torch.ones(spec.num_params).double()), {"conv": 0.5, "head": 0.2})
    draws = mc_dropout.sample(state, (1000,), generator)
    assert (draws["bias"] == 1).all()
    assert (draws["conv"] == draws["conv"][:, :1, :, :1, :1]).all()
    assert set(draws["conv"].unique().tolist()) == {0.0, 2.0}
    assert (draws["head"] == draws["head"][:, :1]).all()
    assert set(draws["head"].unique().tolist()) == {0.0, 1.25}
    masks = mc_dropout.draw_masks(state, (6, 2), generator)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {"conv": (6, 2, 3), "head": (6, 2, 5)}


@pytest.mark.parametrize("batch", [(), (2,)])
def test_moments_are_those_of_the_draws(batch, within_sigmas, generator):
    state = start(batch)
    q = mc_dropout.posterior(state)
    flat = state.spec.flatten(mc_dropout.sample(state, (20000,), generator))
    assert flat.shape == (20000, *batch, P)
    assert within_sigmas(flat, q.mean)
    centred = flat - q.mean
    assert within_sigmas(centred.square(), q.variance)
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), q.covariance_matrix)
    torch.testing.assert_close(q.stddev, q.variance.sqrt())
    same = q.sample((3,), generator=torch.Generator().manual_seed(1))
    other = mc_dropout.sample(state, (3,), torch.Generator().manual_seed(1))
    assert torch.equal(same, state.spec.flatten(other))


def test_a_rate_of_zero_drops_nothing(generator):
    state = mc_dropout.init(dict(network().named_parameters()), {"0.weight": 0.0, "*": 0.5})
    assert state.rates.tolist() == [0.0, 0.0, 0.5, 0.0]
    draws = mc_dropout.sample(state, (50,), generator)
    assert torch.equal(draws["0.weight"], network()[0].weight.detach().expand(50, 3, 3))


def test_predictions_take_the_posterior_as_it_is():
    """The model runs in eval mode, where dropout layers do nothing: columns of the weights are dropped."""
    model, x = network(), data()[0]
    q = mc_dropout.posterior(mc_dropout.init(dict(model.named_parameters()), 0.5))
    found = slangvi.functional_samples(model, q, x, 4, generator=torch.Generator().manual_seed(2))
    source = torch.Generator().manual_seed(2)
    for row in found:
        params = q.param_spec.unflatten(q.sample(generator=source))
        torch.testing.assert_close(row, torch.func.functional_call(model, params, (x,)))
    means = slangvi.predictive_samples(model, q, x, 4, likelihood="gaussian")
    assert means.shape == (4, M)
    assert means.std(0).max() > 0


# ---- Info


def test_info_has_a_penalty_and_no_kl():
    state = start()
    lam = torch.ones(P).double()
    after, info = mc_dropout.update(state, torch.zeros(P).double(), num_rows=1, num_data=1, prior_precision=lam, lr=0.1)
    strength = mc_dropout.decays(after, lam)
    assert math.isclose(info.penalty, 0.5 * float((strength * after.loc.square()).sum()), rel_tol=1e-12)
    assert math.isnan(info.kl)
    assert math.isnan(info.elbo.value)
    assert math.isnan(info.loss)


# ---- the optimizer


def test_the_optimizer_takes_the_step_of_the_functional_interface():
    model, (x, y) = network(), data()
    options = {"num_data": N, "lr": 0.05, "rates": RATES, "prior_precision": 2.0, "mc_samples": S, "decay": "kl"}
    vi = mc_dropout.build(LIKELIHOOD.of(network()), masks="draw", **options)
    state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(5)
    opt = slangvi.MCDropout(model, generator=torch.Generator().manual_seed(5), **options)
    for _ in range(4):
        opt.step(lambda: backward(-LIKELIHOOD.log_prob(model(x), y).mean()))
        masks = [mc_dropout.draw_masks(state, (), generator) for _ in range(S)]
        factors = mc_dropout.multipliers({k: torch.stack([m[k] for m in masks]) for k in masks[0]}, state.spec)
        gradient = torch.zeros(P).double()
        for row in factors:
            theta = (state.loc * row).requires_grad_()
            value = -LIKELIHOOD.of(network())(state.spec.unflatten(theta), (x, y)).sum()
            gradient += row * torch.autograd.grad(value, theta)[0]
        lam = torch.full((P,), 2.0, dtype=torch.float64)
        state, _ = mc_dropout.update(
            state, gradient, num_rows=S * M, num_data=N, prior_precision=lam, lr=0.05, decay="kl"
        )
        torch.testing.assert_close(opt.posterior.loc, state.loc, rtol=1e-10, atol=1e-10)
    assert math.isnan(opt.kl())
    assert opt.info.penalty > 0


def test_the_optimizer_learns_and_predicts():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = (x @ torch.tensor([2.0, -1.0, 0.5]) > 0).long()
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
    opt = slangvi.MCDropout(
        model, num_data=200, lr=0.02, mc_samples=2, rates=0.1, generator=torch.Generator().manual_seed(0)
    )
    losses = [float(opt.step(lambda: backward(F.cross_entropy(model(x), y)))) for _ in range(80)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    probs = slangvi.predictive_samples(model, opt.posterior, x, 16).mean(0)
    assert float((probs.argmax(-1) == y).float().mean()) > 0.9
    elbo = opt.elbo(lambda: F.cross_entropy(model(x), y), 4)
    assert elbo.expected_log_likelihood > -200 * losses[0]


def test_groups_may_have_rates_of_their_own_and_added_ones_keep_what_was_learnt():
    model, (x, y) = network(), data()
    opt = slangvi.MCDropout(model, params=model[0].parameters(), num_data=N, rates={"0.*": 0.4})
    opt.step(lambda: backward(-LIKELIHOOD.log_prob(model(x), y).mean()))
    kept = {name: value.clone() for name, value in tensors(opt._state).items()}
    opt.add_param_group({"params": model[2].parameters(), "rates": 0.1})
    torch.testing.assert_close(opt._state.rates, torch.tensor([0.4, 0.0, 0.1, 0.0]).double())
    for name in ("loc", "momentum", "square"):
        assert torch.equal(getattr(opt._state, name)[:12], kept[name])
    assert not opt._state.square[12:].any()
    assert opt._state.step == 1


# ---- refusals


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_named_and_leave_the_state(bad):
    state = start((2,))
    kept = {name: value.clone() for name, value in tensors(state).items()}
    gradient = torch.ones(2, P).double()
    gradient[1, 14] = bad
    lam = torch.ones(P).double()
    with pytest.raises(
        NumericalError, match=r"the gradient of parameter '2.weight' .*member 1 of the batch.*unchanged"
    ):
        mc_dropout.update(state, gradient, num_rows=4, num_data=4, prior_precision=lam, lr=0.1)
    assert all(torch.equal(value, kept[name]) for name, value in tensors(state).items())


@pytest.mark.parametrize(
    ("rates", "error", "match"),
    [
        (1.0, ValueError, r"rates must be finite and in \[0, 1\), got 1"),
        (-0.1, ValueError, "rates must be finite"),
        ("half", TypeError, "rates must be a number"),
        ({"0.weight": 0.1}, ValueError, "rates has no entry for parameter '2.weight'"),
        ({"0.weight": 0.1, "*": 1.5}, ValueError, r"rates\['\*'\] must be finite"),
        ({"3.weight": 0.1, "*": 0.1}, ValueError, "'3.weight', which matches no parameter"),
        ({"*.bias": 0.1, "*": 0.1}, ValueError, r"rates names '\*.bias'.*biases are never dropped.*Remove the entry"),
    ],
)
def test_impossible_rates_are_named(rates, error, match):
    vi = mc_dropout.build(lambda params, batch: batch, num_data=3, rates=rates)
    with pytest.raises(error, match=match):
        vi.init(dict(network().named_parameters()))
    with pytest.raises(error, match=match):
        slangvi.MCDropout(network(), num_data=3, rates=rates)


def test_models_without_matrices_have_nothing_to_drop():
    with pytest.raises(ValueError, match=r"no tensor of two dimensions or more, got w.*Give a weight the shape"):
        mc_dropout.init({"w": torch.zeros(3)})


BAD = {"masks": "batch", "decay": "l2", "betas": (0.9, 1.0), "eps": 0.0, "lr": 0.0, "num_data": 0, "temperature": 0.0}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_impossible_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        mc_dropout.build(lambda params, batch: batch, **({"num_data": 10} | {name: value}))


def test_length_scales_are_positive():
    assert mc_dropout.prior_precision_of(0.01) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="length_scale"):
        mc_dropout.prior_precision_of(0.0)
