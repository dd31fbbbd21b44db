"""The noise of real targets: given, or learnt beside the posterior."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slangvi.likelihoods import Likelihood, one_entry_each
from slangvi.schedules import by_equal_factors

# Least share of the targets' variance that learnt noise may have: beyond it float32 has nothing left to learn from.
_LEAST = 1e-6
# Share of the targets' variance that learnt noise starts at, and given noise at least.
_START = 0.1
# Steps that the running mean of squared residuals looks back on, at least.
_WINDOW = 20


class Noise(Likelihood):
    r"""Gaussian noise around the outputs, with one variance for each target column.

    Learnt noise is a point estimate. For a fixed posterior the expected log-likelihood is largest at

    $$ \sigma^2 = \tfrac1N \sum_i \mathbb E_q\bigl[(y_i - f(x_i, \theta))^2\bigr]
       = \tfrac1N \sum_i \bigl[(y_i - \mathbb E f_i)^2 + \operatorname{Var} f_i\bigr], $$

    residuals plus predictive variance. Every step sees squared residuals of its minibatch at its own draws of the
    weights, whose mean $v_t$ estimates that without bias, and σ² follows it: σ² ← (1 − ρ)σ² + ρ vₜ with
    ρ = 1/max(20, steps per epoch), between a millionth of the targets' variance and the whole of it. Every target
    column has its own.

    It starts at a tenth of that variance, and waits for part of the first fit before it follows. A network that knows
    nothing yet explains all as noise; with noise that large the likelihood is flat, and it would go on knowing nothing.

    Given noise starts there too, if it is smaller, and falls to what it is. The empirical Fisher of a row is
    r²/σ⁴ JJᵀ for a residual r, where the curvature is JJᵀ/σ². As long as residuals are ten times the noise, precisions
    are a hundred times too large, and the mean would hardly move.

    Args:
        variance: σ² of each column on the scale that is trained on, (K,).
        spread: variance of the targets on that scale, (K,); 0 where all were alike, so that it is not known.
        learnt: whether σ² follows the residuals.
    """

    def __init__(self, variance: Tensor, spread: Tensor, learnt: bool = False) -> None:
        self.variance = self.given = variance
        self.learnt = learnt
        # A spread that nobody has seen is made up, and bounds nothing: targets to come may have any.
        self.spread, self.most = spread.where(spread > 0, 1.0), spread.where(spread > 0, math.inf)

    @classmethod
    def unknown(cls, spread: Tensor) -> Noise:
        """Return noise to be learnt, for targets of that variance, (K,)."""
        return cls(_START * spread.where(spread > 0, 1.0), spread, learnt=True)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ½ Σₖ (−log 2πσₖ² − (y − f)²/σₖ²) of each row, (..., M)."""
        constant = (2 * math.pi * self.variance).log()
        return -0.5 * (constant + (targets - outputs).square() / self.variance).sum(-1)

    has_constant_hessian = True

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return 1/σ at one output of each row, for every output."""
        return one_entry_each((1.0 / self.variance.sqrt()).to(outputs).expand_as(outputs))

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return outputs with noise."""
        noise = torch.empty_like(outputs).normal_(generator=generator)
        drawn: Tensor = outputs + noise * self.variance.sqrt().to(outputs)
        return drawn

    def predictive(self, outputs: Tensor) -> Tensor:
        """Return the mean, which is the outputs."""
        return outputs

    def squares(self, log_likelihood: float) -> Tensor:
        """Return the mean squared residual of rows with that mean log-likelihood, for one target column, (1,)."""
        variance = self.variance.cpu().double()  # not every device has doubles
        return variance * (-2.0 * log_likelihood - (2 * math.pi * variance).log())

    def follow(self, squares: Tensor, steps_per_epoch: int) -> None:
        """Update learnt noise by a step's mean squared residuals of each column, (K,)."""
        if not self.learnt:
            return
        rate = 1.0 / max(_WINDOW, steps_per_epoch)
        moved = ((1.0 - rate) * self.variance.cpu().double() + rate * squares.cpu()).to(self.variance)
        self.variance = torch.minimum(torch.maximum(moved, _LEAST * self.spread), self.most)

    def fall(self, share: float) -> None:
        """Set given noise to σ₀² (σ²/σ₀²)^share for a share from 0 to 1; σ₀² is a tenth of the variance at least."""
        if not self.learnt:
            first = torch.maximum(self.given, _START * self.spread)
            self.variance = by_equal_factors(first, self.given, share) if share < 1.0 else self.given
