"""Replicas in lockstep: each is what it would be alone, whatever the others do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.replica_problems import METHODS, Problem, distance, logistic, regression
from slangvi import replicas, slang

STEPS = 20
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def minibatches(problem: Problem, steps: int, size: int) -> list[torch.Tensor]:
    sizes = problem.own["num_data"]
    return [torch.stack([torch.randperm(min(n, 30))[:size] for n in sizes]) for _ in range(steps)]


def higher_rank(dtype: torch.dtype, rank: int) -> Problem:
    """In float32 without warm-up, whose first averages have eigenvalues so close that rounding decides about U."""
    problem = regression(dtype, rank=rank).calmed()
    problem.shared["precision_warmup"] = dtype is torch.float64
    return problem


PROBLEMS = {
    "regression, dense": regression,
    "regression": regression,
    "regression, many rows": lambda dtype: regression(dtype, draws=8),
    "regression, rank 3": lambda dtype: higher_rank(dtype, 3),
    "regression, rank 0": lambda dtype: regression(dtype, rank=0),
    "regression, one replica": lambda dtype: regression(dtype, count=1),
    "logistic": logistic,
    "logistic, full rank": lambda dtype: logistic(dtype, rank=7),
}
# Columns beyond the fifth are matched in another way.
OWN = {"regression, rank 7": lambda dtype: higher_rank(dtype, 7)}
CASES = [("slang", name, make) for name, make in PROBLEMS.items()]
# Who gathers the gradients, and how many replicas there are, is the same for all methods.
SHARED = {"regression, dense", "regression, one replica"}
CASES += [("online_eig", name, make) for name, make in (PROBLEMS | OWN).items() if name not in SHARED]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("method", "make"), [(m, f) for m, _, f in CASES], ids=[f"{m}: {n}" for m, n, _ in CASES])
def test_each_replica_is_what_it_would_be_alone(method, make, dtype, global_rng_untouched):
    with torch.random.fork_rng():
        problem = replace(make(dtype), method=method)
        indices = minibatches(problem, STEPS, 5)
    runs = problem.runs()
    state, generators = runs.init(problem.starts), replicas.streams(range(problem.count))
    for index in indices:
        state, info = runs.update(state, problem.batch(index), generators)
    tolerance = TOLERANCE[dtype]
    for k in range(problem.count):
        vi, generator = problem.alone(k), torch.Generator().manual_seed(k)
        single = vi.init(problem.starts[k])
        for index in indices:
            single, told = vi.update(single, tuple(x[k] for x in problem.batch(index)), generator=generator)
        mine = runs.replica(state, k)
        assert distance(mine, single) <= tolerance
        assert mine.step == single.step == info.step[k] == STEPS
        assert info.num_rows[k] == told.num_rows
        for found, expected in (
            (info.expected_log_likelihood[k], told.expected_log_likelihood),
            (info.loss[k], told.loss),
            (info.kl[k], told.kl),
            (info.elbo[k], told.elbo.value),
            (info.captured[k], told.captured),
            (info.total[k], float(told.total)),
        ):
            assert math.isclose(float(found), expected, rel_tol=10 * tolerance, abs_tol=10 * tolerance)
        assert torch.allclose(info.spectrum[k], told.spectrum, rtol=10 * tolerance, atol=tolerance * float(told.total))
        assert torch.equal(generators[k].get_state(), generator.get_state())


@settings(max_examples=20)
@given(
    count=st.integers(1, 5),
    rank=st.integers(0, 4),
    draws=st.integers(1, 3),
    method=st.sampled_from(sorted(METHODS)),
    length=st.integers(1, 6),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_padding_counts_for_nothing_and_absent_replicas_stand_still(count, rank, draws, method, length, seed, data):
    """Batches of different sizes, NaN behind them, some replicas without examples in some steps."""
    problem = replace(regression(torch.float64, count, rank, draws), method=method)
    runs, states = problem.runs(), []
    state, generators = runs.init(problem.starts), replicas.streams(range(count))
    vis, alone = [problem.alone(k) for k in range(count)], replicas.streams(range(count))
    states = [vi.init(start) for vi, start in zip(vis, problem.starts, strict=True)]
    torch.manual_seed(seed)
    for _ in range(3):
        counts = data.draw(st.lists(st.integers(0, length), min_size=count, max_size=count))
        batch = problem.batch(torch.randint(30, (count, length)))
        for x in batch:
            for k, size in enumerate(counts):
                x[k, size:] = math.nan
        before = state
        state, info = runs.update(state, batch, generators, counts=counts)
        for k, size in enumerate(counts):
            if size:
                own = tuple(x[k, :size] for x in batch)
                states[k], told = vis[k].update(states[k], own, generator=alone[k])
                assert math.isclose(info.expected_log_likelihood[k], told.expected_log_likelihood, rel_tol=1e-9)
            else:
                assert torch.equal(state.loc[k], before.loc[k])
                assert math.isnan(info.total[k])
            assert info.num_rows[k] == size * draws
            assert state.step[k] == states[k].step
    for k in range(count):
        assert distance(runs.replica(state, k), states[k]) <= 1e-9
    assert not bool(state.failed.any())


def test_a_limit_on_memory_changes_nothing_but_the_number_of_passes():
    problem = regression(torch.float64)
    calls = []
    inner = problem.log_likelihood
    problem.log_likelihood = lambda *args: calls.append(1) or inner(*args)
    index = torch.randint(30, (4, 5))
    results = {}
    for limit in (None, 1, 3 * 8 * 41 * 10 * 3):
        calls.clear()
        runs = problem.runs(memory_limit=limit)
        state, info = runs.update(runs.init(problem.starts), problem.batch(index), replicas.streams(range(4)))
        state, info = runs.update(state, problem.batch(index), replicas.streams(range(4)))
        results[limit] = (state.loc, state.prec_diag, info.expected_log_likelihood, state.precision.gram, len(calls))
    assert [found[-1] for found in results.values()] == [2, 8, 4]
    for found in results.values():
        for a, b in zip(found[:-1], results[None][:-1], strict=True):
            torch.testing.assert_close(a, b)


def test_no_python_code_runs_for_each_replica():
    """The likelihood is called as often for 20 replicas as for 2."""
    calls = []
    for count in (2, 20):
        problem = regression(torch.float64, count)
        inner, counted = problem.log_likelihood, []
        problem.log_likelihood = lambda *args, inner=inner, counted=counted: counted.append(1) or inner(*args)
        runs = problem.runs()
        state = runs.init(problem.starts)
        for _ in range(3):
            state, _ = runs.update(state, problem.batch(torch.randint(30, (count, 4))))
        calls.append(len(counted))
    assert calls[0] == calls[1]


# ---- random streams ----


def test_one_generator_draws_for_all(global_rng_untouched):
    with torch.random.fork_rng():
        problem = regression(torch.float64)
        batch = problem.batch(torch.randint(30, (4, 5)))
    runs, found = problem.runs(), []
    for _ in range(2):
        state, _ = runs.update(runs.init(problem.starts), batch, torch.Generator().manual_seed(3))
        found.append(state.loc)
    assert torch.equal(*found)
    different = {tuple(row.tolist()) for row in runs.sample(state, (), torch.Generator())["2.bias"]}
    assert len(different) == 4


def test_without_a_generator_torchs_own_is_used():
    problem = regression(torch.float64)
    runs, batch = problem.runs(), problem.batch(torch.randint(30, (4, 5)))
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(runs.update(runs.init(problem.starts), batch)[0].loc)
    assert torch.equal(*found)


def test_draws_are_those_of_single_runs():
    problem = regression(torch.float32, rank=2)
    runs, batch = problem.runs(), problem.batch(torch.randint(30, (4, 5)))
    state, _ = runs.update(runs.init(problem.starts), batch, replicas.streams(range(4)))
    for shape in ((), (3,), (2, 5)):
        draws = runs.sample(state, shape, replicas.streams(range(4)))
        for k in range(4):
            alone = slang.sample(runs.replica(state, k), shape, torch.Generator().manual_seed(k))
            for name, value in alone.items():
                torch.testing.assert_close(draws[name][k], value, rtol=1e-5, atol=1e-6)


def test_the_posterior_is_a_batch_of_single_ones():
    problem = regression(torch.float64, rank=2)
    runs, batch = problem.runs(), problem.batch(torch.randint(30, (4, 5)))
    state, _ = runs.update(runs.init(problem.starts), batch)
    q = runs.posterior(state)
    assert q.batch_shape == (4,)
    assert q.param_spec == state.spec
    for k in range(4):
        single = slang.posterior(runs.replica(state, k))
        torch.testing.assert_close(q.variance[k], single.variance)
        torch.testing.assert_close(q.log_prob(q.loc)[k], single.log_prob(single.loc))
