"""The frame of the functional interfaces: prior, schedules, exact Hessians, and the order of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from slangvi.divergence import REMEDY, Watch
from slangvi.errors import UnsupportedModuleError
from slangvi.likelihoods import Gaussian, OutputLogLikelihood, input_and_target
from slangvi.methods._gaussian import GaussianState, longest_step, spread_of_draws
from slangvi.methods.gather import Gatherer, RowGatherer, dense_gatherer, dtypes_of, likelihood_of
from slangvi.methods.learning import Learning, Seen, noise_of, prior_precision_of
from slangvi.out_of_memory import out_of_memory_advice
from slangvi.params import Params, ParamSpec
from slangvi.params.state import FlatState
from slangvi.params.values import learnt_members, per_parameter
from slangvi.priors import Prior, described_prior, prior_from
from slangvi.rows.dense import Together, draws_at_once
from slangvi.schedules import Rate, rate_at, warmed_up
from slangvi.settings import FunctionalSettings, HessianSettings, LogLikelihood, MethodSettings
from slangvi.types import Transform

__all__ = ["HESSIAN_REMEDY", "Basics", "Common", "Replay", "hessian_gatherer", "sample"]

HESSIAN_REMEDY = (
    'The Hessian of a likelihood that is not log-concave may be negative: use curvature="ef", more mc_samples, a lower '
    'precision_lr or a larger prior_precision. If it is "ef" already, rounding did this: use float64 parameters.'
)

# Rows of a Hessian computed together: each holds the activations of a backward pass.
_ROWS = 64

AnyState = TypeVar("AnyState", bound=FlatState)
StateT = TypeVar("StateT", bound=GaussianState)
# State, batch, generator, α and β (None: as α) → state and info after the step and the mean log-likelihood; None where
# the step has to be taken by `update`.
Replay = Callable[[StateT, Any, torch.Generator | None, float, float | None], tuple[StateT, Any, float] | None]


class Basics:
    """Prior, rates and `Transform` of any method, given its settings."""

    def __init__(self, settings: MethodSettings) -> None:
        self.settings = settings
        self._priors: dict[tuple[ParamSpec, torch.dtype, torch.device], Prior] = {}

    @property
    def effective_num_data(self) -> float:
        """N divided by the temperature, the weight of an average example's likelihood."""
        return self.settings.num_data / self.settings.temperature

    def prior_of(self, state: FlatState) -> Prior:
        """Return λ and μ₀ in the layout, dtype and device of a state; computed once for each of these."""
        like = state.loc
        key = (state.spec, like.dtype, like.device)
        if key not in self._priors:
            self._priors[key] = described_prior(self.settings, state.spec, like)
        return self._priors[key]

    def rate(self, step: int) -> float:
        """Return α of a step."""
        return rate_at("lr", self.settings.lr, step, getattr(self.settings, "highest_lr", math.inf))

    def framed(
        self,
        init: Callable[[Params], AnyState],
        take: Callable[[AnyState, Any, torch.Generator | None], tuple[AnyState, Any]],
        sample: Callable[..., Any],
        posterior: Callable[..., Any],
    ) -> Transform:
        """Return the pure functions of a method whose step is take(state, batch, generator) → state, info."""

        def begin(params: Params) -> AnyState:
            posterior = getattr(self.settings, "prior", None)
            if posterior is not None:
                prior_from(posterior, ParamSpec.of(params), posterior.loc)  # checks it
            state = init(params)
            self.prior_of(state)  # checks the prior
            return state

        def advance(state: AnyState, batch: Any, generator: torch.Generator | None = None) -> tuple[AnyState, Any]:
            with out_of_memory_advice("in a step", state):
                return take(state, batch, generator)

        return Transform(begin, advance, sample, posterior)


