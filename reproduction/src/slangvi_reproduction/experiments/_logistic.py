"""Logistic regression as the paper has it: data sets and their settings, stacked splits, and the three metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.likelihoods import Bernoulli
from slangvi.priors import Prior

__all__ = [
    "DATASETS",
    "METRICS",
    "Gaussian",
    "Problem",
    "measure",
    "negative_elbo_per_example",
    "predictive_nll",
    "prior_of",
    "symmetric_kl",
]

METRICS = ("negative_elbo_per_example", "test_nll_nats", "symmetric_kl")
BIAS_PRECISION = 1e-5


class Dataset(NamedTuple):
    """Settings of one data set.

    Args:
        prior_precision: λ of all weights but the bias.
        batch_size: M.
        splits: how many there are; 1 where training and test parts are given.
    """

    prior_precision: float
    batch_size: int
    splits: int


DATASETS = {
    "australian": Dataset(1e-5, 32, 20),
    "breast_cancer": Dataset(1.0, 32, 20),
    "a1a": Dataset(2.8072, 128, 1),
    "usps_3vs5": Dataset(25.0, 64, 20),
}


@dataclass(frozen=True)
class Problem:
    """K training and test sets of the same sizes, float64; the first column of every x is ones.

    Args:
        x_train: (K, N, P).
        y_train: zeros and ones, (K, N).
        x_test: (K, n, P).
        y_test: (K, n).
        prior: λ and μ₀, (P,) each.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    prior: Prior

    @property
    def shape(self) -> torch.Size:
        """K, N, P."""
        return self.x_train.shape

    def to(self, device: str) -> Problem:
        """The same on another device."""
        return Problem(
            self.x_train.to(device),
            self.y_train.to(device),
            self.x_test.to(device),
            self.y_test.to(device),
            Prior(self.prior.precision.to(device), self.prior.mean.to(device)),
        )


class Gaussian(NamedTuple):
    """K Gaussians.

    Args:
        loc: μ, (K, P).
        covariance: Σ, (K, P, P).
    """

    loc: Tensor
    covariance: Tensor


def prior_of(dataset: str, num_params: int) -> Prior:
    """λ for every weight: the bias, which comes first, is nearly free.

    Example:
        >>> prior_of("breast_cancer", 3).precision
        tensor([1.0000e-05, 1.0000e+00, 1.0000e+00], dtype=torch.float64)
    """
    precision = torch.full((num_params,), DATASETS[dataset].prior_precision, dtype=torch.float64)
    precision[0] = BIAS_PRECISION
    return Prior(precision, torch.zeros_like(precision))


def measure(q: Gaussian, problem: Problem, exact: Gaussian) -> dict[str, Tensor]:
    """The three metrics of each split, (K,) each.

    Args:
        q: what is measured.
        problem: the splits.
        exact: the best full Gaussian, to which the divergence is taken.
    """
    apart = torch.zeros_like(q.loc[:, 0]) if q is exact else symmetric_kl(q, exact)
    values = (negative_elbo_per_example(q, problem), predictive_nll(q, problem), apart)
    return dict(zip(METRICS, values, strict=True))


def negative_elbo_per_example(q: Gaussian, problem: Problem) -> Tensor:
    r"""−ELBO/N without the term ½ log λ of the bias, as in the paper's tables, (K,).

    $$ -\tfrac1N\Bigl[\sum_i \mathbb E_q[\log p(y_i \mid x_i^\top\theta)] + \tfrac12\bigl(P + \log\det\Sigma +
       \textstyle\sum_{j \ge 1}\log\lambda_j - \sum_j \lambda_j(\Sigma_{jj} + \mu_j^2)\bigr)\Bigr] $$
    """
    mean, variance = _predictor(q, problem.x_train)
    fit = Bernoulli().expected_log_prob(mean, variance, problem.y_train).sum(-1)
    lam = problem.prior.precision
    away = (q.loc - problem.prior.mean).square() + q.covariance.diagonal(dim1=-2, dim2=-1)
    closeness = lam[1:].log().sum() + _logdet(q.covariance) - (lam * away).sum(-1) + len(lam)
    return -(fit + 0.5 * closeness) / problem.x_train.shape[-2]


def predictive_nll(q: Gaussian, problem: Problem) -> Tensor:
    """Mean of −log E_q[p(y | x)] over test examples, nats, by quadrature, (K,)."""
    mean, variance = _predictor(q, problem.x_test)
    return -Bernoulli().predictive_log_prob(mean, variance, problem.y_test).mean(-1)


def symmetric_kl(q: Gaussian, p: Gaussian) -> Tensor:
    r"""½[KL(q‖p) + KL(p‖q)], in which the log-determinants cancel, (K,).

    $$ \tfrac14\bigl[\mathrm{tr}(\Sigma_p^{-1}\Sigma_q) + \mathrm{tr}(\Sigma_q^{-1}\Sigma_p) - 2P
       + \delta^\top(\Sigma_p^{-1} + \Sigma_q^{-1})\,\delta\bigr], \qquad \delta = \mu_q - \mu_p $$

    Example:
        >>> one, two = (Gaussian(torch.full((1, 1), m), torch.full((1, 1, 1), v)) for m, v in ((0.0, 1.0), (2.0, 2.0)))
        >>> symmetric_kl(one, two)
        tensor([1.6250])
    """
    p_inv, q_inv = (torch.cholesky_inverse(torch.linalg.cholesky(each.covariance)) for each in (p, q))
    traces = (p_inv * q.covariance + q_inv * p.covariance).sum((-2, -1))
    apart = (q.loc - p.loc).unsqueeze(-1)
    distance = (apart.mT @ (p_inv + q_inv) @ apart).squeeze(-1).squeeze(-1)
    return (0.25 * (traces - 2 * q.loc.shape[-1] + distance)).clamp_min(0.0)  # below 0 by rounding only


def _predictor(q: Gaussian, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of xᵀθ for every row, (K, n) each."""
    mean = (x @ q.loc.unsqueeze(-1)).squeeze(-1)
    return mean, ((x @ q.covariance) * x).sum(-1).clamp_min(0.0)


def _logdet(covariance: Tensor) -> Tensor:
    factor: Tensor = torch.linalg.cholesky(covariance)
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
