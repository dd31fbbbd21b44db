"""Running averages of gradients, and the gradient of the mean that a step follows."""

from __future__ import annotations

import torch
from torch import Tensor

from slangvi.priors import Prior

__all__ = ["averaged", "debiasing", "lerp", "mean_gradient"]


def lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """(1 − w)·start + w·end; w may be of another dtype."""
    return torch.lerp(start, end, weight.to(start.dtype) if isinstance(weight, Tensor) else weight)


def averaged(average: Tensor, total: Tensor, weight: float | Tensor, momentum: float | Tensor) -> Tensor:
    """Return the running average of the likelihood gradient, γm + (1−γ)(N/R)Σ_r g_r; see `mean_gradient`."""
    return lerp((weight * total).to(average.dtype), average, momentum)


def mean_gradient(
    loc: Tensor,
    average: Tensor,
    total: Tensor,
    weight: float | Tensor,
    prior: Prior,
    momentum: float | Tensor,
    correction: float | Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Return the averaged likelihood gradient, and the gradient of the mean, which adds the prior's.

    $$ m^+ = \gamma m + (1-\gamma)\tfrac NR\textstyle\sum_r g_r, \qquad
       \tfrac{m^+}{1-\gamma^t} + \lambda \circ (\mu - \mu_0) $$

    Args:
        loc: μ, (..., P).
        average: m, (..., P).
        total: Σ_r g_r, (..., P).
        weight: N/R.
        prior: λ and μ₀.
        momentum: γ.
        correction: 1 − γᵗ.
    """
    new = averaged(average, total, weight, momentum)
    return new, torch.addcmul((new / correction).to(loc.dtype), prior.precision, loc - prior.mean)


def debiasing(momentum: float | Tensor, step: int, ages: Tensor | None = None) -> float | Tensor:
    """1 − γᵗ, by which an average that began at zero is divided.

    Args:
        momentum: γ.
        step: t.
        ages: t of each entry where some joined later, (P,).
    """
    return 1 - momentum ** (step if ages is None else ages)
