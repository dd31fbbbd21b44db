"""Numbers of steps in bounded memory, and whether a series of them still falls, has settled, or rises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch import Tensor

from slangvi import checks

__all__ = ["History", "Trend", "trend_of"]

# A change between the last two thirds counts when it exceeds this many standard errors of the difference of their
# medians, and this share of the spread of the whole series. Fewer numbers than `FEWEST` are not judged.
ERRORS, SHARE, FEWEST = 4.0, 0.05, 12
# Standard deviation over median absolute deviation, and standard error of a median over that of a mean, for normals.
_MAD, _MEDIAN = 1.4826, 1.2533


class History:
    """Record numbers of each step in bounded memory: a place for `slangvi.track`, and a function to call yourself.

    When `capacity` steps are held, every second one is dropped, and from then on only every second new one is kept, so
    that the record always spans the whole run evenly.

    Args:
        capacity: most steps that are held.

    Example:
        >>> history = History(capacity=4)
        >>> for step in range(1, 8):
        ...     history.add(step, loss=10.0 / step)
        >>> history.steps, [round(value, 2) for value in history["loss"]]
        ([1, 3, 5, 7], [10.0, 3.33, 2.0, 1.43])
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = checks.count("capacity", capacity, least=2)
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._stride, self._seen, self._last = 1, 0, (-1, dict[str, float]())

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        """Record the numbers that `slangvi.track` sends, without prefixes; of several groups the first counts."""
        named: dict[str, float] = {}
        for name, value in numbers.items():
            *before, last = name.split("/")
            named.setdefault(before[-1] if last.isdigit() and before else last, value)
        self.add(step, **named)

    def add(self, step: int, **numbers: float | Tensor) -> None:
        """Record numbers of a step; those of the step that came last are added to what is known of it.

        Args:
            step: number of the step.
            numbers: such as `loss`, N times the mean loss, where your own loop knows it and the optimizer does not.
        """
        step = checks.count("step", step, least=0)
        found = {name: float(x.detach() if isinstance(x, Tensor) else x) for name, x in numbers.items()}
        if self._last[0] == step:
            self._last[1].update(found)
            return
        self._last = step, found
        if self._seen % self._stride == 0 and len(self) == self.capacity:
            self._rows = self._rows[::2]
            self._stride *= 2
        if self._seen % self._stride == 0:
            self._rows.append(self._last)
        self._seen += 1

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps(self) -> list[int]:
        """Steps that are held."""
        return [step for step, _ in self._rows]

    def __getitem__(self, name: str) -> list[float]:
        """Return the numbers of one name over the steps held; NaN where a step did not tell it."""
        return [numbers.get(name, math.nan) for _, numbers in self._rows]

    @property
    def names(self) -> list[str]:
        """Names that at least one step has."""
        return sorted({name for _, numbers in self._rows for name in numbers})

    @property
    def curves(self) -> dict[str, list[float]]:
        """All numbers by name, over those of `step`."""
        return {"step": [float(step) for step in self.steps], **{name: self[name] for name in self.names}}


@dataclass(frozen=True)
class Trend:
    """Direction of a series of numbers.

    Args:
        direction: "falling", "settled", "rising", or "short" for fewer than 12 numbers.
        change: median of the last third minus that of the middle third.
        noise: standard deviation from one number to the next, by the median absolute deviation.
        level: median of the last third.
    """

    direction: str
    change: float
    noise: float
    level: float


def trend_of(values: list[float]) -> Trend:
    r"""Compare the medians of the last two thirds of a series with its noise.

    With n numbers, noise σ = 1.4826 · MAD(Δ)/√2 of their differences Δ, and the medians m₂ and m₃ of the last two
    thirds, the series has settled unless

    $$ |m_3 - m_2| > \max\bigl(4 \cdot 1.2533\,\sigma\sqrt{6/n},\ 0.05\,(q_{95} - q_{5})\bigr). $$

    Single jumps move neither medians nor MAD. NaN is left out; an infinite number counts as rising.

    Example:
        >>> trend_of([1.0 + 0.7**step for step in range(30)]).direction
        'settled'
        >>> trend_of([float(-step) for step in range(30)]).direction
        'falling'
    """
    known = [value for value in values if not math.isnan(value)]
    if len(known) < FEWEST:
        return Trend("short", math.nan, math.nan, median(known) if known else math.nan)
    third = len(known) // 3
    before, last = median(known[-2 * third : -third]), median(known[-third:])
    if math.isinf(last):
        return Trend("rising" if last > 0 else "falling", math.nan, math.nan, last)
    finite = [value for value in known if math.isfinite(value)]
    steps, ordered = [b - a for a, b in pairwise(finite)], sorted(finite)
    middle, change = median(steps), last - before
    noise = _MAD * median(abs(step - middle) for step in steps) / math.sqrt(2)
    spread = ordered[int(0.95 * (len(ordered) - 1))] - ordered[int(0.05 * (len(ordered) - 1))]
    limit = max(ERRORS * _MEDIAN * noise * math.sqrt(2 / third), SHARE * spread)
    direction = "settled" if not abs(change) > limit else "rising" if change > 0 else "falling"
    return Trend(direction, change, noise, last)
