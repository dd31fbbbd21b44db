"""One step captured in two graphs, with the small problem of the projection solved between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.linalg import LowRankPrecision
from slangvi.methods.compiled.capture import aside, capture_graph, keep_randomness
from slangvi.methods.projection import Decision
from slangvi.methods.step import Diagnostics, Rates, Step, Tensors
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate

__all__ = ["CapturedStep", "Numbers", "Replayed"]


class Numbers(NamedTuple):
    """What changes from step to step besides the tensors.

    Args:
        lr: α.
        precision_lr: β.
        momentum: γ.
        correction: 1 − γᵗ.
    """

    lr: float
    precision_lr: float
    momentum: float
    correction: float


class Replayed(NamedTuple):
    """What a replayed step leaves, in memory of its own.

    Args:
        tensors: the new state.
        precision: factorised.
        diagnostics: of the step.
        fit: the mean log-likelihood, or 0.
    """

    tensors: Tensors
    precision: LowRankPrecision
    diagnostics: Diagnostics
    fit: float


class CapturedStep:
    """The streamed step for inputs of one kind.

    The first graph runs from the state to the small problem, the second from its solution to the new state. Both read
    and write tensors that stay where they are.

    Args:
        state: an example of the states to come; copied.
        precision: its precision, factorised.
        spec: layout.
        prior: λ and μ₀, which must stay where they are.
        num_data: N, divided by the temperature.
        gather: (precision, loc, frozen) → per-example gradients and the log-likelihoods, or None. It is captured; where
            it is `frozen` it may not look at a number.
        generator: source of random numbers that `gather` draws from.
    """

    def __init__(
        self,
        state: Tensors,
        precision: LowRankPrecision,
        spec: ParamSpec,
        prior: Prior,
        num_data: float,
        gather: Callable[[LowRankPrecision, Tensor, bool], tuple[GradientOperator, Tensor | None]],
        generator: torch.Generator | None = None,
    ) -> None:
        self.old = Tensors(*(x.clone() for x in state))
        self.new = Tensors(*map(torch.empty_like, state))
        self.spec, self.prior, self.num_data, self.gather = spec, prior, num_data, gather
        self.device = state.loc.device
        self.numbers = torch.ones(4, dtype=torch.float64, device=self.device)
        roots, turns = precision.spectrum
        self.root = [x.clone() for x in (precision.gram, precision.cholesky, roots, turns)]
        with torch.no_grad(), keep_randomness(self.device):
            before = None if generator is None else generator.get_state()
            self.is_frozen = False
            with aside(self.device):
                self.observe()
                self.decide()
                self.finish()
            if generator is not None and before is not None:
                generator.set_state(before)
            self.is_frozen = True
            self.graphs = [capture_graph(self.observe, self.device, generator)]
            self.graphs.append(capture_graph(self.finish, self.device))

    # ---- what is captured

    def observe(self) -> None:
        """Draw, go forward and backward, and make the small problem."""
        alpha, beta, gamma, correction = self.numbers.unbind()
        gram, cholesky, roots, turns = self.root
        precision = LowRankPrecision(self.old.prec_factor, self.old.prec_diag, gram, cholesky)
        precision.__dict__["spectrum"] = (roots, turns)
        gradients, values = self.gather(precision, self.old.loc, self.is_frozen)
        rates = Rates(alpha, Rate(beta), gamma, correction)
        self.work = Step(self.old, self.new, gradients, self.num_data, self.prior, rates, self.spec)
        self.small = self.work.observe()
        trace = self.small.diagonal().sum() if self.small.ndim > 1 else self.small.sum()
        fit = torch.zeros_like(trace) if values is None else values.mean(dtype=torch.float64)
        self.checks = torch.stack([trace, self.work.total.sum(dtype=torch.float64), fit])

    def finish(self) -> None:
        """Write the new state."""
        self.diagnostics = self.work.update_precision(self.decision)
        precision = self.work.update_mean()
        self.made = [precision.gram, precision.cholesky]
        total = self.new.loc.sum(dtype=torch.float64) + self.new.prec_diag.sum(dtype=torch.float64)
        self.result = torch.stack([total, *(x.double() for x in self.diagnostics[1:])])

    def decide(self) -> None:
        """Solve the small problem, into memory that stays where it is."""
        found = self.work.projection.decide(self.small, self.work.parts)
        if not hasattr(self, "decision"):
            self.decision = Decision(*(x.clone() for x in found))
        for place, value in zip(self.decision, found, strict=True):
            place.copy_(value)

    # ---- what runs

    def replay(self, state: Tensors, precision: LowRankPrecision, numbers: Numbers) -> Replayed | None:
        """Take a step from a state; None if it is not finite, and has to be looked into.

        Args:
            state: before the step.
            precision: its precision, factorised.
            numbers: of this step.
        """
        for place, value in zip(self.old, state, strict=True):
            place.copy_(value)
        for place, value in zip(self.root, (precision.gram, precision.cholesky, *precision.spectrum), strict=True):
            place.copy_(value)
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.graphs[0].replay()
        trace, total, fit = self.checks.tolist()
        if not (math.isfinite(trace) and math.isfinite(total) and math.isfinite(fit)):
            return None
        self.decide()
        self.graphs[1].replay()
        if not math.isfinite(float(self.result[0])):
            return None
        tensors = Tensors(*(x.clone() for x in self.new))
        gram, cholesky = (x.clone() for x in self.made)
        told: Any = [x.clone() for x in (self.decision.spectrum, *self.diagnostics[1:])]
        told[2] = self.decision.residual.clone()
        made = LowRankPrecision(tensors.prec_factor, tensors.prec_diag, gram, cholesky)
        return Replayed(tensors, made, Diagnostics(*told), fit)
