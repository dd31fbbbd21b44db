"""Full Gaussian: SLANG with all columns; the Gaussian of the largest ELBO; one factorisation a step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slangvi
from helpers.logistic_runs import logistic, start, unit_prior
from slangvi import full, slang
from slangvi.errors import NumericalError
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("R", [3, 40])
def test_updates_are_those_of_slang_with_all_columns(momentum, R):
    P = 6
    params = {"w": torch.randn(P, dtype=torch.float64)}
    mine, other = full.init(params, 2.0), slang.init(params, P, 2.0)
    prior = Prior(torch.rand(P).double() + 0.5, torch.randn(P).double())
    for _ in range(8):
        rows = DenseGradients.from_rows(torch.randn(R, P, dtype=torch.float64))
        options = {"num_data": 50, "prior": prior, "lr": Rate(0.1), "precision_lr": Rate(0.3), "momentum": momentum}
        mine, _ = full.update(mine, rows, **options)
        other, _ = slang.update(other, rows, **options)
        torch.testing.assert_close(mine.loc, other.loc, rtol=1e-9, atol=1e-9)
        whole = other.prec_factor.T @ other.prec_factor + torch.diag(other.prec_diag)
        torch.testing.assert_close(mine.prec_matrix, whole, rtol=1e-9, atol=1e-9)


def test_the_diagonal_follows_the_mean_field_recursion():
    state, P = start(full, 4), 4
    diag = state.prec_matrix.diagonal().clone()
    for _ in range(4):
        rows = torch.randn(3, P, dtype=torch.float64)
        state, _ = full.update(state, DenseGradients.from_rows(rows), num_data=9, prior=unit_prior(P), lr=Rate(0.2))
        diag = 0.8 * diag + 0.2 * (3 * rows.square().sum(0) + 1)
        torch.testing.assert_close(state.prec_matrix.diagonal(), diag)


def test_the_precision_stays_symmetric():
    state = start(full, 30, (2,))
    for _ in range(20):
        rows = DenseGradients.from_rows(torch.randn(2, 7, 30, dtype=torch.float64))
        state, _ = full.update(state, rows, num_data=9, prior=unit_prior(30), lr=Rate(0.2))
    torch.testing.assert_close(state.prec_matrix, state.prec_matrix.mT, rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_step_and_its_draws_take_one_factorisation(monkeypatch, batch):
    counted = []
    factorise = torch.linalg.cholesky_ex

    def counting(matrix: Tensor, **options: object) -> object:
        counted.append(matrix.shape)
        return factorise(matrix, **options)

    state = start(full, 5, batch)
    assert state.precision is state.precision
    monkeypatch.setattr(torch.linalg, "cholesky_ex", counting)
    for _ in range(3):
        full.sample(state, (4,))
        rows = DenseGradients.from_rows(torch.randn(*batch, 2, 5, dtype=torch.float64))
        state, _ = full.update(state, rows, num_data=9, prior=unit_prior(5), lr=Rate(0.2))
    full.sample(state, (4,))
    assert counted == [(*batch, 5, 5)] * 3


def test_a_state_that_is_not_positive_definite_cannot_be_drawn_from():
    state = full.init({"a": torch.zeros(1), "b": torch.zeros(2)})
    broken = full.State(state.loc, torch.diag(torch.tensor([1.0, 1.0, -1.0])), state.momentum, 4, state.spec)
    with pytest.raises(NumericalError, match=r"step 4: the precision is not positive definite: its leading 3×3.*'b'"):
        full.sample(broken)


def gauss_hermite_fixed_point(x: Tensor, y: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """μ and Λ with Λ = λI + Σ xxᵀ E[p(1−p)] and Xᵀ E[p − y] + λμ = 0, expectations by quadrature."""
    import numpy as np

    nodes, weights = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(64))
    weights = weights / weights.sum()
    mean, precision = x.new_zeros(x.shape[1]), lam * torch.eye(x.shape[1]).double()
    for _ in range(500):
        spread = (x * torch.linalg.solve(precision, x.T).T).sum(1).sqrt()
        p = ((x @ mean)[:, None] + spread[:, None] * nodes).sigmoid()
        precision = lam * torch.eye(len(mean)).double() + x.T @ (x * ((p * (1 - p)) @ weights)[:, None])
        step = torch.linalg.solve(precision, x.T @ (p @ weights - y) + lam * mean)
        mean = mean - 0.5 * step
    assert float(step.abs().max()) < 1e-12
    return mean, precision


def test_logistic_regression_with_hessians_reaches_the_gaussian_of_the_largest_elbo():
    x, y = logistic(60, 3)
    mean, precision = gauss_hermite_fixed_point(x, y, 1.0)
    state, generator = full.init({"w": torch.zeros(3, dtype=torch.float64)}), torch.Generator().manual_seed(0)
    means, precisions = [], []
    for t in range(600):
        p = (full.sample(state, (8,), generator)["w"] @ x.T).sigmoid()
        gradients = LinearPredictorGradients(x, p - y, p * (1 - p))
        rate = Rate(1 / (1 + (t + 1) ** 0.75))
        options = {"num_data": 60, "prior": unit_prior(3), "lr": rate, "curvature": gradients.hessian()}
        state, _ = full.update(state, gradients, **options)
        if t >= 300:
            means.append(state.loc)
            precisions.append(state.prec_matrix)
    # 2400 draws behind the average: a fiftieth of a standard deviation is known of the mean, one per cent of Hessians
    # whose entries each average 480 terms a step.
    error = (torch.stack(means).mean(0) - mean) * torch.linalg.inv(precision).diagonal().rsqrt()
    assert float(error.abs().max()) < 4 / 2400**0.5
    assert float((torch.stack(precisions).mean(0) - precision).abs().max() / precision.abs().max()) < 0.01


def test_the_hessian_makes_conjugate_regression_exact():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    precision = x.T @ x + torch.eye(3).double()

    def gaussian(params, batch):
        return slangvi.Gaussian(1.0).log_prob(batch[0] @ params["w"], batch[1])

    vi = full.build(gaussian, num_data=40, lr=1.0, curvature="hessian")
    state = vi.init({"w": torch.zeros(3, dtype=torch.float64)})
    draw = vi.sample(state, (1,), torch.Generator().manual_seed(0))["w"][0]
    state, info = vi.update(state, (x, y), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(state.prec_matrix, precision)
    # From μ = 0 a Newton step lands at the exact mean, off by how far the gradient at the draw is from that at μ.
    exact = torch.linalg.solve(precision, x.T @ y)
    torch.testing.assert_close(state.loc, exact - torch.linalg.solve(precision, x.T @ x @ draw))
    assert math.isfinite(info.elbo.value)


@pytest.mark.parametrize("engine", ["dense", "factored"])
def test_engines_agree_with_each_other_and_with_the_optimizer(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2
    vi = full.build(slangvi.Categorical().of(model), num_data=20, lr=0.2, engine=engine, curvature="ef")
    state = vi.init({name: p.detach().clone() for name, p in model.named_parameters()})
    for k in range(3):
        state, _ = vi.update(state, (x, y), generator=torch.Generator().manual_seed(k))
    opt = slangvi.FullGaussian(model, num_data=20, lr=0.2, generator=torch.Generator())
    for k in range(3):
        opt.generator.manual_seed(k)
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
        opt.step()
    torch.testing.assert_close(opt.posterior.loc, state.loc, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(opt.posterior.precision_matrix, state.prec_matrix, rtol=1e-9, atol=1e-9)


def test_rounding_that_breaks_a_precision_is_told_apart_from_hessians():
    """An empirical Fisher of rank one that swallows the prior in float32."""
    state = full.init({"w": torch.zeros(40)}, init_precision=1e-12)
    rows = DenseGradients.from_rows(1e3 * torch.rand(3, 40))
    prior = Prior(torch.full((40,), 1e-12), torch.zeros(40))
    with pytest.raises(NumericalError, match='If it is "ef" already, rounding did this: use float64'):
        full.update(state, rows, num_data=1e6, prior=prior, lr=Rate(0.5))


def test_predictions_come_from_the_posterior():
    model = nn.Linear(3, 2)
    opt = slangvi.FullGaussian(model, num_data=10, lr=0.1, init_precision=100.0)
    x = torch.randn(5, 3)
    logits = slangvi.functional_samples(model, opt.posterior, x, 2000, generator=torch.Generator().manual_seed(0))
    error = (logits.mean(0) - model(x).detach()) / logits.std(0) * 2000**0.5
    assert float(error.abs().max()) < 4
    expected = 0.01 * (x.square().sum(1) + 1)
    torch.testing.assert_close(logits.var(0), expected[:, None].expand(5, 2), rtol=0.2, atol=0)
