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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision, factorize
from slangvi.linalg.products import cache_slices, combine_rows, rows_dot_vector
from slangvi.linalg.threads import one_thread
from slangvi.linalg.topk import SMALL
from slangvi.methods._averages import shortening
from slangvi.methods.projection import (
    Decision,
    FactorAnalysis,
    LeadingEigenvectors,
    Observation,
    Part,
    Projection,
    ScaledEigenvectors,
    choose_route,
)
from slangvi.params import ParamSpec
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.rows.appended import append_rows
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate

__all__ = ["GRADIENT_REMEDY", "STATE_REMEDY", "Diagnostics", "Rates", "Tensors", "collect_diagnostics", "take_step"]

Number = float | Tensor
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
    """Numbers about a step besides the new state, (...) each.

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
        by_em: whether the way back to the family is `FactorAnalysis`, and not `LeadingEigenvectors`.
        longest: how far the mean may go, in posterior standard deviations of a typical parameter; None for any length.
        is_start: whether factor analysis begins, by `ScaledEigenvectors`.
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
        by_em: bool = False,
        longest: float | None = None,
        is_start: bool = False,
    ) -> None:
        self.longest = longest
        self.old, self.new, self.prior, self.rates = old, new, prior, rates
        self.weight = num_data / gradients.num_rows
        # The prior's factor is no gradient, but enters the precision like one.
        self.gradients = gradients = append_rows(gradients, prior.factor, self.weight)
        self.total = gradients.sum()
        self.in_place = new.loc.data_ptr() == old.loc.data_ptr()
        self.ends = _ends(spec, rates.precision_lr)
        rank, size = old.prec_factor.shape[-2:]
        self.projection: Projection
        if by_em and rank and not is_start:
            self.projection = FactorAnalysis(old.prec_factor, gradients.height)
        else:
            route, is_exact = choose_route(rank, size, gradients), gradients.spectrum_route == "gram"
            kind = ScaledEigenvectors if by_em and rank else LeadingEigenvectors
            self.projection = kind(old.prec_factor, gradients.height, route, is_exact)

    def parts(self) -> Iterator[Part]:
        """Yield the segments of the precision with their rows."""
        old, new, place = self.old, self.new, 0
        for columns, rows in self.gradients.segments([end for end, _ in self.ends], old.prec_factor):
            while columns.start >= self.ends[place][0]:
                place += 1
            beta = self.ends[place][1]
            yield Part(
                old.prec_factor[..., columns],
                old.prec_diag[..., columns],
                new.prec_factor[..., columns],
                new.prec_diag[..., columns],
                columns,
                rows,
                self.prior.precision[..., columns],
                beta,
                beta * self.weight * self.gradients.scale**2,
            )

    # ---- the passes

    def observe(self) -> Observation:
        """Return the small problem of the projection."""
        return self.projection.observe(self.parts)

    def bounds(self) -> Tensor:
        """Return lengths and extremes that tell whether the step will be finite, float64, (5,)."""
        old = self.old
        lengths = torch._foreach_norm([self.total, old.momentum, old.loc])
        return torch.stack([*lengths, *torch.aminmax(old.prec_diag)]).double()

    def is_surely_finite(self, trace: float, bounds: Sequence[float]) -> bool:
        """Tell whether the new state is finite by what is known before it is made.

        d⁺ is at most d, λ and the trace of (1−β)UUᵀ + βĜ together, and at least the smaller of d and λ. No entry of the
        step of the mean is longer than the whole gradient by the smallest of these, and no square of U⁺ by the diagonal
        than the trace.

        Args:
            trace: of the small problem.
            bounds: see `bounds`.
        """
        total, average, loc, low, high = bounds
        smallest, largest, mean, spread = self.prior.bounds
        lowest, highest = min(low, smallest), max(high, largest)
        weight, rate = (float(x.max() if isinstance(x, Tensor) else x) for x in (self.weight, self.rates.lr))
        correction = self.rates.correction
        correction = float(correction.min() if isinstance(correction, Tensor) else correction)
        slope = (weight * total + average) / correction + (highest + spread) * (loc + mean)
        step = rate * slope / lowest if lowest > 0 else math.inf
        limit = 0.1 * torch.finfo(self.old.loc.dtype).max
        relative = trace / lowest if lowest > 0 else math.inf
        return trace + 2 * highest < limit and relative < limit and step + loc < limit

    def look(self, seen: Observation, bounds: Tensor) -> tuple[Tensor, Tensor, list[float]]:
        """Fetch the numbers that decide about the step, in one wait for the device.

        Args:
            seen: what `observe` returned.
            bounds: what `bounds` returned.

        Returns:
            The small problem, on the host where it is solved faster; its trace (...); and the bounds.
        """
        small, trace = seen
        if not small.is_cuda or self.old.loc.ndim > 1:
            return small, trace, bounds.tolist()
        size = small.numel() if small.numel() <= SMALL**2 else 0
        both = torch.cat([small.flatten()[:size], trace.view(1), bounds]).cpu()
        return both[:size].view(small.shape) if size else small, both[size], both[size + 1 :].tolist()

    def decide(self, small: Tensor) -> Decision:
        """Solve the small problem; with one thread on the host, where several would wait for each other."""
        with nullcontext() if small.is_cuda or self.old.loc.ndim > 1 or small.numel() > SMALL**2 else one_thread():
            return self.projection.decide(small)

    def update_precision(self, decision: Decision) -> Tensor:
        """Write U⁺ and d⁺; return the sum of what rounding would have taken from d⁺ below its bound, (...)."""
        clipped = [self.projection.project(part, decision) for part in self.parts()]
        return clipped[0] if len(clipped) == 1 else torch.stack(clipped).sum(0)

    def update_mean(self, precision: LowRankPrecision) -> None:
        """Write m⁺ and μ⁺, given the new precision."""
        old, size = self.old, self.old.loc.shape[-1]
        weight, alpha, gamma, correction = (
            x.to(old.loc.dtype) if isinstance(x, Tensor) else x
            for x in (self.weight, self.rates.lr, self.rates.momentum, self.rates.correction)
        )
        pull = self._pull()
        for cut in cache_slices(self.total):
            gamma_here, correction_here = (
                x[cut] if isinstance(x, Tensor) and x.shape == (size,) else x for x in (gamma, correction)
            )
            slope = self.total[..., cut]
            slope.mul_(weight).lerp_(old.momentum[..., cut], gamma_here)
            self.new.momentum[..., cut] = slope
            away = old.loc[..., cut] - self.prior.mean[..., cut]
            slope.div_(correction_here).addcmul_(self.prior.precision[..., cut], away)
            if pull is not None and self.prior.factor is not None:
                slope += combine_rows(pull, self.prior.factor[:, cut])
        change = precision.solve(self.total, in_place=True).mul_(alpha)
        if self.longest is not None:
            squared = rows_dot_vector(precision.factor, change).square().sum(-1)
            squared += (precision.diag * change).mul_(change).sum(-1, dtype=torch.float64)
            change.mul_(shortening(squared, size, self.longest).unsqueeze(-1).to(change.dtype))
        torch.sub(old.loc, change, out=self.new.loc)

    def _pull(self) -> Tensor | None:
        """Return Cᵀ(μ − μ₀), (L₀,); None where the prior has no factor."""
        loc, mean, factor = self.old.loc, self.prior.mean, self.prior.factor
        if factor is None:
            return None
        found = [rows_dot_vector(factor[:, cut], loc[cut] - mean[cut]) for cut in cache_slices(loc)]
        return torch.stack(found).sum(0).to(loc.dtype)


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
    longest: float | None = None,
    by_em: bool = False,
    is_start: bool = False,
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
        longest: see `Step`.
        by_em: likewise.
        is_start: likewise.

    Raises:
        NumericalError: if the step would not be finite. `old` is as it was then.
    """
    work = Step(old, new, gradients, num_data, prior, rates, spec, by_em, longest, is_start)
    small, trace, bounds = work.look(work.observe(), work.bounds())
    largest = float(trace.sum())
    if not math.isfinite(largest):
        require_finite("the gradient", step, spec, GRADIENT_REMEDY, work.total, gradients.square_sum())
        raise _too_large(step)
    if not math.isfinite(bounds[0]):
        require_finite("the gradient", step, spec, GRADIENT_REMEDY, work.total)
    is_sure = work.is_surely_finite(largest, bounds)
    if work.in_place and not is_sure:
        work.new, work.in_place = Tensors(*map(torch.empty_like, old)), False
    try:
        decision = work.decide(small)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise _too_large(step) from error
    clipped = work.update_precision(decision)
    precision = factorize(work.new.prec_factor, work.new.prec_diag)
    work.update_mean(precision)
    if not is_sure:
        made = work.new
        if not math.isfinite(float(made.loc.sum() + made.prec_diag.sum())):
            require_finite("the new precision", step, spec, STATE_REMEDY, made.prec_diag, made.prec_factor)
            require_finite("the new mean", step, spec, STATE_REMEDY, made.loc)
        if made is not new:
            for target, value in zip(new, made, strict=True):
                target.copy_(value)
            precision = factorize(new.prec_factor, new.prec_diag)
    spectrum, total = decision.spectrum, trace
    if isinstance(work.projection, FactorAnalysis | ScaledEigenvectors):
        spectrum = precision.spectrum[0].square().sub(1).flip(-1)
        total = spectrum.sum(-1) + old.loc.shape[-1]
    return precision, collect_diagnostics(spectrum, total, decision.residual, clipped, old.loc)


def collect_diagnostics(
    spectrum: Tensor, total: Tensor, residual: Tensor, clipped: Tensor, like: Tensor
) -> Diagnostics:
    """Return diagnostics on the device of a state, wherever they were found, in its dtype but for the residual."""
    spectrum, total = (x.to(like.device, like.dtype, non_blocking=True) for x in (spectrum, total))
    return Diagnostics(spectrum, total, residual.to(like.device, non_blocking=True), clipped.to(like))


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
