"""From cells with small networks to the files of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from slangvi_reproduction.data import load_uci
from slangvi_reproduction.experiments._about import about_run
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._earlier import Earlier
from slangvi_reproduction.experiments._logistic_tables import TRACE_COLUMNS, Finished, Outcome, finished, trace_lines
from slangvi_reproduction.experiments.results import aggregate, refuse_shorter, write_about, write_rows, write_table
from slangvi_reproduction.experiments.runner import Progress, run_cells
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["HIGHER", "Along", "Columns", "run_table"]

# Metrics that are better when higher.
HIGHER = {"test_log_likelihood", "validation_log_likelihood"}
# Arrays with one entry for each split, metrics first.
Columns = tuple[str, ...]


class Along(NamedTuple):
    """Cells with metrics along the way, beside those of a table.

    Args:
        wanted: to compute.
        every: of the experiment.
    """

    wanted: Sequence[Cell]
    every: Sequence[Cell]


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
    along: Along | None = None,
) -> Outcome:
    """Compute chosen cells, and write the tables of all that are finished, here or earlier.

    Args:
        name: of the experiment.
        wanted: cells to compute.
        every: all cells of the experiment.
        columns: of the table of splits; the first two are the metrics.
        common: settings that all cells share.
        settings: what was chosen.
        progress: told what happens.
        traces: metrics along the way and their arrays, for a table of these.
        require: reads a data set, to see that it is there; None reads UCI data.
        along: cells that have the traces; None when all cells have, and then there is no table of splits.
    """
    start, about, told = perf_counter(), settings.out / f"{name}.json", common | {"splits": len(common["splits"])}
    traced = along or Along([], [])
    chosen, planned = [*wanted, *traced.wanted], [*every, *traced.every]
    refuse_shorter(about, told["epochs"], told["splits"])
    earlier = Earlier(about, told, planned, [*chosen, *(cell for cell, _ in finished(planned, settings.cells))])
    for dataset in dict.fromkeys(cell.dataset for cell in wanted):
        (require or load_uci)(dataset)  # a missing or damaged file is told before anything is computed
    run_cells(chosen, settings.cells, jobs=settings.jobs, force=settings.force, progress=progress)
    done = finished(every, settings.cells), None if along is None else finished(along.every, settings.cells)
    return _save(name, *done, columns, told, settings, start, traces or {}, earlier)


def _save(
    name: str,
    cells: Sequence[Finished],
    traced: Sequence[Finished] | None,
    columns: Columns,
    told: dict[str, Any],
    settings: Settings,
    start: float,
    traces: Mapping[str, str],
    earlier: Earlier,
) -> Outcome:
    done = [*cells, *(traced or [])]
    earlier.forget(cell for cell, _ in done)
    rows = [
        aggregate(cell.dataset, metric, cell.method, stored.arrays[metric], _worst(metric))
        for metric in columns[:2]
        for cell, stored in cells
    ]
    tables: dict[str, tuple[Sequence[str], list[tuple[Any, ...]]]] = {}
    if traced is not None or not traces:
        lines = [line for cell in cells for line in _split_lines(cell, columns)]
        tables["splits"] = ("dataset", "method", "split", *columns), lines
    if traces:
        have = cells if traced is None else traced
        lines = [line for metric, array in traces.items() for line in trace_lines(have, metric, array, _worst(metric))]
        tables["trace"] = TRACE_COLUMNS, lines
    paths = [settings.out / f"{name}{end}" for end in (".csv", *(f"-{kind}.csv" for kind in tables), ".json")]
    rows = earlier.rows(paths[0], rows)
    write_rows(paths[0], rows)
    for path, (header, lines) in zip(paths[1:-1], tables.values(), strict=True):
        write_table(path, header, earlier.merged(path, header, lines))
    write_about(paths[-1], about_run(name, done, told, settings, start, kept=earlier.cells))
    return Outcome(rows, paths)


def _worst(metric: str) -> Callable[[list[float]], float]:
    return min if metric in HIGHER else max


def _split_lines(done: Finished, columns: Columns) -> list[tuple[Any, ...]]:
    """What was measured and chosen on every split."""
    cell, stored = done
    values = [stored.arrays[name] for name in columns]
    return [
        (cell.dataset, cell.method, split, *(float(value[k]) for value in values))
        for k, split in enumerate(cell.settings["splits"])
    ]