class Common(Basics):
    """Gradients of every example, and their checks, for the methods that need them."""

    settings: FunctionalSettings

    def __init__(self, log_likelihood: LogLikelihood, settings: FunctionalSettings) -> None:
        super().__init__(settings.for_likelihood(likelihood_of(log_likelihood)))
        self.noise: Gaussian | None = None  # that of the state whose step is taken, where it is learnt
        if settings.noise_precision is not None:
            self.noise = Gaussian(noise_of(likelihood_of(log_likelihood)))
            assert isinstance(log_likelihood, OutputLogLikelihood)
            log_likelihood = replace(log_likelihood, likelihood=self.noise)
        self._first_noise = None if self.noise is None else self.noise.noise_precision
        self._learnings: dict[ParamSpec, Learning] = {}
        self._learnt_prior: tuple[Tensor | None, Prior | None] = None, None
        self.log_likelihood, settings = log_likelihood, self.settings
        self.gather: Gatherer = dense_gatherer(log_likelihood, settings.memory_limit)
        if settings.reads_graph:
            self.gather = RowGatherer(log_likelihood, settings)
        self._watch = Watch(settings.on_divergence, REMEDY)

    def transform(
        self,
        init: Callable[[Params], StateT],
        update: Callable[..., tuple[StateT, Any]],
        sample: Callable[..., Any],
        posterior: Callable[..., Any],
        *,
        diagonal_hessian: bool = False,
        replay: Replay[StateT] | None = None,
    ) -> Transform:
        """Return the pure functions of a method.

        Where the settings ask for exact Hessians, `diagonal_hessian` gives `update` their diagonals only. `replay`
        takes a whole step in another way, where it can.
        """
        hessian = None
        if isinstance(self.settings, HessianSettings) and self.settings.curvature == "hessian":
            dtypes = dtypes_of(self.settings.model) if self.settings.reads_graph else {}
            hessian = hessian_gatherer(self.log_likelihood, diagonal_hessian, dtypes)

        def begin(params: Params) -> StateT:
            state = init(params)
            return replace(state, learnt=self.learning(state.spec).start(state.loc))  # type: ignore[type-var]

        def take(state: StateT, batch: Any, generator: torch.Generator | None) -> tuple[StateT, Any]:
            alpha, beta = self._rates(state.step + 1)
            prior, decay = self.prior_of(state), self.settings.momentum
            learning = self.learning(state.spec)
            if self.noise is not None:
                self.noise.noise_precision = learning.numbers(state)[1]
            taken = None if replay is None else replay(state, batch, generator, alpha, beta)
            if taken is None:
                curvature = self.settings.curvature
                thetas = state.precision.sample((self.settings.mc_samples,), generator, state.loc)
                spread = spread_of_draws(state.step, curvature)
                thetas = thetas if spread == 1.0 else torch.lerp(state.loc, thetas, spread)
                gradients, fit = self.gather(state.spec, thetas, batch, generator)
                options: dict[str, Any] = {"lr": Rate(alpha), "precision_lr": None if beta is None else Rate(beta)}
                options["longest"] = longest_step(state.step + 1, curvature)
                if hessian is not None:
                    options["curvature"] = hessian(state.spec, thetas, batch)
                size = self.effective_num_data
                taken = *update(state, gradients, num_data=size, prior=prior, momentum=decay, **options), fit
            new, info, fit = taken
            if self._watch.due(new.step) and state.loc.ndim == 1:
                self._watch.look(state, new, prior, alpha, decay)
            if learning:
                seen = self._seen(batch, fit)
                new, info = learning.follow(state, new, info, prior, alpha if beta is None else beta, seen)
            return new, replace(info, expected_log_likelihood=self.settings.num_data * fit)

        return self.framed(begin, take, sample, posterior)

    def learning(self, spec: ParamSpec) -> Learning:
        """Return the numbers of noise and prior that runs with this layout learn."""
        if spec not in self._learnings:
            members = learnt_members("prior_precision", self.settings.prior_precision, spec, spec)
            is_compiled = getattr(self.settings, "compile", False)
            self._learnings[spec] = Learning(spec, members, self._first_noise, is_compiled)
        return self._learnings[spec]

    def prior_of(self, state: Any) -> Prior:
        """Return λ and μ₀ of the next step, λ as it is learnt."""
        learning = self.learning(state.spec)
        learning.numbers(state)  # checks them
        if not learning.count:
            return super().prior_of(state)
        known, prior = self._learnt_prior
        if prior is None or known is None or known is not state.learnt:
            lam, like = prior_precision_of(self.settings.prior_precision, state), state.loc
            given = self.settings.prior_mean
            prior = Prior(lam, per_parameter("prior_mean", given, state.spec, like, positive=False))
            self._learnt_prior = state.learnt, prior
        return prior

    def _seen(self, batch: Any, fit: float) -> Seen | None:
        """Return the residuals of a step, given the mean log-likelihood of its examples; None if noise is given."""
        if self.noise is None:
            return None
        targets, tau = input_and_target(batch)[1], self.noise.noise_precision
        columns, draws = targets.numel() / len(targets), self.settings.mc_samples
        mean = (math.log(tau / (2 * math.pi)) - 2.0 * fit / columns) / tau
        return Seen(max(mean, 0.0), draws * len(targets) / self.settings.num_data)

    def _rates(self, step: int) -> tuple[float, float | None]:
        """Return α and β of a step; β is None where it follows α."""
        alpha, beta, warms_up = self.rate(step), self.settings.precision_lr, self.settings.precision_warmup
        if beta is None and not warms_up:
            return alpha, None
        plain = alpha if beta is None else rate_at("precision_lr", beta, step, 1.0)
        return alpha, warmed_up(plain, step) if warms_up else plain


