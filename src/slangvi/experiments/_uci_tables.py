"""From cells with small networks to the files of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from slangvi._environment import environment
from slangvi.data import load_uci
from slangvi.experiments._cells import Cell
from slangvi.experiments._logistic_tables import (
    TRACE_COLUMNS,
    Finished,
    Outcome,
    finished,
    refuse_smaller,
    trace_lines,
)
from slangvi.experiments._results import aggregate, refuse_shorter, write_about, write_rows, write_table
from slangvi.experiments._runner import Progress, run_cells
from slangvi.experiments._settings import Settings

__all__ = ["HIGHER", "Columns", "run_table"]

# Metrics that are better when higher.
HIGHER = {"test_log_likelihood", "validation_log_likelihood"}
# Arrays with one entry for each split, metrics first.
Columns = tuple[str, ...]


def run_table(
    name: str,
    wanted: Sequence[Cell],
    every: Sequence[Cell],
    columns: Columns,
    common: dict[str, Any],
    settings: Settings,
    progress: Progress,
    traces: Mapping[str, str] | None = None,
    require: Callable[[str], object] | None = None,
) -> Outcome:
    """Compute chosen cells, and write the tables of all that are finished.

    Args:
        name: of the experiment.
        wanted: cells to compute.
        every: all cells of the experiment.
        columns: of the table of splits; the first two are the metrics.
        common: settings that all cells share.
        settings: what was chosen.
        progress: told what happens.
        traces: metrics along the way and their arrays, for a table of these in place of that of splits.
        require: reads a data set, to see that it is there; None reads UCI data.
    """
    start, about = perf_counter(), settings.out / f"{name}.json"
    refuse_shorter(about, common["epochs"], len(common["splits"]))
    refuse_smaller(about, [*wanted, *(cell for cell, _ in finished(every, settings.cells))])
    for dataset in dict.fromkeys(cell.dataset for cell in wanted):
        (require or load_uci)(dataset)  # a missing or damaged file is told before anything is computed
    run_cells(wanted, settings.cells, jobs=settings.jobs, force=settings.force, progress=progress)
    return _save(name, finished(every, settings.cells), columns, common, settings, start, traces)


def _save(
    name: str,
    cells: Sequence[Finished],
    columns: Columns,
    common: dict[str, Any],
    settings: Settings,
    start: float,
    traces: Mapping[str, str] | None,
) -> Outcome:
    rows = [
        aggregate(cell.dataset, metric, cell.method, stored.arrays[metric], min if metric in HIGHER else max)
        for metric in columns[:2]
        for cell, stored in cells
    ]
    if traces is None:
        kind, header = "splits", ("dataset", "method", "split", *columns)
        lines = [line for cell in cells for line in _split_lines(cell, columns)]
    else:
        kind, header = "trace", TRACE_COLUMNS
        lines = [line for metric, array in traces.items() for line in trace_lines(cells, metric, array)]
    paths = [settings.out / f"{name}{end}" for end in (".csv", f"-{kind}.csv", ".json")]
    write_rows(paths[0], rows)
    write_table(paths[1], header, lines)
    write_about(paths[2], _about(name, cells, common, settings, start))
    return Outcome(rows, paths)


def _about(
    name: str, cells: Sequence[Finished], common: dict[str, Any], settings: Settings, start: float
) -> dict[str, Any]:
    """Command, settings, environment, and the seconds of every cell."""
    spent = sum(stored.about["seconds"] for _, stored in cells)
    return {
        "experiment": name,
        **environment(settings.command, settings.device, spent),
        "jobs": settings.jobs,
        "wall_seconds": round(perf_counter() - start, 1),
        "seed": settings.seed,
        "settings": {"quick": settings.quick, **common, "splits": len(common["splits"])},
        "cells": {cell.label: {"seconds": round(stored.about["seconds"], 1)} for cell, stored in cells},
    }


def _split_lines(done: Finished, columns: Columns) -> list[tuple[Any, ...]]:
    """What was measured and chosen on every split."""
    cell, stored = done
    values = [stored.arrays[name] for name in columns]
    return [
        (cell.dataset, cell.method, split, *(float(value[k]) for value in values))
        for k, split in enumerate(cell.settings["splits"])
    ]
