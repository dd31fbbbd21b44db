"""One step captured in three graphs, with small problems solved between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision
from slangvi.linalg.lowrank import solve_small, with_small
from slangvi.linalg.products import gram_float64
from slangvi.methods.compiled.capture import aside, capture_graph, keep_randomness
from slangvi.methods.projection import Decision
from slangvi.methods.step import Diagnostics, Rates, Step, Tensors, collect_diagnostics
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate

__all__ = ["CapturedStep", "Numbers", "Replayed"]


class Numbers(NamedTuple):
    """Numbers that change from step to step.

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
    """Result of a replayed step, in memory of its own.

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

    The first graph runs from the state to the small problem of the projection, the second from its solution to the new
    precision, the third from the decomposition of that to the new mean. All read and write tensors that stay where they
    are.

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
        self.root = precision.small.clone()
        self.new_root = self.root.clone()
        with torch.no_grad(), keep_randomness(self.device):
            before = None if generator is None else generator.get_state()
            self.is_frozen = False
            with aside(self.device):
                self.observe()
                if not self.decide():
                    raise NumericalError("the step is not finite. The state is unchanged.")
                self.update_precision()
                self.solve()
                self.update_mean()
            if generator is not None and before is not None:
                generator.set_state(before)
            self.is_frozen = True
            self.graphs = [capture_graph(self.observe, self.device, generator)]
            self.graphs += [capture_graph(work, self.device) for work in (self.update_precision, self.update_mean)]

    # ---- what is captured

    def observe(self) -> None:
        """Draw, go forward and backward, and make the small problem."""
        alpha, beta, gamma, correction = self.numbers.unbind()
        factor, diag = self.old[1:3]
        precision = with_small(factor, diag, self.root[0], self.root)
        gradients, values = self.gather(precision, self.old.loc, self.is_frozen)
        rates = Rates(alpha, Rate(beta), gamma, correction)
        self.work = Step(self.old, self.new, gradients, self.num_data, self.prior, rates, self.spec)
        self.seen = self.work.observe()
        fit = self.numbers.new_zeros(()) if values is None else values.mean(dtype=torch.float64)
        self.checks = torch.cat([self.work.bounds(), fit.unsqueeze(0)])

    def update_precision(self) -> None:
        """Write the new factor and diagonal, and what is to be decomposed of them."""
        self.clipped = self.work.update_precision(self.decision)
        self.gram = gram_float64(self.new.prec_factor, self.new.prec_diag)

    def update_mean(self) -> None:
        """Write the new mean."""
        factor, diag = self.new[1:3]
        self.work.update_mean(with_small(factor, diag, self.new_root[0], self.new_root))
        total = self.new.loc.sum(dtype=torch.float64) + self.new.prec_diag.sum(dtype=torch.float64)
        self.result = torch.stack([total, self.clipped.double()])

    # ---- what runs between

    def decide(self) -> bool:
        """Solve the small problem, into memory that stays where it is; tell whether its numbers are finite."""
        small, self.trace, numbers = self.work.look(self.seen, self.checks)
        if not (math.isfinite(float(self.trace)) and all(map(math.isfinite, numbers))):
            return False
        self.fit = numbers[-1]
        try:
            found = self.work.decide(small)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return False
        if not hasattr(self, "decision"):
            self.decision = Decision(*(x.to(self.device, copy=True) for x in found))
        self.decision.weights.copy_(found.weights, non_blocking=True)
        self.decision = self.decision._replace(spectrum=found.spectrum, residual=found.residual)
        return True

    def solve(self) -> None:
        """Decompose what is small of the new precision, into memory that stays where it is."""
        self.new_root.copy_(solve_small(self.gram.cpu(), self.new.prec_factor), non_blocking=True)

    # ---- what runs

    def replay(self, state: Tensors, precision: LowRankPrecision, numbers: Numbers) -> Replayed | None:
        """Take a step from a state; None if it is not finite, and has to be looked into.

        Args:
            state: before the step.
            precision: its precision, factorised.
            numbers: of this step.
        """
        torch._foreach_copy_(list(self.old), list(state))
        self.root.copy_(precision.small)
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.graphs[0].replay()
        if not self.decide():
            return None
        self.graphs[1].replay()
        self.solve()
        self.graphs[2].replay()
        total, clipped = self.result.tolist()
        if not math.isfinite(total):
            return None
        tensors = Tensors(*(x.clone() for x in self.new))
        _, spectrum, residual = self.decision
        told = collect_diagnostics(spectrum, self.trace.clone(), residual, torch.tensor(clipped), tensors.loc)
        made = with_small(tensors.prec_factor, tensors.prec_diag, self.gram.clone(), self.new_root.clone())
        return Replayed(tensors, made, told, self.fit)
