"""What the files of experiments on images have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from slangvi._environment import environment
from slangvi.experiments._cells import Cell
from slangvi.experiments._logistic_tables import Finished, finished
from slangvi.experiments._settings import Settings

__all__ = ["about_run", "all_finished", "method_of"]


def all_finished(finals: Iterable[Cell], folder: Path) -> list[Finished]:
    """Finished cells, each once: final ones and those they need."""
    cells = {cell.label: cell for final in finals for cell in (*final.needs, final)}
    return finished(cells.values(), folder)


def method_of(cell: Cell) -> str:
    """The method of a cell, without its setting or seed."""
    return cell.method.partition("-")[0]


def about_run(
    name: str, done: Sequence[Finished], common: Mapping[str, Any], settings: Settings, start: float
) -> dict[str, Any]:
    """Command, settings, environment, and the seconds of every cell."""
    spent = sum(stored.about["seconds"] for _, stored in done)
    return {
        "experiment": name,
        **environment(settings.command, settings.device, spent),
        "jobs": settings.jobs,
        "wall_seconds": round(perf_counter() - start, 1),
        "settings": {"quick": settings.quick, **common},
        "cells": {cell.label: {"seconds": round(stored.about["seconds"], 1)} for cell, stored in done},
    }
