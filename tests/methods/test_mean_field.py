"""Mean field: SLANG without a low-rank part, exactly; the fixed points it must reach; the optimizer VOGN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.logistic_runs import log_likelihood, logistic, unit_prior
from slangvi import mean_field, slang
from slangvi.rows import DenseGradients
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_slang_without_columns(momentum, dtype):
    params = {"w": torch.randn(5, dtype=dtype)}
    mine, other = mean_field.init(params, 2.0), slang.init(params, 0, 2.0)
    rounding = 20 * torch.finfo(dtype).eps
    for _ in range(5):
        rows = DenseGradients.from_rows(torch.randn(7, 5, dtype=dtype))
        options = {"num_data": 20, "prior": unit_prior(5, dtype), "lr": Rate(0.1), "precision_lr": Rate(0.3)}
        mine, _ = mean_field.update(mine, rows, momentum=momentum, **options)
        other, _ = slang.update(other, rows, momentum=momentum, **options)
        for name in ("loc", "prec_diag", "momentum"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), rtol=rounding, atol=0)


def test_whole_runs_are_those_of_slang_without_columns():
    options = {"num_data": 40, "lr": lambda t: 0.5 / t, "mc_samples": 3, "momentum": 0.5, "prior_precision": 2.0}
    batch = logistic(12, 4)
    states = []
    for vi in (mean_field.build(log_likelihood, **options), slang.build(log_likelihood, rank=0, **options)):
        state, generator = vi.init({"w": torch.zeros(4, dtype=torch.float64)}), torch.Generator().manual_seed(0)
        for _ in range(5):
            state, _ = vi.update(state, batch, generator=generator)
        states.append(state)
    torch.testing.assert_close(states[0].loc, states[1].loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[0].prec_diag, states[1].prec_diag, rtol=1e-12, atol=1e-12)


def test_the_posterior_is_diagonal_and_knows_the_layout():
    state = mean_field.init({"w": torch.ones(2), "b": torch.zeros(())}, init_precision=4.0)
    q = mean_field.posterior(state)
    assert isinstance(q, slangvi.LowRankPrecisionNormal)
    assert q.prec_factor.shape == (3, 0)
    assert q.param_spec is state.spec
    torch.testing.assert_close(q.covariance_matrix, torch.eye(3) / 4)


def test_the_hessian_makes_conjugate_regression_exact():
    """The best diagonal Gaussian for a Gaussian posterior has its mean, and the diagonal of its precision."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    precision = x.T @ x + torch.eye(3).double()
    state, generator = mean_field.init({"w": torch.zeros(3, dtype=torch.float64)}), torch.Generator().manual_seed(0)
    rate, late = slangvi.inverse_time(1.0, 0.6), []
    for t in range(300):
        slopes = mean_field.sample(state, (8,), generator)["w"] @ x.T - y
        gradients = LinearPredictorGradients(x, slopes, torch.ones_like(slopes))
        options = {"num_data": 40, "prior": unit_prior(3), "lr": Rate(rate(t + 1))}
        state, _ = mean_field.update(state, gradients, curvature=gradients.hessian_diag(), **options)
        late += [state.loc] if t >= 150 else []
    torch.testing.assert_close(state.prec_diag, precision.diagonal(), rtol=1e-6, atol=0)
    # Draws move the mean by a full precision over its diagonal each; 1200 of them are averaged.
    error = (torch.stack(late).mean(0) - torch.linalg.solve(precision, x.T @ y)) * precision.diagonal().sqrt()
    assert float(error.abs().max()) < 4 / 1200**0.5


def test_vogn_steps_are_those_of_slang_without_columns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    options = {"num_data": 40, "lr": 0.1, "prior_precision": {"*.bias": 0.1, "*": 1.0}}
    one = slangvi.VOGN(model, generator=torch.Generator().manual_seed(1), **options)
    two = slangvi.SLANG(twin, rank=0, momentum=0.0, generator=torch.Generator().manual_seed(1), **options)
    for opt in (one, two):
        for _ in range(3):
            with opt.sampled_params(train=True):
                F.cross_entropy(opt.model(x), y).backward()
            opt.step()
    torch.testing.assert_close(one.posterior.loc, two.posterior.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.posterior.variance, two.posterior.variance, rtol=1e-12, atol=1e-12)
    assert one.kl() == pytest.approx(two.kl(), rel=1e-12)
