"""States of replicas: where they start, the way to and from single runs, saving, padding."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.replica_problems import distance, regression
from slangvi import replicas, slang
from slangvi.params.state import tensors_of


def test_all_start_alike_or_each_on_its_own():
    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    together, _ = torch.func.stack_module_state(models)
    singles = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
    stacked = replicas.init(together, 3, rank=1, stacked=True)
    listed = replicas.init(singles, 3, rank=1, init_precision=[1.0, 2.0, {"*": 3.0}])
    alike = replicas.init(singles[1], 3, rank=1)
    assert torch.equal(stacked.loc, listed.loc)
    assert listed.prec_diag[:, 0].tolist() == [1.0, 2.0, 3.0]
    for k in range(3):
        assert torch.equal(listed.loc[k], slang.init(singles[k], 1).loc)
        assert torch.equal(alike.loc[k], listed.loc[1])
    assert stacked.spec == slang.init(singles[0], 1).spec


@pytest.mark.parametrize(
    ("params", "options", "error", "message"),
    [
        ({"w": torch.zeros(3)}, {"stacked": True}, ValueError, "replicas in front, got shape"),
        ({"w": torch.zeros(())}, {"stacked": True}, ValueError, "replicas in front, got shape"),
        ([{"w": torch.zeros(3)}], {}, ValueError, "one for each of the 2 replicas"),
        ([{"w": torch.zeros(3)}, {"v": torch.zeros(3)}], {}, TypeError, "same names"),
        (torch.zeros(2, 3), {}, TypeError, "dict of tensors"),
        ({}, {}, ValueError, "params is empty"),
        ({"w": torch.tensor([math.nan])}, {}, ValueError, "params must be finite"),
        ({"w": torch.zeros(3)}, {"stacked": 1}, TypeError, "stacked"),
        ({"w": torch.zeros(3)}, {"rank": -1}, ValueError, "rank"),
    ],
)
def test_impossible_starts_are_named(params, options, error, message):
    with pytest.raises(error, match=message):
        replicas.init(params, 2, **({"rank": 1} | options))


def test_single_states_become_replicas_and_go_on_as_they_would():
    problem = regression(torch.float64, count=3)
    vis = [problem.alone(k) for k in range(3)]
    generators = replicas.streams(range(3))
    states = [vi.init(start) for vi, start in zip(vis, problem.starts, strict=True)]
    batch = problem.batch(torch.randint(30, (3, 5)))
    for k, steps in enumerate((0, 1, 3)):
        for _ in range(steps):
            states[k], _ = vis[k].update(states[k], tuple(x[k] for x in batch), generator=generators[k])
    runs, twins = problem.runs(), [torch.Generator() for _ in range(3)]
    for twin, generator in zip(twins, generators, strict=True):
        twin.set_state(generator.get_state())
    state, _ = runs.update(runs.stack(states), batch, twins)
    assert state.step.tolist() == [1, 2, 4]
    for k in range(3):
        alone, _ = vis[k].update(states[k], tuple(x[k] for x in batch), generator=generators[k])
        assert distance(runs.replica(state, k), alone) <= 1e-9


def test_only_states_alike_can_be_stacked():
    one, two = slang.init({"w": torch.zeros(2)}, 1), slang.init({"w": torch.zeros(2)}, 2)
    with pytest.raises(ValueError, match="same parameters, rank, dtype and device, got 2 kinds"):
        replicas.stack([one, two])
    with pytest.raises(ValueError, match="got no states"):
        replicas.stack([])


def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path):
    problem = regression(torch.float32, rank=2)
    runs, batch = problem.runs(), problem.batch(torch.randint(30, (4, 5)))
    state, _ = runs.update(runs.init(problem.starts), batch, replicas.streams(range(4)), counts=[5, 5, 0, 5])
    torch.save(dict(tensors_of(state)), tmp_path / "state.pt")
    again = replicas.State(**torch.load(tmp_path / "state.pt"), spec=state.spec)
    a, b = (runs.update(s, batch, replicas.streams(range(9, 13)))[0] for s in (state, again))
    assert a.step.tolist() == [2, 2, 1, 2]
    for (name, x), (_, y) in zip(tensors_of(a), tensors_of(b), strict=True):
        torch.testing.assert_close(x, y, msg=name)


def test_states_are_never_modified():
    problem = regression(torch.float64)
    runs, batch = problem.runs(), problem.batch(torch.randint(30, (4, 5)))
    state = runs.init(problem.starts)
    before = {name: value.clone() for name, value in tensors_of(state)}
    runs.update(state, batch, counts=[5, 0, 3, 5])
    for name, value in tensors_of(state):
        assert torch.equal(value, before[name])


def test_padding_keeps_nesting_and_tells_lengths():
    batches = [{"x": torch.ones(n, 2), "y": (torch.arange(n),)} for n in (3, 1)]
    padded, counts = replicas.pad(batches)
    assert counts == [3, 1]
    assert padded["x"].shape == (2, 3, 2)
    assert padded["y"][0].tolist() == [[0, 1, 2], [0, 0, 0]]
    with pytest.raises(ValueError, match="share a first dimension"):
        replicas.pad([(torch.zeros(2), torch.zeros(3))])


def test_padding_goes_by_names_and_not_by_their_order():
    first, second = {"x": torch.ones(2), "y": torch.zeros(2)}, {"y": torch.zeros(1), "x": torch.ones(1)}
    padded, counts = replicas.pad([first, second])
    assert padded["x"].tolist() == [[1, 1], [1, 0]]
    assert padded["y"].tolist() == [[0, 0], [0, 0]]
    assert counts == [2, 1]


@pytest.mark.parametrize(
    "others",
    [{"y": torch.ones(2)}, {"x": torch.ones(2, 1)}, {"x": torch.ones(2, dtype=torch.long)}, (torch.ones(2),)],
)
def test_padding_refuses_batches_that_are_not_alike(others):
    with pytest.raises(ValueError, match="batches must be nested alike, with tensors that differ in length only"):
        replicas.pad([{"x": torch.ones(3)}, others])


def test_padding_refuses_no_batches():
    with pytest.raises(ValueError, match="batches must be one or more"):
        replicas.pad([])


def test_generators_on_different_devices_or_of_another_number_are_refused():
    state = replicas.init({"w": torch.zeros(2)}, 3, rank=1)
    with pytest.raises(ValueError, match="one for each of the 3 replicas on one device, got 2"):
        replicas.sample(state, (2,), replicas.streams([0, 1]))


def test_seeds_are_whole_numbers():
    assert [g.initial_seed() for g in replicas.streams([1, 2**64 - 1])] == [1, 2**64 - 1]
    with pytest.raises(TypeError, match="seeds must be one whole number for each replica, got 3"):
        replicas.streams(3)
    with pytest.raises(TypeError, match="seeds must be a whole number"):
        replicas.streams(["a"])
    with pytest.raises(ValueError, match="seeds must be below 2⁶⁴"):
        replicas.streams([2**64])
