"""Predictions as columns of text that spreadsheets may open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.tabular.cells import number_of
from slangvi.tabular.model import Classes, Model

__all__ = ["columns", "digits", "safe"]

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
