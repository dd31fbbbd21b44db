"""The frame of the functional interfaces: prior, schedules, and the order of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from slangvi.divergence import REMEDY, Watch
from slangvi.methods._gaussian import GaussianState
from slangvi.methods.gather import Gatherer, RowGatherer, dense_gatherer, dtypes_of
from slangvi.out_of_memory import out_of_memory_advice
from slangvi.params import Params, ParamSpec
from slangvi.params.state import FlatState
from slangvi.params.values import per_parameter
from slangvi.priors import Prior
from slangvi.schedules import Rate, rate_at, warmed_up
from slangvi.settings import FunctionalSettings, GaussianSettings, LogLikelihood, MethodSettings
from slangvi.types import Transform

__all__ = ["Basics", "Common", "Replay"]

AnyState = TypeVar("AnyState", bound=FlatState)
StateT = TypeVar("StateT", bound=GaussianState)
# State, batch, generator, α and β (None: as α) → state and info after the step and the mean log-likelihood; None where
# the step has to be taken by `update`.
Replay = Callable[[StateT, Any, torch.Generator | None, float, float | None], tuple[StateT, Any, float] | None]
# Layout, draws (S, P), batch → what `update` takes as its curvature.
Curvature = Callable[[ParamSpec, Tensor, Any], Tensor]


class Basics:
    """The frame around a method's own functions, whatever the method.

    Args:
        settings: of the method.
        highest_lr: what α may not exceed.
    """

    def __init__(self, settings: MethodSettings, highest_lr: float = math.inf) -> None:
        self.settings = settings
        self._highest_lr = highest_lr
        self._prior_mean = settings.prior_mean if isinstance(settings, GaussianSettings) else 0.0
        self._priors: dict[tuple[ParamSpec, torch.dtype, torch.device], Prior] = {}

    @property
    def effective_num_data(self) -> float:
        """N divided by the temperature, what the likelihood of an average example is multiplied by."""
        return self.settings.num_data / self.settings.temperature

    def prior_of(self, state: FlatState, like: Tensor | None = None) -> Prior:
        """λ and μ₀ in the layout of a state, with the dtype and device of its mean or of a tensor like it."""
        like = state.loc if like is None else like
        key = (state.spec, like.dtype, like.device)
        if key not in self._priors:
            lam = per_parameter("prior_precision", self.settings.prior_precision, state.spec, like)
            mean = per_parameter("prior_mean", self._prior_mean, state.spec, like, positive=False)
            self._priors[key] = Prior(lam, mean)
        return self._priors[key]

    def rate(self, step: int) -> float:
        """α of a step."""
        return rate_at("lr", self.settings.lr, step, self._highest_lr)

    def framed(
        self,
        init: Callable[[Params], AnyState],
        take: Callable[[AnyState, Any, torch.Generator | None], tuple[AnyState, Any]],
        sample: Callable[..., Any],
        posterior: Callable[..., Any],
    ) -> Transform:
        """A method as pure functions.

        Args:
            init: params → the state before the first step; the prior is then checked.
            take: (state, batch, generator) → the next state, and what can be told about it.
            sample: the method's own.
            posterior: likewise.
        """

        def begin(params: Params) -> AnyState:
            state = init(params)
            self.prior_of(state)
            return state

        def advance(state: AnyState, batch: Any, generator: torch.Generator | None = None) -> tuple[AnyState, Any]:
            with out_of_memory_advice("in a step", state):
                return take(state, batch, generator)

        return Transform(begin, advance, sample, posterior)


class Common(Basics):
    """The frame around methods that need the gradient of every example; `transform` makes pure functions of it.

    Args:
        log_likelihood: (params, batch) → (M,).
        settings: of the method.
        rank: L, for the count of costs.
    """

    settings: FunctionalSettings

    def __init__(self, log_likelihood: LogLikelihood, settings: FunctionalSettings, rank: int = 0) -> None:
        super().__init__(settings, settings.highest_lr)
        self.gather: Gatherer = dense_gatherer(log_likelihood, settings.memory_limit)
        if settings.reads_graph:
            self.gather = RowGatherer(log_likelihood, settings, rank)
        self._watch = Watch(settings.on_divergence, REMEDY)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the parameters that `log_likelihood` is to be called with, by name; those of the draws if missing."""
        return dtypes_of(self.settings.model) if self.settings.reads_graph else {}

    def transform(
        self,
        init: Callable[[Params], StateT],
        update: Callable[..., tuple[StateT, Any]],
        sample: Callable[..., Any],
        posterior: Callable[..., Any],
        *,
        curvature: Curvature | None = None,
        replay: Replay[StateT] | None = None,
    ) -> Transform:
        """A method as pure functions.

        Args:
            init: params → the state before the first step.
            update: the method's own.
            sample: likewise.
            posterior: likewise.
            curvature: computes what `update` is to take for the curvature; None leaves it to the gradients.
            replay: takes a whole step in another way, where it can.
        """

        def take(state: StateT, batch: Any, generator: torch.Generator | None) -> tuple[StateT, Any]:
            alpha, beta = self._rates(state.step + 1)
            prior, decay = self.prior_of(state), self.settings.momentum
            taken = None if replay is None else replay(state, batch, generator, alpha, beta)
            if taken is None:
                thetas = state.precision.sample((self.settings.mc_samples,), generator, state.loc)
                gradients, fit = self.gather(state.spec, thetas, batch, generator)
                options: dict[str, Any] = {"lr": Rate(alpha), "precision_lr": None if beta is None else Rate(beta)}
                if curvature is not None:
                    options["curvature"] = curvature(state.spec, thetas, batch)
                size = self.effective_num_data
                taken = *update(state, gradients, num_data=size, prior=prior, momentum=decay, **options), fit
            new, info, fit = taken
            if self._watch.due(new.step) and state.loc.ndim == 1:
                self._watch.look(state, new, prior, alpha, decay)
            return new, replace(info, expected_log_likelihood=self.settings.num_data * fit)

        return self.framed(init, take, sample, posterior)

    def _rates(self, step: int) -> tuple[float, float | None]:
        """α and β of a step."""
        alpha, beta, warms_up = self.rate(step), self.settings.precision_lr, self.settings.precision_warmup
        if beta is None and not warms_up:
            return alpha, None
        plain = alpha if beta is None else rate_at("precision_lr", beta, step, 1.0)
        return alpha, warmed_up(plain, step) if warms_up else plain
