"""Long runs and steep problems: nothing drifts, precisions stay positive, memory stays flat."""

from __future__ import annotations

import gc
import math
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.optimizer_runs import CLASSES, backward, flat
from slangvi.errors import NumericalError
from slangvi.methods import full, mean_field, online_eig, slang
from slangvi.params.state import tensors_of
from slangvi.priors import Prior
from slangvi.rows.dense import DenseGradients
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate

METHODS = {"slang": (slang, 2), "online_eig": (online_eig, 2), "mean_field": (mean_field, None), "full": (full, None)}
LONG = int(os.environ.get("SLANGVI_SOAK_STEPS", "1000000"))
P, M = 4, 6


def diagonal(state):
    """Of the whole precision, (P,)."""
    if hasattr(state, "prec_matrix"):
        return state.prec_matrix.diagonal()
    factor = getattr(state, "prec_factor", None)
    return state.prec_diag if factor is None else state.prec_diag + factor.square().sum(-2)


def positive(state):
    """Whether the precision is one."""
    if hasattr(state, "prec_matrix"):
        return not bool(torch.linalg.cholesky_ex(state.prec_matrix.double()).info.any())
    return bool((state.prec_diag > 0).all())


def soak(name, dtype, steps, every):
    """Linear regression with new examples at every step, beside the diagonal worked out in float64.

    All but OnlineEig keep the diagonal of the whole precision: s ← (1−β)s + β(λ + (N/R) Σ g²). Returns the largest
    relative difference from it. OnlineEig averages vectors, whose squares are then at most the average of squares:
    there it is the largest excess.
    """
    module, rank = METHODS[name]
    start = {"w": torch.zeros(P, dtype=dtype)}
    state = module.init(start) if rank is None else module.init(start, rank)
    prior = Prior(torch.ones(P, dtype=dtype), torch.zeros(P, dtype=dtype))
    source, rate, size = torch.Generator().manual_seed(0), 0.02, 50
    expected, worst = diagonal(state).double(), 0.0
    truth = torch.linspace(-1, 1, P, dtype=dtype)
    for step in range(1, steps + 1):
        x = torch.randn(M, P, generator=source, dtype=dtype)
        y = x @ truth + torch.randn(M, generator=source, dtype=dtype)
        draw = state.precision.sample((), source, state.loc)
        slopes = (x @ draw - y).unsqueeze(0)
        state, _ = module.update(
            state, LinearPredictorGradients(x, slopes), num_data=size, prior=prior, lr=Rate(rate), momentum=0.9
        )
        squares = (slopes[0].double().unsqueeze(-1) * x.double()).square().sum(0)
        expected = (1 - rate) * expected + rate * (1.0 + size / M * squares)
        if step % every == 0:
            assert positive(state), step
            assert all(bool(torch.isfinite(value).all()) for _, value in tensors_of(state)), step
            gaps = (diagonal(state).double() - expected) / expected
            worst = max(worst, float((gaps if name == "online_eig" else gaps.abs()).max()))
    assert state.step == steps
    assert bool(((state.loc - truth).abs() < 1.0).all())
    return worst


