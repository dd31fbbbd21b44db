r"""One step of a Gaussian with precision UUᵀ + diag d, streamed over segments of the parameters.

Two passes over the segments find the new precision (see `projection`), a third moves the mean:

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
from slangvi.rows.operator import GradientOperator, SegmentRows
from slangvi.schedules import Rate

__all__ = ["GRADIENT_REMEDY", "STATE_REMEDY", "Diagnostics", "Rates", "Tensors", "take_step"]

Number = float | Tensor
# Entries of a new factor that a CPU makes at once.
_PIECE = 1 << 20
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


class Columns(NamedTuple):
    """Views of everything that a step needs of one segment.

    Args:
        place: of the segment in the flat vector.
        old: tensors of the state before the step.
        new: tensors that the state after the step is written to.
        total: Σ_r g_r, (..., n).
        prior: λ and μ₀.
        rates: of this step.
        rows: per-example gradients; None where they are not needed.
    """

    place: slice
    old: Tensors
    new: Tensors
    total: Tensor
    prior: Prior
    rates: Rates
    rows: SegmentRows | None


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

    def columns(self) -> Iterator[Columns]:
        """Yield the segments of all tensors, with their rows."""
        cuts = [end for end, _ in self.ends]
        for place, rows in self.gradients.segments(cuts):
            beta = self.ends[bisect_right(cuts, place.start)][1]
            yield self.view(place, beta, rows)

    def pieces(self) -> Iterator[Columns]:
        """Yield the segments, on a CPU in pieces whose new factor it need not ask the system for page by page."""
        rank, size = self.old.prec_factor.shape[-2:]
        most = max(1, _PIECE // max(1, rank)) if self.old.loc.device.type == "cpu" else size
        for columns in self.columns():
            if columns.rows is None or columns.place.stop - columns.place.start <= most:
                yield columns
                continue
            start, beta = columns.place.start, columns.rates.precision_lr.value
            for cut, rows in columns.rows.pieces(most):
                yield self.view(slice(start + cut.start, start + cut.stop), beta, rows)

    def view(self, place: slice, precision_lr: Number, rows: SegmentRows | None) -> Columns:
        """Return some columns of everything."""
        size = self.old.loc.shape[-1]
        alpha, gamma, correction = (_cut(x, place, size) for x in (self.rates.lr, *self.rates[2:]))
        return Columns(
            place,
            Tensors(*(x[..., place] for x in self.old)),
            Tensors(*(x[..., place] for x in self.new)),
            self.total[..., place],
            Prior(self.prior.precision[..., place], self.prior.mean[..., place]),
            Rates(alpha, Rate(precision_lr), gamma, correction),
            rows,
        )

    def slices(self) -> Iterator[Columns]:
        """Yield the segments, on a CPU in pieces that its cache holds; rows are not looked at."""
        start = 0
        for end, beta in self.ends:
            for cut in cache_slices(self.old.loc[..., start:end]):
                yield self.view(slice(start + cut.start, start + cut.stop), beta, None)
            start = end

    def parts(self) -> Iterator[Part]:
        """Yield the segments as projections see them."""
        for columns in self.columns():
            yield self.part(columns)

    def part(self, columns: Columns) -> Part:
        """Return one segment as projections see it."""
        beta, old = columns.rates.precision_lr.value, columns.old
        assert columns.rows is not None
        gain = beta * self.weight * self.gradients.scale**2
        return Part(old.prec_factor, old.prec_diag, columns.rows, columns.prior.precision, beta, gain)

    def average(self, columns: Columns) -> Tensor:
        """Return m⁺."""
        old, gamma = columns.old, columns.rates.momentum
        return torch.lerp(columns.total * _fit(self.weight, old.loc), old.momentum, _fit(gamma, old.loc))

    def slope(self, columns: Columns, average: Tensor | None = None) -> Tensor:
        """Return the gradient of the mean, from m⁺ or from what has been written of it."""
        loc, prior = columns.old.loc, columns.prior
        debiased = (columns.new.momentum if average is None else average) / _fit(columns.rates.correction, loc)
        return torch.addcmul(debiased, prior.precision, loc - prior.mean)

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
        slope = (_largest(self.weight) * total + average) / _smallest(rates.correction) + highest * (loc + mean)
        step = _largest(rates.lr) * slope / lowest if lowest > 0 else math.inf
        limit = 0.1 * torch.finfo(old.loc.dtype).max
        return bool(trace + 2 * highest < limit and step + loc < limit)

    def update_precision(self, decision: Decision) -> Diagnostics:
        """Write U⁺, d⁺ and m⁺; return what is known about them."""
        trace: Any = 0.0
        clipped: Any = 0.0
        self.seen: Any = 0.0
        for columns in self.pieces():
            found = self.projection.project(self.part(columns), decision, columns.place)
            trace, clipped = trace + found.trace, clipped + found.clipped
            columns.new.prec_factor.copy_(found.factor)
            columns.new.prec_diag.copy_(found.diag)
            for cut in cache_slices(found.diag):
                some = self.view(slice(columns.place.start + cut.start, columns.place.start + cut.stop), 0.0, None)
                average = self.average(some)
                scaled = self.slope(some, average).div_(some.new.prec_diag)
                self.seen = self.seen + rows_dot_vector(some.new.prec_factor, scaled)
                some.new.momentum.copy_(average)
        dtype = self.old.loc.dtype
        return Diagnostics(decision.spectrum, trace.to(dtype), decision.residual, clipped.to(dtype))

    def update_mean(self) -> LowRankPrecision:
        """Write μ⁺; return the new precision, factorised.

        D⁻¹(x − U (I + VᵀV)⁻¹ Uᵀ D⁻¹x) loses as many digits along U as U dominates D by, and a mean that moves by what
        is left there would run away. In float32 it is mended: Uᵀy of the result y is known beforehand, as
        (I + VᵀV)⁻¹ Uᵀ D⁻¹x.
        """
        # Not added up over segments: a run that is taken up again factorises all columns at once, and must round alike.
        precision = factorize(self.new.prec_factor, self.new.prec_diag)
        if precision.is_narrow:
            solved = precision.solve(torch.cat([self.slope(some) for some in self.slices()], -1))
            torch.sub(self.old.loc, solved.mul_(_fit(self.rates.lr, solved)), out=self.new.loc)
            return precision
        inner = precision.solve_capacitance(self.seen)
        dtype, mends = self.old.loc.dtype, self.old.loc.dtype is not torch.float64
        seen: Any = 0.0
        for some in self.slices():
            new = some.new
            solved = self.slope(some).sub_(combine_rows(inner.to(dtype), new.prec_factor)).div_(new.prec_diag)
            if mends:
                seen = seen + rows_dot_vector(new.prec_factor, solved)
            torch.sub(some.old.loc, solved.mul_(_fit(some.rates.lr, solved)), out=new.loc)
        if mends and self.new.prec_factor.shape[-2]:
            missing = precision.solve_capacitance(inner - seen).to(dtype)
            for some in self.slices():
                change = combine_rows(missing, some.new.prec_factor).div_(some.new.prec_diag)
                some.new.loc.sub_(change.mul_(_fit(some.rates.lr, change)))
        return precision


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
    """Return the part of what differs by column."""
    is_vector = isinstance(number, Tensor) and number.ndim > 0 and number.shape[-1] == size and number.ndim == 1
    return number[place] if is_vector and isinstance(number, Tensor) else number


def _largest(number: Number) -> float:
    """Return the largest of what differs by column or run."""
    return float(number.max()) if isinstance(number, Tensor) else float(number)


def _smallest(number: Number) -> float:
    """Return the smallest of what differs by column or run."""
    return float(number.min()) if isinstance(number, Tensor) else float(number)


def _fit(number: Number, like: Tensor) -> Any:
    """Return a number in the dtype of a tensor, so that vectors are not widened."""
    return number.to(like.dtype) if isinstance(number, Tensor) else number
