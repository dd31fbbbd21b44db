r"""Bayes by Backprop (Blundell et al. 2015): a mean-field Gaussian, moved by Adam on the reparameterised ELBO.

$$ q(\theta) = \mathcal N\bigl(\mu, \mathrm{diag}(\sigma^2)\bigr), \qquad \theta_s = \mu + \sigma \circ \varepsilon_s,
   \qquad \sigma = \log(1 + e^\rho) \ \text{ or } \ e^\rho $$

There are choices, and these were made. A draw is shared by the whole batch, as by every other method here; the
alternatives, draws of each example and the local reparameterisation of activations (Kingma et al. 2015), lower the
variance of gradients but depend on the layers. S draws are averaged. The KL is the closed form of two Gaussians, not a
sample of it, and the prior is a Gaussian, not Blundell's mixture of two. Only sums of gradients are needed, so that a
step costs S passes forward and backward and nothing by example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg import DiagonalPrecision
from slangvi.linalg.noise import standard_normal
from slangvi.methods import _adam
from slangvi.methods._adam import BETAS, EPS, AdamOptimizer, Betas, Moving, Number
from slangvi.methods._gaussian import Info, kl_to_prior, start
from slangvi.methods.gather import sum_gatherer
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.priors import Prior
from slangvi.schedules import Rate
from slangvi.settings import AdamOptimizerSettings, AdamSettings, GaussianSettings, LogLikelihood, checked, choice
from slangvi.types import Transform

__all__ = ["BBB", "Info", "Moving", "State", "advanced", "build", "init", "posterior", "sample", "stddev_of", "update"]

# From here on log(1 + exp ρ) is ρ in every dtype; torch's own threshold of 20 would be seen in float64.
_LINEAR = 40.0


@dataclass(frozen=True, eq=False)
class State:
    """State between steps; leading dimensions are a batch of runs.

    Args:
        loc: μ, (..., P).
        rho: ρ, the unconstrained scale, (..., P).
        loc_momentum: Adam's mean of gradients by μ, (..., P).
        loc_square: its mean of their squares, (..., P).
        rho_momentum: the mean of gradients by ρ, (..., P).
        rho_square: the mean of their squares, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
        scale: "softplus" or "log", see `stddev_of`.
    """

    loc: Tensor
    rho: Tensor
    loc_momentum: Tensor
    loc_square: Tensor
    rho_momentum: Tensor
    rho_square: Tensor
    step: int
    spec: ParamSpec
    scale: str = "softplus"

    @property
    def stddev(self) -> Tensor:
        """σ, (..., P)."""
        return stddev_of(self.rho, self.scale)

    @cached_property
    def precision(self) -> DiagonalPrecision:
        """diag(σ)⁻², with its operations."""
        return DiagonalPrecision(self.stddev.square().reciprocal())

    @property
    def moving(self) -> tuple[Moving, Moving]:
        """μ and ρ with their running means, as `advanced` takes them."""
        loc = Moving(self.loc, self.loc_momentum, self.loc_square)
        return loc, Moving(self.rho, self.rho_momentum, self.rho_square)


def init(params: Params, init_precision: Any = 1.0, scale: str = "softplus") -> State:
    """Start at the given values with σ = `init_precision`^(−½): number, dict of names or globs, or (P,) tensor."""
    checks.choice("scale", scale, ("softplus", "log"))
    spec, loc, precision = start(params, init_precision)
    sigma = precision.rsqrt()
    rho = sigma.log() if scale == "log" else sigma + torch.log(-torch.expm1(-sigma))
    return State(loc, rho, *Moving.at(loc)[1:], *Moving.at(rho)[1:], step=0, spec=spec, scale=scale)


def stddev_of(rho: Tensor, scale: str = "softplus") -> Tensor:
    """Return σ from the unconstrained ρ, (..., P): log(1 + exp ρ) for "softplus", exp ρ for "log".

    Example:
        >>> stddev_of(torch.tensor([0.0, -5.0])), stddev_of(torch.zeros(1), "log")
        (tensor([0.6931, 0.0067]), tensor([1.]))
    """
    return F.softplus(rho, threshold=_LINEAR) if scale == "softplus" else rho.exp()


def advanced(
    loc: Moving,
    rho: Moving,
    gradients: Tensor,
    noise: Tensor,
    *,
    weight: Number,
    prior: Prior,
    lr: Rate | Number,
    step: int | Tensor,
    betas: Betas = BETAS,
    eps: Number = EPS,
    scale: str = "softplus",
) -> tuple[Moving, Moving]:
    r"""Return μ and ρ after a step. No number is read and no tensor changed, so that a CUDA graph can capture it.

    $$ g_\mu = \tfrac NR \textstyle\sum_s g_s + \lambda(\mu - \mu_0), \qquad
       g_\rho = \Bigl[\tfrac NR \sum_s g_s \circ \varepsilon_s + \lambda\sigma - \sigma^{-1}\Bigr]
       \circ \frac{\partial\sigma}{\partial\rho} $$

    and a step of Adam on each.

    Args:
        loc: μ and its running means, (..., P) each.
        rho: ρ and its running means, likewise.
        gradients: g_s, the gradient at θ_s of the negative log-likelihood added up over the batch, (S, ..., P).
        noise: ε_s, (S, ..., P).
        weight: N/R with R = S·M, divided by the temperature; a number or a tensor (..., 1).
        prior: λ and μ₀, (P,) or (..., P).
        lr: α; a number, a tensor (..., 1) with a rate for every run, or a `Rate`.
        step: t, the number of this step counted from 1; a number or a tensor, () or (..., 1).
        betas: β₁ and β₂ of Adam.
        eps: ε of Adam, against gradients of the whole negative ELBO.
        scale: "softplus" or "log".
    """
    sigma, share = stddev_of(rho.value, scale), _adam.to_dtype_of(loc.value, weight)
    slope = rho.value.sigmoid() if scale == "softplus" else sigma
    by_loc = prior.add_slope(loc.value, share * gradients.sum(0))
    by_sigma = torch.addcmul(share * (gradients * noise).sum(0), prior.diagonal, sigma)
    by_rho = slope * by_sigma - slope / sigma
    options: dict[str, Any] = {"lr": lr, "step": step, "betas": betas, "eps": eps}
    return _adam.adam_step(loc, by_loc, **options), _adam.adam_step(rho, by_rho, **options)


def update(
    state: State,
    gradients: Tensor,
    noise: Tensor,
    *,
    num_rows: int,
    num_data: Number,
    prior: Prior,
    lr: Rate | Number,
    betas: Betas = BETAS,
    eps: Number = EPS,
    ages: Tensor | None = None,
) -> tuple[State, Info]:
    """Take one step from the gradients at S draws; leading dimensions of the state are a batch of runs.

    Arguments are those of `advanced`. N/R comes apart: `num_rows` is R = S·M, draws times examples, `num_data` is N,
    divided by the temperature if there is one. `ages` are t of each entry where some joined later, (P,).

    Returns:
        The state after the step, and its diagnostics. Raises `NumericalError` instead of returning a state that is not
        finite, which is the one look at the numbers.
    """
    step, weight = state.step + 1, num_data / num_rows
    options: dict[str, Any] = {"lr": lr, "step": step if ages is None else ages, "betas": betas, "eps": eps}
    loc, rho = advanced(*state.moving, gradients, noise, weight=weight, prior=prior, scale=state.scale, **options)
    sums = lambda: (gradients.sum(0), (gradients * noise).sum(0))  # noqa: E731
    _adam.require_finite_step(step, state.spec, sums, {"mean": loc, "scale": rho})
    after = State(loc.value, rho.value, *loc[1:], *rho[1:], step=step, spec=state.spec, scale=state.scale)
    return after, Info(step, num_rows, _state=after, _prior=prior)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: name → tensor with `sample_shape`, then a batch's dimensions, in front of the parameter's shape."""
    noise = standard_normal((*sample_shape, *state.loc.shape), state.loc, generator)
    return state.spec.unflatten(torch.addcmul(state.loc, state.stddev, noise))


