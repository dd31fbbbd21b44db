"""SLANG for several problems in lockstep: what single calls give, one by one, and what the dense oracle says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import DenseState, dense_step
from slangvi import NumericalError, slang
from slangvi.linalg import topk
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate

NUM_DATA = 50.0
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
NAMES = ("loc", "prec_factor", "prec_diag", "momentum")


def randn(*shape: int, source: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def start(batch: tuple[int, ...], P: int, rank: int, source: torch.Generator) -> slang.State:
    """A state that has seen a few steps: all of its tensors differ from member to member."""
    spec = slang.init({"w": torch.zeros(P, dtype=torch.float64)}, 0).spec
    diag = torch.rand(*batch, P, generator=source, dtype=torch.float64) + 0.5
    momentum = randn(*batch, P, source=source)
    return slang.State(randn(*batch, P, source=source), randn(*batch, rank, P, source=source), diag, momentum, 4, spec)


def members(state: slang.State) -> list[slang.State]:
    """One single state for each member of the batch."""
    lead, count = state.loc.ndim - 1, state.loc.shape[:-1].numel()
    parts = [getattr(state, name).reshape(count, *getattr(state, name).shape[lead:]) for name in NAMES]
    return [slang.State(*tensors, state.step, state.spec) for tensors in zip(*parts, strict=True)]


def assert_same(batch: slang.State, singles: list[slang.State]) -> None:
    """All but the factor itself, whose rows may be turned."""
    for one, single in zip(members(batch), singles, strict=True):
        torch.testing.assert_close(one.loc, single.loc, **CLOSE)
        torch.testing.assert_close(one.prec_diag, single.prec_diag, **CLOSE)
        torch.testing.assert_close(one.momentum, single.momentum, **CLOSE)
        torch.testing.assert_close(
            one.prec_factor.T @ one.prec_factor, single.prec_factor.T @ single.prec_factor, **CLOSE
        )


@contextmanager
def solved_by(way: str) -> Iterator[None]:
    """Eigenproblems of any size decomposed in full, or iterated from the previous factor wherever that is possible."""

    def pays(size: int, count: int) -> bool:
        return way == "iterated" and count > 0 and size > count + topk.OVERSAMPLING

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "iteration_pays", pays)
        yield


def advance(state: slang.State, gradients: object, prior: Prior, **options: object) -> tuple[slang.State, slang.Info]:
    return slang.update(state, gradients, num_data=NUM_DATA, prior=prior, **({"lr": Rate(0.1)} | options))


@pytest.mark.parametrize("way", ["in full", "iterated"])
@settings(max_examples=60)
@given(
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    P=st.integers(1, 14),
    extra=st.integers(-14, 3),
    M=st.integers(1, 6),
    S=st.integers(1, 3),
    beta=st.sampled_from([0.001, 0.05, 0.5]),
    seed=st.integers(0, 1000),
)
def test_a_batch_equals_single_calls_and_the_dense_oracle(way, batch, P, extra, M, S, beta, seed):
    source = torch.Generator().manual_seed(seed)
    rank = max(0, P + extra)
    state = start(batch, P, rank, source)
    prior = Prior(torch.rand(P, generator=source, dtype=torch.float64) + 0.5, randn(P, source=source))
    singles = members(state)
    dense = [DenseState(s.loc, s.prec_factor.T @ s.prec_factor, s.prec_diag, s.momentum, s.step) for s in singles]
    rates = {"lr": Rate(0.1), "precision_lr": Rate(beta), "momentum": 0.7}
    for _ in range(2):
        x, slopes = randn(*batch, M, P, source=source), randn(*batch, S, M, source=source)
        rows = (slopes.unsqueeze(-1) * x.unsqueeze(-3)).flatten(-3, -2).reshape(-1, S * M, P)
        with solved_by(way):
            state, info = advance(state, LinearPredictorGradients(x, slopes), prior, **rates)
        with solved_by("in full"):
            told = [advance(s, DenseGradients.from_rows(g), prior, **rates) for s, g in zip(singles, rows, strict=True)]
        dense = [
            dense_step(d, g, rank, NUM_DATA, 0.1, beta, prior.precision, prior.mean, 0.7)
            for d, g in zip(dense, rows, strict=True)
        ]
        singles = [single for single, _ in told]
        assert_same(state, singles)
        for one, oracle in zip(members(state), dense, strict=True):
            torch.testing.assert_close(one.loc, oracle.loc, **CLOSE)
            torch.testing.assert_close(one.prec_diag, oracle.diag, **CLOSE)
            torch.testing.assert_close(one.prec_factor.T @ one.prec_factor, oracle.low, **CLOSE)
        assert_told(info, [single for _, single in told], batch, rank)


def assert_told(info: slang.Info, singles: list[slang.Info], batch: tuple[int, ...], rank: int) -> None:
    """Numbers of a batch are tensors, those of a single run are numbers."""
    assert info.step == singles[0].step
    assert info.num_rows == singles[0].num_rows
    assert info.spectrum.shape == (*batch, rank)
    assert info.total.shape == info.residual.shape == info.clipped.shape == batch
    stacked = torch.stack([single.spectrum for single in singles]).reshape(*batch, rank)
    torch.testing.assert_close(info.spectrum, stacked, rtol=1e-9, atol=1e-9)
    for name in ("total", "captured", "kl"):
        expected = torch.tensor([float(getattr(single, name)) for single in singles], dtype=torch.float64)
        value = torch.as_tensor(getattr(info, name), dtype=torch.float64)
        torch.testing.assert_close(value, expected.reshape(batch), rtol=1e-9, atol=1e-9)
    used = torch.as_tensor(info.rank_used)
    assert used.shape == batch
    assert int(used.max()) <= rank
    if not batch:
        assert isinstance(info.captured, float)
        assert isinstance(info.rank_used, int)
        assert isinstance(info.elbo.kl, float)


@pytest.mark.parametrize("way", ["in full", "iterated"])
@pytest.mark.parametrize("P", [3, 12])
def test_formed_rows_can_be_a_batch_too(P, way):
    source = torch.Generator().manual_seed(0)
    state, rows = start((3,), P, 2, source), randn(3, 4, P, source=source)
    prior = Prior(torch.ones(P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64))
    with solved_by(way):
        new, _ = advance(state, DenseGradients.from_rows(rows), prior)
    singles = [advance(s, DenseGradients.from_rows(g), prior)[0] for s, g in zip(members(state), rows, strict=True)]
    assert_same(new, singles)


@pytest.mark.parametrize("way", ["in full", "iterated"])
@pytest.mark.parametrize("P", [4, 12])
def test_rates_may_differ_by_tensor_and_priors_by_member(P, way):
    source = torch.Generator().manual_seed(1)
    spec = slang.init({"a": torch.zeros(1), "b": torch.zeros(P - 1)}, 0).spec
    begun = start((2,), P, 2, source)
    state = slang.State(begun.loc, begun.prec_factor, begun.prec_diag, begun.momentum, 3, spec)
    precision, mean = torch.rand(2, P, generator=source, dtype=torch.float64) + 0.1, randn(2, P, source=source)
    x, slopes = randn(2, 3, P, source=source), randn(2, 2, 3, source=source)
    rates = {"lr": Rate.of([0.1, 0.3], spec, state.loc), "precision_lr": Rate.of([0.02, 0.2], spec, state.loc)}
    with solved_by(way):
        new, _ = advance(state, LinearPredictorGradients(x, slopes), Prior(precision, mean), **rates)
    singles = [
        advance(s, LinearPredictorGradients(x[k], slopes[k]), Prior(precision[k], mean[k]), **rates)
        for k, s in enumerate(members(state))
    ]
    assert_same(new, [single for single, _ in singles])


@pytest.mark.parametrize(("P", "M", "rank"), [(20, 40, 1), (40, 48, 3), (60, 12, 4)])
def test_long_runs_that_iterate_stay_with_single_runs(P, M, rank):
    """Logistic regression with falling rates: eigenvectors iterated from the previous factor, by either matrix."""
    source, K, S, N = torch.Generator().manual_seed(0), 3, 4, 200
    x = randn(K, N, P, source=source) * torch.logspace(0, -1, P, dtype=torch.float64)
    y = (x.sum(-1) + randn(K, N, source=source) > 0).double()
    prior = Prior(torch.ones(P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64))
    state = slang.init({"w": torch.zeros(P, dtype=torch.float64)}, rank)
    state = slang.State(*(getattr(state, name).expand(K, *getattr(state, name).shape) for name in NAMES), 0, state.spec)
    singles, followed = members(state), 0
    for t in range(1, 61):
        pick = torch.randint(N, (M,), generator=source)
        thetas = state.loc + 0.1 * randn(S, K, P, source=source)
        slopes = (thetas.transpose(0, 1) @ x[:, pick].mT).sigmoid() - y[:, pick].unsqueeze(-2)
        rate = {"lr": Rate(0.02 / t)}
        with solved_by("iterated"):
            state, info = advance(state, LinearPredictorGradients(x[:, pick], slopes), prior, **rate)
        followed += int((info.residual > 0).sum())
        assert float(info.residual.max()) <= 1e-11
        with solved_by("in full"):
            parts = [LinearPredictorGradients(x[k, pick], slopes[k]) for k in range(K)]
            singles = [advance(s, g, prior, **rate)[0] for s, g in zip(singles, parts, strict=True)]
    assert followed > 100
    assert_same(state, singles)


@pytest.mark.parametrize("P", [4, 130])
@pytest.mark.parametrize("batch", [(2,), (2, 1)])
def test_draws_have_the_samples_in_front_of_the_batch(P, batch, within_sigmas, generator, global_rng_untouched):
    state = start(batch, P, 2, torch.Generator().manual_seed(0))
    draws = slang.sample(state, (4000,), generator)["w"]
    assert draws.shape == (4000, *batch, P)
    assert within_sigmas(draws, state.loc, 4.5)
    covariance = slang.posterior(state).covariance_matrix[..., :3, :3]
    away = (draws - state.loc)[..., :3]
    assert within_sigmas(away.unsqueeze(-1) * away.unsqueeze(-2), covariance)
    assert slang.sample(state, (), generator)["w"].shape == (*batch, P)
    assert slang.sample(state, (3, 2), generator)["w"].shape == (3, 2, *batch, P)


def test_what_is_not_finite_is_named_with_its_member():
    source = torch.Generator().manual_seed(0)
    state = start((2, 2), 3, 1, source)
    before = {name: getattr(state, name).clone() for name in NAMES}
    slopes = randn(2, 2, 2, 4, source=source)
    slopes[1, 0, 0, 2] = float("nan")
    prior = Prior(torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    message = r"step 5: the gradient of parameter 'w' is not finite \(3 of 3 entries\) in member 1, 0 of the batch"
    with pytest.raises(NumericalError, match=message):
        advance(state, LinearPredictorGradients(randn(2, 2, 4, 3, source=source), slopes), prior)
    assert all(torch.equal(before[name], getattr(state, name)) for name in NAMES)


@pytest.mark.parametrize("scale", [1e100, 1e160])
def test_curvature_that_overflows_is_refused(scale):
    source = torch.Generator().manual_seed(0)
    state = start((2,), 30, 1, source)
    gradients = LinearPredictorGradients(scale * randn(2, 64, 30, source=source), randn(2, 2, 64, source=source))
    prior = Prior(torch.ones(30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64))
    if scale > 1e150:
        with pytest.raises(NumericalError, match=r"the gradient of parameter 'w' is not finite .* in member 0"):
            advance(state, gradients, prior)
    else:
        new, info = advance(state, gradients, prior)
        assert bool(torch.isfinite(new.loc).all())
        assert bool((info.captured > 0).all())
