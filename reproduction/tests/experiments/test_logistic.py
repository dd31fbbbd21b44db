"""The metrics of logistic regression against slow and obvious ways to compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from helpers import fake_experiments
from slangvi_reproduction.experiments._logistic import (
    DATASETS,
    METRICS,
    Gaussian,
    measure,
    negative_elbo_per_example,
    predictive_nll,
    prior_of,
    symmetric_kl,
)

POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(120)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def gaussians(seed: int = 0, splits: int = 2, size: int = 4) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(splits, size, size, generator=generator, dtype=torch.float64)
    loc = torch.randn(splits, size, generator=generator, dtype=torch.float64)
    return Gaussian(loc, 0.2 * root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64))


def logits(q: Gaussian, x: torch.Tensor, split: int) -> np.ndarray:
    """f at every node of the quadrature, (n, nodes)."""
    mean = x[split] @ q.loc[split]
    deviation = torch.einsum("ij,jk,ik->i", x[split], q.covariance[split], x[split]).sqrt()
    return (mean[:, None] + deviation[:, None] * torch.tensor(POINTS)).numpy()


@pytest.mark.parametrize("dataset", DATASETS)
def test_negative_elbo_leaves_out_the_prior_of_the_bias(dataset):
    problem, q = fake_experiments.problem(dataset), gaussians()
    lam = problem.prior.precision
    found = negative_elbo_per_example(q, problem)
    for k in range(2):
        f, y = logits(q, problem.x_train, k), problem.y_train[k].numpy()[:, None]
        fit = float(((y * f - np.logaddexp(0, f)) @ WEIGHTS).sum())
        prior = MultivariateNormal(torch.zeros_like(lam), precision_matrix=lam.diag())
        kl = float(kl_divergence(MultivariateNormal(q.loc[k], q.covariance[k]), prior))
        assert float(found[k]) == pytest.approx(-(fit - kl - 0.5 * math.log(1e-5)) / 24, rel=1e-7)


def test_nll_is_that_of_the_predictive_integral():
    problem, q = fake_experiments.problem(), gaussians()
    for k, value in enumerate(predictive_nll(q, problem)):
        p = (1 / (1 + np.exp(-logits(q, problem.x_test, k)))) @ WEIGHTS
        y = problem.y_test[k].numpy()
        assert float(value) == pytest.approx(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)), rel=1e-7)


def test_symmetric_kl_is_the_mean_of_both_divergences():
    one, two = gaussians(0), gaussians(1)
    p, q = (MultivariateNormal(*each) for each in (one, two))
    torch.testing.assert_close(symmetric_kl(one, two), (kl_divergence(p, q) + kl_divergence(q, p)) / 2)
    assert bool((symmetric_kl(one, one) >= 0).all())
    assert float(symmetric_kl(one, one).max()) < 1e-9


def test_all_three_are_measured_by_their_names():
    problem, q = fake_experiments.problem(), gaussians()
    found = measure(q, problem, gaussians(1))
    assert tuple(found) == METRICS
    assert torch.equal(found["test_nll_nats"], predictive_nll(q, problem))
    assert all(value.shape == (2,) for value in found.values())


def test_the_bias_is_nearly_free_on_every_data_set():
    for dataset, row in DATASETS.items():
        precision = prior_of(dataset, 3).precision
        assert precision.tolist() == pytest.approx([1e-5, row.prior_precision, row.prior_precision])


def test_a_problem_moves_as_a_whole():
    problem = fake_experiments.problem().to("cpu")
    assert problem.shape == (2, 24, 4)
    assert problem.prior.mean.device.type == "cpu"
