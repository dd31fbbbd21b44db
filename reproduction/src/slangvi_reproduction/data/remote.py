"""Files that are fetched once: where the cache is, what is in it, and that it is what it should be.

A table of `File` rows says all there is to know of a file; `fetch` turns a row into a path. What comes over the network
goes to a temporary file beside the target, is checked there, and takes the target's name only when all of it is right.
So the cache holds whole and checked files, whatever fails and whoever else is fetching.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slangvi.errors import DataError
from slangvi.files import rename
from slangvi_reproduction.data._download import Progress, RejectedError, download
from slangvi_reproduction.data._lock import alone

__all__ = ["File", "Progress", "cache_root", "explained", "fetch", "is_offline", "locate"]

Stamp = tuple[Path, int, int] | None
PATIENCE = 20  # timeouts that one file, or waiting for somebody else to fetch it, may take in all
_verified: set[tuple[File, Stamp]] = set()


@dataclass(frozen=True)
class File:
    """One file of the cache.

    Args:
        path: inside the cache, such as "libsvm/a1a".
        dataset: what `slangvi data fetch` calls the data set it belongs to.
        urls: where it can be had, tried in this order.
        max_bytes: more than this is refused before it fills the disk.
        sha256: of the bytes, where every good copy has the same; None otherwise.
        check: called with a path and the name to use in messages; raises `DataError` when the content is wrong.
        also: other paths in the cache that serve as well, such as the same file unpacked; `sha256` is not theirs.
    """

    path: str
    dataset: str
    urls: tuple[str, ...]
    max_bytes: int
    sha256: str | None = None
    check: Callable[[Path, str], None] | None = None
    also: tuple[str, ...] = ()

    @property
    def target(self) -> Path:
        """Where it is put."""
        return cache_root() / self.path


def cache_root() -> Path:
    """Folder of all files: SLANGVI_DATA, else slangvi in XDG_CACHE_HOME, else ~/.cache/slangvi."""
    if chosen := os.environ.get("SLANGVI_DATA"):
        return Path(chosen).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return base / "slangvi"


def is_offline() -> bool:
    """Whether SLANGVI_OFFLINE forbids the network: any value does but an empty one, 0, false, no and off."""
    return os.environ.get("SLANGVI_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def locate(file: File) -> Path | None:
    """The file in the cache, unverified; None where it is missing."""
    candidates = (cache_root() / path for path in (file.path, *file.also))
    return next((path for path in candidates if os.path.isfile(path)), None)


def fetch(
    file: File, *, force: bool = False, verify: bool = True, progress: Progress | None = None, timeout: float = 30.0
) -> Path:
    """A file of the cache, fetched into it where it is missing.

    Args:
        file: which.
        force: fetch it even if it is there. The old one stays until the new one is known to be good.
        verify: check a file that is there already, once in a process while size and time of change stay the same. What
            is fetched is always checked.
        progress: called with path, bytes so far, and bytes in all (0 where the server does not say).
        timeout: seconds without an answer after which a server is given up.

    Raises:
        DataError: missing while offline, damaged, or not to be had; nothing half-written is left.
    """
    found = locate(file)
    if found is not None and not force:
        if verify:
            _verify(file, found)
        return found
    if is_offline():
        raise DataError(_offline(file, force))
    before = _stamp(found)
    with _writing(file.target, PATIENCE * timeout):
        now = locate(file)
        if now is not None and _stamp(now) != before:  # somebody else fetched it while we waited
            _verify(file, now)
            return now
        _fetch_from_any(file, progress, timeout)
    return file.target


# ---- checks ----


def _stamp(path: Path | None) -> Stamp:
    """What changes when a file does."""
    if path is None:
        return None
    stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns


def _verify(file: File, path: Path) -> None:
    """Compare a cached file with what it should be; raise with what to do."""
    with explained(file, path):
        key = (file, _stamp(path))
        if key not in _verified:
            _inspect(file, path, path == file.target, str(path))
            _verified.add(key)


@contextmanager
def explained(file: File, path: Path) -> Iterator[None]:
    """Reading a cached file: what goes wrong is said with what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}. Make it readable.") from error
    except (RejectedError, DataError) as error:
        raise DataError(
            f"{error} Delete {path}, or run `slangvi data fetch {file.dataset} --force` to replace it."
        ) from error


def _inspect(file: File, path: Path, same_bytes: bool, name: str) -> None:
    """Checksum and content of a file, wherever it lies."""
    if file.sha256 is not None and same_bytes:
        with path.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        if found != file.sha256:
            raise RejectedError(f"{name} has SHA-256 {found}, not {file.sha256}: it is damaged or another file.")
    if file.check is not None:
        file.check(path, name)


# ---- fetching ----


def _fetch_from_any(file: File, progress: Progress | None, timeout: float) -> None:
    """Try one address after the other; the first good copy takes the target's name."""
    failures = []
    for url in file.urls:
        part = file.target.with_name(f".{file.target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            download(url, part, file.path, file.max_bytes, progress, timeout, PATIENCE * timeout)
            _inspect(file, part, True, "what came")
            rename(part, file.target)
            return
        except (RejectedError, DataError) as error:
            failures.append(f"\n  {url}: {error}")
        finally:
            part.unlink(missing_ok=True)
    raise DataError(
        f"{file.path} could not be fetched, and nothing was kept.{''.join(failures)}\n"
        f"Try again later, or put the file there by hand: {file.target}"
    )


@contextmanager
def _writing(target: Path, patience: float) -> Iterator[None]:
    """Make the folder and be alone at the target; what the disk does not allow is said in words."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target, patience):
            yield
    except OSError as error:
        raise DataError(
            f"the cache folder {target.parent} cannot be written: {error.strerror or error}. "
            "Set SLANGVI_DATA to a folder that can, or that holds the files already."
        ) from error


def _offline(file: File, force: bool) -> str:
    state = "cannot be fetched again" if force else "is missing"
    root = cache_root()
    return (
        f"{file.path} {state}, and SLANGVI_OFFLINE forbids the network. Fetch {' or '.join(file.urls)} elsewhere and "
        f"put it at {file.target}, unset SLANGVI_OFFLINE, or set SLANGVI_DATA to a folder that has {file.path}."
        + ("" if root.is_dir() else f" The folder {root} does not exist.")
    )
