"""What "auto" stands for, and how the start of a slow precision is taken out in the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slangvi import SLANGClassifier, SLANGRegressor, slang
from slangvi.estimators._training import Rows, Wishes, without_start

ROWS = Rows(torch.zeros(40, 3), torch.zeros(40), torch.full((40,), 0.5))
OTHERS = {"rank": 1, "prior_precision": 1.0, "mc_samples": 1}


def wishes(**given) -> Wishes:
    nothing = {"lr": None, "precision_lr": None, "init_precision": None, "batch_size": 10}
    return Wishes(**(nothing | given), others=OTHERS, rates=SLANGRegressor._rates)


def test_a_planned_run_has_a_slow_precision():
    found = wishes().planned(ROWS, epochs=25)
    assert (found.lr, found.precision_lr, found.init_precision) == (0.1, 0.1, 20.0)  # 100 steps, rows count for half
    assert not found.precision_warmup
    assert (found.rank, found.batch_size) == (1, 10)


def test_a_run_without_end_has_constant_rates():
    found = wishes().endless()
    assert (found.lr, found.precision_lr, found.init_precision) == (0.1, 0.05, 10.0)
    assert found.precision_warmup


@pytest.mark.parametrize("make", [lambda given: given.planned(ROWS, 25), Wishes.endless], ids=["planned", "endless"])
def test_what_is_given_is_taken(make):
    found = make(wishes(lr=0.3, precision_lr=0.2, init_precision=7.0))
    assert (found.lr, found.precision_lr, found.init_precision) == (0.3, 0.2, 7.0)
    assert found.precision_warmup


def test_a_start_can_be_given_to_a_slow_precision():
    found = wishes(init_precision={"*": 7.0}).planned(ROWS, epochs=25)
    assert found.init_precision == {"*": 7.0}
    assert not found.precision_warmup


def state_of(prec_diag, prec_factor):
    method = slang.build(lambda params, batch: batch, num_data=1, lr=0.1, rank=prec_factor.shape[1])
    return replace(
        method.init({"w": torch.zeros(3, dtype=torch.float64)}), prec_diag=prec_diag, prec_factor=prec_factor
    )


def test_without_its_start_a_precision_is_the_average_of_all_else():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    start, share = torch.tensor([5.0, 50.0, 500.0], dtype=torch.float64), 0.2
    diag = torch.rand(3, generator=generator, dtype=torch.float64) + share * start
    found = slang.posterior(without_start(state_of(diag, rows), start, share)).precision_matrix
    both = share * torch.diag(start) + (1 - share) * found
    torch.testing.assert_close(both, rows.mT @ rows + torch.diag(diag))


def test_rounding_does_not_make_a_precision_negative():
    diag, start = torch.full((3,), 0.1, dtype=torch.float64), torch.full((3,), 1.0, dtype=torch.float64)
    found = without_start(state_of(diag, torch.zeros(1, 3, dtype=torch.float64)), start, 0.1 * (1 + 1e-15))
    assert (found.prec_diag > 0).all()


@pytest.mark.parametrize("early_stopping", [False, True])
def test_what_the_data_do_not_determine_keeps_the_precision_of_the_prior(early_stopping):
    """Inputs that are all zero say nothing about their weights."""
    inputs, targets = np.zeros((400, 3)), np.random.default_rng(0).normal(size=400)
    settings = {"hidden_layer_sizes": (), "standardize": False, "prior_precision": 3.0, "random_state": 0}
    model = SLANGRegressor(**settings, max_iter=5, early_stopping=early_stopping).fit(inputs, targets)
    *weights, bias = model.posterior_.precision_matrix.diagonal().tolist()
    assert weights == pytest.approx([3.0] * 3, rel=1e-6)
    assert bias > 100.0  # which the targets do determine


def test_a_strong_prior_does_not_overshoot():
    inputs = np.random.default_rng(0).normal(size=(60, 2))
    model = SLANGClassifier(hidden_layer_sizes=(8,), prior_precision=1e5, max_iter=30, random_state=0)
    model.fit(inputs, inputs[:, 0] > 0)
    assert model.posterior_.mean.abs().max() < 0.05
