r"""The arithmetic of one low-rank step, in two halves around the small eigenproblem.

`observe` turns gradients into the eigenproblem, `propose` turns its solution into the new state. Neither waits for the
device nor looks at a number, and rates may be tensors without dimensions: the same two functions run eagerly, inside a
captured graph, and for many replicas under vmap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.linalg import Problem, Route, choose_route
from slangvi.linalg.columns import by_columns, in_parts
from slangvi.linalg.products import column_squares, is_plain, sums
from slangvi.linalg.small import factorize_batch
from slangvi.linalg.topk import Averaged, averaged_diagonal
from slangvi.methods._averages import lerp, mean_gradient
from slangvi.priors import Prior
from slangvi.types import GradientOperator

__all__ = [
    "Observed",
    "Proposed",
    "Rates",
    "Widened",
    "eigenproblem",
    "moved",
    "observe",
    "propose",
    "shares",
    "shift",
    "shift_by",
    "widen",
    "widen_by",
]


class Rates(NamedTuple):
    """The numbers of one step; each a number, a tensor without dimensions, or (P,) where groups differ.

    Args:
        lr: α.
        precision_lr: β.
        precision_lr_per_tensor: β with one entry per parameter tensor; None when it is one number.
        momentum: γ.
        correction: 1 − γᵗ.
    """

    lr: float | Tensor
    precision_lr: float | Tensor
    precision_lr_per_tensor: Tensor | None
    momentum: float | Tensor
    correction: float | Tensor


class Observed(NamedTuple):
    """What a step needs from the gradients.

    Args:
        total: Σ_r g_r, (P,).
        squares: Σ_r g_r ∘ g_r, (P,).
        problem: the eigenproblem of (1−β)UUᵀ + βĜ.
    """

    total: Tensor
    squares: Tensor
    problem: Problem


class Proposed(NamedTuple):
    """The state after a step, not yet looked at.

    Args:
        loc: μ⁺, (P,).
        prec_factor: U⁺ by rows, (L, P).
        prec_diag: d⁺, (P,).
        momentum: m⁺, (P,).
        precision: U⁺U⁺ᵀ + diag d⁺, factorised: a `LowRankPrecision`, or what `factorize_batch` makes of a batch.
        told: trace of (1−β)UUᵀ + βĜ, Σ of what rounding would have taken from d⁺ below its bound, and the sums of μ⁺
            and d⁺, finite only if these are, (4,).
    """

    loc: Tensor
    prec_factor: Tensor
    prec_diag: Tensor
    momentum: Tensor
    precision: Any
    told: Tensor


def observe(
    factor: Tensor, gradients: GradientOperator, weight: float | Tensor, rates: Rates, route: Route | None = None
) -> Observed:
    """Sums, and the eigenproblem of (1−β)UUᵀ + β·weight·GᵀG.

    Args:
        factor: U by rows, (L, P).
        gradients: operator with R rows.
        weight: N/R.
        rates: of this step.
        route: how the eigenproblem is to be solved; None takes the cheapest by count.
    """
    return Observed(gradients.sum(), gradients.square_sum(), eigenproblem(factor, gradients, weight, rates, route))


def eigenproblem(
    factor: Tensor, gradients: GradientOperator, weight: float | Tensor, rates: Rates, route: Route | None = None
) -> Problem:
    """That of (1−β)UUᵀ + β·weight·GᵀG; nothing is computed yet."""
    keep, gain = shares(rates.precision_lr, weight)
    per_tensor = rates.precision_lr_per_tensor
    gains = None if per_tensor is None else per_tensor * weight
    return Problem(factor, gradients, keep, gain, gains, route or choose_route(factor, gradients))


def shares(precision_lr: Any, weight: Any) -> tuple[Any, Any]:
    """What UUᵀ and GᵀG count for: 1 − β and β·weight."""
    return 1 - precision_lr, precision_lr * weight


def propose(
    loc: Tensor,
    diag: Tensor,
    momentum: Tensor,
    observed: Observed,
    values: Tensor,
    vectors: Tensor,
    weight: float | Tensor,
    prior: Prior,
    rates: Rates,
) -> Proposed:
    """The new state from the leading eigenpairs; the equations are those of `slang.update`.

    Args:
        loc: μ, (P,).
        diag: d, (P,).
        momentum: m, (P,).
        observed: what `observe` returned.
        values: leading eigenvalues, (L,).
        vectors: their vectors as columns, (n, L).
        weight: N/R.
        prior: λ and μ₀.
        rates: of this step.
    """
    widened = widen(diag, observed, values, vectors, prior, rates)
    return shift(loc, momentum, observed, widened, weight, prior, rates)


class Widened(NamedTuple):
    """The new precision.

    Args:
        precision: U⁺U⁺ᵀ + diag d⁺, factorised: a `LowRankPrecision`, or what `factorize_batch` makes of a batch.
        whole_diag: diagonal of (1−β)UUᵀ + βĜ, (P,), or sums over parts of it, (K,).
        correction: what rounding would have made of d⁺ less than what d⁺ is, negative where it was too small, (P,), or
            sums over parts of what is negative, (K,).
        squares: Σ_l (u⁺_l)², where it was kept, (P,).
    """

    precision: Any
    whole_diag: Tensor
    correction: Tensor
    squares: Tensor | None = None


def widen(
    diag: Tensor,
    observed: Observed,
    values: Tensor,
    vectors: Tensor,
    prior: Prior,
    rates: Rates,
    old_squares: Tensor | None = None,
) -> Widened:
    """The covariance half of `propose`; Σ_l u_l² of the old factor can be given when it is known."""
    problem = observed.problem
    old = problem.factor if old_squares is None else old_squares
    source = Averaged(old, observed.squares, problem.keep, problem.gain)
    return widen_by(diag, problem.solution(values, vectors), source, prior, rates)


def widen_by(diag: Tensor, factor: Tensor, source: Averaged | Tensor, prior: Prior, rates: Rates) -> Widened:
    """The same from U⁺, (..., L, P), and the diagonal of (1−β)UUᵀ + βĜ, float64, (..., P), or what it is made from."""
    columns: tuple[Any, ...] = (diag, factor, prior.precision, rates.precision_lr)
    columns += source if isinstance(source, Averaged) else (source,)
    if in_parts(*columns):
        new_diag, whole_diag, correction = by_columns(_summed, *columns)
        return Widened(factorize_batch(factor, new_diag), whole_diag, correction)
    new_diag, whole_diag, correction, squares = _widened(*columns)
    return Widened(factorize_batch(factor, new_diag), whole_diag, correction, squares)


def _widened(
    diag: Tensor, factor: Tensor, prior_precision: Tensor, precision_lr: float | Tensor, *source: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d⁺, the whole diagonal, the correction and the squares, as in `Widened`, for some columns or all.

    What U⁺ does not hold of the diagonal is added as it is, with the sign that rounding may give it: the next step has
    the same rounding of U⁺ with the other sign. Without it the positive half would add up to more than d itself.
    """
    whole_diag = averaged_diagonal(*source) if len(source) > 1 else source[0]
    squares = column_squares(factor)
    base = lerp(diag, prior_precision, precision_lr)
    whole = (whole_diag - squares).add_(base)
    new_diag = _larger(whole, torch.minimum(base, prior_precision))
    return new_diag, whole_diag, whole.sub_(new_diag), squares


