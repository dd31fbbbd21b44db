"""What the functional interfaces share: arguments that are checked, the prior, schedules, and the order of a step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from slangvi import checks
from slangvi.divergence import REACTIONS, REMEDY, Watch
from slangvi.grads.assemble import Engine
from slangvi.methods._gaussian import GaussianState
from slangvi.methods.gather import FactoredGatherer, check_schedule, dense_gatherer
from slangvi.out_of_memory import out_of_memory_advice
from slangvi.params import Params, ParamSpec
from slangvi.params.state import FlatState
from slangvi.params.values import per_parameter
from slangvi.priors import Prior
from slangvi.schedules import Rate, Schedule, rate_at, warmed_up
from slangvi.types import Routes, Transform

__all__ = ["Basics", "Common", "Replay"]

AnyState = TypeVar("AnyState", bound=FlatState)
StateT = TypeVar("StateT", bound=GaussianState)
# State, batch, generator, α and β (None: as α) → the step, or None when it has to be taken by `update`.
Replay = Callable[[StateT, Any, torch.Generator | None, float, float | None], tuple[StateT, Any] | None]
# Layout, draws (S, P), batch → what `update` takes as its curvature.
Curvature = Callable[[ParamSpec, Tensor, Any], Tensor]


class Basics:
    """What `build` is told whatever the method, checked, and the frame around a method's own functions.

    Args:
        num_data: N.
        lr: α, a number or a function of the step counted from 1.
        prior_precision: λ.
        prior_mean: μ₀.
        mc_samples: S.
        temperature: the likelihood is weighed by its inverse.
        ceiling: what α may not exceed.
    """

    def __init__(
        self,
        *,
        num_data: int,
        lr: Schedule,
        prior_precision: Any,
        prior_mean: Any,
        mc_samples: int,
        temperature: float,
        ceiling: float = math.inf,
    ) -> None:
        self.num_data = checks.count("num_data", num_data, hint="Pass the number of training examples.")
        self.mc_samples = checks.count("mc_samples", mc_samples)
        self.temperature = checks.number("temperature", temperature, 0.0)
        check_schedule("lr", lr, ceiling)
        self._lr, self._ceiling = lr, ceiling
        self._prior_precision, self._prior_mean = prior_precision, prior_mean
        self._priors: dict[tuple[ParamSpec, torch.dtype, torch.device], Prior] = {}

    def prior_of(self, state: FlatState, like: Tensor | None = None) -> Prior:
        """λ and μ₀ in the layout of a state, with the dtype and device of its mean or of a tensor like it."""
        like = state.loc if like is None else like
        key = (state.spec, like.dtype, like.device)
        if key not in self._priors:
            lam = per_parameter("prior_precision", self._prior_precision, state.spec, like)
            mean = per_parameter("prior_mean", self._prior_mean, state.spec, like, positive=False)
            self._priors[key] = Prior(lam, mean)
        return self._priors[key]

    def rate(self, step: int) -> float:
        """α of a step."""
        return rate_at("lr", self._lr, step, self._ceiling)

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


class _Unseen(NamedTuple):
    """A step that was still running when it was to be looked at.

    Args:
        loc: μ before it, (P,).
        after: the state after it, if it is still there.
        lr: α.
    """

    loc: Tensor
    after: weakref.ref[GaussianState]
    lr: float


class Common(Basics):
    """What methods that need the gradient of every example are told; `transform` makes pure functions of it.

    Args:
        log_likelihood: (params, batch) → (M,).
        num_data: N.
        lr: α, a number or a function of the step counted from 1.
        prior_precision: λ.
        prior_mean: μ₀.
        precision_lr: β; None follows `lr`.
        momentum: γ.
        mc_samples: S.
        temperature: the likelihood is weighed by its inverse.
        precision_warmup: whether β is at least 1/(t+1).
        model: the module behind `log_likelihood`.
        engine: "factored" or "dense"; None takes factored when there is a model.
        verify: check per-example gradients of new kinds of batches.
        memory_limit: bytes that formed gradients and temporaries may take.
        routes: what the factored engine forms.
        rank: L, for the count of costs.
        on_divergence: "warn", "raise" or "ignore".
    """

    def __init__(
        self,
        log_likelihood: Callable[[Params, Any], Tensor],
        *,
        num_data: int,
        lr: Schedule,
        prior_precision: Any,
        prior_mean: Any,
        precision_lr: Schedule | None,
        momentum: float,
        mc_samples: int,
        temperature: float,
        precision_warmup: bool,
        model: nn.Module | None,
        engine: Engine | None,
        verify: bool,
        memory_limit: int | None,
        routes: Routes | None,
        rank: int = 0,
        on_divergence: str = "warn",
    ) -> None:
        super().__init__(
            num_data=num_data,
            lr=lr,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            mc_samples=mc_samples,
            temperature=temperature,
            ceiling=1.0 if precision_lr is None else math.inf,
        )
        self.momentum = checks.number("momentum", momentum, 0.0, 1.0, closed="low")
        kind = checks.choice("engine", engine or ("factored" if model else "dense"), ("factored", "dense"))
        if memory_limit is not None:
            memory_limit = checks.count("memory_limit", memory_limit, hint="It is a number of bytes.")
        check_schedule("precision_lr", precision_lr, 1.0)
        self.factored: FactoredGatherer | None = None
        if kind == "factored":
            if model is None:
                raise ValueError('engine="factored" needs model=: pass the module whose layers log_likelihood calls.')
            plan = (routes or Routes()).within(memory_limit)
            checked = checks.flag("verify", verify)
            self.factored = FactoredGatherer(log_likelihood, model, rank, checked, plan, memory_limit)
        self._gather = self.factored or dense_gatherer(log_likelihood, memory_limit)
        self._precision_lr = precision_lr
        self._watch = Watch(checks.choice("on_divergence", on_divergence, REACTIONS), REMEDY)
        self._unseen: _Unseen | None = None
        self._warms_up = checks.flag("precision_warmup", precision_warmup)

    @property
    def dtypes(self) -> dict[str, torch.dtype] | None:
        """Of the parameters that `log_likelihood` is to be called with, by name; None means those of the draws."""
        return None if self.factored is None else self.factored.dtypes

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

        def eagerly(
            state: StateT, batch: Any, generator: torch.Generator | None, lr: float, precision_lr: float | None
        ) -> tuple[StateT, Any]:
            thetas = state.precision.sample((self.mc_samples,), generator, state.loc)
            gradients, mean_log_likelihood = self._gather(state.spec, thetas, batch)
            extra = {} if curvature is None else {"curvature": curvature(state.spec, thetas, batch)}
            new, info = update(
                state,
                gradients,
                num_data=self.num_data / self.temperature,
                prior=self.prior_of(state),
                lr=Rate(lr),
                precision_lr=None if precision_lr is None else Rate(precision_lr),
                momentum=self.momentum,
                **extra,
            )
            return new, replace(info, expected_log_likelihood=self.num_data * mean_log_likelihood)

        def take(state: StateT, batch: Any, generator: torch.Generator | None) -> tuple[StateT, Any]:
            step = state.step + 1
            given = (state, batch, generator, *self._rates(step))
            replayed = replay and replay(*given)
            new, info = replayed or eagerly(*given)
            self._look(state, new, step, given[3], running=bool(replayed))
            return new, info

        return self.framed(init, take, sample, posterior)

    def _look(self, state: GaussianState, new: GaussianState, step: int, lr: float, running: bool) -> None:
        """Show a step to the watch; one that still runs when the step after it has been taken, so as not to wait."""
        seen, self._unseen = self._unseen, None
        if seen is not None and seen.after() is state:
            self._watch.look(seen, state, self.prior_of(state), seen.lr, self.momentum)
        if not self._watch.due(step) or state.loc.ndim > 1:
            return
        if running and self._watch.reaction == "warn":
            self._unseen = _Unseen(state.loc.clone(), weakref.ref(new), lr)
        else:
            self._watch.look(state, new, self.prior_of(state), lr, self.momentum)

    def _rates(self, step: int) -> tuple[float, float | None]:
        """α and β of a step."""
        alpha, beta = self.rate(step), self._precision_lr
        if beta is None and not self._warms_up:
            return alpha, None
        plain = alpha if beta is None else rate_at("precision_lr", beta, step, 1.0)
        return alpha, warmed_up(plain, step) if self._warms_up else plain
