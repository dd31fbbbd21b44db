"""The table of settings that were tried on networks on images, and of those that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._cells import Cell, read_cell, write
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._logistic_tables import Finished
from slangvi_reproduction.experiments.results import read_table
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["Tuning", "chosen"]

_SETTINGS = ("neg_log_sigma", "rate", "temperature")
_MEASURED = ("validation_error_percent", "validation_nll", "chosen")


class Tuning:
    """One table.

    Args:
        names: columns in front that tell whose settings they are.
        key: what a cell has in them.

    Example:
        >>> Tuning(("method",), lambda cell: (cell.method,)).columns[:4]
        ('method', 'neg_log_sigma', 'rate', 'temperature')
    """

    def __init__(self, names: Sequence[str], key: Callable[[Cell], tuple[str, ...]]) -> None:
        self.names, self.key = tuple(names), key
        self.columns = (*self.names, *_SETTINGS, *_MEASURED)

    def labels(self, finals: Sequence[Cell]) -> Callable[[Mapping[str, str]], str | None]:
        """From a line to the cell behind it."""
        tried = {self._tried(cell, setting): cell.label for cell, setting in _searched(finals)}
        return lambda line: tried.get(self._read_back(line))

    def lines(self, finals: Sequence[Cell], done: Sequence[Finished], path: Path) -> list[tuple[Any, ...]]:
        """Every setting that was tried, and whether it was chosen.

        Args:
            finals: all final cells of the experiment.
            done: what is finished of them and of what they need.
            path: of the table as it is so far, which may know choices that were made elsewhere.
        """
        results, known = {cell.label: stored for cell, stored in done}, self._known(path)
        picked: dict[str, int] = {}
        for final in finals:
            if final.label in results:
                choice = int(results[final.label].arrays["choice"])
                picked |= {need.label: int(choice == number) for number, need in enumerate(final.needs)}
        found = {}
        for cell, setting in _searched(finals):
            if (stored := results.get(cell.label)) is not None:
                tried = self._tried(cell, setting)
                measured = [float(stored.arrays[name][0]) for name in METRICS[:2]]
                found[cell.label] = (*tried, *measured, picked.get(cell.label, known.get(tried, "")))
        return list(found.values())

    def missing(self, finals: Sequence[Cell], known: Mapping[str, Mapping[str, Any]], settings: Settings) -> list[Cell]:
        """Final cells that are not known yet; the settings they choose from count as finished where they are known.

        Args:
            finals: chosen cells.
            known: what is told of cells that were made with the same settings, by label.
            settings: where tables and cells are.
        """
        wanted = [cell for cell in finals if cell.label not in known]
        self._bring_back(wanted, known, settings.out / f"{finals[0].group}-tuning.csv", settings.cells)
        return wanted

    def _bring_back(
        self, finals: Sequence[Cell], known: Mapping[str, Mapping[str, Any]], path: Path, folder: Path
    ) -> None:
        """Make cells of settings that were tried elsewhere: two scores of the table, which is all that is chosen by."""
        scored = {self._read_back(line): [float(line[name]) for name in _MEASURED[:2]] for line in self._lines(path)}
        for cell, setting in _searched(finals):
            facts, values = known.get(cell.label), scored.get(self._tried(cell, setting))
            if facts is not None and values is not None and read_cell(cell, folder) is None:
                arrays = {name: np.array([value]) for name, value in zip(METRICS[:2], values, strict=True)}
                write(cell.path(folder), arrays, facts)

    def _known(self, path: Path) -> dict[tuple[Any, ...], str]:
        """Which settings were chosen earlier, by whatever run; a run that takes a choice over may not know it."""
        return {self._read_back(line): line["chosen"] for line in self._lines(path)}

    def _lines(self, path: Path) -> list[dict[str, str]]:
        """Of the table so far, all numbers of which can be read."""
        lines = read_table(path, self.columns) if path.is_file() else []
        for number, line in enumerate(lines, start=2):
            for name in (*_SETTINGS, *_MEASURED[:2]):
                if not _is_readable(line[name]):
                    raise ValueError(
                        f"{path} has {line[name]!r} for {name} in line {number}, which is no number. Put it back, or "
                        "delete the table and run without --extend."
                    )
        return lines

    def _tried(self, cell: Cell, setting: Mapping[str, float]) -> tuple[Any, ...]:
        """Whose setting, and which; not cooled unless it says so."""
        return (*self.key(cell), *(*setting.values(), 1.0)[: len(_SETTINGS)])

    def _read_back(self, line: Mapping[str, str]) -> tuple[Any, ...]:
        """The same from a line of the table."""
        return (*(line[name] for name in self.names), *(float(line[name]) for name in _SETTINGS))


def chosen(lines: Sequence[Mapping[str, str]], rate: str = "rate") -> str:
    """A table, for a page, of the settings that were chosen from some lines; `rate` is what it calls theirs."""
    cells = [
        [
            line["method"],
            *(f"{float(line[name]):g}" for name in _SETTINGS),
            pages.number(float(line[_MEASURED[0]]), None, 0.01),
            pages.number(float(line[_MEASURED[1]]), None, 1e-4),
        ]
        for line in lines
        if line["chosen"] == "1"
    ]
    return pages.markdown(["method", "−log σ", rate, "T", "validation error, %", "validation NLL"], cells)


def _is_readable(text: str) -> bool:
    """As a number, NaN of runs that were lost among them."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _searched(finals: Sequence[Cell]) -> Iterator[tuple[Cell, Mapping[str, float]]]:
    """Cells of settings that were tried, and these settings."""
    for final in finals:
        yield from zip(final.needs, final.settings["grid"], strict=False)
