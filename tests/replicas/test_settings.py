"""Arguments that may differ between replicas: numbers, schedules and constants, or an error that names them."""

from __future__ import annotations

import math

import pytest
import torch

from slangvi import replicas

BAD = {
    "num_replicas": [(0, ValueError), (2.0, TypeError)],
    "num_data": [(0, ValueError), ([5, 0], ValueError), ([5], ValueError), (torch.tensor([3, -1]), ValueError)],
    "rank": [(-1, ValueError), (1.5, TypeError)],
    "lr": [(0.0, ValueError), ([0.1, 2.0], ValueError), ([0.1] * 3, ValueError), ([0.1, "a"], TypeError)],
    "precision_lr": [(1.5, ValueError), ([0.5, -0.5], ValueError)],
    "momentum": [(1.0, ValueError), ([0.5, -0.1], ValueError)],
    "mc_samples": [(0, ValueError)],
    "temperature": [(0.0, ValueError), ([1.0, math.inf], ValueError)],
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
