r"""Noise and prior that a run learns: closed-form updates by the evidence lower bound, kept in the state.

For a fixed q the bound is largest at

$$ \lambda_g = \frac{P_g}{\sum_{i \in g} \sigma_i^2 + (\mu_i - \mu_{0,i})^2}, \qquad
   \tau^{-1} = \frac1n \sum \mathbb E_q\bigl[(y - f)^2\bigr] $$

for a group g of P_g parameters that share a prior precision, and for n targets. The variances σ² are those of q; they
take P L² operations, so that λ is updated every twenty steps. Every step sees squared residuals at its own draws, whose
running mean τ⁻¹ is. Neither moves before the precision has heard of the data: a q that knows nothing yet explains all
as noise and all weights by the prior.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from slangvi.likelihoods import Gaussian, OutputLogLikelihood
from slangvi.params import ParamSpec
from slangvi.params.state import FlatState, learnt_in
from slangvi.params.values import learnt_members, per_parameter, with_numbers
from slangvi.priors import Prior

__all__ = ["Learning", "NotedGaussian", "Seen", "at_learnt_noise", "noise_of", "prior_precision_of"]

# Steps before any number moves, and the share of the precision's start that may be left then.
WAIT, LEFT = 100, 0.1
# Steps from one update of λ to the next, and the factor that it may change by in one.
EVERY, MOST = 20, 1.5
# Steps that the running mean of squared residuals looks back on, at least, and the factor that it may grow by in one.
WINDOW, MOST_NOISE = 20, 2.0
# Factor by which a number may leave where it started.
RANGE = 1e6
# λ at the start.
START = 1.0
StateT = TypeVar("StateT", bound=FlatState)


class Seen(NamedTuple):
    """Residuals of a step at its draws.

    Args:
        mean: of their squares.
        share: examples that they are of, as a share of N.
    """

    mean: float
    share: float


class Learning:
    """The numbers that a run learns, as its states hold them in `learnt`.

    That is a float64 vector: the share that is left of the precision's start, τ, and every λ in the order of the
    settings. τ is 0 where it is not learnt.

    Args:
        spec: layout of the parameters.
        members: how many λ are learnt, and which of them each parameter tensor has; see `learnt_members`.
        noise: τ at the start; None where it is not learnt.
        is_compiled: whether steps are to be replayed, which holds the prior fixed.
    """

    def __init__(
        self, spec: ParamSpec, members: tuple[int, list[int]], noise: float | None, is_compiled: bool = False
    ) -> None:
        self.spec, self.noise = spec, noise
        self.count, self.members = members
        if self.count and is_compiled:
            raise ValueError(
                'compile=True needs a prior_precision that is a number, and not "learn". Drop one of them.'
            )
        self._read: tuple[Tensor | None, list[float]] = None, []

    def __bool__(self) -> bool:
        return self.count > 0 or self.noise is not None

    def start(self, like: Tensor) -> Tensor | None:
        """Return the numbers before the first step, on the device of a tensor; None if none is learnt."""
        if not self:
            return None
        values = [1.0, self.noise or 0.0, *[START] * self.count]
        return torch.tensor(values, dtype=torch.float64, device=like.device)

    def numbers(self, state: Any) -> list[float]:
        """Return the numbers of a state, or those of the start if it comes from a run that learns none."""
        learnt = self.start(state.loc) if self and state.learnt is None else state.learnt
        if learnt is None:
            return []
        if self._read[0] is not learnt:
            theirs, ours = learnt_in(learnt), learnt_in(self.start(learnt))
            if theirs != ours:
                raise ValueError(
                    f"the state is of a run that learns {theirs}, and these settings learn {ours}. Start anew, or set "
                    "prior_precision and noise_precision back."
                )
            self._read = learnt, learnt.tolist()
        return self._read[1]

    def by_name(self, numbers: list[float]) -> dict[str, float]:
        """Return λ of each parameter whose own is learnt."""
        pairs = zip(self.spec.names, self.members, strict=True)
        return {name: numbers[2 + place] for name, place in pairs if place >= 0}

    def follow(
        self, before: Any, state: StateT, info: Any, prior: Prior, beta: float, seen: Seen | None
    ) -> tuple[StateT, Any]:
        """Return a state after a step with the numbers that follow, and an info that tells them.

        Args:
            before: the state before the step.
            state: after it.
            info: likewise.
            prior: of the step.
            beta: weight of the step in the precision.
            seen: its residuals; None where noise is not learnt.
        """
        left, tau, *lams = self.numbers(before)
        left *= 1.0 - beta
        if state.step > WAIT and left <= LEFT:
            if seen is not None and self.noise and math.isfinite(seen.mean):
                grown = 1.0 + min(1.0 / WINDOW, seen.share) * (seen.mean * tau - 1.0)
                tau = _within(tau / min(grown, MOST_NOISE), self.noise)
            if lams and state.step % EVERY == 0:
                lams = self._precisions(state, prior, lams)
        numbers = [left, tau, *lams]
        learnt = torch.tensor(numbers, dtype=torch.float64, device=state.loc.device)
        after = replace(state, learnt=learnt)  # type: ignore[type-var]
        after.__dict__.update({key: value for key, value in state.__dict__.items() if key == "precision"})
        self._read = learnt, numbers
        told = {"prior_precision": self.by_name(numbers)} if self.count else {}
        return after, replace(info, noise_precision=None if self.noise is None else tau, **told)

    def _precisions(self, state: Any, prior: Prior, old: list[float]) -> list[float]:
        """Return every λ where the bound has its largest value, or as far towards it as one update goes."""
        squares = state.precision.inv_diag() + (state.loc - prior.mean).square()
        each = torch.stack([squares[part].sum(dtype=torch.float64) for part in self.spec.slices.values()]).tolist()
        sums, sizes = [0.0] * self.count, [0] * self.count
        for place, value, size in zip(self.members, each, self.spec.numels, strict=True):
            if place >= 0:
                sums[place] += value
                sizes[place] += size
        found = []
        for lam, total, size in zip(old, sums, sizes, strict=True):
            factor = size / (lam * total) if size and 0.0 < lam * total < math.inf else 1.0
            found.append(_within(lam * min(max(factor, 1.0 / MOST), MOST), START))
        return found


def _within(value: float, start: float) -> float:
    """Return a number, or the end of its range that it is beyond."""
    return min(max(value, start / RANGE), start * RANGE)


class NotedGaussian(Gaussian):
    """Gaussian targets with the noise of an optimizer that learns it.

    Residuals of outputs that a backward pass reaches are noted while a block of training is open, which is how the
    optimizer sees them.

    Args:
        noise_precision: τ so far.
    """

    def __init__(self, noise_precision: float) -> None:
        super().__init__(noise_precision)
        self._is_open, self._count, self._sum = False, 0, torch.zeros(())

    def open(self) -> None:
        """Begin a block of training."""
        self._is_open, self._count = True, 0

    def forget(self) -> None:
        """Forget what was noted in an open block."""
        self._count = 0

    def close(self) -> tuple[float, int] | None:
        """End it; return the sum of squared residuals and their number, or None if none was seen."""
        self._is_open = False
        return (float(self._sum), self._count) if self._count else None

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½ (log τ − log 2π − τ (y − f)²)."""
        values = super().log_prob(outputs, targets)
        if self._is_open and outputs.requires_grad:
            squares = (targets - outputs.detach()).double().square().sum()
            outputs.register_hook(partial(self._note, squares, targets.numel()))
        return values

    def _note(self, squares: Tensor, count: int, gradient: Tensor) -> None:
        """Add residuals whose gradient goes back."""
        if self._is_open:
            self._sum = squares + self._sum if self._count else squares
            self._count += count


