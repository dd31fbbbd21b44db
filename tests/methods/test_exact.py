"""The best Gaussian for logistic regression against optimisers and integrals that know nothing of its structure."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slangvi
from slangvi.methods import exact
from slangvi.quadrature import normal_expectation

optimize = pytest.importorskip("scipy.optimize")
integrate = pytest.importorskip("scipy.integrate")
special = pytest.importorskip("scipy.special")

FAMILIES = ("full", "mean_field")


def regression(seed=0, size=15, params=3, spread=1.0, lead=()):
    generator = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(*lead, size, params, generator=generator, dtype=torch.float64)
    x[..., 0] = 1.0
    noise = torch.randn(*lead, size, generator=generator, dtype=torch.float64)
    return x, (x.sum(-1) + noise > 0).to(torch.float64)


def unpacked(flat, params, family):
    """μ and a factor C of Σ = CCᵀ from unconstrained numbers: log-scales, or a triangle with a log-diagonal."""
    loc, rest = flat[:params], flat[params:]
    if family == "mean_field":
        return loc, rest.exp().diag()
    factor = flat.new_zeros(params, params)
    rows, columns = np.tril_indices(params, -1)
    factor[rows, columns] = rest[params:]
    return loc, factor + rest[:params].exp().diag()


def dense_negative_elbo(x, y, lam, mean, loc, factor, nodes=100):
    """By the book: quadrature in numpy's own nodes, KL by torch's own formula for dense normals."""
    points, weights = (torch.as_tensor(v) for v in special.roots_hermitenorm(nodes))
    covariance = factor @ factor.mT
    f = (x @ loc)[:, None] + ((x @ covariance) * x).sum(1).sqrt()[:, None] * points
    signs = (2 * y - 1)[:, None]
    likelihood = (torch.nn.functional.logsigmoid(signs * f) @ (weights / weights.sum())).sum()
    q = torch.distributions.MultivariateNormal(loc, covariance)
    prior = torch.distributions.MultivariateNormal(mean, lam.reciprocal().diag())
    return torch.distributions.kl_divergence(q, prior) - likelihood


def by_bfgs(x, y, lam, mean, family):
    """μ and Σ by a general optimiser on unconstrained numbers."""
    params = x.shape[1]
    size = 2 * params if family == "mean_field" else 2 * params + params * (params - 1) // 2

    def objective(values):
        flat = torch.tensor(values, requires_grad=True)
        value = dense_negative_elbo(x, y, lam, mean, *unpacked(flat, params, family))
        (gradient,) = torch.autograd.grad(value, flat)
        return value.item(), gradient.numpy()

    found = optimize.minimize(objective, np.zeros(size), jac=True, method="BFGS", options={"gtol": 1e-9})
    assert np.abs(found.jac).max() < 1e-6
    loc, factor = unpacked(torch.tensor(found.x), params, family)
    return loc, factor @ factor.mT, -found.fun


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_general_optimiser_finds_the_same_gaussian(family, seed):
    x, y = regression(seed)
    lam, mean = torch.tensor([1e-2, 1.0, 3.0]).double(), torch.tensor([0.5, 0.0, -0.2]).double()
    found = exact.fit(x, y, prior_precision=lam, prior_mean=mean, family=family)
    loc, covariance, elbo = by_bfgs(x, y, lam, mean, family)
    assert float(found.gradient_norm) <= 1e-8
    torch.testing.assert_close(found.loc, loc, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-5, atol=1e-6)
    assert float(found.elbo) == pytest.approx(elbo, abs=1e-9)


def test_a_nearly_flat_prior_gives_what_adaptive_integration_gives():
    """One weight, separable data: the standard deviation of f is beyond what Gauss–Hermite can do."""
    x, y = torch.tensor([[2.0], [-1.0], [0.5]]).double(), torch.tensor([1.0, 0.0, 1.0]).double()
    found = exact.fit(x, y, prior_precision=1e-4)
    inputs, signs = x[:, 0].numpy(), 2 * y.numpy() - 1

    def negative_elbo(values):
        mean, scale = values[0], math.exp(values[1])
        total = 0.5 * (1e-4 * (scale**2 + mean**2) - 1 - math.log(1e-4) - 2 * values[1])
        for a in inputs * signs:
            m, s = a * mean, abs(a) * scale
            cuts = sorted({m - 9 * s, m + 9 * s, *(c for c in (-20, -4, 0, 4, 20) if abs(c - m) < 9 * s)})
            for low, high in itertools.pairwise(cuts):
                total -= integrate.quad(
                    lambda f, m=m, s=s: (
                        special.log_expit(f) * math.exp(-0.5 * ((f - m) / s) ** 2) / (s * 2.5066282746310002)
                    ),
                    low,
                    high,
                )[0]
        return total

    best = optimize.minimize(
        negative_elbo, [20.0, 3.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 2000}
    )
    assert float(found.variance) > 100
    assert float(found.loc) == pytest.approx(best.x[0], rel=1e-6)
    assert float(found.variance.sqrt()) == pytest.approx(math.exp(best.x[1]), rel=1e-6)
    assert float(found.elbo) == pytest.approx(-best.fun, abs=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_norm_is_that_of_the_documented_parameters(family):
    """By μ and the logarithm of the scale at the current posterior, before the optimum is reached."""
    x, y = regression(2)
    lam, mean = torch.full((3,), 0.7).double(), torch.zeros(3).double()
    vi = exact.build(x, y, prior_precision=lam, family=family)
    state = vi.init({"weight": torch.tensor([0.3, -0.2, 0.9])})
    state, info = vi.update(state)
    covariance = vi.posterior(state).covariance_matrix
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.sqrt()) @ vectors.mT
    flat = torch.cat([state.loc, torch.zeros(9 if family == "full" else 3).double()]).requires_grad_()
    log_scale = flat[3:].reshape(3, 3) if family == "full" else flat[3:].diag()
    value = dense_negative_elbo(x, y, lam, mean, flat[:3], root @ torch.matrix_exp(0.5 * (log_scale + log_scale.mT)))
    (gradient,) = torch.autograd.grad(value, flat)
    assert float(info.gradient_norm) > 1e-3
    assert float(info.gradient_norm) == pytest.approx(float(gradient.norm()), rel=1e-8)
    assert float(info.elbo.value) == pytest.approx(-value.item(), rel=1e-10)
    assert float(info.loss) == pytest.approx(-float(info.expected_log_likelihood))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_its_members_alone(family):
    x, y = regression(3, size=9, spread=3.0, lead=(4,))
    lam = torch.tensor([1e-5, 0.1, 1.0]).double()
    together = exact.fit(x, y, prior_precision=lam, family=family, tolerance=1e-10)
    for k in range(4):
        alone = exact.fit(x[k], y[k], prior_precision=lam, family=family, tolerance=1e-10)
        torch.testing.assert_close(together.loc[k], alone.loc, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together.covariance[k], alone.covariance, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together.elbo[k], alone.elbo, rtol=1e-12, atol=1e-12)
    assert together.gradient_norm.shape == (4,)


@settings(max_examples=15)
@given(lead=st.lists(st.integers(1, 2), max_size=2), size=st.integers(1, 5), params=st.integers(1, 4))
def test_shapes(lead, size, params):
    x, y = regression(size, size, params, lead=lead)
    for family in FAMILIES:
        found = exact.fit(x, y, prior_precision=1.0, family=family)
        assert found.loc.shape == found.variance.shape == (*lead, params)
        assert found.covariance.shape == (*lead, params, params)
        assert found.elbo.shape == found.gradient_norm.shape == tuple(lead)
        assert bool((found.gradient_norm <= 1e-8).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_elbo_rises_and_rejected_steps_leave_the_point(family):
    """Far points under a flat prior make whole steps overshoot; they must be halved, not taken."""
    x, y = oscillating()
    vi = exact.build(x, y, prior_precision=1e-5, family=family)
    state, elbos, refused = vi.init(), [], 0
    for _ in range(40):
        new, info = vi.update(state, None, generator=None)
        if not info.accepted:
            refused += 1
            assert torch.equal(new.loc, state.loc)
            assert float(new.damping * new.newton_damping) == 0.5 * float(state.damping * state.newton_damping)
        state = new
        elbos.append(float(state.point.elbo))
    assert refused > 0 or family == "mean_field"
    assert all(b >= a - 1e-8 for a, b in itertools.pairwise(elbos))
    assert state.step == 40


@pytest.mark.parametrize("family", FAMILIES)
def test_newton_steps_solve_the_linearised_equations(family):
    """Against the Jacobian of the equations by autograd, with quadrature and inverses written out."""
    x, y = regression(11, size=6, lead=(2,))
    lam = torch.tensor([0.3, 1.0, 2.0]).double()
    problem = exact.regression(x, y, lam, 0.5, family)
    state = exact.init(problem)
    state, _ = exact.update(state, problem)
    by_loc, by_weights = exact.newton_step(problem, state.point)
    for k in range(2):

        def equations(flat, x=x[k], y=y[k]):
            loc, weights = flat[:3], flat[3:]
            precision = lam.diag() + x.mT @ (weights[:, None] * x)
            covariance = precision.inverse() if family == "full" else precision.diagonal().reciprocal().diag()
            mean, variance = x @ loc, ((x @ covariance) * x).sum(-1)
            slopes = normal_expectation(torch.sigmoid, mean, variance)
            wanted = normal_expectation(lambda f: f.sigmoid() * (-f).sigmoid(), mean, variance)
            return torch.cat([x.mT @ (slopes - y) + lam * (loc - 0.5), wanted - weights])

        at = torch.cat([state.loc[k], state.point.weights[k]])
        jacobian = torch.autograd.functional.jacobian(equations, at)
        step = torch.linalg.solve(jacobian, -equations(at))
        torch.testing.assert_close(by_loc[k], step[:3], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(by_weights[k], step[3:], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_separable_data_under_a_flat_prior(family, monkeypatch):
    """Mean and scale run far out together, which takes natural gradients alone hundreds of steps."""
    x, y = torch.ones(30, 1), torch.zeros(30)
    found = exact.fit(x, y, prior_precision=1e-5, family=family)
    assert float(found.gradient_norm) <= 1e-8
    assert found.steps < 150
    assert float(found.loc) < -200
    monkeypatch.setattr(exact, "_MOST_EXAMPLES", 0)
    with pytest.warns(UserWarning, match="Raise max_steps"):
        slow = exact.fit(x, y, prior_precision=1e-5, family=family, max_steps=150)
    assert float(slow.elbo) < float(found.elbo)


def oscillating():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = 1.0
    x[:4, 2] = torch.tensor([30.0, 25.0, -28.0, 20.0])
    x[4:, 2] = 0.0
    y = (x[:, 1] > 0).double()
    y[:4] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    y[4:10] = 1 - y[4:10]
    return x, y


@pytest.mark.parametrize("family", FAMILIES)
def test_posterior_and_samples(family, generator, within_sigmas):
    x, y = regression(6)
    found = exact.fit(x, y, prior_precision=1.0, family=family)
    kind = slangvi.distributions.DensePrecisionNormal if family == "full" else slangvi.LowRankPrecisionNormal
    assert isinstance(found.posterior, kind)
    assert found.posterior.param_spec.names == ("weight",)
    torch.testing.assert_close(found.posterior.precision_matrix.inverse(), found.covariance)
    off = found.covariance - found.variance.diag()
    assert bool((off.abs() > 1e-3).any()) == (family == "full")
    drawn = exact.sample(found.state, (20000,), generator)["weight"]
    assert drawn.shape == (20000, 3)
    assert within_sigmas(drawn, found.loc)
    centred = drawn - found.loc
    assert within_sigmas((centred[:, :, None] * centred[:, None, :]).flatten(1), found.covariance.flatten())
    again = exact.sample(found.state, (20000,), generator.manual_seed(7))["weight"]
    assert torch.equal(drawn, again)


def test_the_full_gaussian_is_never_worse_and_both_beat_their_neighbours():
    x, y = regression(7)
    full, diagonal = (exact.fit(x, y, prior_precision=1.0, family=family) for family in FAMILIES)
    assert float(full.elbo) > float(diagonal.elbo)
    one, zero = torch.ones(3).double(), torch.zeros(3).double()
    for found in (full, diagonal):
        factor = torch.linalg.cholesky(found.covariance)
        for moved in (found.loc + 0.05 * one, found.loc - 0.05 * one):
            assert -float(dense_negative_elbo(x, y, one, zero, moved, factor)) < float(found.elbo)
        for scale in (0.95, 1.05):
            assert -float(dense_negative_elbo(x, y, one, zero, found.loc, scale * factor)) < float(found.elbo)


def test_single_precision_and_integer_data_are_fitted_in_double():
    x, y = regression(8)
    exactly = exact.fit(x.float().double(), y, prior_precision=1.0)
    found = exact.fit(x.float(), y.long(), prior_precision=torch.ones(3))
    assert found.loc.dtype is torch.float64
    torch.testing.assert_close(found.loc, exactly.loc)


def test_bad_input_says_what_to_do():
    x, y = regression(9)
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., N, P\) and y \(\.\.\., N\)"):
        exact.fit(x, y[:-1], prior_precision=1.0)
    with pytest.raises(ValueError, match="y must be 0 or 1 everywhere"):
        exact.fit(x, 2 * y - 1, prior_precision=1.0)
    with pytest.raises(ValueError, match="x must be finite, got 1 NaN or Inf"):
        exact.fit(torch.where(x == x.max(), torch.inf, x), y, prior_precision=1.0)
    with pytest.raises(ValueError, match="prior_precision must be > 0"):
        exact.fit(x, y, prior_precision=0.0)
    with pytest.raises(ValueError, match=r"prior_mean must be a number or a tensor that broadcasts to \(3,\)"):
        exact.fit(x, y, prior_precision=1.0, prior_mean=torch.zeros(2))
    with pytest.raises(ValueError, match="prior_mean must be finite"):
        exact.fit(x, y, prior_precision=1.0, prior_mean=math.nan)
    with pytest.raises(TypeError, match=r"x must be a tensor, got ndarray\. Convert with torch\.as_tensor"):
        exact.fit(x.numpy(), y, prior_precision=1.0)
    with pytest.raises(TypeError, match="prior_precision must be a number or a tensor that broadcasts to"):
        exact.fit(x, y, prior_precision={"weight": 1.0})
    with pytest.raises(ValueError, match=r'params must have one tensor, "weight", got \[.w.\]'):
        exact.build(x, y, prior_precision=1.0).init({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match=r'params\["weight"\] must be a number or a tensor that broadcasts to'):
        exact.build(x, y, prior_precision=1.0).init({"weight": torch.zeros(7)})
    with pytest.raises(ValueError, match="family must be one of 'full', 'mean_field', got 'diagonal'"):
        exact.fit(x, y, prior_precision=1.0, family="diagonal")
    with pytest.raises(slangvi.NumericalError, match="the ELBO at the start is not finite"):
        exact.fit(1e200 * x, y, prior_precision=1.0)


def test_too_few_steps_warn_and_return_the_best_found():
    x, y = regression(10)
    with pytest.warns(UserWarning, match=r"exact\.fit stopped after 2 steps at a gradient norm of .*Raise max_steps"):
        found = exact.fit(x, y, prior_precision=1.0, max_steps=2)
    assert found.steps == 2
    assert float(found.gradient_norm) > 1e-8
    assert float(found.elbo) < float(exact.fit(x, y, prior_precision=1.0).elbo)
