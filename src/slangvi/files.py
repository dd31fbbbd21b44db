"""Files that are there whole or not at all."""

from __future__ import annotations

import glob
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["put", "rename", "try_lock"]

_IDLE = 60.0  # seconds without a write after which an unlocked draft is nobody's


def put(path: Path, write: Callable[[IO[bytes]], object], previous: Path | None = None) -> None:
    """Write a file, folders included, under another name and then rename it; nothing is left of a failed attempt.

    The bytes are on the disk before the name is, so that whoever looks, even after the process or the machine died,
    finds the old file or the new one. If `previous` is given, the file that was there is kept under that name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    draft = _spare(path)
    try:
        with draft.open("xb") as file:
            try_lock(file.fileno())
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None:
            _keep(path, previous)
        rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def rename(draft: Path, path: Path) -> None:
    """Give a finished draft its name, and see that the name is on the disk too."""
    os.replace(draft, path)
    with suppress(OSError):  # not every system can open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def try_lock(handle: int) -> bool:
    """Lock an open file until it is closed; False if somebody else has, True also where the system has no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _spare(path: Path) -> Path:
    """A name beside the file that nobody else uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _keep(path: Path, previous: Path) -> None:
    """Give the file a second name; where that cannot be done it is renamed, and for a moment only that name exists."""
    spare = _spare(path)
    try:
        os.link(path, spare)
        os.replace(spare, previous)
    except FileNotFoundError:
        return
    except OSError:
        os.replace(path, previous)
    finally:
        spare.unlink(missing_ok=True)  # a rename between two names of one file leaves both


def _sweep(path: Path) -> None:
    """Remove drafts of processes that died; whoever lives holds a lock on the draft, and has just written to it."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > _IDLE:
                with draft.open("r+b") as file:
                    if try_lock(file.fileno()):
                        draft.unlink()
