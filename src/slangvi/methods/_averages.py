"""Running averages of gradients, and the gradient of the mean that a step follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slangvi.priors import Prior

__all__ = ["bounded_step", "debiasing", "lerp", "mean_gradient", "shortening"]

# Parameters that the length of a step is shared out to, at most: a step moves in one direction, and what that does to
# outputs of a large network grows with all parameters that take part.
MOST_COUNTED = 100


def lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """Return (1 − w)·start + w·end; w may be of another dtype."""
    return torch.lerp(start, end, weight.to(start.dtype) if isinstance(weight, Tensor) else weight)


def bounded_step(change: Tensor, curved: Tensor, longest: float) -> Tensor:
    """Return a step Δ (..., P), shortened where it is longer than allowed, given ΛΔ; see `shortening`."""
    return change * shortening((change * curved).sum(-1, keepdim=True), change.shape[-1], longest)


def shortening(squared: Tensor, size: int, longest: float) -> Tensor:
    r"""Return what a step Δ is multiplied by so that it is no longer than allowed, $\sqrt{\Delta^\top\Lambda\Delta/P}$.

    That is its length in posterior standard deviations of a typical parameter; a larger P counts as `MOST_COUNTED`.

    Args:
        squared: ΔᵀΛΔ.
        size: P.
        longest: allowed length.
    """
    return (longest / (squared / min(size, MOST_COUNTED)).sqrt()).clamp_max(1.0)


def debiasing(momentum: float | Tensor, step: int, ages: Tensor | None = None) -> float | Tensor:
    """Return 1 − γᵗ, by which an average that began at zero is divided; `ages` are t of each entry, (P,)."""
    return 1 - momentum ** (step if ages is None else ages)


def mean_gradient(
    state: Any, total: Tensor, weight: float | Tensor, prior: Prior, momentum: float | Tensor, ages: Tensor | None
) -> tuple[Tensor, Tensor]:
    r"""Return the averaged likelihood gradient, and the gradient of the mean, which adds the prior's.

    $$ m^+ = \gamma m + (1-\gamma)\tfrac NR\textstyle\sum_r g_r, \qquad
       \tfrac{m^+}{1-\gamma^t} + \Lambda_0 (\mu - \mu_0) $$

    The state has `loc`, `momentum` and `step`; `total` is Σ_r g_r, (..., P), `weight` is N/R.
    """
    loc, old = state.loc, state.momentum
    new = lerp((weight * total).to(old.dtype), old, momentum)
    corrected = new / debiasing(momentum, state.step + 1, ages)
    return new, prior.add_slope(loc, corrected.to(loc.dtype))
