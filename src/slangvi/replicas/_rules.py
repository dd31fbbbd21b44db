"""What sets one method apart from another in a step of replicas: a rule each, and all else is `_step.take_step`.

A step is the same for all of them: a small matrix from the gradients of each replica, the leading eigenpairs of all of
these at once, and a new state from what was found. Functions of one replica run under vmap and look at no number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slangvi.linalg import Route
from slangvi.linalg.assignment import FEW
from slangvi.linalg.krylov import Eigenpairs
from slangvi.linalg.squaring import pairs_by_squaring
from slangvi.linalg.topk import TOLERANCE, pairs_of
from slangvi.methods import online_eig
from slangvi.methods.lowrank_step import Observed, Proposed, Rates, eigenproblem, propose
from slangvi.priors import Prior
from slangvi.types import GradientOperator

__all__ = ["RULES", "Each", "Lanes", "One", "Rule"]

# (work, tensors with K in front) → work(One, tensors of one replica) for every replica, under vmap.
Each = Callable[..., Any]


class Lanes(NamedTuple):
    """The states of K replicas, or of one without the K.

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


class One(NamedTuple):
    """What a step of one replica is given besides its state.

    Args:
        gradients: operator over R rows.
        weight: N/R, divided by the temperature.
        rates: of this step.
        route: which small matrix is decomposed.
    """

    gradients: GradientOperator
    weight: Tensor
    rates: Rates
    route: Route


class Rule(Protocol):
    """One method in lockstep."""

    def route(self, rank: int, params: int, rows: int) -> Route:
        """Which small matrix is decomposed."""

    def matrix(self, one: One, factor: Tensor) -> Tensor:
        """The small matrix of one replica, float64, (n, n)."""

    def pairs(self, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
        """Leading eigenpairs of small matrices (K, n, n) that are finite."""

    def captured_pairs(self, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
        """The same without a look at a number, as good as `tolerance` asks for or with a residual that says it."""

    @property
    def tolerance(self) -> Mapping[torch.dtype, float]:
        """Residual, relative to the largest eigenvalue, up to which captured pairs are good, by the states' dtype."""

    def why_eager(self, rank: int) -> str:
        """Why a step of this rank cannot be captured; empty when it can."""

    def settled(self, pairs: Eigenpairs, factor: Tensor, each: Each) -> tuple[Tensor, Tensor]:
        """What `propose` needs of the eigenpairs, K in front; nothing is looked at unless `why_eager` says so."""

    def propose(
        self, one: One, lane: Lanes, total: Tensor, squares: Tensor, settled: tuple[Tensor, Tensor], prior: Prior
    ) -> Proposed:
        """The new state of one replica, from Σ g and Σ g∘g, (P,), and what was settled for it."""


class Slang:
    """`slangvi.slang`: the best rank-L factor of the averaged curvature."""

    tolerance: Mapping[torch.dtype, float] = TOLERANCE

    def route(self, rank: int, params: int, rows: int) -> Route:
        """See `Rule`."""
        return "parameters" if params < rank + rows else "gram"

    def matrix(self, one: One, factor: Tensor) -> Tensor:
        """See `Rule`."""
        return eigenproblem(factor, one.gradients, one.weight, one.rates, one.route).matrix

    def pairs(self, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
        """See `Rule`."""
        return pairs_of(matrix, factor, route)

    def captured_pairs(self, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
        """See `Rule`."""
        rank = factor.shape[-2]
        return pairs_by_squaring(matrix, rank, self.tolerance[factor.dtype], 0 if route == "parameters" else rank)

    def why_eager(self, rank: int) -> str:
        """See `Rule`."""
        return ""

    def settled(self, pairs: Eigenpairs, factor: Tensor, each: Each) -> tuple[Tensor, Tensor]:
        """See `Rule`."""
        return pairs.values, pairs.vectors

    def propose(
        self, one: One, lane: Lanes, total: Tensor, squares: Tensor, settled: tuple[Tensor, Tensor], prior: Prior
    ) -> Proposed:
        """See `Rule`."""
        problem = eigenproblem(lane.prec_factor, one.gradients, one.weight, one.rates, one.route)
        observed = Observed(total, squares, problem)
        return propose(lane.loc, lane.prec_diag, lane.momentum, observed, *settled, one.weight, prior, one.rates)


class OnlineEig:
    """`slangvi.online_eig`: an average of scaled eigenvectors of each minibatch's own curvature.

    Matching columns looks at numbers beyond a few of them, so that it is done for all replicas together and not under
    vmap.
    """

    tolerance: Mapping[torch.dtype, float] = {torch.float32: online_eig.TOLERANCE}
    # Nothing of the step before helps to find eigenvectors, and only what is below the tolerance need not be done
    # again: more products, and more squarings.
    _PRODUCTS = 12
    _SHARPER = 0.1

    def route(self, rank: int, params: int, rows: int) -> Route:
        """See `Rule`."""
        return online_eig.shorter_route(params, rows)

    def matrix(self, one: One, factor: Tensor) -> Tensor:
        """See `Rule`."""
        return online_eig.small_matrix(one.gradients, one.weight, one.route)

    def pairs(self, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
        """See `Rule`."""
        return online_eig.leading(matrix, min(factor.shape[-2], matrix.shape[-1]))

    def captured_pairs(self, matrix: Tensor, factor: Tensor, route: Route) -> Eigenpairs:
        """See `Rule`."""
        count, tolerance = min(factor.shape[-2], matrix.shape[-1]), self._SHARPER * self.tolerance[factor.dtype]
        return pairs_by_squaring(matrix, count, tolerance, products=self._PRODUCTS)

    def why_eager(self, rank: int) -> str:
        """See `Rule`."""
        return f"OnlineEig matches more than {FEW} columns on the CPU, got rank {rank}" if rank > FEW else ""

    def settled(self, pairs: Eigenpairs, factor: Tensor, each: Each) -> tuple[Tensor, Tensor]:
        """See `Rule`."""
        fresh = each(_scaled, factor, pairs.values, pairs.vectors)
        return fresh, online_eig.matched(fresh, factor)

    def propose(
        self, one: One, lane: Lanes, total: Tensor, squares: Tensor, settled: tuple[Tensor, Tensor], prior: Prior
    ) -> Proposed:
        """See `Rule`."""
        found = online_eig.Found(total, one.weight * squares, *settled)
        return online_eig.propose(*lane, found, one.weight, prior, one.rates)


def _scaled(one: One, factor: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    return online_eig.scaled_eigenvectors(one.gradients, one.weight, values, vectors, factor, one.route)


RULES: dict[str, Rule] = {"slang": Slang(), "online_eig": OnlineEig()}
