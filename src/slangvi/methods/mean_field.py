r"""Mean-field natural-gradient variational inference; with the empirical Fisher it is VOGN (Khan et al. 2018).

$$ q(\theta) = \mathcal N\bigl(\mu, \mathrm{diag}(s)^{-1}\bigr) $$
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg import DiagonalPrecision
from slangvi.methods._averages import bounded_step, lerp, mean_gradient
from slangvi.methods._build import HESSIAN_REMEDY, Common, sample
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
    """State between steps; leading dimensions are a batch of runs.

    Args:
        loc: μ, (..., P).
        prec_diag: s, (..., P).
        momentum: m, the running mean of likelihood gradients, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
        learnt: numbers of noise and prior that the run learns, see `slangvi.methods.learning`; None for none.
    """

    loc: Tensor
    prec_diag: Tensor
    momentum: Tensor
    step: int
    spec: ParamSpec
    learnt: Tensor | None = None

    @cached_property
    def precision(self) -> DiagonalPrecision:
        """diag(s), with its operations."""
        return DiagonalPrecision(self.prec_diag)


def init(params: Params, init_precision: Any = 1.0) -> State:
    """Start at the given values with s = `init_precision`: a number, a dict of names or globs, or a (P,) tensor."""
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
    longest: float | None = None,
) -> tuple[State, Info]:
    r"""Take one step from per-example gradients (R rows); leading dimensions of the state are a batch of runs.

    $$ s^+ = (1-\beta)\,s + \beta\,(\tfrac NR h + \lambda), \qquad h = \textstyle\sum_r g_r \circ g_r
       \ \text{ or } \ \sum_r \mathrm{diag}\,H_r $$
    $$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
       \mu^+ = \mu - \alpha\,\bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] / s^+ $$

    Where the prior has a factor C, λ is the diagonal of its precision in s⁺, and the whole of it in the gradient of μ.

    Arguments are those of `slangvi.slang.update`; of the gradients only the sum and the sum of squares are used.
    `curvature` holds the diagonals of the R Hessians of the negative log-likelihood, summed, (..., P); None takes the
    empirical Fisher from the gradients.

    Returns:
        The state after the step, and its diagnostics. Raises `NumericalError` instead of returning a state that is not
        finite, or whose precision is not positive.
    """
    weight, beta = num_data / gradients.num_rows, (precision_lr or lr).value
    total, squares = gradients.sum(), gradients.square_sum() if curvature is None else curvature
    diag = lerp(state.prec_diag, prior.diagonal, beta).add_((beta * weight) * squares)
    average, gradient = mean_gradient(state, total, weight, prior, momentum, ages)
    change = lr.value * (gradient / diag)
    if longest is not None:
        change = bounded_step(change, diag * change, longest)
    loc = state.loc - change
    after = State(loc, diag, average, state.step + 1, state.spec)
    # NaN and Inf survive the sums.
    if not (math.isfinite(float(after.loc.sum() + diag.sum())) and bool(diag.min() > 0)):
        _check(after, total, squares)
    return after, Info(after.step, gradients.num_rows, _state=after, _prior=prior)


def _check(after: State, total: Tensor, squares: Tensor) -> None:
    """Raise `NumericalError` if a step went wrong; sums may overflow where no entry does."""
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


def posterior(state: State) -> LowRankPrecisionNormal:
    """Return q as a torch distribution over the flat vector, of rank 0."""
    factor = state.loc.new_zeros(*state.loc.shape, 0)
    return LowRankPrecisionNormal(state.loc, factor, state.prec_diag, validate_args=False, param_spec=state.spec)


@keywords_of(HessianSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """Build mean-field inference as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        options: settings, see `slangvi.settings.HessianSettings`.

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
    begin = partial(init, init_precision=settings.init_precision)
    return Common(log_likelihood, settings).transform(begin, update, sample, posterior, diagonal_hessian=True)


class VOGN(GaussianOptimizer[State, Info]):
    """Mean-field inference with the empirical Fisher, as a torch optimizer for any module.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.settings.CurvatureOptimizerSettings`.

    Example:
        >>> opt = VOGN(nn.Linear(3, 2), num_data=100, lr=0.05)  # then as `slangvi.SLANG`
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
