"""Single cells: which are numbers, which say that nothing is known, and how numbers and words are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["CODES", "advice", "digits", "is_missing", "is_no_number", "number_of", "numbers", "readable", "short"]

Array = NDArray[np.float64]

# Words that programs write where nothing is known.
CODES = frozenset({"", "na", "n/a", "#n/a", "#na", "<na>", "nan", "nat", "?"})
MISSING = CODES | {"null", "none"}
# Beside numbers these say the same; beside words they may be words like others.
_BESIDE_NUMBERS = frozenset({"-", "--", ".", "..", "n.a.", "unknown", "missing", "not available"})
_NO_NUMBERS = MISSING | _BESIDE_NUMBERS | {"#div/0!", "#num!", "#ref!", "#value!"}
_DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}\b")
_SIGNED = re.compile(r"[^\w]*\d[\d.,'’ \u00a0\u202f]*[^\w]*")
# Squares of larger numbers would overflow.
_LARGEST = 1e100


def is_missing(cell: str) -> bool:
    """Return whether a cell says that nothing is known."""
    return cell.lower() in MISSING


def is_no_number(cell: str) -> bool:
    """Return whether a cell says that there is no number, where others are numbers."""
    return cell.lower() in _NO_NUMBERS


def number_of(cell: str) -> float | None:
    """Return the number in a cell, or None: a decimal point, no thousands separators, finite.

    Example:
        >>> number_of("-1.5e3"), number_of("1,5"), number_of("1_000"), number_of("inf")
        (-1500.0, None, None, None)
    """
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST and "_" not in cell else None


def numbers(cells: Sequence[str]) -> Array:
    """Return the numbers in cells, NaN where there is none, (n,)."""
    values = (math.nan if is_missing(cell) else number_of(cell) for cell in cells)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def readable(value: float) -> str:
    """Format a number with four digits, without powers of ten for what people count in thousands, such as prices.

    Example:
        >>> readable(0.03636), readable(43328.1), readable(1e15), readable(1.5e-15)
        ('0.03636', '43,328', '1e+15', '1.5e-15')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def digits(value: float, unit: float) -> int:
    """Return six, or more where these would not reach four digits of the unit: 1700000012.34 ± 10.33.

    Example:
        >>> digits(123.4, 10.0), digits(1700000012.34, 10.33), digits(0.0, 1.0)
        (6, 12, 6)
    """
    if value == 0 or unit <= 0 or not math.isfinite(value) or not math.isfinite(unit):
        return 6
    above = math.floor(math.log10(abs(value)) - math.log10(unit))
    return min(17, max(6, 4 + above))


def short(cell: str) -> str:
    """Return a cell as messages show it."""
    return repr(cell if len(cell) <= 20 else cell[:19] + "…")


def advice(cell: str) -> str:
    """Say what to do with dates such as 5/31/2024 10:00, and with numbers such as 1,5, 1 000, $5, 7 %."""
    if _DATE.match(cell):
        return "; if these are dates, put year, month or age into columns of their own"
    like_a_number = len(cell) <= 40 and _SIGNED.fullmatch(cell)  # longer ones would take long to match
    return "; if these are numbers, write them as 1234.5, without other signs" if like_a_number else ""
