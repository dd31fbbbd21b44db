"""Processes that compute cells; they live as long as the run, since importing torch takes seconds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from slangvi_reproduction.experiments._cells import Cell, Stopped, compute
from slangvi_reproduction.experiments._ledger import Ledger, Sparing, said

__all__ = ["in_processes"]

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class _Worker:
    """A process, the pipe to it, and what it is doing."""

    process: BaseProcess
    pipe: Connection
    cell: Cell | None = None


def in_processes(ledger: Ledger, stop: Callable[[], bool], keep_every: float, jobs: int) -> None:
    """Hand out cells until none is left, or until asked to stop.

    Args:
        ledger: what is to be computed.
        stop: whether the user wants to stop; cells then keep what they have.
        keep_every: seconds between two checkpoints of a cell.
        jobs: processes at most.
    """
    workers = [_start(ledger.folder, keep_every) for _ in range(min(jobs, len(ledger.pending)))]
    asked = False
    try:
        while True:
            if stop() and not asked:
                asked = True
                for worker in workers:
                    _send(worker, None)
            for worker in [] if asked else [worker for worker in workers if worker.cell is None]:
                worker.cell = ledger.take()
                if worker.cell is not None:
                    _send(worker, worker.cell)
            busy = {worker.pipe: worker for worker in workers if worker.cell is not None}
            if not busy:
                break
            for pipe in wait(list(busy), timeout=0.2):
                _hear(busy[pipe], ledger)  # type: ignore[index]
            workers = [worker for worker in workers if not worker.pipe.closed]
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.join(5.0)
            worker.process.kill()
    ledger.stopped = stop()


def _send(worker: _Worker, message: Cell | None) -> None:
    """To a process that may have died; if so, reading from it will tell."""
    with suppress(BrokenPipeError, ConnectionResetError):
        worker.pipe.send(message)


def _start(folder: Path, keep_every: float) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folder, keep_every), daemon=True)
    with _inherited():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _inherited() -> Iterator[None]:
    """What a process that is started now takes over: one thread, and no ear for Ctrl-C.

    Ctrl-C reaches the whole group of processes, but only the first one shall decide what to do.
    """
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        if main:
            signal.signal(signal.SIGINT, handler)


def _hear(worker: _Worker, ledger: Ledger) -> None:
    """One message of a busy worker."""
    assert worker.cell is not None
    try:
        event, *rest = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(5.0)
        ledger.failed(worker.cell, f"its process died with exit code {worker.process.exitcode}; was memory short?")
        worker.pipe.close()
        return
    if event == "advanced":
        ledger.advanced(worker.cell, *rest)
        return
    if event == "finished":
        ledger.finished(worker.cell, *rest)
    elif event == "failed":
        ledger.failed(worker.cell, *rest)
    worker.cell = None


def _serve(pipe: Connection, folder: Path, keep_every: float) -> None:
    """Compute the cells that come through the pipe; None, or its end, asks to stop."""
    report = Sparing(lambda done, steps: pipe.send(("advanced", done, steps)), pipe.poll)
    try:
        while (cell := pipe.recv()) is not None:
            try:
                pipe.send(("finished", compute(cell, folder, report, keep_every)))
            except Stopped:
                pipe.send(("stopped",))
                return
            except Exception as error:
                pipe.send(("failed", said(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the run is over
