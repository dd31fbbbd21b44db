"""Running averages of gradients, and the gradient of the mean that a step follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slangvi.priors import Prior

__all__ = ["MOST_COUNTED", "bounded_step", "debiasing", "lerp", "mean_gradient"]

# Parameters that the length of a step is shared out to, at most: a step moves in one direction, and what that does to
# outputs of a large network grows with all parameters that take part.
MOST_COUNTED = 100


def lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """Return (1 − w)·start + w·end; w may be of another dtype."""
    return torch.lerp(start, end, weight.to(start.dtype) if isinstance(weight, Tensor) else weight)


def bounded_step(change: Tensor, curved: Tensor, longest: float) -> Tensor:
    r"""Return a step Δ, shortened so that $\sqrt{\Delta^\top \Lambda \Delta / P}$ is at most what is allowed.

    That is its length in posterior standard deviations of a typical parameter; a larger P counts as `MOST_COUNTED`.

    Args:
        change: Δ, (..., P).
        curved: ΛΔ, (..., P).
        longest: allowed length.
    """
    squared = (change * curved).sum(-1, keepdim=True) / min(change.shape[-1], MOST_COUNTED)
    return change * (longest / squared.sqrt()).clamp_max(1.0)


def debiasing(momentum: float | Tensor, step: int, ages: Tensor | None = None) -> float | Tensor:
    """Return 1 − γᵗ, by which an average that began at zero is divided; `ages` are t of each entry, (P,)."""
    return 1 - momentum ** (step if ages is None else ages)


def mean_gradient(
    state: Any, total: Tensor, weight: float | Tensor, prior: Prior, momentum: float | Tensor, ages: Tensor | None
) -> tuple[Tensor, Tensor]:
    r"""Return the averaged likelihood gradient, and the gradient of the mean, which adds the prior's.

    $$ m^+ = \gamma m + (1-\gamma)\tfrac NR\textstyle\sum_r g_r, \qquad
       \tfrac{m^+}{1-\gamma^t} + \lambda \circ (\mu - \mu_0) $$

    The state has `loc`, `momentum` and `step`; `total` is Σ_r g_r, (..., P), `weight` is N/R.
    """
    loc, old = state.loc, state.momentum
    new = lerp((weight * total).to(old.dtype), old, momentum)
    corrected = new / debiasing(momentum, state.step + 1, ages)
    return new, torch.addcmul(corrected.to(loc.dtype), prior.precision, loc - prior.mean)