def posterior(state: State) -> LowRankPrecisionNormal:
    """Return q as a torch distribution over the flat vector, of rank 0."""
    factor, diag = state.loc.new_zeros(*state.loc.shape, 0), state.precision.diag
    return LowRankPrecisionNormal(state.loc, factor, diag, validate_args=False, param_spec=state.spec)


@dataclass(frozen=True, eq=False, kw_only=True)
class BBBSettings(AdamSettings, GaussianSettings):
    """Settings of `build`.

    Args:
        mc_samples: S, draws of the weights per step, each shared by the whole batch.
        init_precision: 1/σ² at the start; for networks 100 to 1000, since noise of σ = 1 drowns what they say. Number,
            dict or tensor.
        scale: "softplus", σ = log(1 + exp ρ), or "log", σ = exp ρ: what Adam moves.
    """

    scale: str = checked("softplus", choice("softplus", "log"))


@dataclass(frozen=True, eq=False, kw_only=True)
class BBBOptimizerSettings(AdamOptimizerSettings, BBBSettings):
    """Settings of `BBB`."""


@keywords_of(BBBSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """Build Bayes by Backprop as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example; vmap must be able to follow it.
        options: settings, see `BBBSettings`.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> vi = build(log_likelihood, num_data=2, lr=0.1)
        >>> state = vi.init({"w": torch.zeros(2)})
        >>> batch = {"x": torch.eye(2), "y": torch.tensor([100.0, -200.0])}
        >>> state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
        >>> state.loc, info.num_rows
        (tensor([ 0.1000, -0.1000]), 2)
    """
    settings = bind_settings("build", BBBSettings, **options)
    sums = sum_gatherer(log_likelihood)

    def gather(state: State, batch: Any, generator: torch.Generator | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
        noise = standard_normal((settings.mc_samples, *state.loc.shape), state.loc, generator)
        gradients, values = sums(state.spec, torch.addcmul(state.loc, state.stddev, noise), batch)
        return (gradients, noise), values

    begin = partial(init, init_precision=settings.init_precision, scale=settings.scale)
    return _adam.adam_transform(settings, begin, gather, update, sample, posterior)


class BBB(AdamOptimizer[State, Info]):
    """Bayes by Backprop as a torch optimizer for any module.

    It needs the gradient of each draw only, added up by autograd: no layer is listened to, nothing is computed by
    example, and batch normalisation may stay in train mode. The model must be called as a whole.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.bbb.BBBOptimizerSettings`.

    Example:
        >>> opt = BBB(nn.Linear(3, 2), num_data=100, init_precision=100.0)  # then as `slangvi.SLANG`
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    settings: BBBOptimizerSettings

    @init_keywords_of(BBBOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, BBBOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, hyper.per_parameter("init_precision"), self.settings.scale)

    def _draw(self, state: State, generator: torch.Generator | None) -> Tensor:
        self._drawn = standard_normal(tuple(state.loc.shape), state.loc, generator)
        return torch.addcmul(state.loc, state.stddev, self._drawn)

    def _advance_sums(self, gradients: Tensor, drawn: Tensor, **options: Any) -> tuple[State, Info]:
        return update(self._state, gradients, drawn, prior=self._hyper.prior(), **options)

    def _posterior(self, state: State) -> LowRankPrecisionNormal:
        return posterior(state)

    def _kl(self, state: State, prior: Prior) -> float:
        return float(kl_to_prior(state, prior))