# Rounding of a step is forgotten at the rate β: it adds up to a few times eps/β and no further.
BOUND = {torch.float32: 1e-4, torch.float64: 1e-12}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", BOUND)
def test_invariants_hold(name, dtype):
    assert soak(name, dtype, 150, 10) < BOUND[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", BOUND)
def test_invariants_do_not_drift_in_a_million_steps(name, dtype):
    soak(name, dtype, 1000, 100)
    before = resident()
    assert soak(name, dtype, LONG, 1000) < BOUND[dtype]
    assert resident() - before < 20e6


@pytest.mark.parametrize("rank", [3, 5])
def test_little_rounding_adds_up_where_the_factor_holds_all_curvature(rank):
    """d is λ then, and Δ rounding alone, of which the positive half stays: below a quarter of ε·diag A at a step."""
    source, lam, beta = torch.Generator().manual_seed(0), torch.ones(30), 1e-3
    x = 10 * torch.randn(200, 3, generator=source) @ torch.randn(3, 30, generator=source)
    slopes, prior = torch.randn(200, generator=source), Prior(lam, 0 * lam)
    state = slang.init({"w": 0 * lam}, rank)
    for _ in range(1500):
        index = torch.randint(200, (10,), generator=source)
        rows = DenseGradients.from_rows(slopes[index, None] * x[index])
        state, _ = slang.update(state, rows, num_data=200, prior=prior, lr=Rate(1e-6), precision_lr=Rate(beta))
    whole = float(diagonal(state).mean())
    assert whole > 4e4
    assert float(state.prec_diag.min()) >= 1.0
    assert float(state.prec_diag.mean()) - 1.0 < 0.25 * torch.finfo(torch.float32).eps * whole / beta


# ---- memory


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Whatever was there before is not looked at: a collector that goes through all of it takes a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def resident():
    """Bytes this process holds in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.randn(12, 4), torch.arange(12) % 3


def make(name, model, **more):
    kind, options = CLASSES[name]
    return kind(model, **({"num_data": 40, "lr": 0.05} | options | more))


def steps(opt, x, y, count):
    for k in range(count):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(opt.model(x), y).backward()
        opt.step()
        if k % 10 == 0:
            opt.step(lambda: backward(F.cross_entropy(opt.model(x), y)))


def hooks(model):
    """All that hangs on the modules and parameters of a model."""
    kinds = [key for key in vars(nn.Module()) if "hooks" in key]
    on_modules = sum(len(getattr(module, kind) or ()) for module in model.modules() for kind in kinds)
    return on_modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_steps_leave_nothing_behind(name):
    model, x, y = problem()
    opt = make(name, model)
    steps(opt, x, y, 10)
    before = live_tensors()
    steps(opt, x, y, 15)
    assert live_tensors() == before


@pytest.mark.parametrize("name", CLASSES)
def test_optimizers_go_away_with_all_they_hold(name):
    """Without the garbage collector: a cycle would keep gigabytes until it runs."""
    model, x, y = problem()
    steps(make(name, model), x, y, 1)
    model.zero_grad(set_to_none=True)
    before = live_tensors()
    gc.disable()
    try:
        for _ in range(3):
            opt = make(name, model)
            steps(opt, x, y, 1)
            del opt
        model.zero_grad(set_to_none=True)
        after = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    finally:
        gc.enable()
    assert after <= before
    assert hooks(model) == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", CLASSES)
def test_memory_is_flat_over_ten_thousand_steps(name):
    model, x, y = problem()
    opt = make(name, model)
    steps(opt, x, y, 1000)
    tensors, before = live_tensors(), resident()
    steps(opt, x, y, 10_000)
    assert live_tensors() == tensors
    assert resident() - before < 5e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", CLASSES)
def test_memory_is_flat_over_a_thousand_optimizers(name):
    model, x, y = problem()

    def cycles(count):
        for _ in range(count):
            steps(make(name, model), x, y, 1)

    cycles(100)
    tensors, before = live_tensors(), resident()
    cycles(1000)
    assert live_tensors() == tensors
    assert resident() - before < 5e6
    assert hooks(model) == 0


# ---- rates and scales


@pytest.mark.parametrize("name", ["SLANG", "VOGN", "FullGaussian", "OnlineEig"])
@pytest.mark.parametrize("rate", [5.0, 1e4, 1e30])
def test_rates_far_too_large_never_show_a_bad_state(name, rate):
    """The precision grows with the gradients and holds the mean back for long; what it cannot hold is an error."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    opt = make(name, model, lr=rate, precision_lr=0.05, generator=torch.Generator().manual_seed(0))
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    good, error = {}, None
    for _ in range(25):
        good = {key: value.clone() for key, value in tensors_of(opt._state)}
        assert all(bool(torch.isfinite(value).all()) for value in good.values())
        assert positive(opt._state)
        try:
            opt.step(lambda: backward(F.mse_loss(model(x), y)))
        except NumericalError as caught:
            error = str(caught)
            break
    if rate == 1e30:
        assert error is not None
    if error is not None:
        assert re.search(r"step \d+: .*unchanged.*[Ll]ower lr", error)
        assert all(torch.equal(good[key], value) for key, value in tensors_of(opt._state))
        assert torch.equal(flat(model), good["loc"])


@pytest.mark.parametrize("name", ["slang", "online_eig", "mean_field"])
def test_condition_numbers_to_1e12_in_float32(name):
    """Features whose scales span six decades, so that the precision spans twelve."""
    module, rank = METHODS[name]
    scales = torch.logspace(-3, 3, 8, dtype=torch.float64)
    found = {}
    for dtype in (torch.float32, torch.float64):
        start = {"w": torch.zeros(8, dtype=dtype)}
        state = module.init(start, init_precision=1e-3) if rank is None else module.init(start, rank, 1e-3)
        prior = Prior(torch.full((8,), 1e-6, dtype=dtype), torch.zeros(8, dtype=dtype))
        source = torch.Generator().manual_seed(0)
        for _ in range(100):
            x = torch.randn(M, 8, generator=source, dtype=torch.float64) * scales
            slopes = torch.randn(1, M, generator=source, dtype=torch.float64)
            rows = LinearPredictorGradients(x.to(dtype), slopes.to(dtype))
            state, _ = module.update(state, rows, num_data=100, prior=prior, lr=Rate(0.05))
        found[dtype] = state
    state, whole = found[torch.float32], diagonal(found[torch.float64])
    assert float(whole.max() / whole.min()) > 1e11
    assert positive(state)
    torch.testing.assert_close(diagonal(state).double(), whole, rtol=1e-4, atol=0)
    variance = dense_variance(state)
    torch.testing.assert_close(state.precision.inv_diag().double(), variance, rtol=1e-5, atol=0)
    draws = state.precision.sample((4000,), torch.Generator().manual_seed(1)).double()
    assert bool(((draws.square().mean(0) / variance - 1).abs() < 4 * math.sqrt(2 / 4000)).all())


def dense_variance(state):
    """Diagonal of the inverse by definition, in float64, with the scales taken out first."""
    factor = getattr(state, "prec_factor", state.prec_diag[:0].reshape(0, len(state.prec_diag))).double()
    matrix = factor.T @ factor + torch.diag(state.prec_diag.double())
    scale = matrix.diagonal().rsqrt()
    return torch.linalg.inv(scale[:, None] * matrix * scale).diagonal() * scale.square()
