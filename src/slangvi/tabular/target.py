"""The column that is predicted: classes or numbers, and which of its rows are held out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError
from slangvi.tabular.cells import CODES, is_no_number, number_of
from slangvi.tabular.reading import Table

__all__ = ["Target", "find_target", "held_out"]

Ints = NDArray[np.int64]

MAX_CLASSES = 100
_FEW = 10
_PLAIN = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]*)?")
TASKS = ("classification", "regression")


@dataclass(frozen=True)
class Target:
    """The name of the column, the task and how it was found, and labels in order, of which a regression has none."""

    name: str
    task: str
    why: str
    classes: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """C, one number or a logit for each class."""
        return len(self.classes) or 1

    def encode(self, table: Table) -> NDArray[Any]:
        """Return numbers, or places of labels in `classes`, (n,); a cell that is neither raises a `DataError`."""
        cells = table.columns[self.name]
        if self.task == "classification":
            place = {label: k for k, label in enumerate(self.classes)}
            return np.array([place[cell] for cell in cells], dtype=np.int64)
        values = list(map(number_of, cells))
        for line, cell, value in zip(table.lines, cells, values, strict=True):
            if value is None:
                raise DataError(
                    f"line {line}: the target {self.name!r} is {cell[:20]!r}, which is no number. Correct it, leave it "
                    "empty, or use --task classification."
                )
        return np.array(values, dtype=np.float64)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Target:
        """Return the target of a dict from `dataclasses.asdict`, with every value checked."""
        if plain["task"] not in TASKS:
            raise ValueError(f"unknown task {plain['task']!r}")
        return cls(str(plain["name"]), plain["task"], str(plain["why"]), tuple(map(str, plain["classes"])))


def find_target(table: Table, name: str, task: str | None = None) -> tuple[Target, Table]:
    r"""Return the target with its task, and the table without the rows whose target is missing.

    Text, two different values, or at most ten different whole numbers are classes; other numbers are a regression.
    Beside words, `none` or `unknown` are classes too; beside numbers they say that the target is missing. Labels that
    are the same number, such as 1 and 1.0, are one class. A given task overrides what would be found.

    Example:
        >>> from slangvi.tabular.reading import parse
        >>> find_target(parse(b"x,y\n1,no\n2,yes\n3,\n"), "y")[0]
        Target(name='y', task='classification', why="'y' holds text", classes=('no', 'yes'))
    """
    if name not in table.columns:
        near = ", ".join(map(repr, list(table.columns)[:20]))
        raise DataError(f"there is no column {name!r} for --target. Columns are {near}.")
    rows = table.take(_known(table.columns[name]))
    spelt = _common_spellings(rows.columns[name])
    labels = set(spelt.values())
    if len(labels) < 2:
        raise DataError(f"the target {name!r} has {len(labels)} different values. There is nothing to predict.")
    guess, why = _guess(name, sorted(labels))
    task, why = (task, "as --task says") if task else (guess, why)
    if task == "regression":
        return Target(name, task, why), rows
    if len(labels) > MAX_CLASSES:
        raise DataError(
            f"the target {name!r} has {len(labels)} different values, and at most {MAX_CLASSES} classes are allowed. "
            "Use --task regression if they are numbers."
        )
    cells = [spelt[cell] for cell in rows.columns[name]]

    def rank(label: str) -> tuple[bool, float, str]:  # numbers by their size, then text
        value = number_of(label)
        return value is None, value or 0.0, label

    return Target(name, task, why, tuple(sorted(labels, key=rank))), Table({**rows.columns, name: cells}, rows.lines)


def held_out(target: Target, values: NDArray[Any], seed: int, share: float = 0.2) -> tuple[Ints, Ints]:
    """Return rows to train on and rows to hold out, in the order of the file; of every class the same share."""
    if len(values) < 10:
        raise DataError(f"there are {len(values)} rows with a target, and at least 10 are needed.")
    source = np.random.default_rng(seed)
    groups = [np.arange(len(values))]
    if target.task == "classification":
        groups = [np.flatnonzero(values == k) for k in range(target.outputs)]
    parts = [source.permutation(group)[: min(round(share * len(group)), len(group) - 1)] for group in groups]
    held = np.sort(np.concatenate(parts))
    if not len(held):
        raise DataError(
            f"the {target.outputs} classes of {target.name!r} have too few rows to hold any out. Give more rows or "
            "fewer classes, or use --task regression if they are numbers."
        )
    return np.setdiff1d(np.arange(len(values)), held), held


def _known(cells: Sequence[str]) -> list[int]:
    """Return the places of cells that are not missing."""
    words = any(number_of(cell) is None and not is_no_number(cell) for cell in cells)
    missing = (lambda cell: cell.lower() in CODES) if words else is_no_number
    return [k for k, cell in enumerate(cells) if not missing(cell)]


def _guess(name: str, labels: list[str]) -> tuple[str, str]:
    """Return the task that labels are for, and the reason."""
    values = [number_of(label) for label in labels]
    if None in values:
        text = [label for label, value in zip(labels, values, strict=True) if value is None]
        example = f", such as {text[0][:20]!r}" if len(text) < len(labels) else ""
        return "classification", f"{name!r} holds text{example}"
    if len(values) == 2:
        return "classification", f"{name!r} has two different values"
    if len(values) <= _FEW and all(value == round(value) for value in values if value is not None):
        return "classification", f"{name!r} has {len(values)} different whole numbers"
    return "regression", f"{name!r} holds numbers, {len(values)} different ones"


def _common_spellings(cells: Sequence[str]) -> dict[str, str]:
    """Map labels to the commonest one that is the same number: 1.0 may be another word for 1, but 01 is a code."""
    commonest: dict[Decimal | str, str] = {}
    spelt = {}
    for cell, _ in Counter(cells).most_common():
        key = Decimal(cell) if _PLAIN.fullmatch(cell) else cell
        spelt[cell] = commonest.setdefault(key, cell)
    return spelt
