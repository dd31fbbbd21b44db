"""SLANG's step: dense oracle through every engine, the invariants of the algorithm, the fixed point it must reach."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import slangvi
from reference import DenseState, dense_step
from slangvi import replicas, slang
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

NUM_DATA = 50


def network(sizes: list[int], kind: str) -> nn.Module:
    """A small net of a given kind: its layers differ, its input is (M, sizes[0])."""
    layers: list[nn.Module] = []
    if kind == "conv":
        layers += [nn.Unflatten(1, (1, sizes[0])), nn.Conv1d(1, 2, 2), nn.Flatten()]
        sizes = [2 * (sizes[0] - 1), *sizes[1:]]
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
        if kind == "norm":
            layers.append(nn.LayerNorm(b))
    return nn.Sequential(*layers[:-1], nn.Identity())


def log_likelihood_of(model: nn.Module):
    return slangvi.Gaussian(2.0).of(model).__call__  # a function like any other, whose likelihood is not known


def dense_start(state: slang.State) -> DenseState:
    zeros = torch.zeros_like(state.loc, dtype=torch.float64)
    return DenseState(state.loc.double(), torch.diag(zeros), state.prec_diag.double(), zeros)


def loop_rows(model: nn.Module, thetas: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Per-example gradients at every draw by a Python loop, in float64."""
    rows = []
    draws = len(next(iter(thetas.values())))
    for s in range(draws):
        params = {name: value[s].double().requires_grad_() for name, value in thetas.items()}
        values = -log_likelihood_of(model)(params, tuple(x.double() for x in batch))
        for value in values:
            grads = torch.autograd.grad(value, list(params.values()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def run_functional(engine: str, model: nn.Module, batch, steps: int, **options):
    """States, infos and the rows each step must have seen."""
    vi = slang.build(log_likelihood_of(model), num_data=NUM_DATA, model=model, engine=engine, **options)
    state = vi.init({name: p.detach().clone() for name, p in model.named_parameters()})
    seen = [(state, None, None)]
    for k in range(steps):
        draws = vi.sample(state, (options["mc_samples"],), torch.Generator().manual_seed(k))
        state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(k))
        seen.append((state, info, loop_rows(model, draws, batch)))
    return seen


def run_optimizer(engine: str, model: nn.Module, batch, steps: int, **options):
    """The same through the optimizer and the user's own loop."""
    generator = torch.Generator()
    draws = options.pop("mc_samples")
    opt = slangvi.SLANG(model, num_data=NUM_DATA, engine=engine, generator=generator, **options)
    seen = [(copy.deepcopy(opt._state), None, None)]  # steps are taken in place
    for k in range(steps):
        thetas = []
        generator.manual_seed(k)
        for _ in range(draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                thetas.append({name: p.detach().clone() for name, p in model.named_parameters()})
                (-slangvi.Gaussian(2.0).log_prob(model(batch[0]), batch[1])).mean().backward()
        opt.step()
        stacked = {name: torch.stack([t[name] for t in thetas]) for name in thetas[0]}
        seen.append((copy.deepcopy(opt._state), opt.info, loop_rows(model, stacked, batch)))
    return seen


RUNNERS = {
    "functional-dense": lambda *a, **k: run_functional("dense", *a, **k),
    "functional-factored": lambda *a, **k: run_functional("factored", *a, **k),
    "optimizer-factored": lambda *a, **k: run_optimizer("factored", *a, **k),
    "optimizer-dense": lambda *a, **k: run_optimizer("dense", *a, **k),
}


@pytest.mark.parametrize("runner", RUNNERS)
@settings(max_examples=12)
@given(
    rank=st.sampled_from([0, 1, 2, 5, 100]),
    M=st.integers(1, 4),
    S=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    kind=st.sampled_from(["linear", "conv", "norm"]),
    double=st.booleans(),
    lr=st.sampled_from([0.01, 0.3, 1.0]),
    warm=st.booleans(),
    seed=st.integers(0, 3),
)
def test_whole_steps_equal_the_dense_oracle(runner, rank, M, S, sizes, kind, double, lr, warm, seed):
    # Precisions of a first step that counts half are too ill-conditioned for a whole Newton step in float32.
    assume(double or not warm or lr < 1.0)
    torch.manual_seed(seed)
    model = network([3, *sizes], kind)
    dtype = torch.float64 if double else torch.float32
    model.to(dtype)
    batch = (torch.randn(M, 3, dtype=dtype), torch.randn(M, sizes[-1], dtype=dtype))
    options = {"rank": rank, "lr": lr, "precision_lr": 0.2, "prior_precision": 0.7, "mc_samples": S}
    options["precision_warmup"] = warm
    steps = 3 if double else 1
    seen = RUNNERS[runner](model, batch, steps, **options)
    dense = dense_start(seen[0][0])
    tolerance = 1e-10 if double else 1e-4
    for step, (state, info, rows) in enumerate(seen[1:], 1):
        before = dense
        beta = max(0.2, 1 / (step + 1)) if warm else 0.2
        dense = dense_step(before, rows, rank, NUM_DATA, lr, beta, 0.7)
        low = state.prec_factor.double().T @ state.prec_factor.double()
        scale = float(dense.precision.abs().max())
        assert float((state.loc - dense.loc).abs().max()) <= tolerance * max(1.0, float(dense.loc.abs().max()))
        assert float((low - dense.low).abs().max()) <= tolerance * scale
        assert float((state.prec_diag - dense.diag).abs().max()) <= tolerance * scale
        assert info.num_rows == M * S


@pytest.mark.parametrize("rank", [0, 1, 3, 7, 20])
def test_diagonal_matches_the_full_update_at_every_step(rank):
    """diag of the precision follows the full-Gaussian recursion whatever the rank, since the diagonal is corrected."""
    torch.manual_seed(0)
    P, R, beta, lam = 7, 5, 0.3, 0.5
    state = slang.init({"w": torch.zeros(P, dtype=torch.float64)}, rank)
    prior = Prior(torch.full((P,), lam).double(), torch.zeros(P).double())
    expected = torch.ones(P, dtype=torch.float64)
    for _ in range(30):
        rows = torch.randn(R, P, dtype=torch.float64)
        gradients = DenseGradients.from_rows(rows)
        state, info = slang.update(state, gradients, num_data=20, prior=prior, lr=Rate(0.01), precision_lr=Rate(beta))
        expected = (1 - beta) * expected + beta * (lam + 20 / R * rows.square().sum(0))
        found = state.prec_diag + state.prec_factor.square().sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert bool((state.prec_diag >= min(1.0, lam) - 1e-12).all())
        assert float(info.clipped) < 1e-10


def test_enough_rank_is_the_full_gaussian_update():
    torch.manual_seed(1)
    P, R, beta = 4, 6, 0.2
    state = slang.init({"w": torch.zeros(P, dtype=torch.float64)}, rank=P)
    prior = Prior(torch.ones(P).double(), torch.zeros(P).double())
    full = torch.eye(P, dtype=torch.float64)
    for _ in range(20):
        rows = torch.randn(R, P, dtype=torch.float64)
        state, _ = slang.update(
            state, DenseGradients.from_rows(rows), num_data=R, prior=prior, lr=Rate(0.01), precision_lr=Rate(beta)
        )
        full = (1 - beta) * full + beta * (rows.T @ rows + torch.eye(P).double())
        found = state.prec_factor.T @ state.prec_factor + torch.diag(state.prec_diag)
        torch.testing.assert_close(found, full, rtol=1e-9, atol=1e-9)


def test_rank_zero_is_the_diagonal_recursion():
    rows = torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    state = slang.init({"w": torch.zeros(2, dtype=torch.float64)}, rank=0)
    prior = Prior(torch.ones(2).double(), torch.zeros(2).double())
    state, info = slang.update(state, DenseGradients.from_rows(rows), num_data=2, prior=prior, lr=Rate(0.5))
    torch.testing.assert_close(state.prec_diag, 0.5 + 0.5 * (1 + rows.square().sum(0)))
    assert info.spectrum.shape == (0,)
    assert info.rank_used == 0
    assert info.captured == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("R", [4, 20], ids=["gram", "parameters"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_segments_give_the_step_of_the_dense_oracle(grouped, R, dtype, in_place):
    source = torch.Generator().manual_seed(0)
    state = slang.init({"a": torch.zeros(4, dtype=dtype), "b": torch.zeros(8, dtype=dtype)}, 2)
    prior = Prior(torch.full((12,), 0.5, dtype=dtype), torch.ones(12, dtype=dtype))
    rates = ([0.1, 0.2], [0.3, 0.05]) if grouped else ([0.1, 0.1], [0.3, 0.3])
    lr, beta = (Rate.of(rate, state.spec, state.loc) for rate in rates)
    dense, tolerance = dense_start(copy.deepcopy(state)), 1e-10 if dtype is torch.float64 else 1e-4
    for _ in range(3):
        rows = torch.randn(R, 12, generator=source, dtype=torch.float64).to(dtype)
        gradients = DenseGradients.from_rows(rows)
        trace = (1 - beta.value) * state.prec_factor.square().sum(0) + beta.value * 9 / R * rows.square().sum(0)
        options = {"lr": lr, "precision_lr": beta, "momentum": 0.5, "in_place": in_place}
        state, info = slang.update(state, gradients, num_data=9, prior=prior, **options)
        values = (lr.value, beta.value, 0.5, 1.0, 0.5)
        dense = dense_step(dense, rows.double(), 2, 9, *values)
        torch.testing.assert_close(state.loc.double(), dense.loc, rtol=tolerance, atol=tolerance)
        low = state.prec_factor.T @ state.prec_factor
        torch.testing.assert_close(low.double(), dense.low, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state.prec_diag.double(), dense.diag, rtol=tolerance, atol=tolerance)
        assert float(info.total) == pytest.approx(float(trace.sum()), rel=tolerance)
        assert 0.0 <= float(info.clipped) < tolerance
        assert math.copysign(1.0, float(info.clipped)) == 1.0


def test_one_rate_per_tensor_scales_rows_and_columns():
    torch.manual_seed(0)
    P, rank = 5, 2
    params = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
    state = slang.init(params, rank)
    prior = Prior(torch.full((P,), 0.5).double(), torch.ones(P).double())
    dense = dense_start(state)
    lr, beta = Rate.of([0.1, 0.2], state.spec, state.loc), Rate.of([0.3, 0.05], state.spec, state.loc)
    for _ in range(4):
        rows = torch.randn(6, P, dtype=torch.float64)
        gradients = DenseGradients.from_rows(rows)
        state, _ = slang.update(state, gradients, num_data=9, prior=prior, lr=lr, precision_lr=beta, momentum=0.5)
        dense = dense_step(dense, rows, rank, 9, lr.value, beta.value, 0.5, 1.0, 0.5)
        torch.testing.assert_close(state.loc, dense.loc, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.prec_factor.T @ state.prec_factor, dense.low, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.prec_diag, dense.diag, rtol=1e-10, atol=1e-10)


def empirical_fisher_fixed_point(X: np.ndarray, y: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """μ and precision with Σ⁻¹ = λI + Σ xxᵀ E[(p−y)²], Xᵀ E[p−y] + λμ = 0, expectations by Gauss–Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()
    mean, cov = np.zeros(X.shape[1]), np.eye(X.shape[1]) / lam
    for _ in range(3000):
        centre, spread = X @ mean, np.sqrt(np.einsum("ij,jk,ik->i", X, cov, X))
        residual = 1 / (1 + np.exp(-(centre[:, None] + spread[:, None] * nodes))) - y[:, None]
        precision = lam * np.eye(len(mean)) + X.T @ (X * (residual**2 @ weights)[:, None])
        cov = np.linalg.inv(0.9 * np.linalg.inv(cov) + 0.1 * precision)
        step = cov @ (X.T @ (residual @ weights) + lam * mean)
        mean = mean - 0.1 * step
        if np.abs(step).max() < 1e-12:
            break
    return mean, precision


def test_logistic_regression_reaches_the_empirical_fisher_fixed_point():
    rng = np.random.default_rng(0)
    N, P, lam = 60, 3, 1.0
    X = rng.normal(size=(N, P))
    y = (rng.random(N) < 1 / (1 + np.exp(-X @ np.array([1.0, -0.5, 0.2])))).astype(float)
    mean, precision = empirical_fisher_fixed_point(X, y, lam)
    batch = (torch.tensor(X), torch.tensor(y))

    def log_likelihood(params, batch):
        return slangvi.Bernoulli().log_prob(batch[0] @ params["w"], batch[1])

    vi = slang.build(
        log_likelihood, num_data=N, rank=P, lr=lambda t: 1 / (1 + t**0.75), prior_precision=lam, mc_samples=8
    )
    state = vi.init({"w": torch.zeros(P, dtype=torch.float64)})
    generator = torch.Generator().manual_seed(0)
    late_means, late_precisions = [], []
    for t in range(1500):
        state, _ = vi.update(state, batch, generator=generator)
        if t >= 750:
            late_means.append(state.loc)
            late_precisions.append(state.prec_factor.T @ state.prec_factor + torch.diag(state.prec_diag))
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    # Averages over 750 correlated iterates: the mean is known to a few hundredths of a posterior sd, the precision,
    # whose entries average 480 terms a step, to about one per cent.
    assert np.abs((torch.stack(late_means).mean(0).numpy() - mean) / sd).max() < 0.05
    found = torch.stack(late_precisions).mean(0).numpy()
    assert np.abs(found - precision).max() / np.abs(precision).max() < 0.02


def test_conjugate_regression_reaches_the_exact_mean():
    """With a Gaussian likelihood the mean's fixed point is exact, whatever the precision."""
    torch.manual_seed(0)
    X, noise = torch.randn(40, 3, dtype=torch.float64), 1.0
    y = X @ torch.tensor([1.0, -2.0, 0.5]).double() + noise * torch.randn(40).double()
    tau = 1 / noise**2
    exact = torch.linalg.solve(tau * X.T @ X + torch.eye(3).double(), tau * X.T @ y)

    def log_likelihood(params, batch):
        return slangvi.Gaussian(tau).log_prob(batch[0] @ params["w"], batch[1])

    vi = slang.build(log_likelihood, num_data=40, rank=2, lr=slangvi.inverse_time(1.0, 0.6), mc_samples=8)
    state = vi.init({"w": torch.zeros(3, dtype=torch.float64)})
    generator = torch.Generator().manual_seed(0)
    late = []
    for t in range(600):
        state, _ = vi.update(state, (X, y), generator=generator)
        if t >= 300:
            late.append(state.loc)
    # A step moves by lr times the mean of 8 draws' deviations; the mean of 300 iterates is then the mean of 2400 draws,
    # known to posterior sd / √2400.
    sd = torch.linalg.inv(tau * X.T @ X + torch.eye(3).double()).diagonal().sqrt()
    error = (torch.stack(late).mean(0) - exact) / (sd / 2400**0.5)
    assert float(error.abs().max()) < 4


def test_kl_and_elbo_agree_with_torch():
    torch.manual_seed(0)
    params = {"w": torch.randn(4, dtype=torch.float64)}
    state = slang.init(params, rank=2, init_precision=3.0)
    state = slang.State(state.loc, torch.randn(2, 4).double(), state.prec_diag, state.momentum, 0, state.spec)
    prior = Prior(torch.tensor([0.5, 1.0, 2.0, 3.0]).double(), torch.ones(4).double())
    normal = torch.distributions.Independent(torch.distributions.Normal(prior.mean, prior.precision.rsqrt()), 1)
    expected = torch.distributions.kl_divergence(slang.posterior(state), normal)
    torch.testing.assert_close(slang.kl_to_prior(state, prior), expected)


def test_info_tells_fit_and_kl_apart():
    model = nn.Linear(2, 1).double()
    batch = (torch.randn(5, 2).double(), torch.randn(5, 1).double())
    (_, _, _), (state, info, _) = run_functional("dense", model, batch, 1, rank=1, lr=0.1, mc_samples=2)
    draws = slang.sample(
        run_functional("dense", model, batch, 0, rank=1, lr=0.1, mc_samples=2)[0][0],
        (2,),
        torch.Generator().manual_seed(0),
    )
    values = [
        log_likelihood_of(model)({name: value[s] for name, value in draws.items()}, batch).mean() for s in range(2)
    ]
    assert math.isclose(info.expected_log_likelihood, NUM_DATA * float(sum(values)) / 2, rel_tol=1e-12)
    assert info.loss == -info.expected_log_likelihood
    prior = Prior(torch.ones(3).double(), torch.zeros(3).double())
    assert math.isclose(info.kl, float(slang.kl_to_prior(state, prior)), rel_tol=1e-12)
    assert info.elbo.value == info.expected_log_likelihood - info.kl
    assert 0.0 <= info.captured <= 1.0 + 1e-12


def test_temperature_weighs_the_likelihood():
    rows = torch.randn(3, 2, dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    batch = (rows, torch.zeros(3, 1).double())
    warm = run_functional("dense", model, batch, 1, rank=1, lr=0.1, mc_samples=1, temperature=2.0)[1][0]
    half = slang.build(log_likelihood_of(model), num_data=NUM_DATA // 2, rank=1, lr=0.1)
    state = half.init({name: p.detach().clone() for name, p in model.named_parameters()})
    cold, _ = half.update(state, batch, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(warm.loc, cold.loc)
    torch.testing.assert_close(warm.prec_diag, cold.prec_diag)


def test_tied_parameters_are_counted_once_in_the_functional_api():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    model = Tied().double()
    batch = (torch.randn(4, 3).double(), torch.randn(4, 3).double())
    options = {"rank": 2, "lr": 0.1, "mc_samples": 2}
    one = run_functional("factored", model, batch, 2, **options)[-1][0]
    two = run_functional("dense", model, batch, 2, **options)[-1][0]
    assert one.spec.num_params == 9
    torch.testing.assert_close(one.loc, two.loc, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(one.prec_diag, two.prec_diag, rtol=1e-10, atol=1e-10)


def test_logits_of_any_size_stay_finite():
    model = nn.Linear(1, 3)
    vi = slang.build(slangvi.Categorical().of(model), num_data=4, rank=1, lr=0.1, model=model, curvature="ef")
    state = vi.init(dict(model.named_parameters()))
    batch = (torch.tensor([[1e4], [-1e4]]), torch.tensor([0, 2]))
    state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
    assert math.isfinite(info.expected_log_likelihood)
    assert F.softmax(model(batch[0]), -1).isfinite().all()


def test_half_precision_models_keep_float32_state_in_the_functional_api():
    torch.manual_seed(0)
    model = nn.Linear(2, 1).bfloat16()
    batch = (torch.randn(3, 2).bfloat16(), torch.randn(3, 1).bfloat16())
    vi = slang.build(log_likelihood_of(model), num_data=3, rank=1, lr=0.1, mc_samples=2, model=model)
    state = vi.init(dict(model.named_parameters()))
    for _ in range(2):
        state, _ = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
    assert state.loc.dtype is torch.float32
    assert bool(torch.isfinite(state.loc).all())


@pytest.mark.parametrize("alone", [True, False])
def test_rounding_does_not_add_up_in_the_diagonal_of_float32(alone):
    """Rank 6 holds all of a curvature of rank 4: d stays at the prior, up to one rounding of the whole diagonal."""
    settings = {"num_data": 1000, "rank": 6, "lr": 1e-3, "precision_lr": 1e-3, "prior_precision": 0.01}
    settings |= {"init_precision": 0.01, "precision_warmup": False}

    def log_likelihood(params, batch):
        return -0.5 * (batch["y"] - batch["x"] @ params["w"]).square()

    source = torch.Generator().manual_seed(0)
    span, start = torch.randn(4, 24, generator=source), {"w": torch.zeros(24)}
    runs = (
        slang.build(log_likelihood, **settings) if alone else replicas.build(log_likelihood, num_replicas=2, **settings)
    )
    state = runs.init(start)
    streams = torch.Generator().manual_seed(1) if alone else replicas.streams([1, 2])
    for _ in range(300):
        batch = {"x": torch.randn(8, 4, generator=source) @ span, "y": 10 * torch.randn(8, generator=source)}
        batch = batch if alone else {name: torch.stack([value, value]) for name, value in batch.items()}
        state, _ = runs.update(state, batch, streams)
    whole = state.prec_factor.square().sum(-2)
    excess = (state.prec_diag - 0.01) / (torch.finfo(torch.float32).eps * whole.amax(-1, keepdim=True))
    assert float(excess.abs().mean()) < 5.0  # 20 if rounding that is positive is kept, and negative is not
    assert float(state.prec_diag.min()) >= 0.0099


class Halves(nn.Module):
    """A linear model whose weights are two parameters."""

    def __init__(self, size):
        super().__init__()
        self.first, self.second = (nn.Linear(size // 2, 1, bias=False) for _ in range(2))

    def forward(self, x):
        left, right = x.chunk(2, -1)
        return self.first(left) + self.second(right)


@pytest.mark.parametrize("size", [30, 300])
def test_rates_of_groups_are_not_rounded_alike_at_every_step(size):
    """Rank 7 holds all of a curvature of rank 3, which two rates make one of 6, and d stays at the prior."""
    model, source = Halves(size), torch.Generator().manual_seed(0)
    groups = [{"params": model.first.parameters(), "precision_lr": 2e-3}, {"params": model.second.parameters()}]
    opt = slangvi.SLANG(
        model, groups, num_data=200, rank=7, lr=1e-6, precision_lr=1.3e-3, precision_warmup=False, generator=source
    )
    span = torch.randn(3, size, generator=source)
    for _ in range(300):
        x, y = 10 * torch.randn(40, 3, generator=source) @ span, torch.randn(40, 1, generator=source)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            (0.5 * F.mse_loss(model(x), y)).backward()
        opt.step()
    q = opt.posterior
    rounding = torch.finfo(torch.float32).eps * q.prec_factor.square().sum(-1)
    assert float(((q.prec_diag - 1.0) / rounding).abs().mean()) < 15.0
