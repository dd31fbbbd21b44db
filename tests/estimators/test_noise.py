"""The noise: its likelihood, how it is read back from one, and that it finds the truth."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from slangvi import Gaussian, SLANGRegressor
from slangvi.estimators._noise import Noise

ONE = torch.ones(1, dtype=torch.float64)


def test_the_likelihood_is_the_normal_density():
    outputs, targets = torch.randn(5, 4, 3).double(), torch.randn(4, 3).double()
    noise = Noise(torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), torch.ones(3))
    expected = torch.distributions.Normal(outputs, noise.variance.sqrt()).log_prob(targets).sum(-1)
    torch.testing.assert_close(noise.log_prob(outputs, targets), expected)
    model = nn.Linear(2, 1).double()
    batch, params = (torch.randn(4, 2).double(), torch.randn(4, 1).double()), dict(model.named_parameters())
    one = Noise(0.25 * ONE, ONE).of(model)(params, batch)
    torch.testing.assert_close(one, Gaussian(4.0).of(model)(params, batch))


def test_squared_residuals_are_read_back_from_the_log_likelihood():
    outputs, targets = torch.randn(6, 1).double() / 4, torch.zeros(6, 1).double()
    noise = Noise(0.3 * ONE, ONE, learnt=True)
    found = noise.squares(float(noise.log_prob(outputs, targets).mean()))
    torch.testing.assert_close(found, outputs.square().mean(0))


def test_every_column_follows_its_own_residuals():
    noise = Noise(torch.tensor([0.3, 0.4], dtype=torch.float64), torch.ones(2).double(), learnt=True)
    noise.follow(torch.tensor([0.1, 0.9]), steps_per_epoch=50)
    assert noise.variance.tolist() == pytest.approx([0.98 * 0.3 + 0.02 * 0.1, 0.98 * 0.4 + 0.02 * 0.9])


@pytest.mark.parametrize(("square", "bound"), [(0.0, 1e-6 * 2.0), (100.0, 2.0)])
def test_learnt_noise_stays_between_its_bounds(square, bound):
    noise = Noise.unknown(2.0 * ONE)
    assert float(noise.variance) == pytest.approx(0.2)
    for _ in range(2000):
        noise.follow(square * ONE, 1)
    assert float(noise.variance) == pytest.approx(bound)


def test_a_spread_that_nobody_has_seen_bounds_nothing():
    noise = Noise.unknown(0.0 * ONE)
    assert float(noise.variance) == pytest.approx(0.1)
    for _ in range(500):
        noise.follow(1e6 * ONE, 1)
    assert float(noise.variance) == pytest.approx(1e6, rel=1e-3)


def test_given_noise_does_not_move():
    noise = Noise(ONE, ONE)
    noise.follow(100.0 * ONE, 1)
    assert torch.equal(noise.variance, ONE)


def test_given_noise_starts_at_a_tenth_of_the_spread_and_falls():
    noise = Noise(torch.tensor([0.002, 0.3], dtype=torch.float64), torch.full((2,), 2.0))
    for share, expected in [(0.0, 0.2), (0.5, 0.02), (1.0, 0.002)]:
        noise.fall(share)
        assert noise.variance.tolist() == pytest.approx([expected, 0.3])
    noise.fall(0.5)
    kept = copy.copy(noise)
    kept.fall(1.0)
    assert kept.variance.tolist() == [0.002, 0.3]
    assert float(noise.variance[0]) == pytest.approx(0.02)


def test_learnt_noise_does_not_fall_by_itself():
    noise = Noise.unknown(2.0 * ONE)
    noise.fall(0.5)
    assert float(noise.variance) == pytest.approx(0.2)


@pytest.mark.parametrize("stops", [False, True])
def test_targets_may_spread_over_many_times_the_given_noise(stops):
    """A slope of 40 standard deviations; without larger noise at the start the mean gets nowhere."""
    source = np.random.RandomState(0)
    x = source.uniform(-1, 1, (120, 1))
    y = np.sin(3 * x[:, 0]) + 0.025 * source.randn(120)
    model = SLANGRegressor(noise=0.025, hidden_layer_sizes=(20,), max_iter=100, random_state=0, early_stopping=stops)
    model.fit(x, y)
    assert np.sqrt(np.mean((model.predict(x) - y) ** 2)) < 0.1
    assert model.noise_std_ == pytest.approx(0.025, rel=1e-5)


def test_a_copy_is_not_moved():
    noise = Noise.unknown(ONE)
    kept = copy.copy(noise)
    noise.follow(100.0 * ONE, 1)
    assert float(kept.variance) == pytest.approx(0.1)
    assert float(noise.variance) > 0.1


@pytest.mark.parametrize(("scale", "std"), [(1.0, 0.2), (100.0, 60.0)])
def test_known_noise_is_found(scale, std):
    """A plane under noise: 300 rows leave a standard error of 4 % on the standard deviation."""
    source = np.random.RandomState(0)
    X = source.randn(300, 2)
    y = scale * (X @ [1.0, -0.5]) + 3 * scale + std * source.randn(300)
    settings = {"max_iter": 30, "learning_rate_init": 0.3, "mc_samples": 1, "rank": 1, "random_state": 0}
    model = SLANGRegressor(hidden_layer_sizes=(), **settings).fit(X, y)
    assert model.noise_std_ == pytest.approx(std, rel=0.12)
    mean, spread = model.predict(X, return_std=True)
    assert (spread > model.noise_std_).all()
    assert np.mean(np.abs(y - mean) < spread) == pytest.approx(0.68, abs=0.08)


def test_columns_with_different_noise_are_told_apart():
    source = np.random.RandomState(0)
    X = source.randn(400, 2)
    y = np.column_stack([X[:, 0] + 0.05 * source.randn(400), 20 * X[:, 1] + 20 * source.randn(400)])
    settings = {"max_iter": 30, "learning_rate_init": 0.3, "mc_samples": 1, "rank": 1, "random_state": 0}
    model = SLANGRegressor(hidden_layer_sizes=(), **settings).fit(X, y)
    assert model.noise_std_ == pytest.approx([0.05, 20.0], rel=0.15)
    mean, spread = model.predict(X, return_std=True)
    assert np.mean(np.abs(y - mean) < spread, axis=0) == pytest.approx([0.68, 0.68], abs=0.08)
