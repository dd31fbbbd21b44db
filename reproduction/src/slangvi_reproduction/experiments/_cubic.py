"""The noisy cubic and the network that is fitted to it: exact log density, ELBO and predictions of flat weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.data.toy import cubic
from slangvi_reproduction.experiments._logistic import Gaussian

__all__ = ["GRID", "INSIDE", "NOISE", "Moments", "Problem", "elbo", "negative_kl", "outputs", "predict", "problem"]

# Standard deviation of the noise, which the methods are told.
NOISE = 3.0
# Inputs are drawn from here.
INSIDE = 4.0
# Where predictions are compared: tenths, exactly, half as far again on either side.
GRID = torch.arange(-60, 61, dtype=torch.float64) / 10.0


@dataclass(frozen=True)
class Problem:
    """Data on standardised scales, the network and the prior; all in float64.

    Args:
        x: (N,).
        y: (N,).
        centre: mean of inputs and of targets.
        scale: standard deviation of inputs and of targets.
        hidden: units.
        prior_precision: λ of every weight and bias, on the standardised scales.
    """

    x: Tensor
    y: Tensor
    centre: tuple[float, float]
    scale: tuple[float, float]
    hidden: int
    prior_precision: float

    @property
    def tau(self) -> float:
        """Noise precision on the standardised scale."""
        return (self.scale[1] / NOISE) ** 2

    @property
    def num_params(self) -> int:
        """P."""
        return 3 * self.hidden + 1

    @property
    def grid(self) -> Tensor:
        """Where predictions are compared, on the standardised scale."""
        return (GRID - self.centre[0]) / self.scale[0]

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """Of all examples together, for weights (..., P): (...)."""
        squares = (self.y - outputs(theta, self.x)).square().sum(-1)
        return 0.5 * (len(self.y) * math.log(self.tau / (2 * math.pi)) - self.tau * squares)

    def log_density(self, theta: Tensor) -> Tensor:
        """Of the posterior up to a constant, for weights (..., P): (...)."""
        return self.log_likelihood(theta) - 0.5 * self.prior_precision * theta.square().sum(-1)

    def unscaled(self, curves: Tensor) -> Tensor:
        """Outputs in the targets' own units."""
        return curves * self.scale[1] + self.centre[1]


def problem(num_data: int, seed: int, hidden: int, prior_precision: float) -> Problem:
    """The paper's data from one seed."""
    x, y = (column.double().squeeze(1) for column in cubic(num_data, INSIDE, torch.Generator().manual_seed(seed)))
    centre, scale = (float(x.mean()), float(y.mean())), (float(x.std()), float(y.std()))
    return Problem((x - centre[0]) / scale[0], (y - centre[1]) / scale[1], centre, scale, hidden, prior_precision)


def outputs(theta: Tensor, x: Tensor) -> Tensor:
    """Outputs of one hidden layer of rectified units, for weights (..., P) and inputs (m,): (..., m).

    Weights lie as in the flat vector of `_regression.network`: into the layer, its biases, out of it, the last bias.

    Example:
        >>> outputs(torch.tensor([2.0, 0.5, -3.0, 1.0]), torch.tensor([1.0, -1.0]))
        tensor([-6.5000,  1.0000])
    """
    units = (theta.shape[-1] - 1) // 3
    w, b, v, c = theta.split([units, units, units, 1], -1)
    hidden = torch.relu(x.unsqueeze(-1) * w.unsqueeze(-2) + b.unsqueeze(-2))
    found: Tensor = (hidden @ v.unsqueeze(-1)).squeeze(-1) + c
    return found


def elbo(q: Gaussian, problem: Problem, noise: Tensor) -> Tensor:
    """Of K Gaussians, expectations by draws from standard normal noise (S, P): (K,).

    Args:
        q: K Gaussians.
        problem: what they are to approximate.
        noise: the same for all of them and all along the way, so that differences are not those of the noise.
    """
    thetas = q.loc.unsqueeze(1) + noise @ torch.linalg.cholesky(q.covariance).mT
    return problem.log_likelihood(thetas).mean(1) + negative_kl(q, problem.prior_precision)


def negative_kl(q: Gaussian, prior_precision: float) -> Tensor:
    """−KL(q ‖ N(0, 1/λ)) of K Gaussians, (K,)."""
    size = q.loc.shape[-1]
    squares = q.covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + q.loc.square().sum(-1)
    return 0.5 * (size + size * math.log(prior_precision) + torch.logdet(q.covariance) - prior_precision * squares)


@dataclass(frozen=True)
class Moments:
    """Predictions of the function in the targets' own units.

    Args:
        mean: (..., G).
        sd: (..., G).
    """

    mean: Tensor
    sd: Tensor


def predict(q: Gaussian, problem: Problem, draws: int, generator: torch.Generator) -> Moments:
    """Mean and standard deviation on the grid for each of K Gaussians, (K, G)."""
    found = []
    for loc, covariance in zip(q.loc, q.covariance, strict=True):
        noise = torch.randn((draws, len(loc)), generator=generator, dtype=loc.dtype)
        curves = problem.unscaled(outputs(loc + noise @ torch.linalg.cholesky(covariance).mT, problem.grid))
        found.append((curves.mean(0), curves.std(0)))
    mean, sd = (torch.stack(parts) for parts in zip(*found, strict=True))
    return Moments(mean, sd)
