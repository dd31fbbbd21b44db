"""Parts of all Gaussian methods: start, KL divergence, diagnostics, and the step of their optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from slangvi.divergence import REMEDY, Watch
from slangvi.grads import FactoredGradients, GradientCapture, GraphCapture, RowGroup
from slangvi.grads.blocks import Settle, cheapest
from slangvi.optimizer import InfoT, StateT, VariationalOptimizer
from slangvi.params import Params, ParamSpec
from slangvi.params.state import FlatState, state_dtype
from slangvi.params.values import per_parameter
from slangvi.priors import ELBO, Prior
from slangvi.settings import CurvatureOptimizerSettings
from slangvi.types import Routes

__all__ = [
    "GaussianOptimizer",
    "GaussianState",
    "Info",
    "Precision",
    "Told",
    "flat_start",
    "kl_to_prior",
    "place",
    "start",
]


class Precision(Protocol):
    """A precision that was factorised, or needs not be."""

    def sample(
        self, sample_shape: tuple[int, ...], generator: torch.Generator | None = None, loc: Tensor | None = None
    ) -> Tensor:
        """Draws, (*sample_shape, ..., P)."""

    def inv_diag(self) -> Tensor:
        """Diagonal of the covariance, (..., P)."""

    def logdet(self) -> Tensor:
        """Of the precision, (...)."""


class GaussianState(FlatState, Protocol):
    """A state whose precision can be asked."""

    @property
    def precision(self) -> Precision:
        """Made once per state."""


class Told:
    """What every `Info` can work out from the likelihood it saw, the state and the prior."""

    expected_log_likelihood: float
    _state: Any
    _prior: Prior | None

    @property
    def loss(self) -> float:
        """Negative expected log-likelihood, the fit part of the negative ELBO."""
        return -self.expected_log_likelihood

    @cached_property
    def kl(self) -> Any:
        """KL(q ‖ prior) after the step, computed when first asked for: a number, for a batch a tensor (...)."""
        assert self._prior is not None
        found = kl_to_prior(self._state, self._prior)
        return found if found.ndim else float(found)

    @property
    def elbo(self) -> ELBO:
        """Both parts together."""
        return ELBO(self.expected_log_likelihood, self.kl)


@dataclass(frozen=True, eq=False)
class Info(Told):
    """What a step can tell besides the new state.

    Args:
        step: number of the step, from 1.
        num_rows: R, per-example gradients used.
        expected_log_likelihood: N times the mean log-likelihood over rows; NaN when the loss was not seen.
        skipped: bad batches an optimizer has passed over so far.
    """

    step: int
    num_rows: int
    expected_log_likelihood: float = float("nan")
    skipped: int = 0
    _state: GaussianState | None = field(default=None, repr=False)
    _prior: Prior | None = field(default=None, repr=False)


def kl_to_prior(state: GaussianState, prior: Prior) -> Tensor:
    r"""$\tfrac12[\sum\lambda\,\mathrm{diag}\Sigma + \sum\lambda(\mu-\mu_0)^2 - P - \sum\log\lambda + \log\det]$."""
    lam, double = prior.precision, torch.float64
    # Sums over many parameters, which nearly cancel.
    spread = (lam * state.precision.inv_diag()).sum(-1, dtype=double)
    spread = spread + (lam * (state.loc - prior.mean).square()).sum(-1, dtype=double)
    kl: Tensor = 0.5 * (spread - lam.shape[-1] - lam.log().sum(-1, dtype=double) + state.precision.logdet())
    return kl.to(lam.dtype)


def start(params: Params, init_precision: Any) -> tuple[ParamSpec, Tensor, Tensor]:
    """Layout, mean and diagonal of the precision before the first step.

    Args:
        params: name → tensor.
        init_precision: number, dict of names or globs, or (P,) tensor.

    Returns:
        The layout, μ (P,), and the precision of each entry (P,).
    """
    spec, loc = flat_start(params)
    return spec, loc, per_parameter("init_precision", init_precision, spec, loc).contiguous()


def flat_start(params: Params) -> tuple[ParamSpec, Tensor]:
    """Layout, and the values as one vector (P,) that is a copy."""
    spec = ParamSpec.of(params)
    loc = spec.flatten({name: value.detach() for name, value in params.items()}, state_dtype(list(params.values())))
    if not bool(torch.isfinite(loc).all()):
        raise ValueError("params must be finite, got NaN or Inf. Re-initialise the model.")
    return spec, loc


def place(members: Tensor) -> tuple[tuple[int, ...], str]:
    """The first member of a batch for which something holds, and how to speak of it; nothing is said of single runs."""
    first = tuple(members.nonzero()[0].tolist())
    return first, f" in member {', '.join(map(str, first))} of the batch" if first else ""


class GaussianOptimizer(VariationalOptimizer[StateT, InfoT]):
    """Base of the optimizers of methods with per-example curvature."""

    settings: CurvatureOptimizerSettings
    _update: Callable[..., tuple[StateT, InfoT]]  # the method's own

    @property
    def rank(self) -> int:
        """L, columns of the low-rank factor; 0 where the method has none."""
        return getattr(self.settings, "rank", 0)

    def _examine(self, after: StateT) -> None:
        if self._watch.due(after.step):
            hyper = self._hyper
            self._watch.look(self._state, after, hyper.prior(), hyper.lr().value, hyper.momentum())

    @cached_property
    def _watch(self) -> Watch:
        return Watch(self.settings.on_divergence, REMEDY)

    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        hyper, size = self._hyper, self.settings.num_data / self.settings.temperature
        gradients = FactoredGradients(self._spec, rows, self.rank, self._state.loc, self._routes)
        alpha, beta = hyper.lr(), hyper.precision_lr(self._warming_step)
        rates = {"lr": alpha, "precision_lr": beta, "momentum": hyper.momentum()}
        rates |= {"ages": hyper.ages(self._state.step + 1)}
        return self._update(self._state, gradients, num_data=size, prior=hyper.prior(), **rates)

    @property
    def _warming_step(self) -> int | None:
        """Number of the step about to be taken, if β is to be warmed up."""
        return self._state.step + 1 if self.settings.precision_warmup else None

    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientCapture:
        options = self.settings
        if options.engine == "graph":
            return GraphCapture(self.model, spec, dtype, options.verify, options.curvature_rows, self.generator)
        limit, settle = options.memory_limit, self._settle
        return GradientCapture(
            self.model, spec, dtype, options.engine, options.verify, memory_limit=limit, settle=settle
        )

    @property
    def _routes(self) -> Routes:
        return self.settings.routes_within_limit

    @property
    def _settle(self) -> Settle:
        """How rows are to be kept; holds no reference to the optimizer."""
        rank, routes = self.rank, self._routes
        return lambda name, block: cheapest(block, rank, routes, name)

    def _draw(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        drawn: Tensor = state.precision.sample((), generator, state.loc)  # type: ignore[attr-defined]
        return drawn

    def _kl(self, state: StateT, prior: Prior) -> float:
        return float(kl_to_prior(state, prior))  # type: ignore[arg-type]
