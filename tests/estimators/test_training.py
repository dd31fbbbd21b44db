"""How the start of a slow precision is taken out in the end, and when not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slangvi import SLANGClassifier, SLANGRegressor, slang
from slangvi.estimators._base import BaseSLANG
from slangvi.estimators._training import without_start


def state_of(prec_diag, prec_factor):
    method = slang.build(lambda params, batch: batch, num_data=1, lr=0.1, rank=prec_factor.shape[1])
    return replace(
        method.init({"w": torch.zeros(3, dtype=torch.float64)}), prec_diag=prec_diag, prec_factor=prec_factor
    )


def test_without_its_start_a_precision_is_the_average_of_all_else():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    start, share = torch.tensor([5.0, 50.0, 500.0], dtype=torch.float64), 0.2
    prior = torch.full((3,), 1e-3, dtype=torch.float64)
    diag = torch.rand(3, generator=generator, dtype=torch.float64) + share * start + prior
    found = slang.posterior(without_start(state_of(diag, rows), start, prior, share)).precision_matrix
    both = share * torch.diag(start) + (1 - share) * found
    torch.testing.assert_close(both, rows.mT @ rows + torch.diag(diag))


def test_rounding_leaves_the_prior():
    start, prior = torch.full((3,), 1e4, dtype=torch.float64), torch.full((3,), 1e-3, dtype=torch.float64)
    found = without_start(state_of(0.9 * start, torch.zeros(1, 3, dtype=torch.float64)), start, prior, 0.9 * (1 + 1e-9))
    torch.testing.assert_close(found.prec_diag, prior)


def test_what_the_data_do_not_determine_keeps_the_precision_of_the_prior():
    """Inputs that are all zero say nothing about their weights."""
    inputs, targets = np.zeros((400, 3)), np.random.default_rng(0).normal(size=400)
    settings = {"hidden_layer_sizes": (), "standardize": False, "prior_precision": 3.0, "random_state": 0}
    model = SLANGRegressor(**settings, max_iter=5).fit(inputs, targets)
    *weights, bias = model.posterior_.precision_matrix.diagonal().tolist()
    assert weights == pytest.approx([3.0] * 3, rel=1e-6)
    assert bias > 100.0  # which the targets do determine


@pytest.fixture
def scoring(monkeypatch):
    """Keeps the rows that are held out: the score on them of what a fitted estimator has kept."""
    seen = []
    real = BaseSLANG._loss_on
    monkeypatch.setattr(BaseSLANG, "_loss_on", lambda self, held, *at: seen.append(held) or real(self, held, *at))
    return lambda model: real(model, seen[0], model.state_, model._kept_noise())


def test_a_state_chosen_early_is_the_one_that_was_scored(scoring):
    inputs = np.random.default_rng(0).normal(size=(300, 3))
    stop = {"early_stopping": True, "n_iter_no_change": 1, "tol": 10.0, "random_state": 0}
    model = SLANGClassifier(**stop).fit(inputs, inputs[:, 0] > 0)
    assert model.n_iter_ == 2  # long before the start has faded
    assert scoring(model) == pytest.approx(model.best_validation_nll_, rel=1e-9)


@pytest.mark.parametrize(("rows", "epochs"), [(90, 10), (9, 1)])
def test_given_noise_has_fallen_before_a_score_counts(rows, epochs, scoring):
    """A score with larger noise is that of another model; the second case has a single step."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(rows, 1))
    stop = {"early_stopping": True, "noise": 0.005, "n_iter_no_change": 3, "max_iter": epochs, "random_state": 0}
    model = SLANGRegressor((), **stop).fit(inputs, inputs[:, 0] + 0.05 * rng.normal(size=rows))
    assert scoring(model) == pytest.approx(model.best_validation_nll_, rel=1e-9)


def test_a_strong_prior_does_not_overshoot():
    inputs = np.random.default_rng(0).normal(size=(60, 2))
    settings = {"hidden_layer_sizes": (8,), "prior_precision": 1e5, "batch_size": 1, "mc_samples": 1, "random_state": 0}
    model = SLANGClassifier(**settings, max_iter=30).fit(inputs, inputs[:, 0] > 0)
    assert model.posterior_.mean.abs().max() < 0.05


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_start_knows_the_scale_of_the_targets(scale):
    inputs = np.random.default_rng(0).normal(size=(200, 2))
    targets = scale * (inputs[:, 0] + 0.1 * np.random.default_rng(1).normal(size=200))
    settings = {"hidden_layer_sizes": (), "standardize": False, "prior_precision": 1e-2 / scale**2, "random_state": 0}
    model = SLANGRegressor(**settings, max_iter=40).fit(inputs, targets)
    assert model.score(inputs, targets) > 0.97
