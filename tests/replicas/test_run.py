"""Replicas in lockstep: each is what it would be alone, whatever the others do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slangvi
from replicating import METHODS, Problem, distance, logistic, regression
from slangvi import replicas, slang
from slangvi._flat import tensors_of
from slangvi.errors import NumericalError

STEPS = 20
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def minibatches(problem: Problem, steps: int, size: int) -> list[torch.Tensor]:
    sizes = problem.own["num_data"]
    return [torch.stack([torch.randperm(min(n, 30))[:size] for n in sizes]) for _ in range(steps)]


def rank_3(dtype: torch.dtype) -> Problem:
    """Without warm-up, whose first averages have eigenvalues so close that U is a matter of rounding in float32."""
    problem = regression(dtype, "factored", rank=3)
    problem.shared["precision_warmup"] = dtype is torch.float64
    return problem


PROBLEMS = {
    "regression, dense": regression,
    "regression, factored": lambda dtype: regression(dtype, "factored"),
    "regression, many rows": lambda dtype: regression(dtype, "factored", draws=8),
    "regression, rank 3": rank_3,
    "regression, rank 0": lambda dtype: regression(dtype, rank=0),
    "regression, one replica": lambda dtype: regression(dtype, count=1),
    "logistic": logistic,
    "logistic, full rank": lambda dtype: logistic(dtype, rank=7),
}
# Columns beyond the fifth are matched in another way.
OWN = {
    f"regression, rank {rank}": lambda dtype, rank=rank: regression(dtype, "factored", rank=rank).calmed()
    for rank in (3, 7)
}
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
    engine=st.sampled_from(["dense", "factored"]),
    method=st.sampled_from(sorted(METHODS)),
    length=st.integers(1, 6),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_padding_counts_for_nothing_and_absent_replicas_stand_still(
    count, rank, draws, engine, method, length, seed, data
):
    """Batches of different sizes, NaN behind them, some replicas without examples in some steps."""
    problem = replace(regression(torch.float64, engine, count, rank, draws), method=method)
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


@pytest.mark.parametrize("engine", ["dense", "factored"])
def test_no_python_code_runs_for_each_replica(engine):
    """The likelihood is called as often for 20 replicas as for 2."""
    calls = []
    for count in (2, 20):
        problem = regression(torch.float64, engine, count)
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


# ---- replicas that fail ----


def spoil_data(batch, k):
    batch[1][k, 0] = math.nan


def spoil_gradient(batch, k):
    batch[1][k] = 1e25  # its square is infinite, or, in float32, that of the gradient


@pytest.mark.parametrize(
    ("method", "engine", "rank"),
    [("slang", "dense", 1), ("slang", "factored", 1), ("online_eig", "factored", 1), ("online_eig", "dense", 6)],
)
@pytest.mark.parametrize("spoil", [spoil_data, spoil_gradient])
def test_a_failed_replica_stands_still_and_disturbs_nobody(method, engine, rank, spoil):
    problem = replace(regression(torch.float32, engine, rank=rank).calmed(), method=method)
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


# ---- engines ----


class Centred(torch.nn.Module):
    """Mixes examples, so that layers do not tell the gradient of one."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.inner(x - x.mean(0, keepdim=True))


