"""One step of many replicas at once.

The arithmetic is that of a single run, under vmap. Only the eigenproblems are taken out of it, because their iteration
looks at numbers: they are solved together, as one batch. What differs between methods is in `_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision, Route
from slangvi.linalg.krylov import Eigenpairs
from slangvi.linalg.topk import padded_spectrum, relative_residual
from slangvi.methods.gather import GRADIENT_REMEDY, checked_values
from slangvi.methods.lowrank_state import STATE_REMEDY
from slangvi.methods.lowrank_step import Proposed, Rates
from slangvi.params import ParamSpec
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.replicas._gather import Gathered
from slangvi.replicas._rules import Lanes, One, Rule

__all__ = ["Numbers", "Taken", "Told", "take_step", "told_of", "trouble"]


class Numbers(NamedTuple):
    """What differs between replicas in one step; a tensor without dimensions each, float64.

    Args:
        lr: α.
        precision_lr: β.
        momentum: γ.
        correction: 1 − γᵗ.
        weight: N/R, divided by the temperature.
    """

    lr: Tensor
    precision_lr: Tensor
    momentum: Tensor
    correction: Tensor
    weight: Tensor

    @property
    def rates(self) -> Rates:
        """As the step of a single run has them."""
        return Rates(self.lr, self.precision_lr, None, self.momentum, self.correction)


class Taken(NamedTuple):
    """What a step leaves, not yet looked at; K in front of everything.

    Args:
        lanes: the new states.
        precision: U⁺U⁺ᵀ + diag d⁺, factorised.
        total: Σ_r g_r, (K, P).
        squares: Σ_r g_r ∘ g_r, (K, P).
        spectrum: leading eigenvalues, (K, L).
        residual: relative error of the pairs, (K,).
        told: as in `Proposed`, (K, 4).
        fine: False where something may not be finite, (K,).
    """

    lanes: Lanes
    precision: LowRankPrecision
    total: Tensor
    squares: Tensor
    spectrum: Tensor
    residual: Tensor
    told: Tensor
    fine: Tensor


class Told(NamedTuple):
    """What `Info` tells of some replicas, (k, ...) each."""

    spectrum: Tensor
    total: Tensor
    residual: Tensor
    clipped: Tensor
    expected_log_likelihood: Tensor


def take_step(
    rule: Rule, lanes: Lanes, gathered: Gathered, prior: Prior, numbers: Tensor, captured: bool = False
) -> Taken:
    """From per-example gradients to the new states.

    Args:
        rule: of the method.
        lanes: the states.
        gathered: their gradients.
        prior: λ and μ₀, (K, P).
        numbers: α, β, γ, 1 − γᵗ and N/R of each replica in the order of `Numbers`, float64, (K, 5).
        captured: look at no number, which eigenproblems are otherwise solved by.
    """
    rank, params = lanes.prec_factor.shape[-2:]
    route = rule.route(rank, params, gathered.num_rows)

    def each(work: Callable[..., Any], factor: Tensor, *given: Any) -> Any:
        def one(numbers: Tensor, tensors: Sequence[Tensor], factor: Tensor, *own: Any) -> Any:
            mine = Numbers(*numbers.unbind())
            return work(One(gathered.operator(tensors, factor), mine.weight, mine.rates, route), factor, *own)

        return torch.func.vmap(one)(numbers, list(gathered.tensors), factor, *given)

    def first(one: One, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Without columns to look for, only the size of the matrix matters.
        n = params if route == "parameters" else gathered.num_rows
        total, squares = one.gradients.sum(), one.gradients.square_sum()
        return total, squares, rule.matrix(one, factor) if rank else factor.new_zeros(n, n, dtype=torch.float64)

    def second(one: One, factor: Tensor, given: Sequence[Tensor], settled: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        loc, diag, momentum, total, squares, lam, mean = given
        lane = Lanes(loc, factor, diag, momentum)
        return _tensors(rule.propose(one, lane, total, squares, settled, Prior(lam, mean)))

    factor = lanes.prec_factor
    total, squares, matrix = each(first, factor)
    pairs = rule.captured_pairs(matrix, factor, route) if captured else _pairs(rule, matrix, factor, route)
    given = [lanes.loc, lanes.prec_diag, lanes.momentum, total, squares, prior.precision, prior.mean]
    told, *new = each(second, factor, given, rule.settled(pairs, factor, each))
    fine = torch.isfinite(told).all(-1) & torch.isfinite(total.sum(-1) + squares.sum(-1))
    fine &= torch.isfinite(gathered.values).flatten(1).all(-1)
    spectrum = padded_spectrum(pairs.values, lanes.prec_factor)
    precision = LowRankPrecision(*new[4:])
    return Taken(Lanes(*new[:4]), precision, total, squares, spectrum, relative_residual(pairs), told, fine)


def _pairs(rule: Rule, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
    """Leading eigenpairs; NaN for matrices that are not finite, for which libraries would refuse the whole batch."""
    bad = ~torch.isfinite(matrix.diagonal(dim1=-2, dim2=-1).sum(-1))[:, None, None]
    if not bool(bad.any()):
        return rule.pairs(matrix, factor, route)
    pairs = rule.pairs(matrix.masked_fill(bad, 0.0), factor, route)
    return pairs._replace(vectors=pairs.vectors.masked_fill(bad, torch.nan))


def told_of(taken: Taken, gathered: Gathered, weights: Tensor | None, share: Tensor) -> Told:
    """For `Info`.

    Args:
        taken: the step.
        gathered: its gradients.
        weights: of the examples, (K, M); None means ones.
        share: N/R, (K,).
    """
    values = gathered.values if weights is None else gathered.values * weights.unsqueeze(1)
    fit = values.sum((1, 2), dtype=torch.float64) * share
    return Told(taken.spectrum, taken.told[:, 0], taken.residual, taken.told[:, 1], fit)


def _tensors(new: Proposed) -> tuple[Tensor, ...]:
    """What vmap can hand out: tensors, those of the factorisation last."""
    kept = (getattr(new.precision, item.name) for item in fields(new.precision))
    return new.told, new.loc, new.prec_factor, new.prec_diag, new.momentum, *kept


def trouble(taken: Taken, values: Tensor, k: int, step: int, spec: ParamSpec) -> str:
    """What went wrong in the step of one replica, in the words of a single run; empty when nothing did.

    Args:
        taken: of all replicas.
        values: the replica's log-likelihoods without padding, (S, M).
        k: which replica.
        step: its number of the step.
        spec: layout.
    """
    try:
        for row in values:
            checked_values(row, len(row))
        require_finite("the gradient", step, spec, GRADIENT_REMEDY, taken.total[k], taken.squares[k])
        new = Lanes(*(x[k] for x in taken.lanes))
        require_finite("the new precision", step, spec, STATE_REMEDY, new.prec_diag, new.prec_factor)
        require_finite("the new mean", step, spec, STATE_REMEDY, new.loc)
    except NumericalError as error:
        return str(error)
    return ""
