"""Text that holds numbers: which words are one, and tables of them."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError

__all__ = ["NUMBER", "Array", "is_number", "lines_of", "parse_table"]

Array = NDArray[np.float64]
NUMBER = rb"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_LINE = re.compile(rb"\s*%b(?:\s+%b)*\s*" % (NUMBER, NUMBER))


def is_number(text: str) -> bool:
    """Whether a word is a finite number in plain notation; nan, inf and 1_0 are none."""
    return re.fullmatch(NUMBER, text.encode()) is not None and bool(np.isfinite(float(text)))


def lines_of(text: bytes) -> list[tuple[int, bytes]]:
    """Lines with their numbers from 1; from a # on it is a comment, and what is blank then is left out."""
    lines = [(k, line.partition(b"#")[0]) for k, line in enumerate(text.split(b"\n"), start=1)]
    return [(k, line) for k, line in lines if line and not line.isspace()]


def parse_table(text: bytes, name: str = "text") -> Array:
    r"""Numbers in rows and columns, with any white space between them.

    Args:
        text: lines with equally many numbers.
        name: what messages call it.

    Returns:
        (n, columns), at least one of each.

    Raises:
        DataError: with name, line and reason.

    Example:
        >>> parse_table(b"1 2.5\n\n-3e1\t.5 \n")
        array([[ 1. , 2.5], [-30. , 0.5]])
    """
    lines = lines_of(text)
    if not lines:
        raise DataError(f"{name} holds no numbers.")
    width = len(lines[0][1].split())
    for k, line in lines:
        if _LINE.fullmatch(line) is None or len(line.split()) != width:
            raise DataError(f"{name}:{k}: {_reason(line, width)}")
    table = np.fromstring(b" ".join(line for _, line in lines), sep=" ").reshape(len(lines), width)
    for row in np.flatnonzero(~np.isfinite(table).all(axis=1))[:1]:
        raise DataError(f"{name}:{lines[row][0]}: {_reason(lines[row][1], width)}")
    return table


def _reason(line: bytes, width: int) -> str:
    """What is wrong with a line."""
    words = [word.decode("ascii", "backslashreplace") for word in line.split()]
    strange = next((word for word in words if not is_number(word)), None)
    if strange is not None:
        return f"{strange[:40]!r} is not a finite number."
    return f"{len(words)} numbers, and the lines before it have {width}."
