r"""Mean-field natural-gradient variational inference; with the empirical Fisher it is VOGN (Khan et al. 2018).

$$ q(\theta) = \mathcal N\bigl(\mu, \mathrm{diag}(s)^{-1}\bigr) $$
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg import DiagonalPrecision
from slangvi.methods._averages import debiasing, lerp, mean_gradient
from slangvi.methods._build import Common
from slangvi.methods._curvature import HESSIAN_REMEDY, hessian_gatherer
from slangvi.methods._gaussian import GaussianOptimizer, Info, place, start
from slangvi.methods.step import GRADIENT_REMEDY, STATE_REMEDY
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate
from slangvi.settings import CurvatureOptimizerSettings, HessianSettings, LogLikelihood
from slangvi.types import Transform

__all__ = ["VOGN", "Info", "State", "build", "init", "posterior", "sample", "update"]


@dataclass(frozen=True, eq=False)
class State:
    """What the next step needs; leading dimensions are a batch of runs.

    Args:
        loc: μ, (..., P).
        prec_diag: s, (..., P).
        momentum: m, the running mean of likelihood gradients, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
    """

    loc: Tensor
    prec_diag: Tensor
    momentum: Tensor
    step: int
    spec: ParamSpec

    @cached_property
    def precision(self) -> DiagonalPrecision:
        """diag(s), with its operations."""
        return DiagonalPrecision(self.prec_diag)


def init(params: Params, init_precision: Any = 1.0) -> State:
    """Start at the given values with s = `init_precision`.

    Args:
        params: name → tensor.
        init_precision: number, dict of names or globs, or (P,) tensor.
    """
    spec, loc, diag = start(params, init_precision)
    return State(loc, diag, torch.zeros_like(loc), 0, spec)


def update(
    state: State,
    gradients: GradientOperator,
    *,
    num_data: float,
    prior: Prior,
    lr: Rate,
    precision_lr: Rate | None = None,
    momentum: float | Tensor = 0.0,
    curvature: Tensor | None = None,
    ages: Tensor | None = None,
) -> tuple[State, Info]:
    r"""One step from per-example gradients (R rows); leading dimensions of the state are a batch of runs.

    $$ s^+ = (1-\beta)\,s + \beta\,(\tfrac NR h + \lambda), \qquad h = \textstyle\sum_r g_r \circ g_r
       \ \text{ or } \ \sum_r \mathrm{diag}\,H_r $$
    $$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
       \mu^+ = \mu - \alpha\,\bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] / s^+ $$

    Args:
        state: before the step; never modified.
        gradients: operator over R rows, of which only the sum and the sum of squares are used.
        num_data: N, divided by the temperature if there is one.
        prior: λ and μ₀, (..., P).
        lr: α.
        precision_lr: β; None means α.
        momentum: γ, on the likelihood gradient only.
        curvature: diagonals of the R Hessians of the negative log-likelihood, summed, (..., P); None takes the
            empirical Fisher from the gradients.
        ages: t of each entry where some joined later, (P,); None for the state's own.

    Returns:
        The state after the step, and what can be told about it. Raises `NumericalError` instead of returning a state
        that is not finite, or whose precision is not positive.
    """
    weight, beta = num_data / gradients.num_rows, (precision_lr or lr).value
    total, squares = gradients.sum(), gradients.square_sum() if curvature is None else curvature
    diag = lerp(state.prec_diag, prior.precision, beta).add_((beta * weight) * squares)
    correction = debiasing(momentum, state.step + 1, ages)
    average, gradient = mean_gradient(state.loc, state.momentum, total, weight, prior, momentum, correction)
    after = State(state.loc - lr.value * (gradient / diag), diag, average, state.step + 1, state.spec)
    # NaN and Inf survive the sums.
    if not (math.isfinite(float(after.loc.sum() + diag.sum())) and bool(diag.min() > 0)):
        _refuse(after, total, squares)
    return after, Info(after.step, gradients.num_rows, _state=after, _prior=prior)


def _refuse(after: State, total: Tensor, squares: Tensor) -> None:
    """Say what is wrong with a step, if anything is: sums may overflow where no entry does."""
    step, spec, diag = after.step, after.spec, after.prec_diag
    require_finite("the gradient", step, spec, GRADIENT_REMEDY, total, squares)
    require_finite("the new precision", step, spec, STATE_REMEDY, diag)
    if bool((diag <= 0).any()):
        member, where = place((diag <= 0).any(-1))
        name, part = next((n, diag[member][s]) for n, s in spec.slices.items() if bool((diag[member][s] <= 0).any()))
        raise NumericalError(
            f"step {step}: the new precision of parameter {name!r} is not positive ({int((part <= 0).sum())} of "
            f"{part.numel()} entries, down to {float(part.min()):.3g}){where}. The state is unchanged. {HESSIAN_REMEDY}"
        )
    require_finite("the new mean", step, spec, STATE_REMEDY, after.loc)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: name → tensor with `sample_shape`, then a batch's dimensions, in front of the parameter's shape."""
    return state.spec.unflatten(state.precision.sample(tuple(sample_shape), generator, state.loc))


def posterior(state: State) -> LowRankPrecisionNormal:
    """Q as a torch distribution over the flat vector, of rank 0."""
    factor = state.loc.new_zeros(*state.loc.shape, 0)
    return LowRankPrecisionNormal(state.loc, factor, state.prec_diag, validate_args=False, param_spec=state.spec)


@keywords_of(HessianSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """Mean-field inference as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        options: settings, see `slangvi.settings.HessianSettings`.

    Returns:
        `init(params)`, `update(state, batch, generator=None)`, `sample(state, shape, generator=None)` and
        `posterior(state)`.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> vi = build(log_likelihood, num_data=2, lr=1.0, curvature="hessian")
        >>> state = vi.init({"w": torch.zeros(2)})
        >>> batch = {"x": torch.tensor([[1.0, 0.0], [1.0, 2.0]]), "y": torch.tensor([1.0, 2.0])}
        >>> state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
        >>> state.prec_diag, info.num_rows
        (tensor([3., 5.]), 2)
    """
    settings = bind_settings("build", HessianSettings, **options)
    common, begin = Common(log_likelihood, settings), partial(init, init_precision=settings.init_precision)
    exact = settings.curvature == "hessian"
    hessian = hessian_gatherer(log_likelihood, diagonal=True, dtypes=common.dtypes) if exact else None
    return common.transform(begin, update, sample, posterior, curvature=hessian)


class VOGN(GaussianOptimizer[State, Info]):
    """Mean-field inference with the empirical Fisher, as a torch optimizer for any module.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.settings.CurvatureOptimizerSettings`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> opt = VOGN(model, num_data=100, lr=0.05)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> with opt.sampled_params(train=True):
        ...     opt.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    _update = staticmethod(update)

    @init_keywords_of(CurvatureOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, CurvatureOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, hyper.per_parameter("init_precision"))

    def _posterior(self, state: State) -> LowRankPrecisionNormal:
        return posterior(state)
