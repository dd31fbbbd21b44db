"""Problems side by side, minibatches, and what draws of weights predict."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from helpers.fake_uci import tiny
from slangvi_reproduction.data import folds, standardise
from slangvi_reproduction.experiments._regression import batches, network, scores, side_by_side, starts


def problems(count=3):
    data = tiny()
    pairs = folds(data.splits[0].train, 0, 5)[:count]
    return data, pairs, side_by_side([standardise(data, pair) for pair in pairs], "cpu")


def test_shorter_problems_are_padded_and_keep_their_numbers():
    data, pairs, found = problems(5)
    assert {len(pair.train) for pair in pairs} == {30, 31}
    assert found.num_train.tolist() == [len(pair.train) for pair in pairs]
    assert found.real.sum(1).tolist() == [len(pair.test) for pair in pairs]
    assert found.least == 30
    for k, pair in enumerate(pairs):
        part = standardise(data, pair)
        torch.testing.assert_close(found.x_train[k, : len(pair.train)], part.x_train.float())
        torch.testing.assert_close(found.y_test[k, : len(pair.test)], part.y_test.float())
        assert float(found.y_scale[k]) == pytest.approx(float(part.y_scale))


def test_an_epoch_shows_every_example_at_most_once_and_padding_never():
    _, _, found = problems(5)
    generator = torch.Generator().manual_seed(0)
    seen = list(batches(found, 10, generator))
    assert [x.shape for x, _ in seen] == [(5, 10, 2)] * 3
    for k, count in enumerate(found.num_train.tolist()):
        rows = torch.cat([x[k] for x, _ in seen])
        known = {tuple(row) for row in found.x_train[k, :count].tolist()}
        shown = [tuple(row) for row in rows.tolist()]
        assert len(set(shown)) == 30
        assert set(shown) <= known
    again = list(batches(found, 10, generator))
    assert not torch.equal(again[0][0], seen[0][0])
    pairs = {tuple(row): value for row, value in zip(found.x_train[0].tolist(), found.y_train[0].tolist(), strict=True)}
    x, y = seen[1]
    assert [pairs[tuple(row)] for row in x[0].tolist()] == y[0].tolist()


def test_scores_are_those_of_the_average_in_the_targets_own_units():
    data, pairs, found = problems()
    model = network(2, 4)
    draws = {name: torch.randn(3, 7, *p.shape) for name, p in model.named_parameters()}
    tau = torch.tensor([0.5, 1.0, 2.0])
    result = scores(model, lambda count: draws, 7, found, tau)
    for k, pair in enumerate(pairs):
        part = standardise(data, pair)
        outputs = torch.stack(
            [
                torch.func.functional_call(model, {n: v[k, s] for n, v in draws.items()}, (part.x_test.float(),))
                for s in range(7)
            ]
        ).double()
        scale, y = float(part.y_scale), part.y_test
        rmse = (outputs.mean(0) - y).square().mean().sqrt() * scale
        noise = Normal(outputs * scale, scale / math.sqrt(float(tau[k])))
        fit = (noise.log_prob(y * scale).logsumexp(0) - math.log(7)).mean()
        assert float(result.rmse[k]) == pytest.approx(float(rmse), rel=1e-5)
        assert float(result.log_likelihood[k]) == pytest.approx(float(fit), rel=1e-5)


def test_draws_may_come_in_portions(monkeypatch):
    from slangvi_reproduction.experiments import _regression

    _, _, found = problems()
    model = network(2, 4)
    draws = {name: torch.randn(3, 9, *p.shape) for name, p in model.named_parameters()}
    asked = []

    def draw(count):
        first = sum(asked)
        asked.append(count)
        return {name: value[:, first : first + count] for name, value in draws.items()}

    whole = scores(model, draw, 9, found, torch.ones(3))
    assert asked == [9]
    asked.clear()
    monkeypatch.setattr(_regression, "_AT_ONCE", found.y_test.numel() * 5 * 4)
    parts = scores(model, draw, 9, found, torch.ones(3))
    assert asked == [4, 4, 1]
    torch.testing.assert_close(parts.rmse, whole.rmse)
    torch.testing.assert_close(parts.log_likelihood, whole.log_likelihood)


def test_starts_are_torchs_own_and_leave_the_random_state_alone(global_rng_untouched):
    found = starts(2, 4, [3, 5])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        alone = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    assert torch.equal(found["2.weight"][1], alone[2].weight)
    assert found["0.bias"].shape == (2, 4)
