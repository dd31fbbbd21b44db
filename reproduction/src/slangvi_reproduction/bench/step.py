"""One training step of the paper's 784-400-400-10 network: SLANG at three ranks, and everybody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slangvi_reproduction.bench import own, peers
from slangvi_reproduction.bench._measure import compare, measure
from slangvi_reproduction.bench.limits import Rates, Shape, least_seconds
from slangvi_reproduction.bench.networks import mlp, vectors
from slangvi_reproduction.bench.record import Row, Settings

__all__ = [
    "ABOUT",
    "FULL",
    "QUICK",
    "REPEATS",
    "TITLE",
    "Goal",
    "Work",
    "goals",
    "judge",
    "notes",
    "rows",
    "with_goals",
]

TITLE = "One step of a small network"
ABOUT = """\
The paper's 784-400-400-10 network, $P = 478{,}410$, with $M = 200$ examples, $S = 4$ draws and $N = 60{,}000$.
laplace-torch does not train: its rows are the time of one fit to $M \\cdot S$ examples around a trained network, and an
epoch of fitting is $N / (M S) = 75$ of them.
"""


@dataclass(frozen=True)
class Work:
    """Sizes of the network from input to output, batch M, draws S, ranks L."""

    sizes: tuple[int, ...]
    batch: int
    draws: int
    ranks: tuple[int, ...]

    def shape(self, rank: int) -> Shape:
        """For counting, at one rank."""
        return Shape(self.sizes, self.batch, self.draws, rank)


REPEATS = 15
FULL = Work((784, 400, 400, 10), 200, 4, (1, 8, 32))
QUICK = Work((20, 16, 16, 4), 10, 2, (1, 2))

# What was asked for, by rank: milliseconds on an H200, ratio to Adam on two CPU cores, and 10⁶ bytes.
MILLISECONDS = {1: 1.0, 8: 1.5, 32: 2.5}
RATIOS = {1: 2.5, 8: 5.0, 32: 15.0}
EXTRA_MB = {1: 100.0}
LIKE_IVON = 8  # the rank at which the optimizer must not be slower than IVON on a GPU


def rows(settings: Settings, rates: Rates) -> list[Row]:
    """Peers, then SLANG; all ratios are to Adam on M·S examples."""
    work = QUICK if settings.quick else FULL
    problem = vectors(lambda: mlp(work.sizes), work.batch, work.sizes[0], work.sizes[-1], work.draws, settings.device)
    entries = peers.contenders(problem, settings.device, work.ranks)
    for rank in work.ranks:
        entries += [own.functional(problem, rank), *own.compiled(problem, rank)]
        entries += [own.loop(problem, rank), *own.compiled_loop(problem, rank)]
    found = [_with_share(row, work, rates) for row in compare(measure(entries, settings))]
    return found if settings.quick else with_goals(found, settings.device)


def notes(rows: Sequence[Row]) -> list[str]:
    """How many targets are met."""
    marks = "".join(row.target for row in rows)
    met, asked = marks.count("✓"), marks.count("✓") + marks.count("✗")
    return [f"{met} of {asked} targets are met."] if asked else []


def _with_share(row: Row, work: Work, rates: Rates) -> Row:
    """How near the functional step comes to what the machine can do."""
    if row.name not in (own.FUNCTIONAL, own.COMPILED) or row.milliseconds is None:
        return row
    return replace(row, share=1e3 * least_seconds(work.shape(int(row.settings["L"])), rates) / row.milliseconds)


class Goal(NamedTuple):
    """A quantity of a row, the most it may be, and how that is written."""

    value: float | None
    most: float
    text: str

    @property
    def met(self) -> bool:
        """Whether it was measured and is small enough."""
        return self.value is not None and self.value <= self.most


def goals(row: Row, device: str, ivon: float | None) -> list[Goal]:
    """What a row was asked to reach, given IVON's milliseconds."""
    rank, found = int(row.settings.get("L", 0)), []
    functional = row.name in (own.FUNCTIONAL, own.COMPILED)
    if functional and device == "cuda" and rank in MILLISECONDS:
        found.append(Goal(row.milliseconds, MILLISECONDS[rank], f"≤ {MILLISECONDS[rank]} ms"))
    if functional and device == "cpu" and rank in RATIOS:
        found.append(Goal(row.ratio, RATIOS[rank], f"≤ {RATIOS[rank]:g} × Adam"))
    if row.name in (own.LOOP, own.COMPILED_LOOP) and device == "cuda" and rank == LIKE_IVON and ivon is not None:
        found.append(Goal(row.milliseconds, ivon, "≤ IVON"))
    if (functional or row.name in (own.LOOP, own.COMPILED_LOOP)) and rank in EXTRA_MB:
        found.append(Goal(row.extra_mb, EXTRA_MB[rank], f"≤ {EXTRA_MB[rank]:g} MB extra"))
    return found


def with_goals(rows: Sequence[Row], device: str) -> list[Row]:
    """Targets written beside the rows, and whether all of a row's are met."""
    ivon = next((row.milliseconds for row in rows if row.name == "ivon"), None)
    return [judge(row, goals(row, device, ivon)) for row in rows]


def judge(row: Row, goals: Sequence[Goal]) -> Row:
    """Write the goals beside a row, and whether all of them are met."""
    target = ", ".join(f"{'✓' if goal.met else '✗'} {goal.text}" for goal in goals)
    return replace(row, target=target, met=all(goal.met for goal in goals) if goals else None)
