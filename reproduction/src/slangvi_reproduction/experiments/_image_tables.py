"""What the files of experiments on images have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._logistic_tables import Finished, finished
from slangvi_reproduction.experiments.results import Row, aggregate, read_table

__all__ = ["all_finished", "means_over_seeds", "method_of"]


def all_finished(finals: Iterable[Cell], folder: Path) -> list[Finished]:
    """Finished cells, each once: final ones and those they need."""
    cells = {cell.label: cell for final in finals for cell in (*final.needs, final)}
    return finished(cells.values(), folder)


def method_of(cell: Cell) -> str:
    """The method of a cell, without its setting or seed."""
    return cell.method.partition("-")[0]


def means_over_seeds(path: Path, columns: Sequence[str], dataset: Callable[[Mapping[str, str]], str]) -> list[Row]:
    """What is shown of a table: all of it, whenever its lines were made.

    Args:
        path: of the table.
        columns: its header, with "method" and the metrics.
        dataset: what a line belongs to.
    """
    groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for line in read_table(path, columns):
        groups.setdefault((dataset(line), line["method"]), []).append(line)
    return [
        aggregate(name, metric, method, (float(line[metric]) for line in lines))
        for metric in METRICS
        for (name, method), lines in groups.items()
    ]
