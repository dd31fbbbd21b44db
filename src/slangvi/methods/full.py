r"""Natural-gradient variational inference with an unrestricted Gaussian, for models with few parameters.

$$ q(\theta) = \mathcal N(\mu, \Lambda^{-1}) $$
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.distributions import DensePrecisionNormal
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg import DensePrecision, factorize_dense
from slangvi.methods._averages import bounded_step, mean_gradient
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

__all__ = ["FullGaussian", "Info", "State", "build", "init", "posterior", "sample", "update"]


@dataclass(frozen=True, eq=False)
class State:
    """State between steps; leading dimensions are a batch of runs.

    Args:
        loc: μ, (..., P).
        prec_matrix: Λ, (..., P, P).
        momentum: m, the running mean of likelihood gradients, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
        learnt: numbers of noise and prior that the run learns, see `slangvi.methods.learning`; None for none.
    """

    loc: Tensor
    prec_matrix: Tensor
    momentum: Tensor
    step: int
    spec: ParamSpec
    learnt: Tensor | None = None

    @cached_property
    def precision(self) -> DensePrecision:
        """Λ, factorised once per state."""
        precision = factorize_dense(self.prec_matrix)
        _require_positive(precision, self.step, self.spec, "the precision")
        return precision


def init(params: Params, init_precision: Any = 1.0) -> State:
    """Start at the given values with Λ = diag(`init_precision`), a number, a dict of names or globs, or a tensor."""
    spec, loc, diag = start(params, init_precision)
    return State(loc, diag.diag(), torch.zeros_like(loc), 0, spec)


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
    r"""Take one step from per-example gradients G (R rows); leading dimensions of the state are a batch of runs.

    $$ \Lambda^+ = (1-\beta)\,\Lambda + \beta\,(\tfrac NR H + \mathrm{diag}\,\lambda), \qquad H = G^\top G
       \ \text{ or } \ \textstyle\sum_r H_r $$
    $$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
       \mu^+ = \mu - \alpha\,(\Lambda^+)^{-1}\bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] $$

    The new precision is factorised once, for the mean and for the draws of the next step.

    Arguments are those of `slangvi.mean_field.update`, with whole Hessians as the `curvature`, (..., P, P). Of the
    gradients the sum is used, and the formed rows unless there is a `curvature`.

    Returns:
        The state after the step, and its diagnostics. Raises `NumericalError` instead of returning a state that is not
        finite, or whose precision is not positive definite.
    """
    step, weight, beta = state.step + 1, num_data / gradients.num_rows, (precision_lr or lr).value
    total = gradients.sum()
    matrix = _averaged(state.prec_matrix, gradients, curvature, weight, beta)
    matrix.diagonal(dim1=-2, dim2=-1).add_(beta * prior.precision)
    if prior.factor is not None:
        rows = prior.factor * beta**0.5
        matrix += rows.mT @ rows
    precision = factorize_dense(matrix)
    average, gradient = mean_gradient(state, total, weight, prior, momentum, ages)
    change = lr.value * precision.solve(gradient)
    if longest is not None:
        change = bounded_step(change, (matrix @ change.unsqueeze(-1)).squeeze(-1), longest)
    loc = state.loc - change
    # NaN and Inf survive the sums. What of them is in the matrix reaches the diagonal of its factor.
    sums = loc.sum() + precision.cholesky.diagonal(dim1=-2, dim2=-1).sum()
    if bool(precision.failed.any()) or not math.isfinite(float(sums)):
        require_finite("the gradient", step, state.spec, GRADIENT_REMEDY, total)
        require_finite("the new precision", step, state.spec, STATE_REMEDY, matrix.diagonal(dim1=-2, dim2=-1), matrix)
        _require_positive(precision, step, state.spec, "the new precision")
        require_finite("the new mean", step, state.spec, STATE_REMEDY, loc)
    after = State(loc, matrix, average, step, state.spec)
    after.__dict__["precision"] = precision  # fills the cached property
    return after, Info(step, gradients.num_rows, _state=after, _prior=prior)


def _averaged(
    old: Tensor, gradients: GradientOperator, curvature: Tensor | None, weight: float, beta: float | Tensor
) -> Tensor:
    """Return (1−β)Λ + β·weight·H; where groups have rates of their own, with their roots on both sides."""
    if isinstance(beta, Tensor):
        rows = gradients.form()
        whole = rows.mT @ rows if curvature is None else curvature
        keep, gain = (1 - beta).sqrt(), beta.sqrt()
        return keep.unsqueeze(-1) * old * keep + weight * (gain.unsqueeze(-1) * whole * gain)
    if curvature is not None:
        return ((1 - beta) * old).add_(curvature, alpha=beta * weight)
    flat = old.reshape(-1, *old.shape[-2:])
    rows = gradients.form()
    rows = rows.expand(*old.shape[:-2], *rows.shape[-2:]).reshape(len(flat), *rows.shape[-2:])
    return torch.baddbmm(flat, rows.mT, rows, beta=1 - beta, alpha=beta * weight).view(old.shape)


def _require_positive(precision: DensePrecision, step: int, spec: ParamSpec, what: str) -> None:
    """Raise `NumericalError` naming the parameter at which the factorisation stopped."""
    if not bool(precision.failed.any()):
        return
    member, where = place(precision.failed)
    order = int(precision.failed[member])
    name = next(name for name, part in spec.slices.items() if part.start < order <= part.stop)
    raise NumericalError(
        f"step {step}: {what} is not positive definite{where}: its leading {order}×{order} block is not, which ends in "
        f"parameter {name!r}. The state is unchanged. {HESSIAN_REMEDY}"
    )


def posterior(state: State) -> DensePrecisionNormal:
    """Return q as a torch distribution over the flat vector."""
    return DensePrecisionNormal(state.loc, state.prec_matrix, validate_args=False, param_spec=state.spec)


@keywords_of(HessianSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """Build full-Gaussian inference as pure functions, used as those of `slangvi.mean_field.build`.

    A step forms all R rows and several P×P matrices, whatever `memory_limit` says.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        options: settings, see `slangvi.settings.HessianSettings`.
    """
    settings = bind_settings("build", HessianSettings, **options)
    begin = partial(init, init_precision=settings.init_precision)
    return Common(log_likelihood, settings).transform(begin, update, sample, posterior)


class FullGaussian(GaussianOptimizer[State, Info]):
    """Full-Gaussian inference with the empirical Fisher, as a torch optimizer for small modules.

    State and step take P×P matrices, and all rows are formed, whatever `memory_limit` says: this is for a few thousand
    parameters at most.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.settings.CurvatureOptimizerSettings`.

    Example:
        >>> opt = FullGaussian(nn.Linear(3, 2), num_data=100, lr=0.05)  # then as `slangvi.SLANG`
        >>> opt.posterior.covariance_matrix.shape
        torch.Size([8, 8])
    """

    _update = staticmethod(update)

    @init_keywords_of(CurvatureOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, CurvatureOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, hyper.per_parameter("init_precision"))

    def _posterior(self, state: State) -> DensePrecisionNormal:
        return posterior(state)
