r"""SLANG-OnlineEig, the paper's other way to a low-rank precision: average eigenvectors, not matrices.

$$ q(\theta) = \mathcal N\bigl(\mu, (UU^\top + \mathrm{diag}\,d)^{-1}\bigr) $$

Each step decomposes the curvature of its own minibatch and moves the columns of U towards the scaled eigenvectors it
finds. The average of factors is not a factor of the average, so that neither a large rank nor a large N makes this
exact; the paper keeps it as a comparison, and so does this library. `slangvi.slang` is the better method.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg.assignment import best_assignment
from slangvi.linalg.krylov import Eigenpairs, leading_eigenpairs
from slangvi.linalg.products import column_squares, gram_float64
from slangvi.linalg.small import factorize_batch
from slangvi.linalg.subspace import projected, ritz, sharpened, starting_block
from slangvi.linalg.topk import Route, padded_spectrum, relative_residual
from slangvi.methods._averages import debiasing, lerp
from slangvi.methods._build import Common
from slangvi.methods._gaussian import GaussianOptimizer
from slangvi.methods.gather import GRADIENT_REMEDY
from slangvi.methods.lowrank_state import STATE_REMEDY, Info, State, state_of
from slangvi.methods.lowrank_step import Proposed, Rates, Widened, shift_by
from slangvi.methods.slang import init, posterior, sample
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.schedules import Rate
from slangvi.settings import LogLikelihood, LowRankOptimizerSettings, LowRankSettings
from slangvi.types import GradientOperator, Transform

__all__ = ["Info", "OnlineEig", "State", "build", "init", "posterior", "sample", "update"]

# Vectors beyond the L asked for, and rounds of two products with the small matrix. Both are fixed, and what did not
# converge is decomposed in full: no member of a batch then depends on another.
_EXTRA = 8
_ROUNDS = 4
# Residual allowed relative to the largest eigenvalue, far below what one minibatch says about the curvature.
TOLERANCE = 1e-7


def update(
    state: State,
    gradients: GradientOperator,
    *,
    num_data: float,
    prior: Prior,
    lr: Rate,
    precision_lr: Rate | None = None,
    momentum: float | Tensor = 0.9,
    ages: Tensor | None = None,
) -> tuple[State, Info]:
    r"""One step from per-example gradients G (R rows); leading dimensions of the state are a batch of runs.

    $$ \hat G = \tfrac{N}{R} G^\top G \approx VV^\top, \qquad V = Q_{1:L}\Lambda_{1:L}^{1/2}, \qquad
       u_l^+ = (1-\beta)\,u_l + \beta\,\varsigma_l v_{\pi(l)} $$
    $$ d^+ = (1-\beta)\,d + \beta\,\bigl[\mathrm{diag}\,\hat G - \mathrm{diag}\,VV^\top + \lambda\bigr] $$

    The permutation π and the signs ς make Σ_l ‖u_l − ς_l v_{π(l)}‖² as small as it can be: eigenvectors come in no
    particular order and without a sign. The mean moves as in `slangvi.slang.update`.

    Args:
        state: before the step; never modified.
        gradients: operator over R rows.
        num_data: N, divided by the temperature if there is one.
        prior: λ and μ₀, (..., P).
        lr: α.
        precision_lr: β; None means α.
        momentum: γ, on the likelihood gradient only.
        ages: t of each entry where some joined later, (P,); None for the state's own.

    Returns:
        The state after the step, and what can be told about it: spectrum and trace are those of Ĝ here. Raises
        `NumericalError` instead of returning a state that is not finite.
    """
    step, weight = state.step + 1, num_data / gradients.num_rows
    beta = precision_lr or lr
    rates = Rates(lr.value, beta.value, beta.per_tensor, momentum, debiasing(momentum, step, ages))
    total, squares = gradients.sum(), gradients.square_sum()
    require_finite("the gradient", step, state.spec, GRADIENT_REMEDY, total, squares)
    try:
        fresh, pairs = weighted_eigenvectors(gradients, weight, state.prec_factor)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # sums may not fit the dtype together
        raise NumericalError(
            f"step {step}: the curvature of all parameters together is not finite. The state is unchanged. "
            + GRADIENT_REMEDY
        ) from error
    found = Found(total, weight * squares, fresh, matched(fresh, state.prec_factor))
    new = propose(state.loc, state.prec_factor, state.prec_diag, state.momentum, found, weight, prior, rates)
    if not math.isfinite(new.told.sum()):
        require_finite("the new precision", step, state.spec, STATE_REMEDY, new.prec_diag, new.prec_factor)
        require_finite("the new mean", step, state.spec, STATE_REMEDY, new.loc)
    after = state_of(new, step, state.spec)
    spectrum, residual = padded_spectrum(pairs.values, new.prec_factor), relative_residual(pairs)
    told = (spectrum, new.told[..., 0], residual, new.told[..., 1])
    return after, Info(step, gradients.num_rows, *told, _state=after, _prior=prior)


class Found(NamedTuple):
    """What a step takes from the gradients.

    Args:
        total: Σ_r g_r, (..., P).
        whole_diag: diagonal of Ĝ, (..., P).
        fresh: V by rows, (..., L, P).
        near: the same rows as `matched` returns them, (..., L, P).
    """

    total: Tensor
    whole_diag: Tensor
    fresh: Tensor
    near: Tensor


def propose(
    loc: Tensor,
    factor: Tensor,
    diag: Tensor,
    momentum: Tensor,
    found: Found,
    weight: float | Tensor,
    prior: Prior,
    rates: Rates,
) -> Proposed:
    """The new state, by the equations of `update`; nothing looks at a number, so that vmap and graphs can take it.

    Args:
        loc: μ, (..., P).
        factor: U by rows, (..., L, P).
        diag: d, (..., P).
        momentum: m, (..., P).
        found: in this step.
        weight: N/R.
        prior: λ and μ₀.
        rates: of this step.
    """
    beta, rest = rates.precision_lr, found.whole_diag - column_squares(found.fresh)
    new_factor = lerp(factor, found.near, beta)
    new_diag = lerp(diag, prior.precision, beta).add_(beta * rest.clamp_min(0))
    widened = Widened(factorize_batch(new_factor, new_diag), found.whole_diag, rest)
    return shift_by(loc, momentum, found.total, widened, weight, prior, rates)


def matched(fresh: Tensor, old: Tensor) -> Tensor:
    """Rows in the order and with the signs that bring them closest to old ones.

    Args:
        fresh: V by rows, (..., L, P).
        old: U by rows, (..., L, P).

    Example:
        >>> matched(torch.tensor([[0.0, 2.0], [-1.0, 0.0]]), torch.eye(2))
        tensor([[1., -0.],
                [0., 2.]])
    """
    products = old @ fresh.mT
    order = best_assignment(products.abs()).unsqueeze(-1)
    signs = torch.where(products.take_along_dim(order, -1) < 0, -1.0, 1.0).to(fresh.dtype)
    return signs * fresh.take_along_dim(order, -2)


def weighted_eigenvectors(gradients: GradientOperator, weight: float, like: Tensor) -> tuple[Tensor, Eigenpairs]:
    """V = QΛ^½ of Ĝ = weight·GᵀG by rows, zeros beyond its rank, (..., L, P), and the pairs it was made of.

    Whichever is smaller is decomposed, the Gram GGᵀ or GᵀG itself.

    Args:
        gradients: operator over R rows.
        weight: N/R.
        like: a factor of the same shape and dtype, (..., L, P).
    """
    rows = getattr(gradients, "num_merged", gradients.num_rows)
    route = shorter_route(like.shape[-1], rows)
    matrix = small_matrix(gradients, weight, route)
    pairs = leading(matrix, min(like.shape[-2], matrix.shape[-1]))
    return scaled_eigenvectors(gradients, weight, pairs.values, pairs.vectors, like, route), pairs


def shorter_route(params: int, rows: int) -> Route:
    """Which small matrix has fewer rows, GᵀG or the Gram GGᵀ."""
    return "parameters" if params < rows else "gram"


def small_matrix(gradients: GradientOperator, weight: float | Tensor, route: Route) -> Tensor:
    """Ĝ itself, or weight·GGᵀ, which has the same leading eigenvalues: float64, (..., n, n)."""
    if route == "parameters":
        return weight * gram_float64(gradients.form().mT)
    return weight * gradients.gram().to(torch.float64)


def scaled_eigenvectors(
    gradients: GradientOperator, weight: float | Tensor, values: Tensor, vectors: Tensor, like: Tensor, route: Route
) -> Tensor:
    """V by rows from the leading eigenpairs of the small matrix, zeros beyond its rank, (..., L, P).

    Args:
        gradients: operator over R rows.
        weight: N/R.
        values: leading eigenvalues, (..., k).
        vectors: their vectors as columns, (..., n, k).
        like: a factor of the same shape and dtype, (..., L, P).
        route: by which the matrix was made.
    """
    if route == "parameters":
        rows = (vectors * values.sqrt().unsqueeze(-2)).mT.to(like.dtype)
    else:
        rows = gradients.t_mm((weight**0.5 * vectors).to(like.dtype))
    missing = like.shape[-2] - rows.shape[-2]
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def leading(matrix: Tensor, count: int) -> Eigenpairs:
    """Leading eigenpairs of (..., n, n): single vectors, not just their span."""
    if count == 0 or matrix.shape[-1] <= 4 * (count + _EXTRA):
        return leading_eigenpairs(matrix, count)
    block = starting_block(matrix.shape[-1], count, 0, matrix.dtype, matrix.device, _EXTRA)
    block = sharpened(lambda x: matrix @ (matrix @ x), block, _ROUNDS)
    values, inner, residual, _ = ritz(projected(matrix.__matmul__, block), count)
    found = Eigenpairs(values, block @ inner, residual)
    slow = ~(relative_residual(found) <= TOLERANCE)
    if bool(slow.any()):
        for part, whole in zip(found, leading_eigenpairs(matrix[slow], count), strict=True):
            part[slow] = whole
    return found


@keywords_of(LowRankSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """SLANG-OnlineEig as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        options: settings, see `slangvi.settings.LowRankSettings`.

    Returns:
        `init(params)`, `update(state, batch, generator=None)`, `sample(state, shape, generator=None)` and
        `posterior(state)`.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> vi = build(log_likelihood, num_data=2, rank=1, lr=0.5)
        >>> state = vi.init({"w": torch.zeros(2)})
        >>> batch = {"x": torch.eye(2), "y": torch.tensor([1.0, 2.0])}
        >>> state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
        >>> state.prec_factor.shape, info.num_rows
        (torch.Size([1, 2]), 2)
    """
    settings = bind_settings("build", LowRankSettings, **options)
    begin = partial(init, rank=settings.rank, init_precision=settings.init_precision)
    return Common(log_likelihood, settings, settings.rank).transform(begin, update, sample, posterior)


class OnlineEig(GaussianOptimizer[State, Info]):
    """SLANG-OnlineEig as a torch optimizer for any module.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.settings.LowRankOptimizerSettings`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> opt = OnlineEig(model, num_data=100, rank=2, lr=0.05)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> with opt.sampled_params(train=True):
        ...     opt.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
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
