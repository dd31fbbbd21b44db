"""Replicas that fail: each stands still, says why, and disturbs nobody."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers.replica_problems import METHODS, distance, regression
from slangvi import replicas
from slangvi.errors import DivergenceError, DivergenceWarning, NumericalError
from slangvi.params.state import tensors_of


def spoil_data(batch, k):
    batch[1][k, 0] = math.nan


def spoil_gradient(batch, k):
    batch[1][k] = 1e25  # its square is infinite, or, in float32, that of the gradient


@pytest.mark.parametrize(
    ("method", "rank"),
    [("slang", 1), ("online_eig", 1), ("online_eig", 6)],
)
@pytest.mark.parametrize("spoil", [spoil_data, spoil_gradient])
def test_a_failed_replica_stands_still_and_disturbs_nobody(method, rank, spoil):
    problem = replace(regression(torch.float32, rank=rank).calmed(), method=method)
    runs, twin = problem.runs(), problem.runs()
    first, healthy = runs.init(problem.starts), twin.init(problem.starts)
    generators, others = replicas.streams(range(4)), replicas.streams(range(4))
    state, bad = first, 2
    for step in range(4):
        batch = problem.batch(torch.randint(30, (4, 5)))
        healthy, _ = twin.update(healthy, tuple(x.clone() for x in batch), others)
        if step == 1:
            spoil(batch, bad)
        stream = generators[bad].get_state()
        before = state
        state, info = runs.update(state, batch, generators)
        assert [failure.replica for failure in info.failures] == ([bad] if step == 1 else [])
        if step == 1:
            assert info.failures[0].step == 2
            assert "is not finite" in info.failures[0].reason
            assert math.isnan(info.total[bad])
        if step > 1:
            assert torch.equal(generators[bad].get_state(), stream)
        if step >= 1:
            assert info.failed.tolist() == [False, False, True, False]
            assert info.num_rows.tolist() == [10, 10, 0, 10]
            for name, value in tensors_of(state):
                assert torch.equal(value[bad], dict(tensors_of(before))[name][bad]) or name == "failed"
    assert state.step.tolist() == [4, 4, 1, 4]
    for k in (0, 1, 3):
        assert distance(runs.replica(state, k), twin.replica(healthy, k)) <= 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_reasons_are_those_of_single_runs(method):
    problem = replace(regression(torch.float32), method=method)
    runs, batch = problem.runs(), problem.batch(torch.randint(30, (4, 5)))
    for k, spoil in ((1, spoil_data), (3, spoil_gradient)):
        spoil(batch, k)
    _, info = runs.update(runs.init(problem.starts), batch, replicas.streams(range(4)))
    assert [failure.replica for failure in info.failures] == [1, 3]
    for k, _, reason in info.failures:
        vi = problem.alone(k)
        with pytest.raises(NumericalError) as alone:
            vi.update(vi.init(problem.starts[k]), tuple(x[k] for x in batch), torch.Generator().manual_seed(k))
        assert reason == str(alone.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_precision_that_overflows_is_a_failure(method):
    """The gradients are finite, but N times their squares are not."""
    options = {"rank": 0, "lr": 0.1}
    sizes, start, batch = [10, 10**10, 10], {"w": torch.zeros(())}, torch.full((3, 40), 1e18)
    runs = replicas.build(lambda p, b: -b * p["w"], num_replicas=3, num_data=sizes, method=method, **options)
    state, info = runs.update(runs.init(start), batch)
    assert [failure.replica for failure in info.failures] == [1]
    assert "the new precision of parameter 'w'" in info.failures[0].reason
    assert state.step.tolist() == [1, 0, 1]
    alone = METHODS[method].build(lambda p, b: -b * p["w"], num_data=sizes[1], **options)
    with pytest.raises(NumericalError) as error:
        alone.update(alone.init(start), batch[1])
    assert str(error.value) == info.failures[0].reason


def test_sums_may_overflow_where_no_entry_does():
    runs = replicas.build(lambda p, b: -(b * p["w"]).sum(-1), num_replicas=2, num_data=1, rank=0, lr=1e-9)
    state, info = runs.update(runs.init({"w": torch.zeros(4)}), torch.full((2, 1, 4), 1.5e19))
    assert info.failures == ()
    assert state.step.tolist() == [1, 1]


def test_failures_can_raise_instead():
    problem = regression(torch.float32)
    runs = problem.runs(on_failure="raise")
    state, batch = runs.init(problem.starts), problem.batch(torch.randint(30, (4, 5)))
    spoil_data(batch, 1)
    with pytest.raises(NumericalError, match=r"replica 1: log_likelihood is not finite for 1 of 5"):
        runs.update(state, batch)
    spoil_data(batch, 3)
    with pytest.raises(NumericalError, match=r"replica 1 \(and 1 more\)"):
        runs.update(state, batch)


def test_nothing_happens_when_nobody_can_move():
    problem = regression(torch.float32)
    runs = problem.runs()
    state, batch = runs.init(problem.starts), problem.batch(torch.randint(30, (4, 5)))
    same, info = runs.update(state, batch, replicas.streams(range(4)), counts=[0, 0, 0, 0])
    assert same.step.tolist() == [0] * 4
    assert torch.equal(same.loc, state.loc)
    assert bool(info.total.isnan().all())
    assert info.kl.shape == (4,)


# ---- rates that are far too large ----


def logistic(lr, **options):
    """Two replicas on the same 60 examples."""
    source = torch.Generator().manual_seed(0)
    x, noise = torch.randn(60, 3, generator=source), torch.randn(60, generator=source)
    y = (x.sum(1) + noise > 0).float()
    runs = replicas.build(
        lambda p, b: -F.binary_cross_entropy_with_logits(b["x"] @ p["w"], b["y"], reduction="none"),
        **{"num_replicas": 2, "num_data": 60, "rank": 1, "lr": lr, "precision_lr": 0.05, **options},
    )

    def train(steps, counts=None):
        state = runs.init({"w": torch.zeros(3)})
        for _ in range(steps):
            picked = torch.randint(60, (2, 12), generator=source)
            state, _ = runs.update(state, {"x": x[picked], "y": y[picked]}, source, counts)
        return state

    return train


@pytest.mark.parametrize("method", ["slang", "online_eig"])
def test_a_hundred_times_the_usual_rate_is_loud(method):
    with pytest.warns(DivergenceWarning, match=r"replica 1, step 128: over the last 128 steps the mean .*\(lr=10\)"):
        state = logistic([0.1, 10.0], method=method)(2 * 128)
    assert state.step.tolist() == [256, 256]


def test_a_rate_that_is_too_large_may_stop_all():
    with pytest.raises(DivergenceError, match=r"replica 0 \(and 1 more\), step 128"):
        logistic(10.0, on_divergence="raise")(128)
    logistic(10.0, on_divergence="ignore")(128)


def test_who_sits_out_is_not_thrown_about():
    state = logistic([0.1, 10.0], on_divergence="raise")(160, counts=[12, 0])
    assert state.step.tolist() == [160, 0]


def test_impossible_reactions_are_named():
    with pytest.raises(ValueError, match="on_divergence must be one of 'warn', 'raise', 'ignore', got 'shout'"):
        logistic(0.1, on_divergence="shout")
