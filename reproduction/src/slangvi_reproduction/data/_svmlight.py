"""Svmlight text, as the LIBSVM collection has it, and a digest of what it says.

A line is `label index:value index:value …`: indices count from 1 and grow, what is not listed is zero, and from a # on
it is a comment.
"""

from __future__ import annotations

import bz2
import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError
from slangvi_reproduction.data._numbers import NUMBER, Array, is_number, lines_of

__all__ = ["Table", "digest", "parse", "read"]

MAX_UNPACKED = 1 << 28  # a few compressed bytes can unpack to any size
STEPS = 1200
_LINE = re.compile(rb"\s*%b(?:\s+\d+:%b)*\s*" % (NUMBER, NUMBER))


class Table(NamedTuple):
    """What a file says.

    Args:
        x: (n, P), zero where nothing is listed.
        y: (n,) labels as they stand in the file.
    """

    x: Array
    y: Array


def read(path: Path, num_features: int, name: str = "") -> Table:
    """Parse a file, packed by bzip2 or not; `name` is what messages call it.

    The last two files stay in memory until they change, so that many splits of a data set cost one reading. The arrays
    are shared and cannot be written to.
    """
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns, num_features, name or str(path))


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int, num_features: int, name: str) -> Table:
    return parse(_unpacked(path, name), num_features, name)


def _unpacked(path: Path, name: str) -> bytes:
    """Bytes of a file; bzip2 is known by its first letters, whatever the file is called."""
    with path.open("rb") as handle:
        packed = handle.read(3) == b"BZh"
        handle.seek(0)
        try:
            with bz2.open(handle) if packed else handle as content:
                text = content.read(MAX_UNPACKED + 1)
        except (EOFError, OSError) as error:
            if packed and not getattr(error, "errno", None):
                raise DataError(f"{name} is not a whole bzip2 file: {error}.") from error
            raise
    if len(text) > MAX_UNPACKED:
        raise DataError(f"{name} unpacks to more than {MAX_UNPACKED:,} bytes.")
    return text


def parse(text: bytes, num_features: int, name: str = "text") -> Table:
    r"""Labels and features of svmlight text.

    Args:
        text: lines; blank ones are skipped.
        num_features: P. Larger indices are refused, and smaller ones padded, as a file need not use all.
        name: what messages call it.

    Returns:
        x (n, P) and y (n,).

    Raises:
        DataError: with name, line and reason.

    Example:
        >>> parse(b"+1 1:0.5 3:2  # a comment\n-1 2:-1e-1", num_features=3)
        Table(x=array([[ 0.5,  0. ,  2. ], [ 0. , -0.1,  0. ]]), y=array([ 1., -1.]))
    """
    lines = lines_of(text)
    for k, line in lines:
        if _LINE.fullmatch(line) is None:
            raise DataError(f"{name}:{k}: {_reason(line, num_features)}")
    # All numbers in one go: label, index, value, index, value, … of one line after the other.
    numbers = np.fromstring(b" ".join(line for _, line in lines).replace(b":", b" "), sep=" ")
    pairs = np.array([line.count(b":") for _, line in lines], dtype=np.intp)
    labels = np.cumsum(1 + 2 * pairs) - (1 + 2 * pairs)
    y = numbers[labels]
    index, value = np.delete(numbers, labels).reshape(-1, 2).T
    row = np.repeat(np.arange(len(lines)), pairs)
    if (wrong := _first_wrong(y, row, index, value, num_features)) is not None:
        raise DataError(f"{name}:{lines[wrong][0]}: {_reason(lines[wrong][1], num_features)}")
    x = np.zeros((len(lines), num_features))
    x[row, index.astype(np.intp) - 1] = value
    x.flags.writeable = y.flags.writeable = False
    return Table(x, y)


def _first_wrong(y: Array, row: NDArray[np.intp], index: Array, value: Array, num_features: int) -> int | None:
    """The first row with a number that is not finite, or with an index too small, too large, or out of order."""
    wrong = ~np.isfinite(value) | (index < 1) | (index > num_features)
    wrong[1:] |= (np.diff(row) == 0) & (np.diff(index) <= 0)
    rows = np.concatenate([row[wrong], np.flatnonzero(~np.isfinite(y))])
    return int(rows.min()) if len(rows) else None


def _reason(content: bytes, num_features: int) -> str:
    """What is wrong with a line, by looking at one word after the other."""
    label, *words = (word.decode("ascii", "backslashreplace") for word in content.split())
    if not is_number(label):
        return f"the label {label[:40]!r} is not a finite number."
    last = 0
    for word in words:
        index, colon, value = word.partition(":")
        if not colon or not index.isdecimal():
            return f"expected index:value, got {word[:40]!r}."
        if not is_number(value):
            return f"the value of {word[:40]!r} is not a finite number."
        if not 1 <= int(index) <= num_features:
            return f"{word[:40]!r}: indices go from 1 to {num_features}."
        if int(index) <= last:
            return f"{word[:40]!r} comes after index {last}: indices must grow."
        last = int(index)
    return "not svmlight text."


def digest(table: Table) -> str:
    """SHA-256 of labels and values in the order of the file: of y as 64-bit floats and ⌊1200 x + ½⌋ as 32-bit integers.

    Copies of a file may write the same number with other last digits. The step of 1/1200 is chosen so that no value of
    the files known here lies within 2.6e-6 of where rounding changes, which is five times the error of six digits. A
    change of 1/1200 or more is always seen.

    Example:
        >>> same = digest(parse(b"1 1:0.333333", 1)) == digest(parse(b"+1 1:0.33333334", 1))
        >>> same, digest(parse(b"1 1:0.333333", 1)) == digest(parse(b"1 1:0.334333", 1))
        (True, False)
    """
    steps = np.clip(np.floor(table.x * STEPS + 0.5), -(2.0**31), 2.0**31 - 1).astype("<i4")
    return hashlib.sha256(table.y.astype("<f8").tobytes() + steps.tobytes()).hexdigest()
