r"""Adam (Kingma & Ba 2015) as arithmetic that looks at no number, and the frames of the methods that move by it.

$$ m^+ = \beta_1 m + (1-\beta_1)\,g, \qquad v^+ = \beta_2 v + (1-\beta_2)\,g \circ g, \qquad
   x^+ = x - \alpha\,\frac{m^+ / (1-\beta_1^t)}{\sqrt{v^+ / (1-\beta_2^t)} + \epsilon} $$
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.methods._averages import lerp
from slangvi.methods._build import Basics
from slangvi.methods.gather import GRADIENT_REMEDY, checked_mean
from slangvi.optimizer import InfoT, StateT, VariationalOptimizer
from slangvi.params import Params, ParamSpec
from slangvi.params.state import require_finite
from slangvi.rows import GradientRecorder, RowGroup
from slangvi.schedules import Rate
from slangvi.settings import BETAS, EPS, AdamSettings
from slangvi.types import Transform

__all__ = ["BETAS", "EPS", "AdamOptimizer", "Betas", "Moving", "Number", "adam_step", "adam_transform", "to_dtype_of"]

# A number, or a tensor that broadcasts against (..., P): one for every run of a batch is (..., 1).
Number = float | Tensor
Betas = tuple[Number, Number]


class Moving(NamedTuple):
    """A vector that Adam moves, beside its running means.

    Args:
        value: x, (..., P).
        momentum: m, the mean of gradients, (..., P).
        square: v, the mean of their squares, (..., P).
    """

    value: Tensor
    momentum: Tensor
    square: Tensor

    @classmethod
    def at(cls, value: Tensor) -> Moving:
        """Return the vector before the first step."""
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))


def adam_step(
    x: Moving, gradient: Tensor, *, lr: Rate | Number, step: int | Tensor, betas: Betas = BETAS, eps: Number = EPS
) -> Moving:
    """Return x after one step of Adam. No number is read and no tensor changed, so a CUDA graph can capture it.

    Every number may be a tensor that broadcasts against (..., P); `step` is counted from 1.

    Example:
        >>> x = adam_step(Moving.at(torch.zeros(2)), torch.tensor([3.0, -0.1]), lr=0.5, step=torch.tensor(1))
        >>> x.value, x.momentum
        (tensor([-0.5000,  0.5000]), tensor([ 0.3000, -0.0100]))
    """
    # By 1 − β, whose digits float32 keeps; of β close to 1 it would lose half of them.
    momentum = lerp(x.momentum, gradient, 1 - betas[0])
    square = lerp(x.square, gradient.square(), 1 - betas[1])
    rate = to_dtype_of(x.value, lr.value if isinstance(lr, Rate) else lr) / _correction(betas[0], step, x.value)
    spread = (square / _correction(betas[1], step, x.value)).sqrt_().add_(to_dtype_of(x.value, eps))
    return Moving(x.value - rate * (momentum / spread), momentum, square)


def _correction(beta: Number, step: int | Tensor, like: Tensor) -> Number:
    """Return 1 − βᵗ, computed in float64 whatever the state's dtype: it cancels when β is close to 1."""
    base, power = (x.to(torch.float64) if isinstance(x, Tensor) else x for x in (beta, step))
    return to_dtype_of(like, 1 - base**power)


def to_dtype_of(like: Tensor, x: Number) -> Number:
    """Return a number in a dtype that does not widen the result."""
    return x.to(like.dtype) if isinstance(x, Tensor) else x


def require_finite_step(
    step: int, spec: ParamSpec, gradients: Callable[[], Sequence[Tensor]], moving: Mapping[str, Moving]
) -> None:
    """Raise `NumericalError` unless all is finite; when it is, that is one look at the device.

    `gradients` is called when something is wrong; `moving` has the vectors after the step by their names.
    """
    # NaN and Inf survive the sums. Gradients whose squares overflow would leave a finite value that never moves again.
    total = torch.stack([x.value.sum() + x.square.sum() for x in moving.values()]).sum()
    if math.isfinite(float(total)):
        return
    require_finite("the gradient", step, spec, GRADIENT_REMEDY, *gradients())
    for name, x in moving.items():
        require_finite(f"the squared gradient by the {name}", step, spec, GRADIENT_REMEDY, x.square)
        require_finite(f"the new {name}", step, spec, "Lower lr, or use float64 parameters.", x.value)


def adam_transform(
    settings: AdamSettings,
    init: Callable[[Params], Any],
    gather: Callable[[Any, Any, torch.Generator | None], tuple[tuple[Tensor, ...], Tensor]],
    update: Callable[..., tuple[Any, Any]],
    sample: Callable[..., Any],
    posterior: Callable[..., Any],
) -> Transform:
    """Return the pure functions of a method that moves by Adam.

    `gather` takes (state, batch, generator) and returns the tensors for `update`, and log-likelihoods (S, M).
    """
    basics = Basics(settings)

    def take(state: Any, batch: Any, generator: torch.Generator | None) -> tuple[Any, Any]:
        tensors, values = gather(state, batch, generator)
        fit = settings.num_data * checked_mean(values)
        options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "lr": basics.rate(state.step + 1)}
        options |= {"num_rows": values.numel(), "num_data": basics.effective_num_data, "prior": basics.prior_of(state)}
        new, info = update(state, *tensors, **options)
        return new, replace(info, expected_log_likelihood=fit)

    return basics.framed(init, take, sample, posterior)


@dataclass(frozen=True)
class SumGroup(RowGroup):
    """Gradients of one backward pass, added up over its examples."""

    drawn: Tensor | None = None  # the numbers behind the draw of the weights, such as its noise, (P,)


class AdamOptimizer(VariationalOptimizer[StateT, InfoT]):
    """Base of optimizers that need the gradient of each draw, added up over its examples, and move by Adam."""

    _drawn: Tensor  # the numbers behind the draw in the model, (P,)

    @abstractmethod
    def _advance_sums(self, gradients: Tensor, drawn: Tensor, **options: Any) -> tuple[StateT, InfoT]:
        """Take the method's step from the summed gradients and the numbers behind the draws, (S, P) each.

        `options` are `num_rows`, `num_data`, `lr`, `betas`, `eps` and `ages` of `update`.
        """

    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        groups, like = [row for row in rows if isinstance(row, SumGroup)], self._state.loc
        gradients = torch.stack([group.total * group.scale for group in groups if group.total is not None])
        drawn = torch.stack([group.drawn.to(like) for group in groups if group.drawn is not None])
        betas, eps = self._hyper.adam()
        options: dict[str, Any] = {"lr": self._hyper.lr(), "betas": betas, "eps": eps}
        options["num_rows"] = sum(group.num_rows for group in groups)
        options["num_data"] = self.settings.num_data / self.settings.temperature
        return self._advance_sums(gradients, drawn, ages=self._hyper.ages(self._state.step + 1), **options)

    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientRecorder:
        return GradientRecorder(self.model, spec, dtype, wants_rows=False)

    def _collected(self) -> list[RowGroup]:
        groups = super()._collected()
        return [SumGroup(g.num_rows, {}, g.total, g.scale, drawn=self._drawn) for g in groups]
