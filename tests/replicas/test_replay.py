"""The step of all replicas as a graph: the same states and numbers as eagerly, whatever some replicas meet."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

from helpers.replica_problems import METHODS, distance, logistic, regression
from slangvi import replicas
from slangvi.errors import NumericalError

PROBLEMS = {
    "dense": (lambda: regression(torch.float32), 1e-5),
    "factored": (lambda: regression(torch.float32, "factored"), 1e-5),
    "many rows": (lambda: regression(torch.float32, "factored", draws=8), 1e-5),
    "rank 3": (lambda: regression(torch.float32, "factored", rank=3), 1e-5),
    "one replica": (lambda: regression(torch.float32, count=1), 1e-5),
    "few parameters": (lambda: logistic(torch.float32), 1e-5),
}
OWN = {"rank 3": (lambda: regression(torch.float32, "factored", rank=3).calmed(), 1e-5)}
CASES = [("slang", name, *row) for name, row in PROBLEMS.items()]
CASES += [("online_eig", name, *row) for name, row in (PROBLEMS | OWN).items() if name not in ("dense", "one replica")]


def told(info):
    values = (info.spectrum, info.total, info.clipped, info.expected_log_likelihood, info.kl)
    return torch.cat([x.double().reshape(len(info.step), -1) for x in values], 1)


def both(problem, steps=9, size=5, counts=lambda step: None, meddle=lambda step, batch: batch, **options):
    """States and infos after every step: eagerly, and replayed."""
    found = []
    for compiled in (False, True):
        runs = problem.runs(compile=compiled, **options)
        state, generators = runs.init(problem.starts), replicas.streams(range(problem.count))
        source, path = torch.Generator().manual_seed(0), []
        for step in range(steps):
            index = torch.stack([torch.randperm(30, generator=source)[:size] for _ in range(problem.count)])
            state, info = runs.update(state, meddle(step, problem.batch(index)), generators, counts(step))
            path.append((state, info))
        found.append((path, [generator.get_state() for generator in generators]))
    return found


def assert_alike(found, tolerance):
    (eager, sources), (replayed, theirs) = found
    assert all(torch.equal(a, b) for a, b in zip(sources, theirs, strict=True))
    for (a, info), (b, other) in zip(eager, replayed, strict=True):
        assert torch.equal(a.step, b.step)
        assert torch.equal(a.failed, b.failed)
        assert torch.equal(info.num_rows, other.num_rows)
        assert info.failures == other.failures
        for k in range(len(a.loc)):
            assert distance(replicas.replica(b, k), replicas.replica(a, k)) <= tolerance
        x, y = told(info), told(other)
        torch.testing.assert_close(
            y, x, rtol=10 * tolerance, atol=tolerance * float(x.nan_to_num().abs().max()), equal_nan=True
        )


@pytest.mark.parametrize(
    ("method", "make", "tolerance"), [(m, *row) for m, _, *row in CASES], ids=[f"{m}: {n}" for m, n, *_ in CASES]
)
def test_a_replayed_step_is_the_eager_one(method, make, tolerance, taped):
    with torch.random.fork_rng():
        problem = replace(make(), method=method)
    assert_alike(both(problem), tolerance)
    assert taped.captured == ["step"]
    # Eagerly go the first step, and with a model those at which gradients are checked.
    assert len(taped.replayed) == (8 if problem.model is None else 5)


def test_fewer_rows_than_columns_leave_the_others_empty(taped):
    problem = replace(regression(torch.float32, rank=5, draws=1).calmed(), method="online_eig")
    found = both(problem, size=3)
    assert_alike(found, 1e-5)
    assert float(found[1][0][-1][1].spectrum[:, 3:].abs().max()) == 0.0
    assert len(taped.replayed) == 8


def test_other_shapes_and_padding_have_graphs_of_their_own(taped):
    problem = regression(torch.float32, "factored")
    ragged = lambda step: [5, 4, 5, 3] if step % 3 == 2 else None  # noqa: E731
    assert_alike(both(problem, 15, counts=ragged), 1e-5)
    assert taped.captured == ["step", "step"]


def test_replicas_that_sit_out_stand_still(taped):
    problem = regression(torch.float32)
    found = both(problem, 6, counts=lambda step: [5, 0, 5, 5] if step == 4 else None)
    assert_alike(found, 1e-5)
    path = found[1][0]
    assert torch.equal(path[4][0].loc[1], path[3][0].loc[1])
    assert path[5][0].step.tolist() == [6, 5, 6, 6]
    assert math.isnan(float(path[4][1].total[1]))
    assert len(taped.replayed) == 5


def poison(step, batch):
    x, y = batch
    return (x, y.index_fill(0, torch.tensor([2]), torch.inf)) if step == 3 else (x, y)


@pytest.mark.parametrize("method", METHODS)
def test_a_replica_that_fails_is_told_in_the_same_words_and_the_others_go_on(method, taped):
    problem = replace(regression(torch.float32), method=method)
    found = both(problem, 7, meddle=poison)
    assert_alike(found, 1e-5)
    path = found[1][0]
    assert [failure.replica for failure in path[3][1].failures] == [2]
    assert path[6][0].step.tolist() == [7, 7, 3, 7]
    assert len(taped.replayed) == 6  # the step in which it fails is tried, and taken again


def test_a_failure_raises_when_asked_to(taped):
    problem = regression(torch.float32)
    with pytest.raises(NumericalError, match="replica 2"):
        both(problem, 7, meddle=poison, on_failure="raise")


def test_a_state_from_elsewhere_is_loaded(taped):
    problem = regression(torch.float32)
    runs = problem.runs(compile=True)
    first = runs.init(problem.starts)
    batch = problem.batch(torch.arange(5).expand(4, 5))
    step = lambda state: runs.update(state, batch, replicas.streams(range(4)))[0]  # noqa: E731
    second = step(first)
    third = step(second)
    again = step(second)
    assert torch.equal(third.loc, again.loc)
    assert torch.equal(third.prec_factor, again.prec_factor)
    assert not torch.equal(third.loc, second.loc)
    copied = replicas.stack([replicas.replica(third, k) for k in range(4)])
    assert torch.equal(step(copied).loc, step(third).loc)


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, torch.float64, "torch.float64 asks for eigenvectors to the last digit"),
        ({"rank": 0}, torch.float32, "rank must lie between 1 and the 41 parameters for it, got 0"),
        ({"memory_limit": 8000}, torch.float32, "memory_limit lets only some replicas advance at a time"),
        ({"rank": 6, "method": "online_eig"}, torch.float32, "OnlineEig matches more than 5 columns on the CPU"),
    ],
)
def test_what_cannot_be_captured_says_so_once_and_runs_eagerly(taped, options, dtype, reason):
    rank, method = options.pop("rank", 1), options.pop("method", "slang")
    problem = replace(regression(dtype, rank=rank), method=method)
    with pytest.warns(UserWarning, match=f"compile=True has no effect: {reason}") as caught:
        found = both(problem, 3, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_alike(found, 1e-9)
    assert not taped.captured


def test_a_likelihood_that_looks_at_numbers_runs_eagerly(taped):
    problem = logistic(torch.float32)
    plain = problem.log_likelihood

    def looks(params, batch):
        seen.append(1)
        if taped.busy:
            raise RuntimeError("not permitted")
        return plain(params, batch)

    seen: list[int] = []
    problem.log_likelihood = looks
    with pytest.warns(UserWarning, match=r"the step could not be captured \(RuntimeError: not permitted\)"):
        found = both(problem, 4)
    assert_alike(found, 1e-9)


def test_on_a_cpu_it_says_so():
    problem = regression(torch.float32)
    with pytest.warns(UserWarning, match="parameters are on cpu, and only CUDA devices have graphs"):
        found = both(problem, 3)
    assert_alike(found, 0.0)


@pytest.mark.choreography
def test_only_the_latest_kinds_keep_their_graphs(taped):
    problem = regression(torch.float32)
    runs = problem.runs(compile=True)
    state = runs.init(problem.starts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1, 2, 3, 4, 5, 1):
            batch = problem.batch(torch.arange(size).expand(4, size))
            for _ in range(2):
                state, _ = runs.update(state, batch, replicas.streams(range(4)))
    assert len(taped.captured) == 6
    assert state.step.tolist() == [12] * 4
