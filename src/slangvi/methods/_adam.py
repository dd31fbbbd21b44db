r"""Adam (Kingma & Ba 2015) as arithmetic that looks at no number, and what the methods that take it share.

$$ m^+ = \beta_1 m + (1-\beta_1)\,g, \qquad v^+ = \beta_2 v + (1-\beta_2)\,g \circ g, \qquad
   x^+ = x - \alpha\,\frac{m^+ / (1-\beta_1^t)}{\sqrt{v^+ / (1-\beta_2^t)} + \epsilon} $$
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.methods._averages import lerp
from slangvi.methods.gather import GRADIENT_REMEDY
from slangvi.optimizer import InfoT, StateT, VariationalOptimizer
from slangvi.params import ParamSpec
from slangvi.params.state import require_finite
from slangvi.rows import GradientRecorder, RowGroup
from slangvi.schedules import Rate
from slangvi.settings import BETAS, EPS

__all__ = ["BETAS", "EPS", "AdamOptimizer", "Betas", "Moving", "Number", "fitted", "moved", "require_moved"]

# A number, or a tensor that broadcasts against (..., P): one for every run of a batch is (..., 1).
Number = float | Tensor
Betas = tuple[Number, Number]
ADAM_REMEDY = "Lower lr, or use float64 parameters."


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
        """Before the first step."""
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))


def moved(
    x: Moving, gradient: Tensor, *, lr: Rate | Number, step: int | Tensor, betas: Betas = BETAS, eps: Number = EPS
) -> Moving:
    """One step of Adam. Nothing is looked at and no tensor changed, so that it can be captured in a CUDA graph.

    Args:
        x: before the step.
        gradient: g, (..., P).
        lr: α; a number, a tensor that broadcasts against (..., P), or a `Rate`.
        step: t, counted from 1; a number or a tensor, likewise.
        betas: β₁ and β₂.
        eps: ε.

    Example:
        >>> x = moved(Moving.at(torch.zeros(2)), torch.tensor([3.0, -0.1]), lr=0.5, step=torch.tensor(1))
        >>> x.value, x.momentum
        (tensor([-0.5000,  0.5000]), tensor([ 0.3000, -0.0100]))
    """
    # By 1 − β, whose digits float32 keeps; of β close to 1 it would lose half of them.
    momentum = lerp(x.momentum, gradient, 1 - betas[0])
    square = lerp(x.square, gradient.square(), 1 - betas[1])
    rate = fitted(lr.value if isinstance(lr, Rate) else lr, x.value) / _correction(betas[0], step, x.value)
    spread = (square / _correction(betas[1], step, x.value)).sqrt_().add_(fitted(eps, x.value))
    return Moving(x.value - rate * (momentum / spread), momentum, square)


def _correction(beta: Number, step: int | Tensor, like: Tensor) -> Number:
    """1 − βᵗ, in float64 whatever the state's dtype: it cancels when β is close to 1."""
    base = beta.to(torch.float64) if isinstance(beta, Tensor) else beta
    return fitted(1 - base ** (step.to(torch.float64) if isinstance(step, Tensor) else step), like)


def fitted(x: Number, like: Tensor) -> Number:
    """The same number, in a dtype that does not widen the result."""
    return x.to(like.dtype) if isinstance(x, Tensor) else x


def require_moved(
    step: int, spec: ParamSpec, gradients: Callable[[], Sequence[Tensor]], moving: Mapping[str, Moving]
) -> None:
    """Raise `NumericalError` unless all is finite; when it is, that is one look at the device.

    Args:
        step: number of the step, for the message.
        spec: layout.
        gradients: what the vectors were moved by, (..., P) each, computed when something is wrong.
        moving: what it is called → the vector after the step.
    """
    # NaN and Inf survive the sums. Gradients whose squares overflow would leave a finite value that never moves again.
    total = torch.stack([x.value.sum() + x.square.sum() for x in moving.values()]).sum()
    if math.isfinite(float(total)):
        return
    require_finite("the gradient", step, spec, GRADIENT_REMEDY, *gradients())
    for name, x in moving.items():
        require_finite(f"the squared gradient by the {name}", step, spec, GRADIENT_REMEDY, x.square)
        require_finite(f"the new {name}", step, spec, ADAM_REMEDY, x.value)


@dataclass(frozen=True)
class SumGroup(RowGroup):
    """What one backward pass brought, added up over its examples, and what its weights were drawn from.

    Args:
        drawn: the numbers behind the draw, such as its noise, (P,); None until somebody says so.
    """

    drawn: Tensor | None = None

    def sum(self, spec: ParamSpec, like: Tensor) -> Tensor:
        """Return Σ_i g_i as one vector (P,), zeros for parameters the pass did not reach."""
        found = {name: self.totals.get(name) for name in spec.names}
        sizes = dict(zip(spec.names, spec.numels, strict=True))
        pieces = [like.new_zeros(sizes[name]) if x is None else x.flatten().to(like) for name, x in found.items()]
        return torch.cat(pieces).mul_(self.scale)


class AdamOptimizer(VariationalOptimizer[StateT, InfoT]):
    """Optimizers that need the gradient of each draw, added up over its examples, and move by Adam."""

    _drawn: Tensor  # what the draw in the model was made of, (P,)

    @abstractmethod
    def _advance_sums(self, gradients: Tensor, drawn: Tensor, **options: Any) -> tuple[StateT, InfoT]:
        """The method's update.

        Args:
            gradients: gradient of the summed negative log-likelihood of every backward pass, (S, P).
            drawn: what its draw was made of, (S, P).
            options: `num_rows`, `num_data`, `lr`, `betas`, `eps` and `ages` of `update`.
        """

    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        groups, like = [row for row in rows if isinstance(row, SumGroup)], self._state.loc
        gradients = torch.stack([group.sum(self._spec, like) for group in groups])
        drawn = torch.stack([group.drawn.to(like) for group in groups if group.drawn is not None])
        betas, eps = self._hyper.adam()
        return self._advance_sums(
            gradients,
            drawn,
            num_rows=sum(group.num_rows for group in groups),
            num_data=self.settings.num_data / self.settings.temperature,
            lr=self._hyper.lr(),
            betas=betas,
            eps=eps,
            ages=self._hyper.ages(self._state.step + 1),
        )

    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientRecorder:
        return GradientRecorder(self.model, spec, dtype, wants_rows=False)

    def _collected(self) -> list[RowGroup]:
        groups = super()._collected()
        return [SumGroup(g.num_rows, {}, g.totals, g.scale, drawn=self._drawn) for g in groups]
