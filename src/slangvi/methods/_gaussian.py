"""Parts of all Gaussian methods: start, KL divergence, diagnostics, and the step of their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slangvi.divergence import REMEDY, Watch
from slangvi.likelihoods import Likelihood, curvature_seeds, likelihood_named
from slangvi.linalg.products import rows_dot_vector
from slangvi.methods.learning import Learning, NotedGaussian, Seen, noise_of
from slangvi.optimizer import InfoT, StateT, VariationalOptimizer
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.params.state import FlatState, state_dtype
from slangvi.params.values import per_parameter
from slangvi.priors import ELBO, Prior
from slangvi.rows import FactoredGradients, GradientRecorder, OwnPass, RowGroup
from slangvi.settings import OWN_PASS, CurvatureOptimizerSettings
from slangvi.types import Routes

__all__ = [
    "GaussianOptimizer",
    "GaussianState",
    "Info",
    "Precision",
    "Told",
    "flat_start",
    "kl_to_prior",
    "longest_step",
    "own_pass_of",
    "place",
    "spread_of_draws",
    "start",
]


# Steps by the likelihood's curvature whose draws have less noise, and how far the mean may go in each of them, in
# posterior standard deviations.
FIRST_STEPS, LONGEST = 50, 0.1
# Factors by which misfit may enlarge the likelihood's curvature: where that can vanish, and where it is the same for
# all outputs (True) and a model that does not fit yet is only to be slowed down.
MOST_ENLARGED = {False: 1e6, True: 10.0}


class Precision(Protocol):
    """A precision that was factorised, or needs not be."""

    def sample(
        self, sample_shape: tuple[int, ...], generator: torch.Generator | None = None, loc: Tensor | None = None
    ) -> Tensor:
        """Draws, (*sample_shape, ..., P)."""

    def inv_diag(self) -> Tensor:
        """Diagonal of the covariance, (..., P)."""

    def inv_quadratic(self, rows: Tensor) -> Tensor:
        """Return xᵀΣx of every row x, (K, P) → (K,)."""

    def logdet(self) -> Tensor:
        """Log-determinant of the precision, (...)."""


class GaussianState(FlatState, Protocol):
    """A state whose precision can be asked."""

    @property
    def precision(self) -> Precision:
        """Made once per state."""


class Told:
    """Base of every `Info`: numbers worked out from the likelihood it saw, the state and the prior."""

    expected_log_likelihood: float
    _state: Any
    _prior: Prior | None
    _version: int | None

    @property
    def loss(self) -> float:
        """Negative expected log-likelihood, the fit part of the negative ELBO."""
        return -self.expected_log_likelihood

    @cached_property
    def kl(self) -> Any:
        """KL(q ‖ prior) after the step, computed when first asked for: a number, for a batch a tensor (...)."""
        assert self._prior is not None
        if _version_of(self._state) != self._version:
            raise RuntimeError(
                f"info.kl of step {self._state.step} is asked for after a later step, which has written over its "
                "state. Ask for it before the next step, or call opt.kl() for the current one."
            )
        found = kl_to_prior(self._state, self._prior)
        return found if found.ndim else float(found)

    def __post_init__(self) -> None:
        # Optimizers write the next state over this one: the version tells.
        object.__setattr__(self, "_version", _version_of(self._state))

    @property
    def elbo(self) -> ELBO:
        """Both parts together."""
        return ELBO(self.expected_log_likelihood, self.kl)


def _version_of(state: GaussianState | None) -> int | None:
    """Return how often the tensors of a state were written to, as far as torch counts that."""
    return None if state is None or state.loc.is_inference() else state.loc._version


@dataclass(frozen=True, eq=False)
class Info(Told):
    """Diagnostics of a step.

    Args:
        step: number of the step, from 1.
        num_rows: R, per-example gradients used.
        expected_log_likelihood: N times the mean log-likelihood over rows; NaN when the loss was not seen.
        skipped: bad batches an optimizer has passed over so far.
        noise_precision: τ after the step, where it is learnt.
        prior_precision: λ after the step of each parameter whose own is learnt, by name.
    """

    step: int
    num_rows: int
    expected_log_likelihood: float = float("nan")
    skipped: int = 0
    noise_precision: float | None = None
    prior_precision: Mapping[str, float] | None = None
    _state: GaussianState | None = field(default=None, repr=False)
    _prior: Prior | None = field(default=None, repr=False)


def kl_to_prior(state: GaussianState, prior: Prior) -> Tensor:
    r"""Return KL(q ‖ prior), exactly, for priors with a factor too.

    $$ \tfrac12\bigl[\mathrm{tr}\,\Lambda_0\Sigma + (\mu-\mu_0)^\top\Lambda_0(\mu-\mu_0) - P
       - \log\det\Lambda_0 + \log\det\Lambda\bigr] $$
    """
    lam, double = prior.precision, torch.float64
    # Sums over many parameters, which nearly cancel.
    spread = (lam * state.precision.inv_diag()).sum(-1, dtype=double)
    away = state.loc - prior.mean
    spread = spread + (lam * away.square()).sum(-1, dtype=double)
    if prior.factor is not None:
        spread = spread + state.precision.inv_quadratic(prior.factor).sum(0, dtype=double)
        spread = spread + rows_dot_vector(prior.factor, away).square().sum(-1)
    kl: Tensor = 0.5 * (spread - lam.shape[-1] - prior.logdet + state.precision.logdet())
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


def spread_of_draws(step: int, curvature: str) -> float:
    """Return what the noise of draws is multiplied by: 1, and less in first steps by the likelihood's curvature.

    That curvature vanishes where outputs are sure and wrong, as they are at draws of a posterior that knows nothing
    yet. First steps look near the mean, where it can be seen.

    Args:
        step: steps taken so far.
        curvature: of the settings.
    """
    return min(1.0, step / FIRST_STEPS) if curvature in OWN_PASS else 1.0


def longest_step(step: int, curvature: str) -> float | None:
    """Return how far a step may go, in posterior standard deviations of a typical parameter; None for any length.

    By the likelihood's curvature a step is as far as a quadratic model has its minimum, which is good for the draws
    that it was made from and not much farther: one standard deviation, and less in first steps. The empirical Fisher is
    large where the minimum is far.

    Args:
        step: number of the step, from 1.
        curvature: of the settings.
    """
    if curvature not in OWN_PASS:
        return None
    return min(LONGEST * max(1.0, step / FIRST_STEPS) ** 2, 1.0)


def own_pass_of(likelihood: str | Likelihood | None, curvature: str, verify: bool) -> OwnPass | None:
    """Return the source of rows for a curvature that does not come from the loss; None for one that does."""
    if curvature not in OWN_PASS or likelihood is None:
        return None
    known = likelihood_named(likelihood)
    most = MOST_ENLARGED[known.has_constant_hessian]
    return OwnPass(partial(curvature_seeds, known, curvature), verify, most, partial(known.draws_targets, curvature))


class GaussianOptimizer(VariationalOptimizer[StateT, InfoT]):
    """Base of the optimizers of methods with per-example curvature."""

    settings: CurvatureOptimizerSettings
    _update: Callable[..., tuple[StateT, InfoT]]  # the method's own
    _writes_in_place = False  # whether it can write the new state over the old one

    def __init__(self, model: nn.Module, settings: CurvatureOptimizerSettings) -> None:
        super().__init__(model, settings.for_likelihood(settings.likelihood))

    @property
    def rank(self) -> int:
        """L, columns of the low-rank factor; 0 where the method has none."""
        return getattr(self.settings, "rank", 0)

    @cached_property
    def _watch(self) -> Watch:
        return Watch(self.settings.on_divergence, REMEDY)

    @cached_property
    def _routes(self) -> Routes:
        return self.settings.routes_within_limit

    @property
    def likelihood(self) -> Likelihood | None:
        """The likelihood of the settings, with the noise precision learnt so far where it is learnt.

        Its −log_prob is the loss then; the noise of one that is kept follows the run.
        """
        own = self._own()
        if isinstance(own._known, NotedGaussian):
            own._known.noise_precision = own._learning.numbers(own._state)[1]
        return own._known

    @property
    def prior_precision(self) -> dict[str, float]:
        """λ of each parameter whose own is learnt, by name; empty where all are given."""
        own = self._own()
        return own._learning.by_name(own._learning.numbers(own._state))

    @cached_property
    def _known(self) -> Likelihood | None:
        """The likelihood of the settings; one that notes residuals where noise is learnt."""
        given = self.settings.likelihood
        known = None if given is None else likelihood_named(given)
        return known if self.settings.noise_precision is None else NotedGaussian(noise_of(known))

    def _with_learnt(self, fresh: StateT, hyper: GroupValues) -> StateT:
        noise = self._known.noise_precision if isinstance(self._known, NotedGaussian) else None
        learning = Learning(fresh.spec, hyper.learnt(), noise, getattr(self.settings, "compile", False))
        hyper.begun = hyper.learnt()
        started: StateT = replace(fresh, learnt=learning.start(fresh.loc))  # type: ignore[type-var]
        hyper.prior(learning.numbers(started)[2:])  # checks it
        self._learning = learning
        return started

    def discard_gradients(self) -> None:
        """See `VariationalOptimizer`; residuals that learnt noise would follow are forgotten as well."""
        super().discard_gradients()
        own = self._own()
        if isinstance(own._known, NotedGaussian):
            own._known.forget()

    def _learns(self) -> list[Any] | None:
        count, members = self._learning.count, self._learning.members
        return [count, members] if count else None

    def _rebuild(self, old: StateT | None) -> None:
        super()._rebuild(old)
        learnt: Tensor | None = self._state.learnt  # type: ignore[attr-defined]
        if old is not None and learnt is not None:  # numbers wait until the precision has heard of what joined
            waiting = torch.cat([torch.ones_like(learnt[:1]), learnt[1:]])
            self._state = replace(self._state, learnt=waiting)  # type: ignore[type-var]

    def _prior(self) -> Prior:
        return self._hyper.prior(self._learning.numbers(self._state)[2:])

    def _write(self, flat: Tensor) -> None:
        super()._write(flat)
        if isinstance(self._known, NotedGaussian):
            self._known.noise_precision = self._learning.numbers(self._state)[1]

    def _collected(self) -> list[RowGroup]:
        seen = self._known.close() if isinstance(self._known, NotedGaussian) else None
        groups = super()._collected()
        return [replace(groups[0], residuals=seen), *groups[1:]] if groups else groups

    def _residuals(self, rows: list[RowGroup]) -> Seen | None:
        """Return the residuals of all passes of a step, where noise is learnt."""
        if self._learning.noise is None:
            return None
        noted = [group.residuals for group in rows if group.residuals is not None]
        if not noted:
            raise RuntimeError(
                'step() saw no residuals, which noise_precision="learn" needs. Let the loss be '
                "-opt.likelihood.log_prob(outputs, targets).mean(), inside the block."
            )
        squares, counts = zip(*noted, strict=True)
        share = sum(group.num_rows for group in rows) / self.settings.num_data
        return Seen(sum(squares) / sum(counts), share)

    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        step, settings, before = self._state.step + 1, self.settings, self._state
        seen = self._residuals(rows)
        gradients = FactoredGradients(self._spec, rows, before.loc, self._routes)
        rates, prior = self._hyper.rates(step, settings.precision_warmup)._asdict(), self._prior()
        is_due, alpha, gamma = self._watch.due(step), rates["lr"].value, rates["momentum"]
        if self._writes_in_place:
            rates["in_place"] = not (self._handed_out or (is_due and self._watch.reaction == "raise"))
            if is_due and rates["in_place"]:
                before = replace(before, loc=before.loc.clone())  # type: ignore[type-var]
        size = settings.num_data / settings.temperature
        longest = longest_step(step, settings.curvature)
        state, info = self._update(self._state, gradients, num_data=size, prior=prior, longest=longest, **rates)
        if is_due:
            self._watch.look(before, state, prior, alpha, gamma)
        if self._learning:
            rate = rates["precision_lr"]
            beta = rate.value if rate.per_tensor is None else min(rate.per_tensor)
            state, info = self._learning.follow(before, state, info, prior, beta, seen)
        return state, info

    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientRecorder:
        options = self.settings
        return GradientRecorder(
            self.model,
            spec,
            dtype,
            by_definition=options.engine == "dense",
            verify=options.verify,
            curvature_rows=options.rows_of_pass(spec.num_params),
            generator=self.generator,
            own_pass=own_pass_of(self._known, options.curvature, options.verify),
        )

    def _draw(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        drawn: Tensor = state.precision.sample((), generator, state.loc)  # type: ignore[attr-defined]
        return drawn

    def _draw_to_learn(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        if isinstance(self._known, NotedGaussian):
            self._known.open()
        drawn, spread = self._draw(state, generator), spread_of_draws(state.step, self.settings.curvature)
        return drawn if spread == 1.0 else torch.lerp(state.loc, drawn, spread)

    def _kl(self, state: StateT, prior: Prior) -> float:
        return float(kl_to_prior(state, prior))  # type: ignore[arg-type]
