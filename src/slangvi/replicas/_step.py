"""One step of SLANG for many replicas at once.

The arithmetic is that of a single run, `_lowrank_step`, under vmap. Only the eigenproblems are taken out of it, because
their iteration looks at numbers: they are solved together, as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi._steps import Prior, require_finite
from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision, Route
from slangvi.linalg.krylov import Eigenpairs
from slangvi.linalg.topk import padded_spectrum, pairs_of, relative_residual
from slangvi.methods._gather import GRADIENT_REMEDY, checked_values
from slangvi.methods._lowrank_state import STATE_REMEDY
from slangvi.methods._lowrank_step import Observed, Proposed, Rates, eigenproblem, observe, propose
from slangvi.replicas._gather import Gathered
from slangvi.types import ParamSpec

__all__ = ["Lanes", "Numbers", "Taken", "Told", "take_step", "told_of", "trouble"]

# Small matrices (K, n, n), the factors (K, L, P) they belong to, and the route → leading eigenpairs.
Solver = Callable[[Tensor, Tensor, Route], Eigenpairs]


class Lanes(NamedTuple):
    """The states of K replicas.

    Args:
        loc: μ, (K, P).
        prec_factor: U by rows, (K, L, P).
        prec_diag: d, (K, P).
        momentum: m, (K, P).
    """

    loc: Tensor
    prec_factor: Tensor
    prec_diag: Tensor
    momentum: Tensor


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


def take_step(lanes: Lanes, gathered: Gathered, prior: Prior, numbers: Tensor, solve: Solver | None = None) -> Taken:
    """From per-example gradients to the new states; nothing waits for the device but the eigenproblem.

    Args:
        lanes: the states.
        gathered: their gradients.
        prior: λ and μ₀, (K, P).
        numbers: α, β, γ, 1 − γᵗ and N/R of each replica in the order of `Numbers`, float64, (K, 5).
        solve: of the eigenproblems; None takes the way of single runs.
    """
    rank, params = lanes.prec_factor.shape[-2:]
    route: Route = "parameters" if params < rank + gathered.num_rows else "gram"

    def first(factor: Tensor, numbers: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = Numbers(*numbers.unbind())
        seen = observe(factor, gathered.operator(tensors, factor), own.weight, own.rates, route)
        size = seen.problem.size
        matrix = seen.problem.matrix if rank else factor.new_zeros(size, size, dtype=torch.float64)
        return seen.total, seen.squares, matrix

    def second(given: Sequence[Tensor], numbers: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        loc, factor, diag, momentum, total, squares, values, vectors, lam, mean = given
        own = Numbers(*numbers.unbind())
        problem = eigenproblem(factor, gathered.operator(tensors, factor), own.weight, own.rates, route)
        observed = Observed(total, squares, problem)
        return _tensors(
            propose(loc, diag, momentum, observed, values, vectors, own.weight, Prior(lam, mean), own.rates)
        )

    total, squares, matrix = torch.func.vmap(first)(lanes.prec_factor, numbers, *gathered.tensors)
    pairs = (solve or _pairs)(matrix, lanes.prec_factor, route)
    given = [*lanes, total, squares, pairs.values, pairs.vectors, prior.precision, prior.mean]
    told, *new = torch.func.vmap(second)(given, numbers, *gathered.tensors)
    fine = torch.isfinite(told).all(-1) & torch.isfinite(total.sum(-1) + squares.sum(-1))
    fine &= torch.isfinite(gathered.values).flatten(1).all(-1)
    spectrum = padded_spectrum(pairs.values, lanes.prec_factor)
    precision = LowRankPrecision(*new[4:])
    return Taken(Lanes(*new[:4]), precision, total, squares, spectrum, relative_residual(pairs), told, fine)


def _pairs(matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
    """Leading eigenpairs; NaN for matrices that are not finite, for which libraries would refuse the whole batch."""
    bad = ~torch.isfinite(matrix.diagonal(dim1=-2, dim2=-1).sum(-1))[:, None, None]
    if not bool(bad.any()):
        return pairs_of(matrix, factor, route)
    pairs = pairs_of(matrix.masked_fill(bad, 0.0), factor, route)
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
