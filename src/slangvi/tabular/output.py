"""Predictions as columns of text that spreadsheets may open."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from slangvi.tabular.model import Classes, Model
from slangvi.tabular.schema import number_of

__all__ = ["columns", "safe"]

Array = NDArray[Any]

# Spreadsheets run text that begins like this; some read the wide signs of East Asian fonts as the narrow ones.
_RUN = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def safe(cell: str) -> str:
    """A cell that no spreadsheet runs; numbers stay as they are.

    Example:
        >>> safe("=1+1"), safe("-1.5"), safe("-x"), safe("x")
        ("'=1+1", '-1.5', "'-x", 'x')
    """
    return f"'{cell}" if cell.startswith(_RUN) and number_of(cell) is None else cell


def columns(model: Model, inputs: Array, level: float) -> dict[str, list[str]]:
    """Header → cells.

    | task           | columns                                                   |
    |----------------|-----------------------------------------------------------|
    | regression     | mean, std, lower, upper, epistemic_share                  |
    | classification | class, p_<label> for each label, entropy, epistemic_share |

    Args:
        model: fitted.
        inputs: encoded rows, (n, D).
        level: that the interval from lower to upper holds.
    """
    found = model.predict(inputs)
    share = _told(found.epistemic_share)
    if isinstance(found, Classes):
        labels = [safe(model.target.classes[k]) for k in found.probs.argmax(1)]
        probs = {f"p_{label}": _told(found.probs[:, k]) for k, label in enumerate(model.target.classes)}
        return {"class": labels, **probs, "entropy": _told(found.entropy), "epistemic_share": share}
    lower, upper = found.interval(level)
    numbers = {"mean": found.mean, "std": found.std, "lower": lower, "upper": upper}
    return {**{name: _told(values) for name, values in numbers.items()}, "epistemic_share": share}


def _told(values: Array) -> list[str]:
    return [f"{value:.6g}" for value in values.tolist()]
