"""How time and memory grow with the number of parameters and with the rank, and one large network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slangvi_reproduction.bench import own, peers
from slangvi_reproduction.bench._measure import BASELINE, FLOOR, Contender, compare, measure
from slangvi_reproduction.bench.limits import Rates, Shape, least_seconds
from slangvi_reproduction.bench.networks import Transformer, mlp, mlp_width, tokens, vectors
from slangvi_reproduction.bench.record import Row, Settings

__all__ = ["ABOUT", "FULL", "LARGE", "QUICK", "REPEATS", "TITLE", "Sweep", "notes", "rows", "slope", "slopes"]

TITLE = "Growth"
ABOUT = """\
Networks with two hidden layers of equal width, 64 examples and two draws. The sweep over $P$ has rank 8, the sweep over
$L$ about a million parameters. Exponents are fitted to the upper part of each sweep: the largest $P$ and those up to 30
times smaller, and $L$ from 8. *Large* is a transformer of the shape of GPT-2 small, with 4 texts of 256 tokens and one
draw.
"""


@dataclass(frozen=True)
class Sweep:
    """The points of both sweeps.

    Args:
        params: P of the networks trained at `rank`.
        rank: L of the first sweep.
        ranks: L of the second sweep.
        at: P of the second sweep.
        batch: M.
        draws: S.
        inputs: width of the data.
    """

    params: tuple[float, ...]
    rank: int
    ranks: tuple[int, ...]
    at: float
    batch: int = 64
    draws: int = 2
    inputs: int = 784


_RANKS = (1, 2, 4, 8, 16, 32, 64)
FULL = {
    "cpu": Sweep((1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7), 8, _RANKS, 1e6),
    "cuda": Sweep((1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8), 8, _RANKS, 1e6),
}
QUICK = Sweep((500, 1000, 2000), 2, (1, 2), 1000, batch=4, inputs=8)
REPEATS = 7  # the large points take seconds, and a slope averages over points anyway
ALONE = 5e7  # networks of this size and more are timed one contender after the other
UPPER = {"P": 30.0, "L": 8.0}  # the slope is fitted to the points within this factor of the largest


@dataclass(frozen=True)
class Large:
    """A transformer: vocabulary, width, heads, depth, longest text, batch M, length of the texts in it."""

    vocab: int
    width: int
    heads: int
    depth: int
    longest: int
    batch: int
    length: int


LARGE = Large(50_257, 768, 12, 12, 1024, batch=4, length=256)  # GPT-2 small, 124 million parameters
_LARGE_QUICK = Large(30, 16, 2, 1, 8, batch=2, length=8)
OUTPUTS = 10


def rows(settings: Settings, rates: Rates) -> list[Row]:
    """Both sweeps, and on a GPU the large network."""
    sweep = QUICK if settings.quick else FULL[settings.device]
    found = []
    for size in sweep.params:
        found += _point("P", sweep, size, sweep.rank, settings, rates)
    for rank in sweep.ranks:
        found += _point("L", sweep, sweep.at, rank, settings, rates)
    if settings.quick or settings.device == "cuda":
        found += _large(_LARGE_QUICK if settings.quick else LARGE, sweep.rank, settings)
    return found


def _point(kind: str, sweep: Sweep, size: float, rank: int, settings: Settings, rates: Rates) -> list[Row]:
    """Adam and SLANG on a network of about `size` parameters."""
    width = mlp_width(size, sweep.inputs, OUTPUTS)
    shape = Shape((sweep.inputs, width, width, OUTPUTS), sweep.batch, sweep.draws, rank)
    problem = vectors(lambda: mlp(shape.sizes), sweep.batch, sweep.inputs, OUTPUTS, sweep.draws, settings.device)
    labels: dict[str, int | str] = {"sweep": kind, "P": shape.num_params, "L": rank}
    entries = [
        *peers.contenders(problem, settings.device, names=(FLOOR, BASELINE)),
        own.functional(problem, rank),
        *own.compiled(problem, rank),
    ]
    least = 1e3 * least_seconds(shape, rates)
    return [
        replace(row, share=least / row.milliseconds) if row.milliseconds and "slang" in row.name else row
        for row in _measured(entries, labels, settings)
    ]


def _large(large: Large, rank: int, settings: Settings) -> list[Row]:
    """A step of a transformer of the shape of GPT-2 small; one draw."""
    build = lambda: Transformer(large.vocab, large.width, large.heads, large.depth, large.longest)  # noqa: E731
    problem = tokens(build, large.batch, large.length, large.vocab, 1, settings.device)
    size = sum(p.numel() for p in problem.model().parameters())
    entries = [
        *peers.contenders(problem, settings.device, names=(FLOOR, BASELINE)),
        own.functional(problem, rank),
        own.loop(problem, rank),
    ]
    return _measured(entries, {"sweep": "large", "P": size, "L": rank}, settings)


def _measured(entries: Sequence[Contender], labels: dict[str, int | str], settings: Settings) -> list[Row]:
    """Rows without those that were needed for comparison alone; Adam knows no rank."""
    named = [replace(contender, settings=labels) for contender in entries]
    found = compare(measure(named, settings, together=int(labels["P"]) < ALONE))
    return [row for row in found if row.name != FLOOR and (row.name, labels["sweep"]) != (BASELINE, "L")]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of log y over log x.

    Example:
        >>> slope([(1.0, 3.0), (10.0, 30.0), (100.0, 300.0)])
        1.0
    """
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    above = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / math.fsum((x - mean_x) ** 2 for x in xs)


def slopes(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Fitted exponents by (contender, sweep, "time" or "memory"), over the upper part of each sweep."""
    found = {}
    for kind, factor in UPPER.items():
        for name in dict.fromkeys(row.name for row in rows if row.settings["sweep"] == kind):
            mine = [row for row in rows if row.name == name and row.settings["sweep"] == kind]
            top = max(int(row.settings[kind]) for row in mine)
            upper = [row for row in mine if int(row.settings[kind]) * factor >= top]
            for what, values in {"time": [r.milliseconds for r in upper], "memory": [r.peak_mb for r in upper]}.items():
                points = [(int(r.settings[kind]), v) for r, v in zip(upper, values, strict=True) if v]
                if len(points) > 1:
                    found[name, kind, what] = slope(points)
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """The exponents in words."""
    found = slopes(rows)
    return [
        f"{name}: time grows as {kind}^{value:.2f}, peak memory as {kind}^{found[name, kind, 'memory']:.2f}."
        for (name, kind, what), value in found.items()
        if what == "time" and (name, kind, "memory") in found
    ]
