r"""Hamiltonian Monte Carlo: a reference where exact posteriors are out of reach and models are small.

$$ H(\theta, p) = -\log \pi(\theta) + \tfrac12 \lVert p \rVert^2 $$

All chains move in one batch. The number of leapfrog steps is drawn anew for every trajectory, the same for all chains,
so that no period of the motion is hit again and again; every chain has a step size of its own, found by dual averaging
(Hoffman and Gelman 2014) while warming up and fixed from then on. Nothing looks for U-turns: a trajectory that is drawn
too short or too long now and then costs time, not exactness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Adaptation", "Chains", "LogDensity", "advance", "begin", "leapfrog", "split_rhat"]

# Log density up to a constant, (K, P) → (K,); no row may depend on another.
LogDensity = Callable[[Tensor], Tensor]
# Dual averaging, as in the paper: how fast it forgets the start, how strongly it is drawn there, how it averages.
_SETTLING, _PULL, _FORGETTING = 10.0, 0.05, 0.75


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Step sizes of K chains on their way to a wanted acceptance rate.

    Args:
        centre: where the logarithm is drawn to.
        log_step: log ε of the next trajectory, (K,).
        average: its running mean, to be used after warming up, (K,).
        error: running mean of wanted − seen acceptance, (K,).
        count: trajectories seen.
    """

    centre: float
    log_step: Tensor
    average: Tensor
    error: Tensor
    count: int = 0

    @classmethod
    def at(cls, step: float, like: Tensor) -> Adaptation:
        """Start all chains at one step size; `like` is (K,)."""
        log_step = torch.full_like(like, math.log(step))
        return cls(math.log(10.0 * step), log_step, log_step, torch.zeros_like(like))

    def after(self, acceptance: Tensor, target: float) -> Adaptation:
        """What follows from the acceptance probabilities (K,) of a trajectory."""
        count = self.count + 1
        share = 1.0 / (count + _SETTLING)
        error = (1.0 - share) * self.error + share * (target - acceptance)
        log_step = self.centre - math.sqrt(count) / _PULL * error
        weight = count**-_FORGETTING
        average = weight * log_step + (1.0 - weight) * self.average
        return Adaptation(self.centre, log_step, average, error, count)


@dataclass(frozen=True, eq=False)
class Chains:
    """Where K chains are.

    Args:
        theta: (K, P).
        density: log π(θ), (K,).
        gradient: of log π, (K, P).
        adaptation: of the step sizes.
        acceptance: probability with which the last proposal was accepted, (K,).
    """

    theta: Tensor
    density: Tensor
    gradient: Tensor
    adaptation: Adaptation
    acceptance: Tensor


def begin(log_density: LogDensity, theta: Tensor, step: float = 0.01) -> Chains:
    """Chains at θ (K, P), with a first guess of the step size."""
    density, gradient = _graded(log_density, theta)
    return Chains(theta, density, gradient, Adaptation.at(step, density), torch.zeros_like(density))


def _graded(log_density: LogDensity, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The log density and its gradient."""
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        density = log_density(leaf)
        (gradient,) = torch.autograd.grad(density.sum(), leaf)
    return density.detach(), gradient


def leapfrog(
    log_density: LogDensity, theta: Tensor, gradient: Tensor, momentum: Tensor, step: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the motion for so many steps.

    Args:
        log_density: log π.
        theta: (K, P).
        gradient: of log π at θ, (K, P).
        momentum: p, (K, P).
        step: ε, (K, 1).
        count: of steps, at least 1.

    Returns:
        θ, log π(θ), its gradient, and the momentum, all at the end.
    """
    density = theta.new_zeros(len(theta))
    for _ in range(count):
        momentum = momentum + 0.5 * step * gradient
        theta = theta + step * momentum
        density, gradient = _graded(log_density, theta)
        momentum = momentum + 0.5 * step * gradient
    return theta, density, gradient, momentum


def advance(
    log_density: LogDensity,
    chains: Chains,
    longest: int,
    generator: torch.Generator,
    target: float | None = None,
) -> Chains:
    """One trajectory of every chain.

    Args:
        log_density: log π.
        chains: where they are.
        longest: leapfrog steps at most; their number is drawn from 1 to this.
        generator: source of randomness, on the CPU.
        target: wanted acceptance while warming up; None holds the averaged step sizes fixed.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> normal = lambda theta: -0.5 * theta.square().sum(1)
        >>> chains = begin(normal, torch.zeros(100, 1), step=1.0)
        >>> for _ in range(20):
        ...     chains = advance(normal, chains, 4, generator)
        >>> bool((chains.theta.var() - 1.0).abs() < 0.5)
        True
    """
    adaptation = chains.adaptation
    log_step = adaptation.average if target is None else adaptation.log_step
    momentum = torch.randn(chains.theta.shape, generator=generator, dtype=chains.theta.dtype)
    count = int(torch.randint(1, longest + 1, (), generator=generator))
    draw = torch.rand(len(momentum), generator=generator, dtype=momentum.dtype)
    step = log_step.exp().unsqueeze(1)
    theta, density, gradient, end = leapfrog(log_density, chains.theta, chains.gradient, momentum, step, count)
    energy = density - chains.density - 0.5 * (end.square() - momentum.square()).sum(1)
    # A trajectory that left the numbers behind has no energy to speak of, and is refused.
    acceptance = energy.nan_to_num(nan=-torch.inf, posinf=-torch.inf).clamp(max=0.0).exp()
    taken = draw < acceptance
    moved = replace(
        chains,
        theta=torch.where(taken.unsqueeze(1), theta, chains.theta),
        density=torch.where(taken, density, chains.density),
        gradient=torch.where(taken.unsqueeze(1), gradient, chains.gradient),
        acceptance=acceptance,
    )
    return moved if target is None else replace(moved, adaptation=adaptation.after(acceptance, target))


def split_rhat(values: Tensor) -> Tensor:
    r"""Gelman and Rubin's $\hat R$ over halves of chains: 1 where all halves tell the same.

    $$ \hat R^2 = \frac{n-1}{n} + \frac{B}{W}, \qquad B = \operatorname{Var}_j \bar x_j, \quad
       W = \operatorname{mean}_j s_j^2 $$

    Args:
        values: of K chains of T draws, (K, T, ...), T ≥ 4.

    Example:
        >>> split_rhat(torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]))
        tensor(0.7071)
        >>> float(split_rhat(torch.tensor([[0.0, 1.0, 0.0, 1.0], [5.0, 6.0, 6.0, 5.0]]))) > 4.0
        True
    """
    size = values.shape[1] // 2
    halves = torch.cat([values[:, :size], values[:, -size:]])
    between, within = halves.mean(1).var(0), halves.var(1).mean(0)
    return ((size - 1) / size + between / within).sqrt()
