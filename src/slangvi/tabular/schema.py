"""From columns of text to columns of numbers: what kind each column is, learnt from some rows, applied to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError
from slangvi.estimators.data import is_rounding
from slangvi.tabular.cells import advice, is_missing, is_no_number, numbers, short
from slangvi.tabular.reading import Table

__all__ = ["MAX_LEVELS", "Categorical", "Numeric", "Schema", "Unusual", "counters", "infer"]

Array = NDArray[np.float64]

MAX_LEVELS = 30  # of a categorical column that have a number of their own
MAX_FEATURES = 10_000
# A column is numeric if so many of its cells that are not missing are numbers; the others then count as missing.
_NUMBERS = 0.95
# It was meant to be if so many are.
_MOST = 0.5
# Text with more different values than this share of the rows names rows and says nothing about others.
_IDS = 0.5
_FEW = 10
_COUNTS = "it only counts the rows"


class Unusual(NamedTuple):
    """How many cells of a column tell a model less than it expects, and what they are and count as."""

    cells: int
    what: str


@dataclass(frozen=True)
class Numeric:
    """A column of numbers: (x − mean)/scale, 0 where missing; with an indicator, 1 where missing.

    Mean and standard deviation are over the rows it was learnt from, of which some were missing if it has an indicator.
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
        """Return cells (n,) as numbers (n, 1 or 2)."""
        values = numbers(cells)
        lost = np.isnan(values)
        scaled = np.where(lost, 0.0, (values - self.mean) / self.scale)
        return np.stack([scaled, lost.astype(np.float64)], 1) if self.indicator else scaled[:, None]

    def unusual(self, cells: Sequence[str]) -> Unusual:
        """Count cells that are neither numbers nor missing; missing ones too if there were none when it was learnt."""
        odd = _odd(cells, numbers(cells))
        missing = 0 if self.indicator else sum(map(is_no_number, cells))
        words = [*["missing"] * bool(missing), *[f"no numbers, such as {short(odd[0])}," for _ in odd[:1]]]
        return Unusual(len(odd) + missing, f"are {' or '.join(words)} and count as the mean")


@dataclass(frozen=True)
class Categorical:
    """A column of words: a 0/1 column for each level, most frequent first, and one for all others and missing ones."""

    name: str
    levels: tuple[str, ...]
    kind: str = field(default="categorical", init=False)

    @property
    def features(self) -> int:
        """Columns of numbers it becomes."""
        return len(self.levels) + 1

    def encode(self, cells: Sequence[str]) -> Array:
        """Return cells (n,) as numbers (n, levels + 1)."""
        place = {level: k for k, level in enumerate(self.levels)}
        picked = np.fromiter((place.get(cell, len(place)) for cell in cells), dtype=np.int64, count=len(cells))
        return np.eye(self.features)[picked]

    def unusual(self, cells: Sequence[str]) -> Unusual:
        """Count cells of no known level."""
        known = set(self.levels)
        strange = [cell for cell in cells if cell not in known]
        words = (f", such as {short(cell)}" for cell in strange if not is_missing(cell))
        return Unusual(len(strange), f"are missing or of no level that the model knows{next(words, '')}")


Column = Numeric | Categorical


@dataclass(frozen=True)
class Schema:
    """Columns in the order of the features, names of dropped ones with the reason, and notes on some that are used."""

    columns: tuple[Column, ...]
    dropped: dict[str, str]
    notes: dict[str, str]

    @property
    def features(self) -> int:
        """D."""
        return sum(column.features for column in self.columns)

    def encode(self, table: Table) -> Array:
        """Return the inputs of the model, (n, D), from a table with all of its columns in any order."""
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            raise DataError(
                f"the table has no column {', '.join(map(repr, absent[:5]))}{' …' * (len(absent) > 5)}, which the "
                f"model was fitted with. Its columns are {', '.join(map(repr, list(table.columns)[:10]))}."
            )
        inputs, start = np.empty((len(table), self.features)), 0
        for column in self.columns:  # into one array, not joined in the end, which would take twice the memory
            inputs[:, start : start + column.features] = column.encode(table.columns[column.name])
            start += column.features
        return inputs

    def unusual(self, table: Table) -> dict[str, Unusual]:
        """Map columns to unusual cells in them, where there are any."""
        found = {column.name: column.unusual(table.columns[column.name]) for column in self.columns}
        return {name: unusual for name, unusual in found.items() if unusual.cells}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Schema:
        """Return the schema of a dict from `dataclasses.asdict`, with every value checked."""
        return cls(tuple(map(_column, plain["columns"])), dict(plain["dropped"]), dict(plain["notes"]))


