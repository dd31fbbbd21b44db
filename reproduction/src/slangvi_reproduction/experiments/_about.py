"""How the results of an experiment came about, for the JSON beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from slangvi.environment import PLATFORM, environment
from slangvi_reproduction.experiments._cells import Cell, Stored
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["about_run"]


def about_run(
    name: str,
    cells: Sequence[tuple[Cell, Stored]],
    chosen: Mapping[str, Any],
    settings: Settings,
    start: float,
    more: Callable[[Cell, Stored], Mapping[str, Any]] = lambda cell, stored: {},
    kept: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Command, settings, environment, and what is to be known of every cell.

    Args:
        name: of the experiment.
        cells: finished ones with their results.
        chosen: settings that all cells share, as JSON can hold them.
        settings: what was chosen on the command line.
        start: of the run, by `perf_counter`.
        more: what else is to be told of a cell.
        kept: what was told earlier of cells that are not here.
    """
    before = dict(kept or {})
    spent = sum(stored.about["seconds"] for _, stored in cells) + sum(facts["seconds"] for facts in before.values())
    here = environment(settings.command, settings.device, spent)
    return {
        "experiment": name,
        **here,
        "jobs": settings.jobs,
        "wall_seconds": round(perf_counter() - start, 1),
        "seed": settings.seed,
        "settings": {"quick": settings.quick, **chosen},
        "cells": before
        | {cell.label: {**_about_cell(cell, stored, here), **more(cell, stored)} for cell, stored in cells},
    }


def _about_cell(cell: Cell, stored: Stored, here: Mapping[str, Any]) -> dict[str, Any]:
    """How long it took, and on what; a cell of a time when that was not kept was computed here."""
    facts = {name: stored.about.get(name, here[name]) for name in PLATFORM}
    return {"fingerprint": cell.fingerprint, "seconds": round(stored.about["seconds"], 1), **facts}
