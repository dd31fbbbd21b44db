"""From columns of text to columns of numbers: what kind each column is, learnt from some rows, applied to others."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError
from slangvi.tabular.reading import Table

__all__ = ["MAX_LEVELS", "Categorical", "Numeric", "Schema", "counters", "infer", "is_missing", "number_of"]

Array = NDArray[np.float64]

MAX_LEVELS = 30  # of a categorical column that have a number of their own
MAX_FEATURES = 10_000
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
# A column is numeric if so many of its cells that are not missing are numbers; the others then count as missing.
_NUMBERS = 0.95
# Text with more different values than this share of the rows names rows and says nothing about others.
_IDS = 0.5
_FEW = 10
_COUNTS = "it only counts the rows"
_DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}\b")
_SIGNED = re.compile(r"[^\w]*\d[\d.,'’ \u00a0\u202f]*[^\w]*")
# Squares of larger numbers would overflow.
_LARGEST = 1e100


def is_missing(cell: str) -> bool:
    """Whether a cell says that nothing is known."""
    return cell.lower() in MISSING


def number_of(cell: str) -> float | None:
    """The number in a cell, if it is one: a decimal point, no thousands separators, finite.

    Example:
        >>> number_of("-1.5e3"), number_of("1,5"), number_of("1_000"), number_of("inf")
        (-1500.0, None, None, None)
    """
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST and "_" not in cell else None


@dataclass(frozen=True)
class Numeric:
    """A column of numbers: (x − mean)/scale, 0 where missing; with an indicator, 1 where missing.

    Args:
        name: of the column.
        mean: over the rows it was learnt from.
        scale: standard deviation over them, 1 if they are all alike.
        indicator: whether some of them were missing.
    """

    name: str
    mean: float
    scale: float
    indicator: bool
    kind: str = field(default="numeric", init=False)

    @property
    def features(self) -> int:
        """Columns of numbers it becomes."""
        return 1 + self.indicator

    def encode(self, cells: Sequence[str]) -> Array:
        """(n,) cells → (n, 1 or 2)."""
        values = _numbers(cells)
        lost = np.isnan(values)
        scaled = np.where(lost, 0.0, (values - self.mean) / self.scale)
        return np.stack([scaled, lost.astype(np.float64)], 1) if self.indicator else scaled[:, None]

    def unusual(self, cells: Sequence[str]) -> int:
        """Cells that it has no number for, and had none of when it was learnt."""
        return 0 if self.indicator else int(np.isnan(_numbers(cells)).sum())


@dataclass(frozen=True)
class Categorical:
    """A column of words: a 0/1 column for each level, and one for all others and for missing ones.

    Args:
        name: of the column.
        levels: the words, most frequent first.
    """

    name: str
    levels: tuple[str, ...]
    kind: str = field(default="categorical", init=False)

    @property
    def features(self) -> int:
        """Columns of numbers it becomes."""
        return len(self.levels) + 1

    def encode(self, cells: Sequence[str]) -> Array:
        """(n,) cells → (n, levels + 1)."""
        place = {level: k for k, level in enumerate(self.levels)}
        picked = np.fromiter((place.get(cell, len(place)) for cell in cells), dtype=np.int64, count=len(cells))
        return np.eye(self.features)[picked]

    def unusual(self, cells: Sequence[str]) -> int:
        """Cells of no known level."""
        known = set(self.levels)
        return sum(cell not in known for cell in cells)


Column = Numeric | Categorical


@dataclass(frozen=True)
class Schema:
    """How the inputs of a model are made from a table.

    Args:
        columns: in the order of the features.
        dropped: name → why it is not used.
        notes: name → what one should know about a column that is used.
    """

    columns: tuple[Column, ...]
    dropped: dict[str, str]
    notes: dict[str, str]

    @property
    def features(self) -> int:
        """D."""
        return sum(column.features for column in self.columns)

    def encode(self, table: Table) -> Array:
        """Inputs of the model, (n, D).

        Args:
            table: with the same columns, in any order; others are not looked at.

        Raises:
            DataError: a column is missing.
        """
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            raise DataError(
                f"the table has no column {', '.join(map(repr, absent[:5]))}{' …' * (len(absent) > 5)}, which the "
                f"model was fitted with. Its columns are {', '.join(map(repr, list(table.columns)[:10]))}."
            )
        return np.concatenate([column.encode(table.columns[column.name]) for column in self.columns], 1)

    def unusual(self, table: Table) -> dict[str, int]:
        """Column → cells that are missing or of an unknown level there, where there are any."""
        counts = {column.name: column.unusual(table.columns[column.name]) for column in self.columns}
        return {name: count for name, count in counts.items() if count}

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "columns": [asdict(column) for column in self.columns]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Schema:
        """From what `to_json` made."""
        return cls(tuple(map(_column, plain["columns"])), dict(plain["dropped"]), dict(plain["notes"]))


def counters(table: Table) -> frozenset[str]:
    """Columns that only count the rows: 1, 2, 3, … in order, from wherever."""
    return frozenset(name for name, cells in table.columns.items() if _counts(_numbers(cells)))


def infer(table: Table, counting: Collection[str] = ()) -> Schema:
    r"""Look at every column and decide what it is.

    | cells                                                       | becomes                               |
    |-------------------------------------------------------------|---------------------------------------|
    | numbers, at least 95 % of those that are not missing        | `Numeric`                             |
    | other text                                                  | `Categorical`, its 30 commonest words |
    | nothing; all the same; 1, 2, 3, … in order; hardly twice the same word | dropped                    |

    Args:
        table: the rows to learn from, without the target.
        counting: `counters` of the whole file, if these are some of its rows: the gaps between them would hide it.

    Raises:
        DataError: no column is left, or they become too many numbers.

    Example:
        >>> from slangvi.tabular.reading import parse
        >>> schema = infer(parse(b"id,size,town\n1,10,Bern\n2,,Bern\n3,30,Basel\n"))
        >>> schema.columns[1], schema.dropped
        (Categorical(name='town', levels=('Bern', 'Basel'), kind='categorical'), {'id': 'it only counts the rows'})
        >>> schema.encode(parse(b"town,size\nZug,30\n"))
        array([[1., 0., 0., 0., 1.]])
    """
    columns: list[Column] = []
    dropped: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name, cells in table.columns.items():
        found, told = (None, _COUNTS) if name in counting else _judged(name, cells)
        if found is None:
            dropped[name] = told
        else:
            columns.append(found)
            notes |= {name: told} if told else {}
    if not columns:
        told = "; ".join(f"{name!r}: {why}" for name, why in list(dropped.items())[:5])
        raise DataError(f"there is no column to learn from. {told}".rstrip())
    schema = Schema(tuple(columns), dropped, notes)
    if schema.features > MAX_FEATURES:
        raise DataError(
            f"the columns become {schema.features} numbers for each row, and at most {MAX_FEATURES} are allowed. "
            "Leave columns out with --exclude."
        )
    return schema


def _judged(name: str, cells: Sequence[str]) -> tuple[Column | None, str]:
    """The column and a note on it, or None and why it is dropped."""
    present = [cell for cell in cells if not is_missing(cell)]
    counts = Counter(present)
    if not present:
        return None, "all of it is missing"
    if len(counts) == 1 and len(present) == len(cells):
        return None, f"it is {_short(present[0])} in every row"
    values = _numbers(cells)
    known = values[~np.isnan(values)]
    if len(known) >= _NUMBERS * len(present):
        return _numeric(name, cells, known, len(present) - len(known))
    if len(counts) > max(_FEW, _IDS * len(cells)):
        return None, f"it has {len(counts)} different words in {len(cells)} rows{_advice(present[0])}"
    levels = tuple(level for level, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_LEVELS])
    rest = len(counts) - len(levels)
    return Categorical(name, levels), f"{rest} rarer levels are taken together" if rest else ""


def _advice(cell: str) -> str:
    """What to do with dates and numbers that are told otherwise: 31.05.24, 5/31/2024 10:00; 1,5, 1 000, $5, 7 %."""
    if _DATE.match(cell):
        return "; if these are dates, put year, month or age into columns of their own"
    like_a_number = len(cell) <= 40 and _SIGNED.fullmatch(cell)  # longer ones would take long to match
    return "; if these are numbers, write them as 1234.5, without other signs" if like_a_number else ""


def _numeric(name: str, cells: Sequence[str], known: Array, odd: int) -> tuple[Column | None, str]:
    if len(known) == len(cells) and _counts(known):
        return None, _COUNTS
    mean, scale = float(known.mean()), float(known.std())
    missing = len(cells) - len(known)
    told = f"{missing} missing values are set to the mean" if missing else ""
    if odd:
        told += f", among them {odd} that are no numbers"
    # Values that differ by rounding alone have nothing to tell.
    usable = scale > 1e-12 * abs(mean) and math.isfinite(scale)
    return Numeric(name, mean, scale if usable else 1.0, missing > 0), told


def _counts(values: Array) -> bool:
    return len(values) > 2 and bool((np.diff(values) == 1.0).all())


def _numbers(cells: Sequence[str]) -> Array:
    """NaN where there is none."""
    values = (math.nan if is_missing(cell) else number_of(cell) for cell in cells)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 20 else cell[:19] + "…")


def _column(plain: Mapping[str, Any]) -> Column:
    if plain["kind"] == "numeric":
        return Numeric(str(plain["name"]), float(plain["mean"]), float(plain["scale"]), bool(plain["indicator"]))
    if plain["kind"] == "categorical":
        return Categorical(str(plain["name"]), tuple(map(str, plain["levels"])))
    raise ValueError(f"a column of unknown kind {plain['kind']!r}")
