r"""SLANG-OnlineEig, the paper's other way to a low-rank precision: average eigenvectors, not matrices.

$$ q(\theta) = \mathcal N\bigl(\mu, (UU^\top + \mathrm{diag}\,d)^{-1}\bigr) $$

Each step decomposes the curvature of its own minibatch and moves the columns of U towards the scaled eigenvectors it
finds. The average of factors is not a factor of the average, so that neither a large rank nor a large N makes this
exact; the paper keeps it as a comparison, and so does this library. `slangvi.slang` is the better method.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg import factorize
from slangvi.linalg.assignment import best_assignment
from slangvi.linalg.products import column_squares, gram_float64
from slangvi.linalg.topk import Eigenpairs, leading_eigenpairs
from slangvi.methods._averages import bounded_step, lerp, mean_gradient
from slangvi.methods._build import Common
from slangvi.methods._gaussian import GaussianOptimizer
from slangvi.methods.slang import Info, State, finished, init, posterior, sample
from slangvi.methods.step import GRADIENT_REMEDY, STATE_REMEDY, Diagnostics, Tensors
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.rows.appended import append_rows
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate
from slangvi.settings import LogLikelihood, LowRankOptimizerSettings, LowRankSettings
from slangvi.types import Transform

__all__ = ["Info", "OnlineEig", "State", "build", "init", "posterior", "sample", "update"]

# Residual allowed relative to the largest eigenvalue, far below what one minibatch says about the curvature.
TOLERANCE = 1e-7


def update(
    state: State,
    gradients: GradientOperator,
    *,
    num_data: float | Tensor,
    prior: Prior,
    lr: Rate,
    precision_lr: Rate | None = None,
    momentum: float | Tensor = 0.9,
    ages: Tensor | None = None,
    longest: float | None = None,
) -> tuple[State, Info]:
    r"""Take one step from per-example gradients G (R rows); leading dimensions of the state are a batch of runs.

    $$ \hat G = \tfrac{N}{R} G^\top G \approx VV^\top, \qquad V = Q_{1:L}\Lambda_{1:L}^{1/2}, \qquad
       u_l^+ = (1-\beta)\,u_l + \beta\,\varsigma_l v_{\pi(l)} $$
    $$ d^+ = (1-\beta)\,d + \beta\,\bigl[\mathrm{diag}\,\hat G - \mathrm{diag}\,VV^\top + \lambda\bigr] $$

    The permutation π and the signs ς make Σ_l ‖u_l − ς_l v_{π(l)}‖² as small as it can be: eigenvectors come in no
    particular order and without a sign. The mean moves as in `slangvi.slang.update`.

    Arguments are those of `slangvi.slang.update`.

    Returns:
        The state after the step, and its diagnostics: spectrum and trace are those of Ĝ here. Raises `NumericalError`
        instead of returning a state that is not finite.
    """
    step, weight = state.step + 1, num_data / gradients.num_rows
    beta, factor = (precision_lr or lr).value, state.prec_factor
    gradients = append_rows(gradients, prior.factor, weight)
    total, squares = gradients.sum(), gradients.square_sum()
    require_finite("the gradient", step, state.spec, GRADIENT_REMEDY, total, squares)
    try:
        fresh, pairs = scaled_eigenvectors(gradients, weight, factor)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # sums may not fit the dtype together
        raise NumericalError(
            f"step {step}: the curvature of all parameters together is not finite. The state is unchanged. "
            + GRADIENT_REMEDY
        ) from error
    whole = (weight * squares).to(factor.dtype)
    rest = whole - column_squares(fresh)
    diag = lerp(state.prec_diag, prior.precision, beta).add_((beta * rest.clamp_min(0)).to(factor.dtype))
    row_beta = beta.unsqueeze(-2) if isinstance(beta, Tensor) and beta.ndim > 1 else beta
    precision = factorize(lerp(factor, matched(fresh, factor), row_beta), diag)
    average, slope = mean_gradient(state, total, weight, prior, momentum, ages)
    change = lr.value * precision.solve(slope)
    if longest is not None:
        change = bounded_step(change, precision.matmul(change), longest)
    loc = state.loc - change.to(factor.dtype)
    new = Tensors(loc, precision.factor, diag, average)
    if not math.isfinite(float((new.loc.sum() + diag.sum() + precision.factor.sum()).sum())):
        require_finite("the new precision", step, state.spec, STATE_REMEDY, diag, precision.factor)
        require_finite("the new mean", step, state.spec, STATE_REMEDY, new.loc)
    missing = factor.shape[-2] - pairs.values.shape[-1]
    spectrum = (F.pad(pairs.values, (0, missing)) if missing else pairs.values).to(factor.dtype)
    diagnostics = Diagnostics(spectrum, whole.sum(-1), pairs.residual, rest.clamp_max(0).sum(-1).abs())
    return finished(new, precision, diagnostics, step, state.spec, gradients.num_rows, prior)


def matched(fresh: Tensor, old: Tensor) -> Tensor:
    """Return rows (..., L, P) in the order and with the signs that bring them closest to old ones, (..., L, P)."""
    products = old @ fresh.mT
    order = best_assignment(products.abs()).unsqueeze(-1)
    signs = torch.where(products.take_along_dim(order, -1) < 0, -1.0, 1.0).to(fresh.dtype)
    return signs * fresh.take_along_dim(order, -2)


def scaled_eigenvectors(gradients: GradientOperator, weight: float | Tensor, like: Tensor) -> tuple[Tensor, Eigenpairs]:
    """Return V = QΛ^½ of Ĝ = weight·GᵀG by rows, zeros beyond its rank, (..., L, P), and the pairs it is made of.

    Whichever is smaller is decomposed, the Gram GGᵀ or GᵀG itself. `like` has the shape and dtype of V.
    """
    scale: Any = weight.unsqueeze(-1) if isinstance(weight, Tensor) and weight.ndim else weight
    rank, size = like.shape[-2:]
    rows = gradients.form() if size < gradients.height else None
    if rows is None:
        gram = sum(some.gram() for _, some in gradients.segments()) * gradients.scale**2
        matrix = scale * gram.to(torch.float64)  # type: ignore[union-attr]
    else:
        matrix = scale * gram_float64(rows.mT)
    pairs = leading_eigenpairs(matrix, min(rank, matrix.shape[-1]), TOLERANCE)
    if rows is not None:
        fresh = (pairs.vectors * pairs.values.sqrt().unsqueeze(-2)).mT.to(like.dtype)
    else:
        weights = (scale**0.5 * gradients.scale * pairs.vectors).to(like.dtype)
        fresh = like.new_zeros(*like.shape[:-2], weights.shape[-1], size)
        for columns, some in gradients.segments():
            some.add_t_mm(weights, fresh[..., columns])
    missing = rank - fresh.shape[-2]
    return F.pad(fresh, (0, 0, 0, missing)) if missing else fresh, pairs


@keywords_of(LowRankSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """Build SLANG-OnlineEig as pure functions, used as those of `slangvi.slang.build`.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        options: settings, see `slangvi.settings.LowRankSettings`.
    """
    settings = bind_settings("build", LowRankSettings, **options)
    begin = partial(init, rank=settings.rank, init_precision=settings.init_precision)
    return Common(log_likelihood, settings).transform(begin, update, sample, posterior)


class OnlineEig(GaussianOptimizer[State, Info]):
    """SLANG-OnlineEig as a torch optimizer for any module.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.settings.LowRankOptimizerSettings`.

    Example:
        >>> opt = OnlineEig(nn.Linear(3, 2), num_data=100, rank=2, lr=0.05)  # then as `slangvi.SLANG`
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    _update = staticmethod(update)
    settings: LowRankOptimizerSettings

    @init_keywords_of(LowRankOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, LowRankOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, self.settings.rank, hyper.per_parameter("init_precision"))

    def _posterior(self, state: State) -> LowRankPrecisionNormal:
        return posterior(state)