def sample(
    state: GaussianState, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: name → tensor with `sample_shape`, then a batch's dimensions, in front of the parameter's shape."""
    return state.spec.unflatten(state.precision.sample(tuple(sample_shape), generator, state.loc))


def hessian_gatherer(
    log_likelihood: Callable[[Params, Any], Tensor], diagonal: bool, dtypes: Mapping[str, torch.dtype] | None = None
) -> Callable[[ParamSpec, Tensor, Any], Tensor]:
    """Return a function of (layout, draws (S, P), batch) that gives the Hessian summed over draws and examples.

    Every draw takes one forward and backward pass, and one more backward pass through both for each of the P
    parameters, diagonal or not: automatic differentiation gives whole rows. Small problems take all draws in one pass.
    `dtypes` are those of the parameters that `log_likelihood` expects, by name; others have those of the draws.

    Example:
        >>> found = hessian_gatherer(lambda params, x: -0.5 * (x @ params["w"]) ** 2, diagonal=False)
        >>> found(ParamSpec.of({"w": torch.zeros(2)}), torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.],
                [2., 4.]])
    """
    together, known = Together(), dtypes or {}

    def gather(spec: ParamSpec, thetas: Tensor, batch: Any) -> Tensor:
        def loss(flat: Tensor) -> Tensor:
            params = {name: value.to(known.get(name, value.dtype)) for name, value in spec.unflatten(flat).items()}
            return -log_likelihood(params, batch).sum()

        at_once = draws_at_once(spec, thetas, batch, backward_passes=min(_ROWS, spec.num_params))
        return together.summed(lambda theta: _hessian(loss, theta, diagonal), thetas, at_once)

    return gather


def _hessian(loss: Callable[[Tensor], Tensor], theta: Tensor, diagonal: bool) -> Tensor:
    """Return the second derivatives at one point, (P,) or (P, P)."""
    size, found = len(theta), []
    try:
        pull = vjp(grad(loss), theta)[1]
        for place in torch.arange(size, device=theta.device).split(_ROWS):
            units = torch.zeros(len(place), size, dtype=theta.dtype, device=theta.device)
            units.scatter_(1, place[:, None], 1.0)
            rows = vmap(lambda unit: pull(unit)[0])(units)
            found.append(rows.gather(1, place[:, None])[:, 0] if diagonal else rows)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise UnsupportedModuleError(
            'curvature="hessian" needs second derivatives, which an operation in log_likelihood does not have: '
            f'{error} Use curvature="ef".'
        ) from error
    return torch.cat(found)
