"""Detection of learning rates that are too large, by how far the mean goes in a step.

The precision grows with the gradients, so such a rate rarely ends in NaN: the mean is thrown about, and all numbers
stay finite. The length of a step, measured by the posterior itself, gives it away.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slangvi.errors import DivergenceError, DivergenceWarning, user_stacklevel
from slangvi.priors import Prior

__all__ = ["REACTIONS", "REMEDY", "Watch", "step_length"]

REACTIONS = ("warn", "raise", "ignore")
REMEDY = (
    "Lower lr, let it fall by a schedule such as slangvi.inverse_time, take larger batches, or go back to a checkpoint."
)

# One step in so many is looked at, and so many looks are judged together: only then a device is waited for.
EVERY, LOOKS = 8, 16
# Posterior standard deviations, as a mean square over parameters, that a step may go in the long run; and the share of
# looks that must have found more.
FARTHEST, SHARE = 1.0, 0.75
# Net over travelled distance: near 1 for a mean on its way, less than this for one that goes to and fro.
STRAIGHT = 0.5
# Entries of the mean that are remembered to tell the two apart.
KEPT = 1024


def step_length(before: Any, after: Any, prior: Prior, lr: float | Tensor, momentum: float | Tensor) -> Tensor:
    r"""Return how far a step moved the mean, in posterior standard deviations: root mean square over parameters, (...).

    With the gradient $\tilde g = \hat m + \lambda(\mu - \mu_0)$ a step is $\Delta = -\alpha\Lambda^{-1}\tilde g$, so

    $$ \tfrac1P\,\Delta^\top\Lambda\Delta = -\tfrac1P\,\alpha\,\tilde g^\top\Delta $$

    needs no solve. (Where groups have rates of their own, α weighs each entry.) Nothing is read from the device.
    States have `loc`, (..., P), the later one also `momentum` and `step`; α, γ and the step broadcast with `loc`.
    """
    gradient = prior.add_slope(before.loc, after.momentum / (1 - momentum**after.step))
    squared: Tensor = -(lr * gradient * (after.loc - before.loc)).sum(-1) / before.loc.shape[-1]
    return squared.clamp_min(0.0).sqrt()


class Watch:
    """Looks at a run every few steps, and warns once or raises when its rate is too large.

    An alarm needs three of four looks in a window of 128 steps to have found a step longer than one posterior standard
    deviation, and a mean that goes to and fro. A run that is far from its goal also takes long steps, but in one
    direction; only with rates of 1 and more, which overshoot whatever lies ahead, the direction is not asked for.
    Windows begin at multiples of 128 steps, so a resumed run judges the same ones but for the first.
    """

    def __init__(self, reaction: str, advice: str) -> None:
        self.reaction, self.advice = reaction, advice
        self._seen = 0  # looks of this window so far, without a gap
        self._lengths = self._places = torch.empty(0)

    def due(self, step: int) -> bool:
        """Tell whether the step of this number is to be looked at."""
        return self.reaction != "ignore" and step % EVERY == 0

    def look(self, before: Any, after: Any, prior: Prior, lr: float | Tensor, momentum: float | Tensor) -> None:
        """Look at a step; the arguments are those of `step_length`. Raises `DivergenceError` if asked to."""
        largest = float(lr.max()) if isinstance(lr, Tensor) else float(lr)
        self.note(step_length(before, after, prior, lr, momentum), after.loc, [largest], after.step)

    def note(self, lengths: Tensor, loc: Tensor, lr: Sequence[float], step: int) -> None:
        """Note how far one run, or each of several, has gone in a step: lengths (...), means (..., P), α of each."""
        place, index = loc[..., :: -(-loc.shape[-1] // KEPT)], (step // EVERY - 1) % LOOKS
        if self._places.shape[1:] != place.shape or self._places.device != place.device:
            self._seen, self._places = 0, place.new_empty(LOOKS, *place.shape)
            self._lengths = place.new_empty(LOOKS, *lengths.shape)
        self._places[index] = place
        self._lengths[index] = lengths
        self._seen = index + 1 if index in (0, self._seen) else 0
        if self._seen == LOOKS:
            self._judge(lr, step)

    def _judge(self, lr: Sequence[float], step: int) -> None:
        ordered = self._lengths.reshape(LOOKS, -1).sort(0).values.T.tolist()
        straight = straightness(self._places).flatten().tolist()
        far = [found[round((1 - SHARE) * LOOKS)] > FARTHEST for found in ordered]
        astray = [rate >= 1.0 or not ahead > STRAIGHT for rate, ahead in zip(lr, straight, strict=True)]
        lost = [k for k in range(len(lr)) if far[k] and astray[k]]
        if not lost:
            return
        first, more = lost[0], f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        who = f"replica {first}{more}, " if self._lengths.ndim > 1 else ""
        found = (
            f"{who}step {step}: over the last {EVERY * LOOKS} steps the mean moved by {ordered[first][LOOKS // 2]:.2g} "
            f"posterior standard deviations per parameter in a typical step, and by up to {ordered[first][-1]:.2g} "
            f"(lr={lr[first]:g}). It is thrown about rather than converging: mean and variances tell little of the "
            f"posterior. {self.advice}"
        )
        if self.reaction == "raise":
            raise DivergenceError(f"{found} The state is that of the step before.")
        self.reaction = "ignore"  # once is enough
        warnings.warn(found, DivergenceWarning, stacklevel=user_stacklevel())


def straightness(places: Tensor) -> Tensor:
    """Return net over travelled distance between places (n, ..., K), (...): 1 is straight on, 0 a round trip."""
    travelled, net = places.diff(dim=0).norm(dim=-1).sum(0), (places[-1] - places[0]).norm(dim=-1)
    return torch.where((travelled > 0) & travelled.isfinite(), net / travelled, 0.0)
