"""Expectations under a normal distribution against adaptive integration, closed forms and autograd."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slangvi
from slangvi import quadrature
from slangvi.quadrature import normal_expectation, softplus_expectations

integrate = pytest.importorskip("scipy.integrate")
special = pytest.importorskip("scipy.special")


def softplus_derivative(order):
    def value(f):
        p, q = special.expit(f), special.expit(-f)
        return (np.logaddexp(0, f), p, p * q, p * q * (q - p), p * q * (1 - 6 * p * q))[order]

    return value


def integral(function, mean, scale):
    """E[function(f)] by adaptive integration, cut where the function bends and where the density lives."""
    low, high = mean - 10 * scale, mean + 10 * scale
    cuts = sorted({low, high, *(c for c in (-30.0, -8.0, 0.0, 8.0, 30.0, mean) if low < c < high)})

    def integrand(f):
        return function(f) * math.exp(-0.5 * ((f - mean) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))

    parts = [
        integrate.quad(integrand, a, b, epsabs=1e-13, epsrel=1e-12, limit=200)[0] for a, b in itertools.pairwise(cuts)
    ]
    return math.fsum(parts)


@pytest.mark.parametrize("scale", [0.01, 0.6, 1.0, 1.001, 1.7, 5.0, 40.0, 1000.0])
@pytest.mark.parametrize("mean", [0.0, -0.7, 6.0, -45.0])
def test_softplus_expectations_equal_adaptive_integrals(mean, scale):
    got = softplus_expectations(
        torch.tensor(mean, dtype=torch.float64), torch.tensor(scale**2, dtype=torch.float64), orders=5
    )
    wanted = [integral(softplus_derivative(order), mean, scale) for order in range(5)]
    np.testing.assert_allclose(got[:3].numpy(), wanted[:3], rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(got[3:].numpy(), wanted[3:], atol=5e-12)


def test_moments_of_polynomials_are_exact():
    mean, variance = torch.tensor([0.5, -2.0], dtype=torch.float64), torch.tensor([0.3, 4.0], dtype=torch.float64)
    got = normal_expectation(lambda f: f**4, mean, variance, nodes=3)
    torch.testing.assert_close(got, mean**4 + 6 * mean**2 * variance + 3 * variance**2)


def test_gauss_hermite_agrees_with_the_grid_where_both_hold():
    mean, variance = torch.linspace(-5, 5, 11).double(), torch.tensor(1.2, dtype=torch.float64)
    hermite = normal_expectation(lambda f: -torch.nn.functional.logsigmoid(-f), mean, variance)
    torch.testing.assert_close(softplus_expectations(mean, variance)[0], hermite, rtol=0, atol=1e-13)


@given(lead=st.lists(st.integers(1, 3), max_size=2), columns=st.integers(1, 4), orders=st.integers(1, 5))
def test_shapes_broadcast_and_entries_do_not_mix(lead, columns, orders):
    generator = torch.Generator().manual_seed(columns)
    mean = torch.randn(*lead, columns, generator=generator, dtype=torch.float64)
    variance = 3 * torch.rand(columns, generator=generator, dtype=torch.float64)
    got = softplus_expectations(mean, variance, orders)
    assert got.shape == (orders, *lead, columns)
    alone = softplus_expectations(mean.reshape(-1, columns)[-1, -1], variance[-1], orders)
    torch.testing.assert_close(got.reshape(orders, -1)[:, -1], alone, rtol=1e-13, atol=1e-13)
    assert normal_expectation(torch.sin, mean, variance).shape == (*lead, columns)


def test_derivatives_by_mean_and_variance_are_the_higher_orders():
    mean = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([0.5, 9.0], dtype=torch.float64, requires_grad=True)
    value, slope, curvature = softplus_expectations(mean, variance)
    by_mean, by_variance = torch.autograd.grad(value.sum(), (mean, variance))
    torch.testing.assert_close(by_mean, slope.detach())
    torch.testing.assert_close(by_variance, 0.5 * curvature.detach())


@pytest.mark.parametrize("variance", [0.5, 9.0])
def test_a_first_call_in_inference_mode_does_not_spoil_later_gradients(variance):
    quadrature._hermite.cache_clear()
    quadrature._remainder.cache_clear()
    spread = torch.tensor([variance])
    with torch.inference_mode():
        expected = softplus_expectations(torch.zeros(1), spread)[1].tolist()
    mean = torch.zeros(1, requires_grad=True)
    softplus_expectations(mean, spread, orders=3)[0].sum().backward()
    assert mean.grad.tolist() == pytest.approx(expected)


def test_single_precision_stays_single_and_whole_numbers_become_floats():
    value = softplus_expectations(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 30.0]))
    assert value.dtype is torch.float32
    exact = softplus_expectations(
        torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.5, 30.0], dtype=torch.float64)
    )
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    assert normal_expectation(torch.square, torch.tensor(1), torch.tensor(4)).item() == pytest.approx(5.0)


def test_a_wide_normal_gives_half_a_ramp_and_no_variance_gives_the_function():
    wide = softplus_expectations(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1e12, dtype=torch.float64))
    assert wide[0].item() == pytest.approx(1e6 / math.sqrt(2 * math.pi))
    assert wide[1].item() == pytest.approx(0.5)
    point = softplus_expectations(torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    assert point.tolist() == pytest.approx(
        [math.log1p(math.exp(2)), special.expit(2), special.expit(2) * special.expit(-2)]
    )


def test_bad_arguments_say_what_to_do():
    with pytest.raises(TypeError, match="mean must be a tensor of real numbers, got float"):
        softplus_expectations(0.0, torch.ones(()))
    with pytest.raises(TypeError, match="variance must be a tensor of real numbers, got float"):
        normal_expectation(torch.square, torch.zeros(()), 1.0)
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"variance must be ≥ 0, got -1\. Clamp"):
        normal_expectation(torch.sin, one, -one)
    with pytest.raises(ValueError, match="nodes must be at most 200"):
        normal_expectation(torch.sin, one, one, nodes=201)
    with pytest.raises(ValueError, match="nodes must be ≥ 1"):
        normal_expectation(torch.sin, one, one, nodes=0)
    with pytest.raises(ValueError, match="orders must be 1 to 5"):
        softplus_expectations(one, one, orders=6)


# ---- Bernoulli ----


@pytest.mark.parametrize("scale", [0.3, 3.0, 60.0])
def test_bernoulli_expectations_equal_integrals(scale):
    likelihood, mean, variance = slangvi.Bernoulli(), 1.3, scale**2
    m, v = torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64)
    for y, sign in ((1.0, 1), (0.0, -1)):
        target = torch.tensor(y, dtype=torch.float64)
        expected = integral(lambda f, s=sign: special.log_expit(s * f), mean, scale)
        assert likelihood.expected_log_prob(m, v, target).item() == pytest.approx(expected, rel=1e-12)
        probability = integral(lambda f, s=sign: special.expit(s * f), mean, scale)
        assert likelihood.predictive_log_prob(m, v, target).item() == pytest.approx(math.log(probability), rel=1e-12)
    assert likelihood.predictive_from_moments(m, v).item() == pytest.approx(
        integral(special.expit, mean, scale), rel=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variance", [0.0, 0.5, 4.0])
def test_predictive_log_prob_is_not_cut_off_where_the_probability_underflows(dtype, variance):
    mean = torch.tensor([-100.0, -2000.0], dtype=dtype, requires_grad=True)
    got = slangvi.Bernoulli().predictive_log_prob(mean, torch.full_like(mean, variance), torch.ones(2))
    # Far out σ(f) is eᶠ, whose expectation is e^(m + v/2); its lower bound has no v.
    assert bool((got <= mean + variance / 2 + 1e-3).all())
    assert bool((got >= mean - 1e-3).all())
    (slope,) = torch.autograd.grad(got.sum(), mean)
    assert slope.tolist() == pytest.approx([1.0, 1.0], rel=1e-3)


def test_predictive_log_prob_is_finite_and_above_its_bound_far_out():
    likelihood = slangvi.Bernoulli()
    mean, variance = (
        torch.tensor([-500.0, -90.0, -50.0], dtype=torch.float64),
        torch.tensor([9.0, 4.0, 0.25], dtype=torch.float64),
    )
    got = likelihood.predictive_log_prob(mean, variance, torch.ones(3))
    assert torch.isfinite(got).all()
    assert (got >= likelihood.expected_log_prob(mean, variance, torch.ones(3)) - 1e-9).all()
    assert got[2].item() == pytest.approx(-50 + 0.125)
    with pytest.raises(ValueError, match="targets must be 0 or 1"):
        likelihood.predictive_log_prob(mean, variance, torch.full((3,), 0.5))
