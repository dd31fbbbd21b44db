r"""One step of a Gaussian with precision UUᵀ + diag d, streamed over segments of the parameters.

Two passes over the segments find the new precision (see `projection`), two more over U move the mean:

$$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
   \mu^+ = \mu - \alpha\,(U^+U^{+\top} + \mathrm{diag}\,d^+)^{-1}
   \bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] $$

The same arithmetic writes over the old state or into fresh memory, for one run or for many in lockstep. Written over,
nothing is changed before it is known that the new state will be finite: `take_step` looks at the small matrix, and at
bounds on the new state, before the second pass. Where they are not clear it works in fresh memory after all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision, factorize
from slangvi.linalg.products import cache_slices, combine_rows, rows_dot_vector
from slangvi.methods.projection import Decision, LeadingEigenvectors, Part, Projection, choose_route
from slangvi.params import ParamSpec
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate

__all__ = ["GRADIENT_REMEDY", "STATE_REMEDY", "Diagnostics", "Rates", "Tensors", "take_step"]

Number = float | Tensor
# Columns, and entries of the factor, that a CPU makes at once: temporaries then stay in its cache.
_COLUMNS = 1 << 17
_PIECE = 1 << 21
GRADIENT_REMEDY = (
    "Look for NaN, Inf or huge values (squares must fit the dtype) in the inputs and the loss, or skip this batch."
)
STATE_REMEDY = "Lower lr, raise prior_precision or init_precision, or use float64 parameters."


class Tensors(NamedTuple):
    """The tensors of a low-rank state; leading dimensions are runs in lockstep.

    Args:
        loc: μ, (..., P).
        prec_factor: U by rows, (..., L, P).
        prec_diag: d, (..., P).
        momentum: m, (..., P).
    """

    loc: Tensor
    prec_factor: Tensor
    prec_diag: Tensor
    momentum: Tensor


class Rates(NamedTuple):
    """The numbers of one step; where runs in lockstep differ, (..., 1).

    Args:
        lr: α; a (P,) tensor where groups of parameters differ.
        precision_lr: β.
        momentum: γ; likewise.
        correction: 1 − γᵗ; likewise.
    """

    lr: Number
    precision_lr: Rate
    momentum: Number
    correction: Number


class Diagnostics(NamedTuple):
    """What a step tells besides the new state, (...) each.

    Args:
        spectrum: leading L eigenvalues, largest first, (..., L).
        total: trace of (1−β)UUᵀ + βĜ.
        residual: bound on the relative error of the eigenpairs.
        clipped: sum of what rounding would have taken from d⁺ below its bound.
    """

    spectrum: Tensor
    total: Tensor
    residual: Tensor
    clipped: Tensor


class Step:
    """The arithmetic of one step, pass by pass; `take_step` runs the passes.

    Args:
        old: the state before the step.
        new: memory for the state after it, which may be that of the old one.
        gradients: per-example gradients.
        num_data: N, divided by the temperature; a number, or (..., 1).
        prior: λ and μ₀, (..., P).
        rates: of this step.
        spec: layout of the flat vector.
    """

    def __init__(
        self,
        old: Tensors,
        new: Tensors,
        gradients: GradientOperator,
        num_data: Number,
        prior: Prior,
        rates: Rates,
        spec: ParamSpec,
    ) -> None:
        self.old, self.new, self.gradients, self.prior, self.rates = old, new, gradients, prior, rates
        self.weight = num_data / gradients.num_rows
        self.total = gradients.sum()
        self.in_place = new.prec_factor.data_ptr() == old.prec_factor.data_ptr() and new.prec_factor.numel() > 0
        self.ends = _ends(spec, rates.precision_lr)
        rank, size = old.prec_factor.shape[-2:]
        route = choose_route(rank, size, gradients, old.loc.dtype)
        self.projection: Projection = LeadingEigenvectors(old.prec_factor, route)

    def parts(self, most: int | None = None) -> Iterator[Part]:
        """Yield the segments of the precision with their rows, in pieces of at most so many columns if it is given."""
        cuts = [end for end, _ in self.ends]
        for place, rows in self.gradients.segments(cuts):
            beta, start = self.ends[bisect_right(cuts, place.start)][1], place.start
            is_small = most is None or place.stop - start <= most
            pieces = [(slice(0, place.stop - start), rows)] if is_small else rows.pieces(most or 0)
            for cut, some in pieces:
                columns = slice(start + cut.start, start + cut.stop)
                old, new = ((x.prec_factor[..., columns], x.prec_diag[..., columns]) for x in (self.old, self.new))
                gain = beta * self.weight * self.gradients.scale**2
                yield Part(columns, *old, *new, some, self.prior.precision[..., columns], beta, gain)

    # ---- the passes

    def observe(self) -> Tensor:
        """Return the small problem of the projection."""
        return self.projection.observe(self.parts)

    def is_surely_finite(self, trace: float) -> bool:
        """Tell whether the new state is finite by what is known before it is made.

        d⁺ is at most d, λ and the trace of (1−β)UUᵀ + βĜ together, and at least the smaller of d and λ. No entry of the
        step of the mean is longer than the whole gradient by the smallest of these.
        """
        old, prior, rates = self.old, self.prior, self.rates
        norms = [torch.linalg.vector_norm(x) for x in (self.total, old.momentum, old.loc, prior.mean)]
        edges = [*torch.aminmax(old.prec_diag), *torch.aminmax(prior.precision)]
        total, average, loc, mean, *bounds = torch.stack(norms + edges).tolist()
        lowest, highest = min(bounds[0], bounds[2]), max(bounds[1], bounds[3])
        weight, rate = (float(x.max() if isinstance(x, Tensor) else x) for x in (self.weight, rates.lr))
        correction = float(rates.correction.min() if isinstance(rates.correction, Tensor) else rates.correction)
        slope = (weight * total + average) / correction + highest * (loc + mean)
        step = rate * slope / lowest if lowest > 0 else math.inf
        limit = 0.1 * torch.finfo(old.loc.dtype).max
        return bool(trace + 2 * highest < limit and step + loc < limit)

    def update_precision(self, decision: Decision) -> Diagnostics:
        """Write U⁺ and d⁺; return what is known about them."""
        rank, dtype = self.old.prec_factor.shape[-2], self.old.loc.dtype
        most = min(_COLUMNS, max(1, _PIECE // max(1, rank))) if self.old.loc.device.type == "cpu" else None
        found = [self.projection.project(part, decision) for part in self.parts(most)]
        trace, clipped = (torch.stack(x).sum(0).to(dtype) for x in zip(*found, strict=True))
        return Diagnostics(decision.spectrum, trace, decision.residual, clipped)

    def update_mean(self) -> LowRankPrecision:
        """Write m⁺ and μ⁺; return the new precision, factorised.

        D⁻¹(x − U (I + VᵀV)⁻¹ Uᵀ D⁻¹x) loses as many digits along U as U dominates D by, and a mean that moves by what
        is left there would run away. In float32 it is mended: Uᵀy of the result y is known beforehand, as
        (I + VᵀV)⁻¹ Uᵀ D⁻¹x.
        """
        factor, diag, loc = self.new.prec_factor, self.new.prec_diag, self.old.loc
        precision, change = factorize(factor, diag), self.total
        for cut in cache_slices(loc):
            slope = self._slope(cut)
            torch.div(slope, 1.0 if precision.is_narrow else diag[..., cut], out=change[..., cut])
        if precision.is_narrow:
            change = precision.solve(change)
        elif factor.shape[-2]:
            inner = precision.solve_capacitance(rows_dot_vector(factor, change))
            self._add_combination(change, -inner)
            if loc.dtype is not torch.float64:
                missing = precision.solve_capacitance(inner - rows_dot_vector(factor, change))
                self._add_combination(change, missing)
        torch.sub(loc, change.mul_(_fit(self.rates.lr, loc)), out=self.new.loc)
        return precision

    def _slope(self, cut: slice) -> Tensor:
        """Write m⁺ of some columns; return the gradient of the mean there."""
        loc, size = self.old.loc[..., cut], self.old.loc.shape[-1]
        gamma, correction = (_fit(_cut(x, cut, size), loc) for x in (self.rates.momentum, self.rates.correction))
        average = torch.lerp(self.total[..., cut] * _fit(self.weight, loc), self.old.momentum[..., cut], gamma)
        self.new.momentum[..., cut] = average
        offset = loc - self.prior.mean[..., cut]
        return torch.addcmul(average.div_(correction), self.prior.precision[..., cut], offset)

    def _add_combination(self, change: Tensor, weights: Tensor) -> None:
        """Add D⁻¹Uy to a vector."""
        factor, diag, y = self.new.prec_factor, self.new.prec_diag, weights.to(change.dtype)
        for cut in cache_slices(change):
            change[..., cut].addcdiv_(combine_rows(y, factor[..., cut]), diag[..., cut])


def take_step(
    old: Tensors,
    new: Tensors,
    gradients: GradientOperator,
    *,
    num_data: Number,
    prior: Prior,
    rates: Rates,
    spec: ParamSpec,
    step: int,
) -> tuple[LowRankPrecision, Diagnostics]:
    """Take one step from `old` to `new`, which may be the same tensors; return the factorised precision as well.

    Args:
        old: the state before the step.
        new: tensors to write the state after it to.
        gradients: per-example gradients, with the leading dimensions of the state.
        num_data: N, divided by the temperature if there is one.
        prior: λ and μ₀, (..., P).
        rates: of this step.
        spec: layout, for messages.
        step: number of the step, for messages.

    Raises:
        NumericalError: if the step would not be finite. `old` is as it was then.
    """
    work = Step(old, new, gradients, num_data, prior, rates, spec)
    small = work.observe()
    trace = small.diagonal(dim1=-2, dim2=-1).sum(-1) if small.ndim > old.loc.ndim else small.sum(-1)
    largest = float(trace.sum())
    if not math.isfinite(largest):
        require_finite("the gradient", step, spec, GRADIENT_REMEDY, work.total, gradients.square_sum())
        raise _too_large(step)
    if not math.isfinite(float(work.total.sum(dtype=torch.float64))):
        require_finite("the gradient", step, spec, GRADIENT_REMEDY, work.total)
    if work.in_place and not work.is_surely_finite(largest):
        work.new, work.in_place = Tensors(*map(torch.empty_like, old)), False
    try:
        diagnostics = work.update_precision(work.projection.decide(small, work.parts))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise _too_large(step) from error
    precision = work.update_mean()
    if not work.in_place:
        made = work.new
        if not math.isfinite(float(made.loc.sum() + made.prec_diag.sum())):
            require_finite("the new precision", step, spec, STATE_REMEDY, made.prec_diag, made.prec_factor)
            require_finite("the new mean", step, spec, STATE_REMEDY, made.loc)
        if made is not new:
            for target, value in zip(new, made, strict=True):
                target.copy_(value)
            precision = factorize(new.prec_factor, new.prec_diag)
    return precision, diagnostics


def _too_large(step: int) -> NumericalError:
    """Return the error that says that no single parameter is to blame."""
    return NumericalError(
        f"step {step}: the curvature of all parameters together is not finite. The state is unchanged. "
        + GRADIENT_REMEDY
    )


def _ends(spec: ParamSpec, rate: Rate) -> Sequence[tuple[int, Number]]:
    """Return where runs of tensors with the same β end, and that β."""
    if rate.per_tensor is None:
        return [(spec.num_params, rate.value)]
    found: list[tuple[int, Number]] = []
    for name, beta in zip(spec.names, rate.per_tensor, strict=True):
        if found and found[-1][1] == beta:
            found.pop()
        found.append((spec.slices[name].stop, beta))
    return found


def _cut(number: Number, place: slice, size: int) -> Number:
    """Return the part of a number that differs by column."""
    return number[place] if isinstance(number, Tensor) and number.shape == (size,) else number


def _fit(number: Number, like: Tensor) -> Any:
    """Return a number in the dtype of a tensor, so that vectors are not widened."""
    return number.to(like.dtype) if isinstance(number, Tensor) else number
