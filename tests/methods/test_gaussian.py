"""What mean-field and full Gaussian steps promise alike: their dense oracle, batches of runs, Info, and refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence

from helpers.logistic_runs import (
    METHODS,
    assert_close,
    log_likelihood,
    logistic,
    matrix_of,
    member,
    oracle,
    start,
    tensors,
    unit_prior,
)
from reference import gaussian_step
from slangvi.errors import NumericalError
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def hessians(method, *shape: int) -> torch.Tensor:
    """A sum of Hessians as the method takes it."""
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    whole = root @ root.mT
    return whole if method is METHODS["full"] else whole.diagonal(dim1=-2, dim2=-1)


@methods
@settings(max_examples=15)
@given(
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    P=st.integers(2, 6),
    R=st.integers(1, 8),
    momentum=st.sampled_from([0.0, 0.9]),
    hessian=st.booleans(),
    tied=st.booleans(),
    seed=st.integers(0, 3),
)
def test_whole_steps_equal_the_dense_oracle_for_every_member_of_a_batch(
    method, batch, P, R, momentum, hessian, tied, seed
):
    torch.manual_seed(seed)
    state = start(method, P, batch)
    places = list(torch.cartesian_prod(*(torch.arange(n) for n in batch)).reshape(-1, len(batch))) if batch else [()]
    places = [tuple(int(k) for k in place) for place in places]
    dense = {place: oracle(member(state, place)) for place in places}
    prior = Prior(torch.rand(P).double() + 0.1, torch.randn(P).double())
    options = {"num_data": 20, "prior": prior, "lr": Rate(0.3), "momentum": momentum}
    options |= {} if tied else {"precision_lr": Rate(0.1)}
    for _ in range(3):
        rows = torch.randn(*batch, R, P, dtype=torch.float64)
        curvature = hessians(method, *batch, P) if hessian else None
        state, info = method.update(state, DenseGradients.from_rows(rows), curvature=curvature, **options)
        for place in places:
            given = None if curvature is None else curvature[place]
            given = torch.diag(given) if given is not None and given.ndim == 1 else given
            dense[place] = gaussian_step(
                dense[place],
                rows[place],
                *(20, 0.3, 0.3 if tied else 0.1, prior.precision, prior.mean, momentum),
                hessian=given,
                diagonal=method is METHODS["mean_field"],
            )
            found = member(state, place)
            torch.testing.assert_close(found.loc, dense[place].loc, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(matrix_of(found), dense[place].precision, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(found.momentum, dense[place].momentum, rtol=1e-10, atol=1e-10)
    assert (info.step, info.num_rows, state.step) == (3, R, 3)


@methods
@pytest.mark.parametrize("P", [5, 190])  # matrices of 190×190 are factorised one by one
def test_a_batch_equals_its_members_one_by_one(method, P):
    state = start(method, P, (3,))
    rows = torch.randn(3, 7, P, dtype=torch.float64)
    prior = Prior(torch.rand(3, P).double() + 0.1, torch.randn(3, P).double())
    together, _ = method.update(state, DenseGradients.from_rows(rows), num_data=30, prior=prior, lr=Rate(0.2))
    for k in range(3):
        own = Prior(prior.precision[k], prior.mean[k])
        gradients = DenseGradients.from_rows(rows[k])
        alone, _ = method.update(member(state, k), gradients, num_data=30, prior=own, lr=Rate(0.2))
        assert_close(member(together, k), alone)


@methods
def test_rows_and_curvature_that_all_members_share_need_no_copies(method):
    state = start(method, 4, (2, 3))
    rows, curvature = torch.randn(5, 4, dtype=torch.float64), hessians(method, 4)
    for options in ({}, {"curvature": curvature}):
        shared, _ = method.update(
            state, DenseGradients.from_rows(rows), num_data=9, prior=unit_prior(4), lr=Rate(0.5), **options
        )
        spread = DenseGradients.from_rows(rows.expand(2, 3, 5, 4))
        copied, _ = method.update(state, spread, num_data=9, prior=unit_prior(4), lr=Rate(0.5), **options)
        assert_close(shared, copied, 1e-12)


@methods
@pytest.mark.parametrize("hessian", [False, True])
def test_one_rate_per_tensor_scales_rows_and_columns(method, hessian):
    P = 5
    state = start(method, P)
    dense = oracle(state)
    lr, beta = Rate.of([0.1, 0.2], state.spec, state.loc), Rate.of([0.3, 0.05], state.spec, state.loc)
    for _ in range(3):
        rows = torch.randn(6, P, dtype=torch.float64)
        curvature = hessians(method, P) if hessian else None
        whole = torch.diag(curvature) if hessian and curvature.ndim == 1 else curvature
        options = {"num_data": 9, "prior": unit_prior(P), "lr": lr, "precision_lr": beta, "curvature": curvature}
        state, _ = method.update(state, DenseGradients.from_rows(rows), momentum=0.5, **options)
        diagonal = method is METHODS["mean_field"]
        dense = gaussian_step(dense, rows, 9, lr.value, beta.value, 1.0, 0.0, 0.5, whole, diagonal)
        torch.testing.assert_close(state.loc, dense.loc, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(matrix_of(state), dense.precision, rtol=1e-10, atol=1e-10)


@methods
def test_draws_of_a_batch_have_the_moments_of_each_member(method, within_sigmas, generator):
    state = start(method, 3, (2,))
    draws = method.sample(state, (4, 2500), generator)
    assert draws["a"].shape == (4, 2500, 2, 2)
    assert draws["b"].shape == (4, 2500, 2)
    flat = state.spec.flatten(draws).reshape(10000, 2, 3)
    assert within_sigmas(flat, state.loc)
    centred = flat - state.loc
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    assert within_sigmas(products, method.posterior(state).covariance_matrix)


@methods
def test_the_posterior_draws_what_sample_draws(method):
    state = start(method, 3, (2,))
    expected = state.spec.flatten(method.sample(state, (5,), torch.Generator().manual_seed(1)))
    found = method.posterior(state).sample((5,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@methods
@pytest.mark.parametrize("batch", [(), (3,)])
def test_kl_of_info_and_state_is_that_of_the_distributions(method, batch):
    P = 4
    prior = Prior(torch.rand(P).double() + 0.5, torch.randn(P).double())
    rows = torch.randn(*batch, 6, P, dtype=torch.float64)
    state, info = method.update(
        start(method, P, batch), DenseGradients.from_rows(rows), num_data=6, prior=prior, lr=Rate(0.1)
    )
    expected = kl_divergence(method.posterior(state), Independent(Normal(prior.mean, prior.precision.rsqrt()), 1))
    torch.testing.assert_close(torch.as_tensor(info.kl, dtype=torch.float64), expected)
    assert isinstance(info.kl, torch.Tensor) == bool(batch)
    assert math.isnan(info.loss)


@methods
@pytest.mark.parametrize("curvature", ["ef", "hessian"])
def test_info_tells_fit_and_kl_apart(method, curvature):
    batch = logistic(12, 3)
    vi = method.build(log_likelihood, num_data=30, lr=0.1, mc_samples=2, curvature=curvature)
    state = vi.init({"w": torch.zeros(3, dtype=torch.float64)})
    draws = vi.sample(state, (2,), torch.Generator().manual_seed(0))
    _, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
    values = [float(log_likelihood({"w": w}, batch).mean()) for w in draws["w"]]
    assert math.isclose(info.expected_log_likelihood, 30 * sum(values) / 2, rel_tol=1e-12)
    assert info.loss == -info.expected_log_likelihood
    assert info.elbo.value == info.expected_log_likelihood - info.kl


@methods
def test_temperature_weighs_the_hessian_too(method):
    batch = logistic(12, 3)
    states = []
    for options in ({"num_data": 30, "temperature": 2.0}, {"num_data": 15}):
        vi = method.build(log_likelihood, lr=0.1, curvature="hessian", **options)
        state = vi.init({"w": torch.zeros(3, dtype=torch.float64)})
        states.append(vi.update(state, batch, generator=torch.Generator().manual_seed(0))[0])
    assert_close(*states)


# ---- refusals


@methods
def test_gradients_that_are_not_finite_are_named_and_leave_the_state(method):
    state = start(method, 3, (2,), torch.float32)
    kept = copy.deepcopy(tensors(state))
    for bad in (math.nan, math.inf, 1e30):  # the square of the last overflows
        rows = torch.ones(2, 4, 3)
        rows[1, 2, 2] = bad
        with pytest.raises(NumericalError, match=r"step 1: .* of parameter 'b' is not finite .*member 1 of the batch"):
            method.update(
                state, DenseGradients.from_rows(rows), num_data=4, prior=unit_prior(3, torch.float32), lr=Rate(0.1)
            )
    assert all(torch.equal(value, kept[name]) for name, value in tensors(state).items())


@methods
def test_curvature_that_is_not_finite_is_refused(method):
    state = start(method, 3)
    for bad in (math.nan, math.inf):
        curvature = hessians(method, 3).clone()
        curvature[..., -1] = bad
        rows = DenseGradients.from_rows(torch.ones(2, 3).double())
        with pytest.raises(
            NumericalError, match=r"of parameter '[ab]' is not finite \(1 of [12] entries\)\. The state"
        ):
            method.update(state, rows, num_data=4, prior=unit_prior(3), lr=Rate(0.1), curvature=curvature)


@methods
def test_a_mean_that_overflows_is_refused(method):
    state = method.init({"a": torch.zeros(1)}, init_precision=1e-30)
    prior = Prior(torch.full((1,), 1e-30), torch.zeros(1))
    rows = DenseGradients.from_rows(torch.tensor([[1e12]]))
    options = {"num_data": 1e3, "prior": prior, "lr": Rate(1e38), "precision_lr": Rate(1e-30)}
    with pytest.raises(NumericalError, match="the new mean of parameter 'a'"):
        method.update(state, rows, **options)


@methods
def test_sums_may_overflow_where_no_entry_does(method):
    state = method.init({"a": torch.full((2,), 3e38)})
    rows = DenseGradients.from_rows(torch.zeros(1, 2))
    prior = Prior(torch.full((2,), 1e-6), torch.full((2,), 3e38))
    after, _ = method.update(state, rows, num_data=1, prior=prior, lr=Rate(0.1))
    torch.testing.assert_close(after.loc, state.loc)


@methods
def test_negative_curvature_is_refused_by_name_and_leaves_the_state(method):
    state = start(method, 4, (3,))
    kept = copy.deepcopy(tensors(state))
    curvature = torch.zeros(3, 4, dtype=torch.float64)
    curvature[2, 3] = -1e3
    curvature = torch.diag_embed(curvature) if method is METHODS["full"] else curvature
    rows = DenseGradients.from_rows(torch.ones(3, 2, 4).double())
    with pytest.raises(NumericalError, match=r"parameter 'b'.*unchanged.*curvature=\"ef\"") as error:
        method.update(state, rows, num_data=4, prior=unit_prior(4), lr=Rate(0.5), curvature=curvature)
    assert "not positive" in str(error.value)
    assert "in member 2 of the batch" in str(error.value)
    assert all(torch.equal(value, kept[name]) for name, value in tensors(state).items())


@methods
def test_a_likelihood_that_is_not_log_concave_is_refused_with_the_remedy(method):
    vi = method.build(lambda p, b: 50 * (b * p["w"]).square().sum(1), num_data=3, lr=0.5, curvature="hessian")
    state = vi.init({"w": torch.zeros(2)})
    with pytest.raises(NumericalError, match="step 1: the new precision"):
        vi.update(state, torch.ones(3, 2))
    assert state.step == 0


BAD = {
    "num_data": [(0, ValueError), (2.5, TypeError)],
    "lr": [(0.0, ValueError), (1.5, ValueError)],
    "precision_lr": [(1.5, ValueError)],
    "momentum": [(1.0, ValueError)],
    "mc_samples": [(0, ValueError)],
    "temperature": [(0.0, ValueError)],
    "engine": [("sparse", ValueError)],
    "memory_limit": [(0, ValueError)],
    "curvature": [("fisher", ValueError), (None, ValueError)],
}


@methods
@pytest.mark.parametrize(("name", "value", "error"), [(n, v, e) for n, rows in BAD.items() for v, e in rows])
def test_impossible_arguments_are_named(method, name, value, error):
    with pytest.raises(error, match=name):
        method.build(lambda params, batch: batch, **({"num_data": 10, "lr": 0.1} | {name: value}))


@methods
@pytest.mark.parametrize(("name", "value"), [("prior_precision", 0.0), ("init_precision", -1.0)])
def test_impossible_priors_are_named_at_init(method, name, value):
    vi = method.build(lambda params, batch: batch, num_data=10, lr=0.1, **{name: value})
    with pytest.raises(ValueError, match=name):
        vi.init({"w": torch.zeros(2)})
