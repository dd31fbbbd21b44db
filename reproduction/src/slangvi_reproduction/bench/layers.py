"""Convolution and attention: a residual network and a transformer, both engines against Adam and IVON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slangvi_reproduction.bench import own, peers
from slangvi_reproduction.bench._measure import BASELINE, FLOOR, Contender, compare, measure
from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.networks import Problem, ResNet20, Transformer, images, tokens
from slangvi_reproduction.bench.record import Row, Settings

__all__ = ["ABOUT", "DENSE", "RANK", "REPEATS", "TITLE", "notes", "problems", "rows", "with_goals"]

TITLE = "Convolution and attention"
ABOUT = """\
ResNet-20 with GroupNorm on images of $32 \\times 32$, and a causal transformer of six layers and width 256 on 64 tokens
of a vocabulary of 1000; 8 examples on a CPU, 64 on a GPU, 2 draws, rank 8. *Dense* forms the gradient of every example.
"""
RANK, DRAWS = 8, 2
REPEATS = 7  # a step may take seconds
DENSE = "slang functional, dense"


def problems(settings: Settings) -> dict[str, Problem]:
    """The networks by name, each with a batch that suits the device."""
    if settings.quick:
        return {
            "small residual": images(lambda: ResNet20(4, 1), 4, 8, DRAWS, settings.device),
            "small transformer": tokens(lambda: Transformer(20, 16, 2, 1, 8), 4, 8, 20, DRAWS, settings.device),
        }
    batch = 64 if settings.device == "cuda" else 8
    return {
        "ResNet-20": images(ResNet20, batch, 32, DRAWS, settings.device),
        "transformer": tokens(lambda: Transformer(1000, 256, 4, 6, 64), batch, 64, 1000, DRAWS, settings.device),
    }


def rows(settings: Settings, rates: Rates) -> list[Row]:
    """Every contender on every network; ratios are to Adam on M·S examples of the same network."""
    found = []
    for name, problem in problems(settings).items():
        size = sum(p.numel() for p in problem.model().parameters())
        labels: dict[str, int | str] = {"network": name, "P": size}
        entries = [replace(c, settings=labels) for c in contenders(problem, settings.device)]
        measured = compare(measure(entries, settings))
        found += measured if settings.quick else with_goals(measured)
    return found


def contenders(problem: Problem, device: str) -> list[Contender]:
    """Adam, IVON, and SLANG by either engine."""
    return [
        *peers.contenders(problem, device, names=(FLOOR, BASELINE, "ivon")),
        own.functional(problem, RANK),
        *own.compiled(problem, RANK),
        own.functional(problem, RANK, DENSE, engine="dense"),
        own.loop(problem, RANK),
        *own.compiled_loop(problem, RANK),
    ]


def with_goals(rows: Sequence[Row]) -> list[Row]:
    """The factored engine must never need more memory than the dense one."""
    dense = next((row.peak_mb for row in rows if row.name == DENSE), None)
    return [
        _judged(row, dense) if row.name in (own.FUNCTIONAL, own.COMPILED, own.LOOP, own.COMPILED_LOOP) else row
        for row in rows
    ]


def _judged(row: Row, dense: float | None) -> Row:
    if dense is None or row.peak_mb is None:
        return row
    met = row.peak_mb <= dense
    return replace(row, target=f"{'✓' if met else '✗'} peak ≤ dense", met=met)


def notes(rows: Sequence[Row]) -> list[str]:
    """Whether the dense engine is ever the smaller."""
    judged = [row.met for row in rows if row.met is not None]
    said = f"{sum(judged)} of {len(judged)} rows of the factored engine hold no more memory than the dense one."
    return [said] if judged else []
