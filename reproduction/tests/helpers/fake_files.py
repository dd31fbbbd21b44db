"""A file to fetch, as the tables of data sets describe theirs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slangvi.errors import DataError
from slangvi_reproduction.data.remote import File

BODY = b"a,b\n" * 50_000


def table_row(*urls: str, **changes) -> File:
    return File(**{"path": "set/tiny", "dataset": "tiny", "urls": urls, "max_bytes": 1_000_000} | changes)


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def refuse(path: Path, name: str) -> None:
    raise DataError(f"{name} has the wrong words.")
