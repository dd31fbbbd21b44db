"""Learning rates: numbers, functions of the step, and one per parameter tensor where groups differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from slangvi import checks
from slangvi.params.spec import ParamSpec

__all__ = [
    "Cosine",
    "InverseTime",
    "Rate",
    "Schedule",
    "by_equal_factors",
    "inverse_time",
    "rate_at",
    "slow_precision",
    "warmed_up",
]


Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Rate:
    """A rate that is one number, or one number per parameter tensor when groups differ."""

    value: float | Tensor  # the number, or (P,)
    per_tensor: tuple[float, ...] | None = None  # one number per parameter tensor; None when `value` is a number

    @classmethod
    def of(cls, values: list[float], spec: ParamSpec, like: Tensor) -> Rate:
        """Make a rate from one number per parameter tensor."""
        if len(set(values)) == 1:
            return cls(values[0])
        return cls(spec.expand(values, like), tuple(values))


def rate_at(name: str, schedule: Schedule, step: int, high: float = math.inf) -> float:
    """Return the rate at a step, checked; the schedule is a number or a function of the step."""
    return checks.rate(name, schedule(step) if callable(schedule) else schedule, high)


def warmed_up(precision_lr: float, step: int) -> float:
    """Return β of a step counted from 1, or 1/(t+1) while that is more, so that the precision averages all it has seen.

    The mean moves by α P⁻¹ĝ. A precision that starts at `init_precision` and learns with a small β needs 1/β steps to
    hear of the curvature; a mean that moves faster than that overshoots, to where gradients are larger still. A rate of
    zero stays zero.
    """
    return max(precision_lr, 1.0 / (step + 1)) if precision_lr else 0.0


@dataclass(eq=False)
class InverseTime:
    """lr_t = lr / (1 + t^decay), t counted from `first`; picklable, so schedulers can be saved."""

    lr: float
    decay: float
    first: int = 1

    def __call__(self, step: int) -> float:
        """Return the rate at a step."""
        return float(self.lr / (1.0 + float(step + 1 - self.first) ** self.decay))


@overload
def inverse_time(target: Optimizer, decay: float = 0.51) -> LambdaLR: ...


@overload
def inverse_time(target: float, decay: float = 0.51) -> InverseTime: ...


def inverse_time(target: Optimizer | float, decay: float = 0.51) -> LambdaLR | InverseTime:
    r"""Return the paper's schedule, $\alpha_t = \alpha_0 / (1 + t^{\omega})$ with t counted in steps from 1.

    Args:
        target: an optimizer (gives a torch scheduler, call `step()` after each `opt.step()`), or α₀ itself (gives a
            function of the step for `slangvi.slang.build(lr=...)`).
        decay: ω ≥ 0; 0 holds the rate constant at α₀/2.

    Example:
        >>> inverse_time(0.1, decay=1.0)(4)
        0.02
    """
    decay = checks.number("decay", decay, 0.0, closed="low", hint="The paper uses 0.51 to 0.60.")
    if isinstance(target, Optimizer):
        return LambdaLR(target, InverseTime(1.0, decay, first=0))
    return InverseTime(checks.rate("lr", target), decay)


@dataclass(eq=False)
class Cosine:
    """A rate that falls from `lr` to nearly nothing over `steps` steps after `start`, αₜ = α₀ (1 + cos(πt/T))/2.

    Example:
        >>> rate = Cosine(0.2, 100)
        >>> rate(1), rate(50), rate(100)
        (0.199..., 0.1, 0.0002)
    """

    lr: float
    steps: int
    start: int = 0

    def __call__(self, step: int) -> float:
        """Return the rate at a step counted from 1."""
        share = min(step - self.start, self.steps) / self.steps
        return self.lr * max(0.5 * (1.0 + math.cos(math.pi * share)), 1e-3)


def by_equal_factors(first: Tensor, last: Tensor, share: float | Tensor) -> Tensor:
    """Interpolate between two positive tensors by equal factors, first · (last/first)^share."""
    found: Tensor = first * (last / first) ** share
    return found


def slow_precision(
    num_data: float, steps: int, *, curvature: float = 0.25, temperature: float = 1.0
) -> dict[str, float | bool]:
    r"""Return settings for a precision that starts high and learns slowly, to train networks with.

    Far from the optimum the empirical Fisher says little of the curvature, and weights that hardly matter yet would be
    drawn as widely as the prior allows. The high start keeps draws close and steps short until the mean has settled.

    $$ d_0 = \kappa N / \mathcal T, \qquad \beta = 10 / \text{steps} $$

    Of the start $e^{-10}$ is left in the end, or $e^{-5}$ where β falls to zero along a half cosine.

    Args:
        num_data: N.
        steps: of the whole run.
        curvature: κ, of the negative log-likelihood of one example by an output of the model: at most 1/4 for class
            probabilities, 1/σ² for a normal with standard deviation σ.
        temperature: 𝒯, where the prior's precision is divided by it too.

    Returns:
        `init_precision`, `precision_lr` and `precision_warmup`, as `SLANG` and `slang.build` take them. The mean wants
        a rate far above `precision_lr`, such as 0.1, that falls to zero. Where the prior's precision is larger than
        `init_precision`, start at that.

    Example:
        >>> slow_precision(60_000, 5_000)
        {'init_precision': 15000.0, 'precision_lr': 0.002, 'precision_warmup': False}
    """
    kappa = checks.number("curvature", curvature, 0.0, hint="It is 1/4 for classes.")
    cooled = checks.number("num_data", num_data, 0.0) / checks.number("temperature", temperature, 0.0)
    rate = min(0.5, 10.0 / checks.count("steps", steps))
    return {"init_precision": kappa * cooled, "precision_lr": rate, "precision_warmup": False}
