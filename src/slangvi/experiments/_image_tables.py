"""What the files of experiments on images have in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slangvi.experiments._cells import Cell
from slangvi.experiments._logistic_tables import Finished, finished

__all__ = ["all_finished", "method_of"]


def all_finished(finals: Iterable[Cell], folder: Path) -> list[Finished]:
    """Finished cells, each once: final ones and those they need."""
    cells = {cell.label: cell for final in finals for cell in (*final.needs, final)}
    return finished(cells.values(), folder)


def method_of(cell: Cell) -> str:
    """The method of a cell, without its setting or seed."""
    return cell.method.partition("-")[0]