def _summed(*columns: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same with sums in place of the diagonal and of the correction."""
    new_diag, whole_diag, correction, _ = _widened(*columns)
    return new_diag, whole_diag.sum(), correction.clamp_max_(0).sum()


def _larger(whole: Tensor, bound: Tensor) -> Tensor:
    """The larger of two in the dtype of the second, which is that of d."""
    if whole.is_cuda and is_plain(
        whole
    ):  # in one kernel; a CPU would make the larger one in whole's dtype all the same
        return torch.maximum(whole, bound, out=torch.empty_like(bound))
    return torch.maximum(whole, bound).to(bound.dtype)


def _negative(correction: Tensor) -> Tensor:
    """What is negative of it, in place where nobody watches: it is not needed any more."""
    return correction.clamp_max_(0) if is_plain(correction) else correction.clamp_max(0)


def moved(loc: Tensor, lr: float | Tensor, direction: Tensor) -> Tensor:
    """μ − α·direction, in one pass; with α a number it is written over a direction that nobody watches."""
    if isinstance(lr, Tensor):
        return torch.addcmul(loc, lr.to(loc.dtype), direction, value=-1)  # vmap would promote the result
    if is_plain(loc) and is_plain(direction):
        return torch.sub(loc, direction, alpha=lr, out=direction)
    return torch.sub(loc, direction, alpha=lr)


def shift(
    loc: Tensor,
    momentum: Tensor,
    observed: Observed,
    widened: Widened,
    weight: float | Tensor,
    prior: Prior,
    rates: Rates,
) -> Proposed:
    """The mean half of `propose`."""
    return shift_by(loc, momentum, observed.total, widened, weight, prior, rates)


def _gradient(
    loc: Tensor,
    momentum: Tensor,
    total: Tensor,
    weight: float | Tensor,
    prior_precision: Tensor,
    prior_mean: Tensor,
    decay: float | Tensor,
    correction: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """m⁺ and the gradient of the mean, for some columns or all."""
    return mean_gradient(loc, momentum, total, weight, Prior(prior_precision, prior_mean), decay, correction)


def shift_by(
    loc: Tensor,
    momentum: Tensor,
    total: Tensor,
    widened: Widened,
    weight: float | Tensor,
    prior: Prior,
    rates: Rates,
) -> Proposed:
    """The same from Σ_r g_r, (..., P)."""
    precision = widened.precision
    given = (total, weight, prior.precision, prior.mean, rates.momentum, rates.correction)
    average, gradient = by_columns(_gradient, loc, momentum, *given)
    new_loc = moved(loc, rates.lr, precision.solve(gradient))
    told = sums(widened.whole_diag, _negative(widened.correction), new_loc, precision.diag)
    told[..., 1] = 0.0 - told[..., 1]  # not its negative, which would be -0.0 where nothing is clipped
    return Proposed(new_loc, precision.factor, precision.diag, average, precision, told)