def noise_of(likelihood: Any) -> float:
    """Return the noise precision that learning starts from, or say that a likelihood has none."""
    if type(likelihood) not in (Gaussian, NotedGaussian):
        got = "None" if likelihood is None else type(likelihood).__name__
        raise ValueError(
            f'noise_precision="learn" needs Gaussian targets, got {got}. Pass likelihood="gaussian" to an optimizer, '
            "or slangvi.Gaussian().of(model) to build; no other likelihood, not even a class made from it, is learnt."
        )
    tau: float = likelihood.noise_precision
    return tau


def at_learnt_noise(log_likelihood: Any, state: Any) -> Any:
    """Return a log-likelihood with the noise that a state has learnt, if it has."""
    if getattr(state, "learnt", None) is None or not isinstance(log_likelihood, OutputLogLikelihood):
        return log_likelihood
    tau = float(state.learnt[1])
    return replace(log_likelihood, likelihood=Gaussian(tau)) if tau else log_likelihood


def prior_precision_of(given: Any, state: Any) -> Tensor:
    """Return λ of every parameter, (P,), as it was given or as a state has learnt it."""
    count, _ = learnt_members("prior_precision", given, state.spec, state.spec)
    if count and hasattr(state, "learnt"):
        numbers = [START] * count if state.learnt is None else state.learnt[2:].tolist()
        given = with_numbers("prior_precision", given, state.spec, state.spec, numbers)
    return per_parameter("prior_precision", given, state.spec, state.loc)
