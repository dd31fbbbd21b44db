"""A cell of an experiment: one data set with one method, and the file its result is kept in.

A finished cell is one `.npz` under `<folder>/<group>/`, named after a fingerprint of its settings: other settings are
another file, so that nothing is ever overwritten by a shorter run, and a finished cell is never computed twice. A cell
that is being computed has a `.partial.npz` beside it from which it goes on. Files are written under another name first
and then renamed, so that there is never half a file.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slangvi.environment import platform_facts
from slangvi.files import put

__all__ = ["Arrays", "Attempt", "Cell", "Stopped", "Stored", "compute", "forget", "read", "read_cell", "write"]

Arrays = dict[str, NDArray[Any]]
_ABOUT = "about"


class Stopped(Exception):  # noqa: N818  # not an error
    """A cell was asked to stop, and has kept what it had."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One data set with one method.

    Args:
        group: folder of the file; experiments that share cells share the group.
        dataset: name of the data set.
        method: name of the method.
        settings: all that decides the result, as JSON can hold it.
        work: "module:function" that computes it, called with the cell and an `Attempt`; importable in a new process.
        cost: predicted seconds.
        needs: cells whose results `work` reads.
    """

    group: str
    dataset: str
    method: str
    settings: Mapping[str, Any]
    work: str
    cost: float = 1.0
    needs: tuple[Cell, ...] = ()

    @property
    def label(self) -> str:
        """Data set and method, for people."""
        return f"{self.dataset} {self.method}"

    @cached_property
    def fingerprint(self) -> str:
        """Ten characters that change with every setting but the device: one table may be made in several places."""
        settings = {name: "cpu" if name == "device" else value for name, value in self.settings.items()}
        text = json.dumps([self.work, self.dataset, self.method, settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def path(self, folder: Path) -> Path:
        """Where the result is kept."""
        return folder / self.group / f"{self.dataset}-{self.method}-{self.fingerprint}.npz"

    def partial_path(self, folder: Path) -> Path:
        """Where an unfinished result is kept; a device cannot go on with the random numbers of another kind."""
        kind = str(self.settings.get("device", "cpu")).partition(":")[0]
        return self.path(folder).with_suffix(".partial.npz" if kind == "cpu" else f".{kind}.partial.npz")


@dataclass(frozen=True)
class Stored:
    """What a file holds.

    Args:
        arrays: by name.
        about: seconds spent, steps taken, settings.
    """

    arrays: Arrays
    about: Mapping[str, Any]


class Report(Protocol):
    """Called with the steps done and in all; True asks the cell to stop."""

    def __call__(self, done: int, steps: int) -> bool:
        """See the class."""


class Attempt:
    """The desk at which a cell is computed: what it needs, what it had, and whether it must stop.

    Args:
        cell: what is computed.
        folder: of all cells.
        report: told about progress.
        keep_every: seconds between two checkpoints.
    """

    def __init__(self, cell: Cell, folder: Path, report: Report, keep_every: float = 60.0) -> None:
        self.cell, self.folder, self.keep_every = cell, folder, keep_every
        self._report = report
        self._before = 0.0
        self._start = self._kept = perf_counter()

    @property
    def seconds(self) -> float:
        """Spent on the cell so far, earlier attempts included."""
        return self._before + perf_counter() - self._start

    def needed(self, method: str) -> Arrays:
        """The result of a needed cell."""
        return read(next(cell for cell in self.cell.needs if cell.method == method).path(self.folder)).arrays

    def include(self, seconds: float) -> None:
        """Count time that was spent on parts of the cell elsewhere."""
        self._before += seconds

    def restored(self) -> Arrays | None:
        """What an earlier attempt kept; None when there is nothing, or nothing that can be read."""
        path = self.cell.partial_path(self.folder)
        if not path.is_file():
            return None
        try:
            kept = read(path)
            self._before = float(kept.about["seconds"])
        except (KeyError, ValueError):  # the disk may have failed us, and a checkpoint can be done without
            return None
        return kept.arrays

    def tick(self, done: int, steps: int, capture: Callable[[], Arrays]) -> None:
        """Tell how far it is; keep a checkpoint when one is due.

        Args:
            done: steps taken.
            steps: in all.
            capture: what to keep, called only when something is kept.
        """
        stop = self._report(done, steps)
        if stop or perf_counter() - self._kept >= self.keep_every:
            about = {"seconds": self.seconds, "done": done, "steps": steps}
            write(self.cell.partial_path(self.folder), capture(), about)
            self._kept = perf_counter()
        if stop:
            raise Stopped(self.cell.label)


def compute(cell: Cell, folder: Path, report: Report, keep_every: float = 60.0) -> float:
    """Compute a cell and keep its result; returns the seconds it took."""
    attempt = Attempt(cell, folder, report, keep_every)
    module, _, name = cell.work.partition(":")
    arrays = getattr(import_module(module), name)(cell, attempt)
    about = {"dataset": cell.dataset, "method": cell.method, "settings": cell.settings, "seconds": attempt.seconds}
    write(cell.path(folder), arrays, about | platform_facts(str(cell.settings.get("device", "cpu"))))
    cell.partial_path(folder).unlink(missing_ok=True)
    return attempt.seconds


def read_cell(cell: Cell, folder: Path) -> Stored | None:
    """The result of a cell if it is finished and readable."""
    path = cell.path(folder)
    try:
        return read(path) if path.is_file() else None
    except ValueError:
        return None


def forget(cell: Cell, folder: Path) -> None:
    """Remove the result and the checkpoint."""
    cell.path(folder).unlink(missing_ok=True)
    cell.partial_path(folder).unlink(missing_ok=True)


def write(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Arrays and a JSON text in one file, all or nothing."""
    text = np.array(json.dumps(about))
    put(path, lambda file: np.savez(file, allow_pickle=False, **arrays, **{_ABOUT: text}))


def read(path: Path) -> Stored:
    """What `write` wrote; ValueError for anything else."""
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return Stored(arrays, json.loads(str(arrays.pop(_ABOUT))))
    except (OSError, KeyError, TypeError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or not a result of ours ({error}). Remove it, or use --force.") from error
