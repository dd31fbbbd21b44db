"""State and Info of methods whose precision is low-rank plus diagonal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slangvi.linalg import LowRankPrecision
from slangvi.linalg.small import SmallPrecision, factorize_batch
from slangvi.linalg.topk import padded_spectrum
from slangvi.methods._awaited import Awaited, awaiting, close, settle
from slangvi.methods._gaussian import Told, kl_to_prior
from slangvi.methods._launched import Launched
from slangvi.methods.gather import GRADIENT_REMEDY
from slangvi.methods.lowrank_step import Proposed
from slangvi.params import ParamSpec
from slangvi.params.state import require_finite
from slangvi.priors import Prior

__all__ = ["STATE_REMEDY", "Info", "State", "finite_check", "kl_to_prior", "state_of", "told"]

STATE_REMEDY = "Lower lr, raise prior_precision or init_precision, or use float64 parameters."


@dataclass(frozen=True, eq=False)
class State(Awaited):
    """What the next step needs; leading dimensions, the same everywhere, are runs that go in lockstep.

    Args:
        loc: μ, (..., P).
        prec_factor: U by rows, (..., L, P).
        prec_diag: d, (..., P).
        momentum: m, the running mean of likelihood gradients, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
    """

    loc: Tensor
    prec_factor: Tensor
    prec_diag: Tensor
    momentum: Tensor
    step: int
    spec: ParamSpec

    @cached_property
    def precision(self) -> LowRankPrecision | SmallPrecision:
        """UUᵀ + diag d, factorised once per state; `sample((S,), generator, loc)` gives draws of shape (S, ..., P)."""
        return factorize_batch(self.prec_factor, self.prec_diag)


@dataclass(frozen=True, eq=False)
class Info(Told, Awaited):
    """What a step can tell besides the new state.

    For runs in lockstep every number is a tensor with their leading dimensions.

    Args:
        step: number of the step, from 1.
        num_rows: R, per-example gradients used.
        leading: the leading L eigenvalues of (1−β)UUᵀ + βĜ in any order, (..., L), or a matrix that has them,
            (..., L, L).
        total: sum of all its eigenvalues; `captured` is the share that U⁺ holds, (...).
        residual: bound on the relative error of U⁺U⁺ᵀ or of those eigenpairs; 0 when they were computed in full, (...).
        clipped: Σ of what rounding would have taken from d⁺ below its bound; rounding only, (...).
        expected_log_likelihood: N times the mean log-likelihood over rows; NaN when the loss was not seen.
        skipped: bad batches an optimizer has passed over so far.
    """

    step: int
    num_rows: int
    leading: Tensor
    total: Tensor
    residual: Tensor
    clipped: Tensor
    # A factory, since a plain default would be found on the class before the field is filled.
    expected_log_likelihood: float = field(default_factory=lambda: float("nan"))
    skipped: int = 0
    _state: State | None = field(default=None, repr=False)
    _prior: Prior | None = field(default=None, repr=False)

    @cached_property
    def spectrum(self) -> Tensor:
        """Leading L eigenvalues of (1−β)UUᵀ + βĜ, largest first, (..., L)."""
        single = self.leading.ndim == self.total.ndim + 1
        values: Tensor = self.leading if single else torch.linalg.eigvalsh(self.leading)
        return values.sort(dim=-1, descending=True).values.clamp_min(0.0)

    @property
    def captured(self) -> Any:
        """Share of the curvature's trace that the low-rank part holds, 0…1."""
        share = torch.where(self.total > 0, self.spectrum.sum(-1) / self.total, 1.0)
        return share if share.ndim else float(share)

    @property
    def rank_used(self) -> Any:
        """Directions whose eigenvalue is above rounding."""
        tiny = torch.finfo(self.spectrum.dtype).eps * self.total.unsqueeze(-1)
        used = (self.spectrum > tiny).sum(-1)
        return used if used.ndim else int(used)


def state_of(new: Proposed, step: int, spec: ParamSpec) -> State:
    """The state that was proposed, with its factorisation, which the next draw needs."""
    state = State(new.loc, new.prec_factor, new.prec_diag, new.momentum, step, spec)
    state.__dict__["precision"] = new.precision  # fills the cached property
    return state


def finite_check(spec: ParamSpec, step: int) -> Callable[..., None]:
    """What a replayed step calls with vectors that may not be finite."""

    def check(what: str, *vectors: Tensor) -> None:
        remedy = GRADIENT_REMEDY if what == "the gradient" else STATE_REMEDY
        require_finite(what, step, spec, remedy, *vectors)

    return check


def told(
    running: Launched, before: State, prior: Prior, fit: Callable[[float], float] = lambda mean: mean
) -> tuple[State, Info]:
    """State and info of a replayed step, which need not be over: they wait for it when they are looked at.

    A step that turns out to have failed raises its error then, once, and its state becomes the one before it.

    Args:
        running: the step.
        before: the state it started from.
        prior: λ and μ₀.
        fit: from the mean log-likelihood over rows to that of all data.
    """

    def fill_state(after: State) -> None:
        try:
            running.outcome()
        except Exception:
            settle(before)
            after.__dict__.update(before.__dict__)
            close(after)
            raise
        # There may be no memory for it now, and the next time there is.
        loc, diag, momentum, *factor = running.kept().split([1, 1, 1, running.graph.rank])
        after.__dict__.update(loc=loc[0], prec_diag=diag[0], momentum=momentum[0], prec_factor=factor[0])

    def fill_info(info: Info) -> None:
        done, like = running.outcome(), after.loc  # of a failed step there is nothing to be told, however often
        numbers = torch.tensor((done.total, done.residual, done.clipped), dtype=like.dtype, device="cpu")
        leading = done.ritz.to(like.dtype) if done.ritz.ndim == 2 else padded_spectrum(done.ritz, after.prec_factor)
        total, residual, clipped = numbers.unbind()
        info.__dict__.update(leading=leading, total=total, residual=residual, clipped=clipped)
        info.__dict__["expected_log_likelihood"] = fit(done.mean_log_likelihood)

    step = before.step + 1
    after = awaiting(State, fill_state, step=step, spec=before.spec)
    info = awaiting(Info, fill_info, step=step, num_rows=running.graph.num_rows, _state=after, _prior=prior)
    return after, info
