"""Bayes by Backprop: autograd and torch's Adam on the ELBO written out; the exact answer; batches; refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Independent, Normal, kl_divergence

import slangvi
from helpers.adam_oracle import Descent, replayed
from helpers.logistic_runs import assert_close, log_likelihood, logistic, member, tensors, unit_prior
from slangvi import bbb
from slangvi.errors import NumericalError
from slangvi.priors import Prior
from slangvi.schedules import Rate

SCALES = {"softplus": F.softplus, "log": torch.exp}
scales = pytest.mark.parametrize("scale", SCALES)


def start(P=4, batch=(), scale="softplus", dtype=torch.float64):
    """A state whose tensors differ everywhere, with leading dimensions."""
    state = bbb.init({"a": torch.zeros(P - 1, dtype=dtype), "b": torch.zeros((), dtype=dtype)}, scale=scale)
    changed = {name: torch.randn(*batch, P, dtype=dtype) for name in tensors(state)}
    return replace(state, **{k: v.abs() if k.endswith("square") else v for k, v in changed.items()})


def fresh(P, batch, scale):
    """The same before the first step."""
    state = start(P, batch, scale)
    zeros = torch.zeros_like(state.loc)
    still = ("loc_momentum", "loc_square", "rho_momentum", "rho_square")
    return replace(state, **dict.fromkeys(still, zeros))


def random_prior(*shape):
    return Prior(torch.rand(shape).double() + 0.5, torch.randn(shape).double())


# ---- the ELBO written out


@scales
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_updates_are_adam_on_the_reparameterised_elbo(scale, batch, temperature):
    N, M, S, P = 50, 6, 3, 4
    prior, state = random_prior(*batch, P), fresh(P, batch, scale)
    x, y = torch.randn(M, P).double(), torch.randint(2, (M,)).double()
    oracle = Descent(state.loc, state.rho, betas=(0.8, 0.95), eps=1e-6)

    def fit(theta):
        return F.binary_cross_entropy_with_logits(theta @ x.T, y.expand(*theta.shape[:-1], M), reduction="none")

    for t in range(20):
        noise = torch.randn(S, *batch, P).double()

        def objective(mu, rho, noise=noise):
            sigma = SCALES[scale](rho)
            weighed = N / (temperature * S * M) * fit(mu + sigma * noise).sum((0, -1))
            q, p = Normal(mu, sigma), Normal(prior.mean, prior.precision.rsqrt())
            return weighed + kl_divergence(q, p).sum(-1)

        thetas = (state.loc + state.stddev * noise).requires_grad_()
        (gradients,) = torch.autograd.grad(fit(thetas).sum(), thetas)
        options = {"num_rows": S * M, "num_data": N / temperature, "prior": prior, "betas": (0.8, 0.95), "eps": 1e-6}
        state, info = bbb.update(state, gradients, noise, lr=0.05, **options)
        loc, rho = oracle.step(objective)
        torch.testing.assert_close(state.loc, loc, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.rho, rho, rtol=1e-10, atol=1e-10)
        assert (state.step, info.step, info.num_rows) == (t + 1, t + 1, S * M)


@scales
def test_whole_runs_are_adam_on_the_reparameterised_elbo(scale, global_rng_untouched):
    N, S, batch = 40, 3, logistic(12, 4)
    vi = bbb.build(
        log_likelihood,
        num_data=N,
        lr=lambda t: 0.1 / t,
        prior_precision=2.0,
        prior_mean=0.3,
        mc_samples=S,
        init_precision=9.0,
        temperature=2.0,
        scale=scale,
    )
    state = vi.init({"w": torch.zeros(4, dtype=torch.float64)})
    torch.testing.assert_close(state.stddev, torch.full((4,), 1 / 3, dtype=torch.float64), rtol=1e-12, atol=0)
    oracle, mine, theirs = Descent(state.loc, state.rho), *(torch.Generator().manual_seed(3) for _ in range(2))
    for t in range(20):
        noise = torch.randn(S, 4, generator=theirs, dtype=torch.float64)

        def objective(mu, rho, noise=noise):
            sigma = SCALES[scale](rho)
            values = torch.stack([log_likelihood({"w": mu + sigma * e}, batch).mean() for e in noise])
            p = Normal(torch.full((4,), 0.3, dtype=torch.float64), 0.5**0.5)
            return -N / 2.0 * values.mean() + kl_divergence(Normal(mu, sigma), p).sum()

        oracle.adam.param_groups[0]["lr"] = 0.1 / (t + 1)
        loc, rho = oracle.step(objective)
        state, _ = vi.update(state, batch, generator=mine)
        torch.testing.assert_close(state.loc, loc, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.rho, rho, rtol=1e-10, atol=1e-10)


@scales
def test_conjugate_regression_with_a_diagonal_design_becomes_exact(scale):
    """Its posterior factorises, so the best mean-field Gaussian is the posterior itself."""
    x = torch.diag(torch.tensor([1.0, 2.0, 5.0]).double()).repeat(4, 1)
    y, noise_precision, lam = torch.linspace(-1, 2, 12).double(), 3.0, torch.tensor([1.0, 4.0, 0.5]).double()
    precision = lam + noise_precision * x.square().sum(0)
    mean = noise_precision * x.T @ y / precision
    likelihood = slangvi.Gaussian(noise_precision)
    vi = bbb.build(
        lambda params, batch: likelihood.log_prob(batch[0] @ params["w"], batch[1]),
        num_data=12,
        lr=slangvi.inverse_time(0.5, 0.6),
        prior_precision=lam,
        mc_samples=8,
        init_precision=10.0,
        scale=scale,
    )
    state, generator = vi.init({"w": torch.zeros(3, dtype=torch.float64)}), torch.Generator().manual_seed(0)
    late = []
    for t in range(600):
        state, _ = vi.update(state, (x, y), generator=generator)
        late += [(state.loc, state.stddev)] if t >= 300 else []
    loc, sigma = (torch.stack(part).mean(0) for part in zip(*late, strict=True))
    # Draws shake the end of a run. Averaged over its second half, the mean lies within a twentieth of a standard
    # deviation, and the standard deviation within 5 %.
    assert float(((loc - mean) * precision.sqrt()).abs().max()) < 0.05
    torch.testing.assert_close(sigma, precision.rsqrt(), rtol=0.05, atol=0)


# ---- numbers that may be tensors


@scales
def test_a_batch_equals_its_members_with_rates_data_and_priors_of_their_own(scale):
    state, prior = start(4, (3,), scale), random_prior(3, 4)
    gradients, noise = torch.randn(2, 5, 3, 4).double()
    rates, sizes = torch.tensor([[0.1], [0.01], [0.3]]).double(), torch.tensor([[10.0], [20.0], [30.0]]).double()
    together, _ = bbb.update(state, gradients, noise, num_rows=5, num_data=sizes, prior=prior, lr=rates)
    for k in range(3):
        own = Prior(prior.precision[k], prior.mean[k])
        options = {"num_rows": 5, "num_data": float(sizes[k]), "prior": own, "lr": Rate(float(rates[k]))}
        alone, _ = bbb.update(member(state, k), gradients[:, k], noise[:, k], **options)
        assert_close(member(together, k), alone, 1e-13)


def test_float32_states_stay_so_whatever_the_numbers_are():
    state, (gradients, noise) = start(3, (2,), dtype=torch.float32), torch.randn(2, 5, 2, 3)
    wide = torch.full((2, 1), 0.1, dtype=torch.float64)
    options = {"prior": unit_prior(3, torch.float32), "lr": wide, "weight": wide, "step": wide.new_ones(2, 1)}
    for moving in bbb.advanced(*state.moving, gradients, noise, **options):
        assert {part.dtype for part in moving} == {torch.float32}


def test_early_corrections_are_exact_in_float32():
    """1 − 0.999 has four digits only when it is computed in float32."""
    state = replace(bbb.init({"a": torch.zeros(3)}), step=1)
    gradients, noise = torch.ones(2, 4, 3)
    options = {"prior": unit_prior(3, torch.float32), "lr": 1.0, "weight": 1.0}
    by_tensor = bbb.advanced(*state.moving, gradients, noise, step=torch.tensor(1.0), **options)
    by_number = bbb.advanced(*state.moving, gradients, noise, step=1, **options)
    torch.testing.assert_close(by_tensor[0].value, by_number[0].value, rtol=1e-6, atol=0)
    torch.testing.assert_close(by_tensor[0].value, torch.full((3,), -1.0), rtol=1e-6, atol=0)


@scales
def test_the_arithmetic_can_be_captured_and_replayed(scale):
    """Step, rates, state, gradients and noise are memory that is filled anew; no number is looked at."""
    prior, shape = random_prior(2, 4), (2, 4)

    def numbers():
        state = start(4, (2,), scale)
        loc, rho = state.moving
        gradients, noise = torch.randn(2, 3, *shape).double()
        return [*loc, *rho, gradients, noise, torch.rand(2, 1).double(), torch.rand(2, 1).double()]

    def function(*buffers, step):
        loc, rho = bbb.Moving(*buffers[:3]), bbb.Moving(*buffers[3:6])
        gradients, noise, lr, weight = buffers[6:]
        options = {"weight": weight, "prior": prior, "lr": lr, "step": step, "scale": scale}
        return bbb.advanced(loc, rho, gradients, noise, **options)

    def with_step(*buffers):
        return function(*buffers[:-1], step=buffers[-1])

    later = numbers()
    found = replayed(with_step, [*numbers(), torch.tensor(1)], [*later, torch.tensor(7)])
    for mine, other in zip(found, function(*later, step=7), strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


# ---- start, draws, Info


@scales
@pytest.mark.parametrize("precision", [1e-8, 0.01, 1.0, 400.0, 1e10])
def test_the_start_has_the_width_asked_for(scale, precision):
    state = bbb.init({"w": torch.zeros(2, dtype=torch.float64)}, precision, scale)
    torch.testing.assert_close(
        state.precision.diag, torch.full((2,), precision, dtype=torch.float64), rtol=1e-10, atol=0
    )


@scales
def test_draws_of_a_batch_have_the_moments_of_each_member(scale, within_sigmas, generator):
    state = start(3, (2,), scale)
    draws = bbb.sample(state, (4, 2500), generator)
    assert draws["a"].shape == (4, 2500, 2, 2)
    assert draws["b"].shape == (4, 2500, 2)
    flat = state.spec.flatten(draws).reshape(10000, 2, 3)
    assert within_sigmas(flat, state.loc)
    centred = flat - state.loc
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), torch.diag_embed(state.stddev.square()))


@scales
def test_the_posterior_is_that_of_mean_field_and_draws_what_sample_draws(scale):
    state = start(3, (2,), scale)
    q = bbb.posterior(state)
    assert isinstance(q, slangvi.LowRankPrecisionNormal)
    assert q.prec_factor.shape == (2, 3, 0)
    assert q.param_spec is state.spec
    expected = state.spec.flatten(bbb.sample(state, (5,), torch.Generator().manual_seed(1)))
    torch.testing.assert_close(q.sample((5,), torch.Generator().manual_seed(1)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_info_tells_fit_and_kl_apart(batch):
    prior, state = random_prior(4), start(4, batch)
    gradients, noise = torch.randn(2, 5, *batch, 4).double()
    state, info = bbb.update(state, gradients, noise, num_rows=5, num_data=9, prior=prior, lr=0.1)
    expected = kl_divergence(bbb.posterior(state), Independent(Normal(prior.mean, prior.precision.rsqrt()), 1))
    torch.testing.assert_close(torch.as_tensor(info.kl, dtype=torch.float64), expected)
    assert math.isnan(info.loss)


def test_the_loss_is_the_mean_over_draws_at_the_old_state():
    batch, vi = logistic(12, 3), bbb.build(log_likelihood, num_data=30, mc_samples=2)
    state = vi.init({"w": torch.zeros(3, dtype=torch.float64)})
    draws = vi.sample(state, (2,), torch.Generator().manual_seed(0))
    _, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
    values = [float(log_likelihood({"w": w}, batch).mean()) for w in draws["w"]]
    assert math.isclose(info.expected_log_likelihood, 30 * sum(values) / 2, rel_tol=1e-12)
    assert info.elbo.value == -info.loss - info.kl


# ---- refusals


@pytest.mark.parametrize(("bad", "what"), [(math.nan, "the gradient"), (math.inf, "the gradient"), (1e25, "squared")])
def test_gradients_that_are_not_finite_are_named_and_leave_the_state(bad, what):
    state, (gradients, noise) = start(3, (2,), dtype=torch.float32), torch.ones(2, 4, 2, 3)
    kept = {name: value.clone() for name, value in tensors(state).items()}
    gradients = gradients.clone()
    gradients[1, 1, 2] = bad
    with pytest.raises(
        NumericalError, match=rf"step 1: .*{what}.* of parameter 'b' .*member 1 of the batch.*unchanged"
    ):
        bbb.update(state, gradients, noise, num_rows=4, num_data=4, prior=unit_prior(3, torch.float32), lr=0.1)
    assert all(torch.equal(value, kept[name]) for name, value in tensors(state).items())


@pytest.mark.parametrize(("name", "field"), [("mean", "loc"), ("scale", "rho")])
def test_what_overflows_is_refused_by_name(name, field):
    state = bbb.init({"a": torch.zeros(2), "b": torch.zeros(())})
    state = replace(state, **{field: torch.full((3,), 3.4e38)})
    prior = Prior(torch.full((3,), 1e-38), state.loc)
    # Draws whose gradients agree move the mean; draws whose gradients differ as their noise does, the scale.
    signs = torch.tensor([[1.0], [1.0 if name == "mean" else -1.0]])
    gradients, noise = -100 * signs.expand(2, 3), signs.expand(2, 3)
    with pytest.raises(NumericalError, match=f"the new {name} of parameter 'a'.*Lower lr"):
        bbb.update(state, gradients, noise, num_rows=4, num_data=4, prior=prior, lr=1e37)


def test_log_likelihoods_that_are_not_finite_or_not_one_per_example_are_refused():
    vi = bbb.build(lambda params, batch: batch[0] @ params["w"] / batch[1], num_data=3)
    state, x = vi.init({"w": torch.zeros(2)}), torch.ones(3, 2)
    with pytest.raises(NumericalError, match="not finite for 1 of 3 examples"):
        vi.update(state, (x, torch.tensor([1.0, 0.0, 1.0])))
    with pytest.raises(ValueError, match="one value per example"):
        bbb.build(lambda params, batch: (batch * params["w"]).sum(), num_data=3).update(state, x)


BAD = {
    "num_data": [(0, ValueError), (2.5, TypeError)],
    "lr": [(0.0, ValueError), (math.nan, ValueError), ("slow", TypeError)],
    "mc_samples": [(0, ValueError)],
    "temperature": [(0.0, ValueError)],
    "scale": [("exp", ValueError), (None, ValueError)],
    "betas": [((0.9,), TypeError), (0.9, TypeError), ((0.9, 1.0), ValueError), ((-0.1, 0.9), ValueError)],
    "eps": [(0.0, ValueError), ("small", TypeError)],
}


@pytest.mark.parametrize(("name", "value", "error"), [(n, v, e) for n, rows in BAD.items() for v, e in rows])
def test_impossible_arguments_are_named(name, value, error):
    with pytest.raises(error, match=name):
        bbb.build(lambda params, batch: batch, **({"num_data": 10} | {name: value}))


@pytest.mark.parametrize(("name", "value"), [("prior_precision", 0.0), ("init_precision", -1.0)])
def test_impossible_priors_are_named_at_init(name, value):
    with pytest.raises(ValueError, match=name):
        bbb.build(lambda params, batch: batch, num_data=10, **{name: value}).init({"w": torch.zeros(2)})