class Unruly(torch.nn.Module):
    """Has no rule."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("model", "reason"), [(Centred(), "not those of single examples"), (Unruly(), "has no rule")], ids=str
)
def test_models_that_cannot_be_read_are_served_by_the_dense_engine(model, reason):
    model = model.double()
    log_likelihood = slangvi.Gaussian().of(model)
    batch = (torch.randn(2, 5, 2).double(), torch.randn(2, 5, 1).double())
    options = {"num_replicas": 2, "num_data": 5, "rank": 1, "lr": 0.1}
    found = {}
    for seen in (model, None):
        runs = replicas.build(log_likelihood, model=seen, **options)
        state, generators = runs.init(dict(model.named_parameters())), replicas.streams(range(2))
        if seen is not None:
            with pytest.warns(UserWarning, match=reason):
                state, _ = runs.update(state, batch, generators)
        else:
            state, _ = runs.update(state, batch, generators)
        found[seen], _ = runs.update(state, batch, generators)
    torch.testing.assert_close(found[model].loc, found[None].loc)


def test_mistakes_of_the_caller_are_not_blamed_on_the_layers():
    model = torch.nn.Linear(2, 1)
    runs = replicas.build(slangvi.Gaussian().of(model), model=model, num_replicas=2, num_data=5, rank=1, lr=0.1)
    with pytest.raises(ValueError, match="targets must have shape"):
        runs.update(runs.init(dict(model.named_parameters())), (torch.zeros(2, 5, 2), torch.zeros(2, 5)))
    runs = replicas.build(lambda p, b: b.sum(), num_replicas=2, num_data=5, rank=1, lr=0.1)
    with pytest.raises(ValueError, match=r"one value per example, shape \(1,\)"):
        runs.update(runs.init({"w": torch.zeros(2)}), torch.zeros(2, 5))


# ---- arguments ----

BAD = {
    "num_replicas": [(0, ValueError), (2.0, TypeError)],
    "num_data": [(0, ValueError), ([5, 0], ValueError), ([5], ValueError), (torch.tensor([3, -1]), ValueError)],
    "rank": [(-1, ValueError), (1.5, TypeError)],
    "lr": [(0.0, ValueError), ([0.1, 2.0], ValueError), ([0.1] * 3, ValueError), ([0.1, "a"], TypeError)],
    "precision_lr": [(1.5, ValueError), ([0.5, -0.5], ValueError)],
    "momentum": [(1.0, ValueError), ([0.5, -0.1], ValueError)],
    "mc_samples": [(0, ValueError)],
    "temperature": [(0.0, ValueError), ([1.0, math.inf], ValueError)],
    "engine": [("sparse", ValueError), ("factored", ValueError)],
    "memory_limit": [(0, ValueError)],
    "on_failure": [("ignore", ValueError)],
    "method": [("bbb", ValueError), (None, ValueError)],
    "constants": [(torch.zeros(3), ValueError), (2.0, ValueError)],
}


@pytest.mark.parametrize(("name", "value", "error"), [(n, v, e) for n, rows in BAD.items() for v, e in rows])
def test_impossible_arguments_are_named(name, value, error):
    options = {"num_replicas": 2, "num_data": 10, "rank": 1, "lr": 0.1} | {name: value}
    with pytest.raises(error, match=name):
        replicas.build(lambda params, batch: batch, **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prior_precision", [1.0, 0.0]),
        ("prior_precision", torch.ones(2, 7)),
        ("prior_mean", [0.0, math.inf]),
        ("init_precision", {"v": 1.0}),
        ("init_precision", [1.0]),
    ],
)
def test_impossible_priors_are_named_at_init(option, value):
    runs = replicas.build(lambda p, b: b, num_replicas=2, num_data=10, rank=1, lr=0.1, **{option: value})
    with pytest.raises(ValueError, match=option):
        runs.init({"w": torch.zeros(3)})


def quadratic(**options):
    options = {"num_replicas": 2, "num_data": 2, "rank": 1, "lr": 0.1} | options
    runs = replicas.build(lambda p, b: -(b - p["w"]).square().sum(-1), **options)
    return runs, runs.init({"w": torch.zeros(1)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"batch": torch.zeros(3, 2, 1)}, r"tensors of shape \(2, M"),
        ({"batch": torch.zeros(2, 0, 1)}, r"tensors of shape \(2, M"),
        ({"batch": torch.zeros(2)}, r"tensors of shape \(2, M"),
        ({"batch": (torch.zeros(2, 3, 1), torch.zeros(2, 4))}, r"tensors of shape \(2, M"),
        ({"batch": 3}, "it has no tensors"),
        ({"counts": [1]}, "counts must be 2 whole numbers"),
        ({"counts": [1.0, 2.0]}, "counts must be 2 whole numbers"),
        ({"counts": [1, 4]}, "between 0 .* and the batch's 3 examples"),
        ({"generators": [torch.Generator()]}, "one for each of the 2 replicas"),
    ],
)
def test_impossible_batches_and_generators_are_named(call, message):
    runs, state = quadratic()
    with pytest.raises(ValueError, match=message):
        runs.update(state, **({"batch": torch.zeros(2, 3, 1)} | call))


def test_states_of_another_number_of_replicas_are_refused():
    runs, state = quadratic()
    with pytest.raises(ValueError, match="state has 1 replicas, but num_replicas is 2"):
        runs.update(runs.stack([runs.replica(state, 0)]), torch.zeros(2, 3, 1))


def test_a_schedule_that_leaves_its_range_is_named_at_the_step():
    runs, state = quadratic(lr=[0.1, lambda t: 2.0 - t])
    state, _ = runs.update(state, torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match=r"lr\[1\] must be"):
        runs.update(state, torch.zeros(2, 3, 1))


def test_a_shared_schedule_follows_the_steps_of_each():
    seen = []
    runs, state = quadratic(lr=lambda t: seen.append(t) or 0.1 / t)
    state, _ = runs.update(state, torch.zeros(2, 3, 1))
    state, _ = runs.update(state, torch.zeros(2, 3, 1), counts=[3, 0])
    state, _ = runs.update(state, torch.zeros(2, 3, 1))
    assert seen == [1, 2, 3, 2]
    assert state.step.tolist() == [3, 2]


def test_constants_may_follow_the_steps_of_each():
    def log_likelihood(params, batch, tau):
        return -0.5 * tau * (batch - params["w"]).square().sum(-1)

    def built(constants):
        return replicas.build(log_likelihood, num_replicas=2, num_data=4, rank=1, lr=0.1, constants=constants)

    rows = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])  # by step, then by replica
    moving = built(lambda steps: rows[steps - 1, torch.arange(2)])
    begin = moving.init({"w": torch.zeros(1)})
    batch, source = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0)), replicas.streams([0, 1])
    state, expected = begin, begin
    for counts in ([3, 3], [3, 0], [3, 3]):
        tau = rows[expected.step, torch.arange(2)]
        held = built(tau).update(expected, batch, [copied(s) for s in source], counts=counts)[0]
        state, _ = moving.update(state, batch, source, counts=counts)
        assert torch.equal(state.loc, held.loc)
        expected = held
    assert state.step.tolist() == [3, 2]


def test_constants_of_a_step_are_checked():
    runs = replicas.build(
        lambda params, batch, tau: batch, num_replicas=2, num_data=4, rank=1, lr=0.1, constants=lambda steps: 1.0
    )
    with pytest.raises(ValueError, match="constants must be tensors with the 2 replicas in front, got float"):
        runs.update(runs.init({"w": torch.zeros(1)}), torch.zeros(2, 3))


def copied(source):
    return torch.Generator().set_state(source.get_state())


def test_numbers_may_come_as_tensors():
    runs, state = quadratic(
        lr=torch.tensor([0.1, 0.2]), momentum=torch.tensor([0.5, 0.9]), num_data=torch.tensor([4, 5])
    )
    listed, _ = quadratic(lr=[0.1, 0.2], momentum=[0.5, 0.9], num_data=[4, 5])
    batch = torch.randn(2, 3, 1)
    a, b = (r.update(state, batch, replicas.streams([0, 1]))[0] for r in (runs, listed))
    torch.testing.assert_close(a.loc, b.loc)
