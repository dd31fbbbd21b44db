"""Many cells in several processes: longest first, each kept when it is done, interrupted and taken up again at will."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slangvi_reproduction.experiments._cells import Cell, Stopped, compute
from slangvi_reproduction.experiments._ledger import CellsFailed, Interrupted, Ledger, Progress, Sparing, Status, said
from slangvi_reproduction.experiments._workers import in_processes

__all__ = ["CellsFailed", "Interrupted", "Progress", "Status", "run_cells"]


def run_cells(
    cells: Iterable[Cell],
    folder: Path,
    *,
    jobs: int = 1,
    force: bool = False,
    progress: Progress = lambda status: None,
    keep_every: float = 60.0,
) -> None:
    """Compute all cells that are not finished, with those they need.

    Args:
        cells: what is wanted.
        folder: where results are kept.
        jobs: processes; 1 computes in this one.
        force: forget finished cells first.
        progress: told what happens.
        keep_every: seconds between two checkpoints of a cell.
    """
    ledger = Ledger(_with_needs(cells), folder, progress, force)
    with _interrupts() as stop:
        if jobs == 1:
            _inline(ledger, stop, keep_every)
        elif ledger.pending:
            in_processes(ledger, stop, keep_every, jobs)
    ledger.close()


def _with_needs(cells: Iterable[Cell]) -> list[Cell]:
    """Every cell once, and those it needs."""
    found: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        for each in (*_with_needs(cell.needs), cell):
            found.setdefault((each.group, each.label, each.fingerprint), each)
    return list(found.values())


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. The first asks politely, so that cells keep what they have; a later one insists."""
    pressed = threading.Event()
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def heard(number: int, frame: Any) -> None:
        nonlocal first
        if not pressed.is_set():
            first = time.perf_counter()
            pressed.set()
        elif time.perf_counter() - first > 1.0:  # wrappers like to send a signal twice
            raise KeyboardInterrupt("Stopped at once; cells are kept up to their last checkpoint.")

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _inline(ledger: Ledger, stop: Callable[[], bool], keep_every: float) -> None:
    """One cell after the other, in this process and, as sums depend on it, by one thread as in any other."""
    from slangvi.linalg.threads import one_thread

    with one_thread():
        _one_by_one(ledger, stop, keep_every)
    ledger.stopped = stop()


def _one_by_one(ledger: Ledger, stop: Callable[[], bool], keep_every: float) -> None:
    while not stop() and (cell := ledger.take()) is not None:
        report = Sparing(partial(ledger.advanced, cell), stop)
        try:
            ledger.finished(cell, compute(cell, ledger.folder, report, keep_every))
        except Stopped:
            break
        except Exception as error:
            ledger.failed(cell, said(error))
