"""SLANG-OnlineEig against a dense, slow version of its equations, and what its columns must not depend on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import slangvi
from slangvi.methods import mean_field, online_eig
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate

TENSORS = ("loc", "prec_factor", "prec_diag", "momentum")


def start(params, rank, seed=0, lead=()):
    """A state in the middle of training."""
    source = torch.Generator().manual_seed(seed)
    state = online_eig.init({"a": torch.zeros(2).double(), "b": torch.zeros(params - 2).double()}, rank)
    shapes = {"loc": (params,), "prec_factor": (rank, params), "prec_diag": (params,), "momentum": (params,)}
    made = {name: torch.randn(*lead, *shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}
    made["prec_diag"] = made["prec_diag"].exp()
    return replace(state, **made, step=3)


def rows_of(count, params, seed=1, lead=()):
    source = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -2, params, dtype=torch.float64)
    return scale * torch.randn(*lead, count, params, generator=source, dtype=torch.float64)


def prior_of(params):
    return Prior(torch.linspace(0.5, 2.0, params).double(), torch.linspace(-1.0, 1.0, params).double())


def dense_step(state, rows, num_data, prior, alpha, beta, gamma=0.9):
    """The equations as they are written, with every permutation and sign tried."""
    weight, rank = num_data / len(rows), len(state.prec_factor)
    prior_matrix = prior.precision.diag() + (0 if prior.factor is None else prior.factor.mT @ prior.factor)
    curvature = weight * rows.mT @ rows + prior_matrix - prior.precision.diag()
    values, vectors = torch.linalg.eigh(curvature)
    values = torch.where(values > 1e-12 * values[-1], values, 0.0)  # roots of rounding errors would be large
    fresh = (vectors * values.sqrt()).mT.flip(0)[:rank]
    fresh = torch.cat([fresh, fresh.new_zeros(rank - len(fresh), rows.shape[1])])
    candidates = [
        torch.tensor(signs).double()[:, None] * fresh[list(order)]
        for order in itertools.permutations(range(rank))
        for signs in itertools.product((1.0, -1.0), repeat=rank)
    ]
    nearest = min(candidates, key=lambda rows: float((state.prec_factor - rows).square().sum()))
    factor = (1 - beta) * state.prec_factor + beta * nearest
    rest = curvature.diagonal() - fresh.square().sum(0)
    diag = (1 - beta) * state.prec_diag + beta * (rest + prior.precision)
    average = gamma * state.momentum + (1 - gamma) * weight * rows.sum(0)
    gradient = average / (1 - gamma ** (state.step + 1)) + prior_matrix @ (state.loc - prior.mean)
    loc = state.loc - alpha * torch.linalg.solve(factor.mT @ factor + diag.diag(), gradient)
    return {"loc": loc, "prec_factor": factor, "prec_diag": diag, "momentum": average}, values.flip(0)


@pytest.mark.parametrize(("count", "params", "rank"), [(4, 7, 2), (9, 5, 3), (6, 6, 1), (2, 6, 4), (7, 4, 0)])
def test_a_step_is_the_written_equations(count, params, rank):
    state, rows, prior = start(params, rank), rows_of(count, params), prior_of(params)
    wanted, values = dense_step(state, rows, 50, prior, 0.1, 0.3)
    after, info = online_eig.update(
        state, DenseGradients.from_rows(rows), num_data=50, prior=prior, lr=Rate(0.1), precision_lr=Rate(0.3)
    )
    for name in TENSORS:
        torch.testing.assert_close(getattr(after, name), wanted[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(info.spectrum[:count], values[:rank][:count], rtol=1e-9, atol=1e-9)
    assert float(info.total) == pytest.approx(float(values.sum()))
    assert (after.step, info.step, info.num_rows) == (4, 4, count)


@pytest.mark.parametrize(("count", "params", "rank", "columns"), [(4, 7, 2, 2), (9, 5, 3, 1), (2, 6, 4, 3)])
def test_columns_of_a_prior_count_as_curvature(count, params, rank, columns):
    state, rows, plain = start(params, rank), rows_of(count, params), prior_of(params)
    prior = replace(plain, factor=rows_of(columns, params, seed=2))
    wanted, values = dense_step(state, rows, 50, prior, 0.1, 0.3)
    after, info = online_eig.update(
        state, DenseGradients.from_rows(rows), num_data=50, prior=prior, lr=Rate(0.1), precision_lr=Rate(0.3)
    )
    for name in TENSORS:
        torch.testing.assert_close(getattr(after, name), wanted[name], rtol=1e-9, atol=1e-9)
    assert float(info.total) == pytest.approx(float(values.sum()))


def test_rates_may_differ_between_parameters():
    state, rows, prior = start(6, 2), rows_of(4, 6), prior_of(6)
    alpha, beta = (Rate.of(values, state.spec, state.loc) for values in ([0.1, 0.4], [0.2, 0.6]))
    wanted, _ = dense_step(state, rows, 50, prior, alpha.value, beta.value)
    after, _ = online_eig.update(
        state, DenseGradients.from_rows(rows), num_data=50, prior=prior, lr=alpha, precision_lr=beta
    )
    for name in TENSORS:
        torch.testing.assert_close(getattr(after, name), wanted[name], rtol=1e-9, atol=1e-9)


def test_order_and_signs_of_the_columns_do_not_matter():
    state, rows, prior = start(8, 3), DenseGradients.from_rows(rows_of(5, 8)), prior_of(8)
    turn = torch.tensor([[0.0, -1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]).double()
    turned = replace(state, prec_factor=turn @ state.prec_factor)
    settings = {"num_data": 50, "prior": prior, "lr": Rate(0.2)}
    plain, _ = online_eig.update(state, rows, **settings)
    other, _ = online_eig.update(turned, rows, **settings)
    torch.testing.assert_close(turn @ plain.prec_factor, other.prec_factor)
    torch.testing.assert_close(plain.loc, other.loc)


def test_rank_zero_is_mean_field():
    state, rows, prior = start(6, 0), DenseGradients.from_rows(rows_of(4, 6)), prior_of(6)
    settings = {"num_data": 50, "prior": prior, "lr": Rate(0.2), "momentum": 0.9}
    ours, _ = online_eig.update(state, rows, **settings)
    diagonal = mean_field.State(state.loc, state.prec_diag, state.momentum, 3, state.spec)
    theirs, _ = mean_field.update(diagonal, rows, **settings)
    torch.testing.assert_close(ours.loc, theirs.loc)
    torch.testing.assert_close(ours.prec_diag, theirs.prec_diag)


def test_curvature_that_does_not_change_is_found_in_the_end():
    """With the same rows in every step the columns settle on its eigenvectors, and nothing is lost with all of them."""
    rows, prior = rows_of(3, 6), Prior(torch.ones(6).double(), torch.zeros(6).double())
    state = online_eig.init({"w": torch.zeros(6).double()}, 3)
    for _ in range(60):
        state, info = online_eig.update(
            state, DenseGradients.from_rows(rows), num_data=30, prior=prior, lr=Rate(1e-3), precision_lr=Rate(0.5)
        )
    precision = 10 * rows.mT @ rows + torch.eye(6).double()
    torch.testing.assert_close(online_eig.posterior(state).precision_matrix, precision, rtol=1e-9, atol=1e-9)
    assert info.captured == pytest.approx(1.0)
    assert info.rank_used == 3


@pytest.mark.parametrize(("count", "params", "rank"), [(5, 9, 2), (9, 5, 2), (80, 90, 3), (12, 20, 7)])
def test_a_batch_equals_its_members_alone(count, params, rank):
    """Routes by the Gram, by parameters, by iteration, and with more columns than permutations can be tried for."""
    state, x = start(params, rank, lead=(2, 3)), rows_of(count, params, lead=(2, 3))
    slopes = torch.randn(2, 3, 4, count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    settings = {"num_data": 200, "prior": prior_of(params), "lr": Rate(0.1)}
    together, info = online_eig.update(state, LinearPredictorGradients(x, slopes), **settings)
    assert info.total.shape == info.residual.shape == (2, 3)
    assert info.spectrum.shape == (2, 3, rank)
    for i, j in itertools.product(range(2), range(3)):
        single = replace(state, **{name: getattr(state, name)[i, j] for name in TENSORS})
        formed = (slopes[i, j, :, :, None] * x[i, j]).flatten(0, 1)
        for gradients in (LinearPredictorGradients(x[i, j], slopes[i, j]), DenseGradients.from_rows(formed)):
            alone, _ = online_eig.update(single, gradients, **settings)
            tolerance = 1e-10 if isinstance(gradients, LinearPredictorGradients) else 1e-6
            for name in TENSORS:
                torch.testing.assert_close(
                    getattr(together, name)[i, j], getattr(alone, name), rtol=tolerance, atol=tolerance
                )


def test_iterated_pairs_equal_the_full_decomposition():
    """Members that converge, and one whose eigenvalues lie too close together to do so."""
    rows = rows_of(90, 120, lead=(3,)) * torch.logspace(0, -3, 120, dtype=torch.float64)
    rows[1] = torch.linalg.qr(rows[1].mT).Q.mT * (1 + 1e-3 * torch.arange(90.0)[:, None])
    fresh, pairs = online_eig.scaled_eigenvectors(
        LinearPredictorGradients(rows, torch.ones(3, 1, 90).double()), 2.0, rows[:, :4]
    )
    values, vectors = torch.linalg.eigh(2.0 * rows @ rows.mT)
    torch.testing.assert_close(pairs.values, values[..., -4:].flip(-1))
    dense = (vectors[..., -4:].flip(-1).mT @ rows) * 2.0**0.5
    torch.testing.assert_close(fresh * (fresh * dense).sum(-1, keepdim=True).sign(), dense, rtol=1e-5, atol=1e-5)
    assert float(pairs.residual[1]) == 0.0
    assert float(pairs.residual[0]) > 0.0
    alone, single = online_eig.scaled_eigenvectors(DenseGradients.from_rows(rows[1]), 2.0, rows[1, :4])
    torch.testing.assert_close(single.values, pairs.values[1])
    torch.testing.assert_close(alone.square().sum(0), fresh[1].square().sum(0), rtol=1e-6, atol=1e-6)


def test_matched_rows_lie_closest():
    source = torch.Generator().manual_seed(3)
    old, fresh = (torch.randn(4, 5, generator=source) for _ in range(2))
    found = online_eig.matched(fresh, old)
    distances = [
        float((old - torch.tensor(signs)[:, None] * fresh[list(order)]).square().sum())
        for order in itertools.permutations(range(4))
        for signs in itertools.product((1.0, -1.0), repeat=4)
    ]
    assert float((old - found).square().sum()) == pytest.approx(min(distances), rel=1e-5)
    assert torch.equal(online_eig.matched(fresh, torch.zeros(4, 5)), fresh)


def test_what_is_not_finite_is_refused_and_the_state_kept():
    state, prior = start(6, 2), prior_of(6)
    kept = {name: getattr(state, name).clone() for name in TENSORS}
    rows = rows_of(4, 6)
    settings = {"num_data": 50, "prior": prior, "lr": Rate(0.2)}
    with pytest.raises(slangvi.NumericalError, match="the gradient of parameter 'b' is not finite"):
        online_eig.update(state, DenseGradients.from_rows(rows.index_fill(1, torch.tensor([3]), torch.nan)), **settings)
    with pytest.raises(slangvi.NumericalError, match=r"step 4: .* not finite"):
        online_eig.update(state, DenseGradients.from_rows(rows * 1e154), **settings)
    with pytest.raises(slangvi.NumericalError, match="the new mean of parameter 'a' is not finite"):
        online_eig.update(
            state, DenseGradients.from_rows(rows), num_data=50, prior=prior, lr=Rate(torch.inf), precision_lr=Rate(0.1)
        )
    assert all(torch.equal(getattr(state, name), value) for name, value in kept.items())


def test_the_optimizer_takes_the_same_steps_by_either_engine():
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randint(2, (12,))
    finals = []
    for engine in ("factored", "dense"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        opt = slangvi.OnlineEig(
            model, num_data=12, rank=2, lr=0.1, engine=engine, generator=torch.Generator().manual_seed(5)
        )
        for _ in range(4):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                nn.functional.cross_entropy(model(x.double()), y).backward()
            opt.step()
        finals.append(opt.posterior)
        assert opt.param_groups[0]["momentum"] == 0.9
        assert opt.kl() > 0
    torch.testing.assert_close(finals[0].loc, finals[1].loc, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(finals[0].precision_matrix, finals[1].precision_matrix, rtol=1e-8, atol=1e-8)
    again = slangvi.OnlineEig(model, num_data=12, rank=2, generator=torch.Generator())
    again.load_state_dict(opt.state_dict())
    assert torch.equal(again.posterior.loc, opt.posterior.loc)


def test_bad_arguments_say_what_to_do():
    with pytest.raises(ValueError, match=r"rank must be ≥ 0, got -1\. 0 keeps the diagonal only"):
        slangvi.OnlineEig(nn.Linear(2, 2), num_data=3, rank=-1)
    with pytest.raises(TypeError, match="rank must be a whole number"):
        online_eig.build(lambda params, batch: batch, num_data=3, rank=1.5, lr=0.1)
    with pytest.raises(ValueError, match="curvature must be one of 'ef', 'ggn', 'fisher'"):
        slangvi.OnlineEig(nn.Linear(2, 2), num_data=3, curvature="gnn")