def counters(table: Table) -> frozenset[str]:
    """Return the columns that only count the rows: 1, 2, 3, … in order, from wherever."""
    return frozenset(name for name, cells in table.columns.items() if _counts(numbers(cells)))


def infer(table: Table, counting: Collection[str] = ()) -> Schema:
    r"""Look at every column and decide what it is.

    | cells                                                       | becomes                               |
    |-------------------------------------------------------------|---------------------------------------|
    | numbers, at least 95 % of those that are not missing        | `Numeric`                             |
    | other text                                                  | `Categorical`, its 30 commonest words |
    | nothing; all the same; 1, 2, 3, … in order; hardly twice the same word | dropped                    |

    `counting` are the `counters` of the whole file, if these are some of its rows: the gaps between them would hide it.

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
        column, note = (None, _COUNTS) if name in counting else _column_of(name, cells)
        if column is None:
            dropped[name] = note
        else:
            columns.append(column)
            notes |= {name: note} if note else {}
    if not columns:
        reasons = "; ".join(f"{name!r}: {why}" for name, why in list(dropped.items())[:5])
        raise DataError(f"there is no column to learn from. {reasons}".rstrip())
    schema = Schema(tuple(columns), dropped, notes)
    if schema.features > MAX_FEATURES:
        raise DataError(
            f"the columns become {schema.features} numbers for each row, and at most {MAX_FEATURES} are allowed. "
            "Leave columns out with --exclude."
        )
    return schema


def _column_of(name: str, cells: Sequence[str]) -> tuple[Column | None, str]:
    """Return the column and a note on it, or None and why it is dropped."""
    present = [cell for cell in cells if not is_missing(cell)]
    counts = Counter(present)
    if not present:
        return None, "all of it is missing"
    if len(counts) == 1 and len(present) == len(cells):
        return None, f"it is {short(present[0])} in every row"
    values = numbers(cells)
    known = values[~np.isnan(values)]
    odd = _odd(cells, values)
    if len(known) and len(known) >= _NUMBERS * (len(known) + len(odd)):
        return _numeric(name, cells, known, odd)
    mixed = _mixed(len(known), odd)
    if len(counts) > max(_FEW, _IDS * len(cells)):
        return None, f"it has {len(counts)} different words in {len(cells)} rows{mixed or advice((odd or present)[0])}"
    levels = tuple(sorted(counts, key=lambda level: (-counts[level], level))[:MAX_LEVELS])
    rest = len(counts) - len(levels)
    note = f"{rest} rarer levels are taken together{mixed}" if rest else mixed.removeprefix("; ")
    return Categorical(name, levels), note


def _odd(cells: Sequence[str], values: Array) -> list[str]:
    """Return cells that are neither numbers nor say that there is none; `values` are the numbers in them."""
    return [cells[k] for k in np.flatnonzero(np.isnan(values)).tolist() if not is_no_number(cells[k])]


def _mixed(known: int, odd: Sequence[str]) -> str:
    """Say what to do with a column whose words are a minority beside numbers."""
    if not odd or known < _MOST * (known + len(odd)):
        return ""
    share = round(100 * known / (known + len(odd)))
    examples = " and ".join(short(cell) for cell, _ in Counter(odd).most_common(2))
    return (
        f"; {share} % are numbers, and the others such as {examples}: write those as numbers, or "
        "leave them empty, and it is a column of numbers"
    )


def _numeric(name: str, cells: Sequence[str], known: Array, odd: Sequence[str]) -> tuple[Column | None, str]:
    if len(known) == len(cells) and _counts(known):
        return None, _COUNTS
    mean, scale = float(known.mean()), float(known.std())
    missing, alike = len(cells) - len(known), bool(is_rounding(scale, mean))
    if alike and not missing:
        return None, f"it is {short(cells[0])} in every row, but for rounding"
    told = f"{missing} missing values are set to the mean" if missing else ""
    if odd:
        told += f", among them {len(odd)} that are no numbers, such as {short(odd[0])}"
    return Numeric(name, mean, 1.0 if alike else scale, missing > 0), told


def _counts(values: Array) -> bool:
    return len(values) > 2 and bool((np.diff(values) == 1.0).all())


def _column(plain: Mapping[str, Any]) -> Column:
    if plain["kind"] == "numeric":
        return Numeric(str(plain["name"]), float(plain["mean"]), float(plain["scale"]), bool(plain["indicator"]))
    if plain["kind"] == "categorical":
        return Categorical(str(plain["name"]), tuple(map(str, plain["levels"])))
    raise ValueError(f"a column of unknown kind {plain['kind']!r}")
