"""The replicas that the benchmark trains, in CUDA graphs and eagerly; skipped where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

import slangvi
from slangvi import replicas
from slangvi_reproduction.bench import replicas as bench

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # autograd's thread makes its context late
]


def source(seed=1):
    return torch.Generator(DEVICE).manual_seed(seed)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("method", ["slang", "online_eig"])
@pytest.mark.parametrize(("rank", "batch"), [(1, 10), (4, 10), (1, 60)])
@pytest.mark.parametrize("engine", ["dense", "factored"])
@pytest.mark.parametrize("own", [True, False], ids=["own generators", "one for all"])
def test_replicas_in_lockstep_equal_eager_ones(engine, rank, batch, own, method):
    setting = bench.Setting.of(bench.Work(7, (5, 20, 1), batch, 4), DEVICE)
    model = setting.model if engine == "factored" else None
    likelihood = slangvi.Gaussian().of(setting.model)
    found = []
    for compiled in (False, True):
        options = setting.options | {"rank": rank, "engine": engine, "model": model, "method": method}
        runs = replicas.build(likelihood, num_replicas=7, compile=compiled, **options)
        state, generators = runs.init(setting.params), replicas.streams(range(7), DEVICE) if own else source()
        counts = torch.tensor([batch, 3, batch, batch, 0, batch, batch])
        for step in range(20):
            given = counts if step % 5 == 4 else None
            state, info = runs.update(state, (setting.x, setting.y), generators, given)
        found.append((state, info, runs))
    (eager, a, _), (replayed, b, _) = found
    assert eager.step.tolist() == replayed.step.tolist() == [20, 20, 20, 20, 16, 20, 20]
    for k in range(7):
        one, other = replicas.replica(eager, k), replicas.replica(replayed, k)
        assert relative(one.loc, other.loc) <= 1e-4
        assert relative(one.prec_diag, other.prec_diag) <= 1e-4
    torch.testing.assert_close(a.spectrum, b.spectrum, rtol=1e-3, atol=0, equal_nan=True)
    torch.testing.assert_close(a.elbo, b.elbo, rtol=1e-3, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("method", ["slang", "online_eig"])
def test_a_replica_that_fails_in_a_graph_is_told_and_the_others_go_on(method):
    setting = bench.Setting.of(bench.Work(4, (5, 20, 1), 10, 2), DEVICE)
    options = setting.options | {"method": method}
    runs = replicas.build(slangvi.Gaussian().of(setting.model), num_replicas=4, compile=True, **options)
    state = runs.init(setting.params)
    for step in range(8):
        y = setting.y.clone()
        y[2] = math.nan if step == 5 else y[2]
        state, info = runs.update(state, (setting.x, y), source(step))
        assert [failure.replica for failure in info.failures] == [2] * (step == 5)
    assert state.step.tolist() == [8, 8, 5, 8]
