"""Predictions as a CSV file that spreadsheets may open."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError
from slangvi.tabular.cells import digits, number_of
from slangvi.tabular.model import Classes, Model
from slangvi.tabular.reading import Table

__all__ = ["columns", "csv_text", "safe"]

Array = NDArray[Any]

# Spreadsheets run text that begins like this; some read the wide signs of East Asian fonts as the narrow ones.
_RUN = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def safe(cell: str) -> str:
    """Return a cell that no spreadsheet runs; numbers stay as they are.

    Example:
        >>> safe("=1+1"), safe("-1.5"), safe("-x"), safe("x")
        ("'=1+1", '-1.5', "'-x", 'x')
    """
    return f"'{cell}" if cell.startswith(_RUN) and number_of(cell) is None else cell


def csv_text(model: Model, table: Table, level: float, keep: Sequence[str]) -> str:
    """Return a CSV file of predictions for the rows of a table, beside the columns of it that are to be kept."""
    for name in keep:
        if name not in table.columns:
            raise DataError(f"there is no column {name!r} to keep. Columns are {list(table.columns)[:20]}.")
    kept = {name: list(map(safe, table.columns[name])) for name in keep}
    found = columns(model, model.schema.encode(table), level)
    header = [*map(safe, kept), *found]
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"there would be two columns named {twice!r} in the predictions. Rename the one to keep.")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*kept.values(), *found.values(), strict=True))
    return text.getvalue()


def columns(model: Model, inputs: Array, level: float) -> dict[str, list[str]]:
    """Return predictions for encoded rows (n, D), header → cells; the interval holds the share `level` of targets.

    | task           | columns                                                   |
    |----------------|-----------------------------------------------------------|
    | regression     | mean, std, lower, upper, epistemic_share                  |
    | classification | class, p_<label> for each label, entropy, epistemic_share |
    """

    def formatted(values: Array, units: Array | None = None) -> list[str]:
        units = np.zeros(len(values)) if units is None else units
        return [f"{value:.{digits(value, unit)}g}" for value, unit in zip(values.tolist(), units.tolist(), strict=True)]

    found = model.predict(inputs)
    share = formatted(found.epistemic_share)
    if isinstance(found, Classes):
        labels = [safe(model.target.classes[k]) for k in found.probs.argmax(1)]
        probs = {f"p_{label}": formatted(found.probs[:, k]) for k, label in enumerate(model.target.classes)}
        return {"class": labels, **probs, "entropy": formatted(found.entropy), "epistemic_share": share}
    lower, upper = found.interval(level)
    numbers = {"mean": found.mean, "std": found.std, "lower": lower, "upper": upper}
    return {**{name: formatted(values, found.std) for name, values in numbers.items()}, "epistemic_share": share}
