"""What a run knows of its cells: which are finished, which are left, and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slangvi_reproduction.experiments._cells import Cell, forget, read_cell

__all__ = ["CellsFailed", "Interrupted", "Ledger", "Progress", "Sparing", "Status", "said"]


@dataclass(frozen=True)
class Status:
    """Something happened to a cell.

    Args:
        event: "kept" (it was finished before), "started", "advanced", "finished" or "failed".
        label: of the cell.
        done: steps taken in it.
        steps: in all; 0 while unknown.
        seconds: spent on it, once finished.
        finished: cells finished by now.
        cells: in all.
        share: of all work, by predicted cost, 0…1.
        seconds_left: of the whole run; None while nobody can tell.
    """

    event: str
    label: str
    done: int
    steps: int
    seconds: float
    finished: int
    cells: int
    share: float
    seconds_left: float | None


Progress = Callable[[Status], None]


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; says what is kept."""


class CellsFailed(RuntimeError):  # noqa: N818  # reads better than an Error
    """Some cells raised; the others are finished and kept."""


class Ledger:
    """Which cells are finished, which are left, and how long the rest may take.

    Args:
        cells: of the run, needed ones included.
        folder: where results are kept.
        progress: told what happens.
        force: forget finished cells first.
    """

    def __init__(self, cells: Sequence[Cell], folder: Path, progress: Progress, force: bool) -> None:
        self.folder, self.progress, self.force = folder, progress, force
        self.cells = cells
        self.failures: list[str] = []
        self.begun = time.perf_counter()
        self.pending: list[Cell] = []
        self.stopped = False
        if force:
            for cell in cells:
                forget(cell, folder)
        kept: list[Cell] = []
        for cell in sorted(cells, key=lambda cell: -cell.cost):
            (self.pending if read_cell(cell, folder) is None else kept).append(cell)
        self.shares = {cell.path(folder): 1.0 for cell in kept}
        self.before = self._work_done()
        for cell in kept:
            self.tell("kept", cell)

    def take(self) -> Cell | None:
        """The longest cell whose needs are met."""
        for cell in self.pending:
            if all(self.shares.get(need.path(self.folder)) == 1.0 for need in cell.needs):
                self.pending.remove(cell)
                self.tell("started", cell)
                return cell
        return None

    def advanced(self, cell: Cell, done: int, steps: int) -> None:
        """A cell has done so many of its steps."""
        path = cell.path(self.folder)
        if path not in self.shares:  # what an earlier run left does not count as this run's speed
            self.before += cell.cost * done / steps
        self.shares[path] = min(done / steps, 0.999)
        self.tell("advanced", cell, done, steps)

    def finished(self, cell: Cell, seconds: float) -> None:
        """A cell is finished and kept."""
        self.shares[cell.path(self.folder)] = 1.0
        self.tell("finished", cell, seconds=seconds)

    def failed(self, cell: Cell, reason: str) -> None:
        """A cell will not be finished."""
        self.failures.append(f"{cell.label}: {reason}")
        self.tell("failed", cell)

    def tell(self, event: str, cell: Cell, done: int = 0, steps: int = 0, seconds: float = 0.0) -> None:
        """Pass on what happened, and how far the whole run is by predicted cost."""
        total, work = sum(cell.cost for cell in self.cells), self._work_done()
        fresh = work - self.before
        left = (time.perf_counter() - self.begun) * (total - work) / fresh if fresh > 0.005 * total else None
        finished = sum(share == 1.0 for share in self.shares.values())
        share = work / total if total else 1.0
        self.progress(Status(event, cell.label, done, steps, seconds, finished, len(self.cells), share, left))

    def _work_done(self) -> float:
        return sum(cell.cost * self.shares.get(cell.path(self.folder), 0.0) for cell in self.cells)

    def close(self) -> None:
        """Say what went wrong, if anything did."""
        finished = sum(share == 1.0 for share in self.shares.values())
        if self.stopped and finished < len(self.cells):
            again = "The same command without --force" if self.force else "The same command"
            failed = "".join(f"\n{failure}" for failure in self.failures)
            raise Interrupted(
                f"{finished} of {len(self.cells)} cells are finished and kept in {self.folder}, unfinished ones up to "
                f"where they were. {again} goes on from there.{failed}"
            )
        if self.failures:
            kept = f"{finished} of {len(self.cells)} cells are finished and kept in {self.folder}."
            raise CellsFailed("\n".join([*self.failures, kept]))


class Sparing:
    """Passes progress on twice a second, and the wish to stop at once."""

    def __init__(self, tell: Callable[[int, int], None], stop: Callable[[], bool]) -> None:
        self.tell, self.stop, self.told = tell, stop, -1.0

    def __call__(self, done: int, steps: int) -> bool:
        stop = self.stop()  # first: when nobody listens any more there is nobody to tell
        if not stop and (time.perf_counter() - self.told > 0.5 or done == steps):
            self.told = time.perf_counter()
            self.tell(done, steps)
        return stop


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"
