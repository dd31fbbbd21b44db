"""One at a time: threads and processes that want to write the same file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slangvi.errors import DataError
from slangvi.files import try_lock

__all__ = ["alone"]


@contextmanager
def alone(target: Path, patience: float) -> Iterator[None]:
    """One process or thread at a time fetches a file.

    The lock is the operating system's, on an open file, so it ends with the process that holds it; a lock file somebody
    left behind is nobody's lock. Where the system has no such locks two may fetch the same file. That costs time only,
    as each writes a file of its own until the last rename.
    """
    lock = target.with_name(f".{target.name}.lock")
    handle = _wait_for(lock, patience)
    try:
        _sweep(target, patience)
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(handle)


def _sweep(target: Path, patience: float) -> None:
    """Remove what a killed process left; nobody else writes to a file for longer than the patience."""
    for part in target.parent.glob(f".{target.name}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > patience:
                part.unlink()


def _wait_for(lock: Path, patience: float) -> int:
    """An open and locked file; whoever had it before may have removed it, so the name must still be its own."""
    end = time.monotonic() + patience
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        if try_lock(handle):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(lock)):
                    return handle
        os.close(handle)
        if time.monotonic() > end:
            raise DataError(
                f"another process has been fetching {lock.name[1:-5]} for {patience:g} s and holds {lock}. "
                "Wait for it, or end it."
            )
        time.sleep(0.02)
