"""Numbers printed in the paper (Mishkin et al. 2018), for comparison: one CSV for each table."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Printed", "learning_rates", "printed"]


class Printed(NamedTuple):
    """One number of a table.

    Args:
        mean: as printed.
        standard_error: as printed; None where the table has none.
        unit: of the last digit printed.
    """

    mean: float
    standard_error: float | None
    unit: float


def printed(table: str) -> dict[tuple[str, str, str], Printed]:
    """(dataset, metric, method) → what the paper prints.

    Args:
        table: "logreg", "logreg_online_eig", "logreg_covariance", "uci" or "uci_online_eig".

    Example:
        >>> printed("logreg")["australian", "symmetric_kl", "slang_1"]
        Printed(mean=332.0, standard_error=68.0, unit=1.0)
    """
    return {
        (line["dataset"], line["metric"], line["method"]): Printed(
            float(line["mean"]), float(line["standard_error"]) if line["standard_error"] else None, float(line["unit"])
        )
        for line in _lines(table)
    }


def learning_rates() -> dict[tuple[str, str], float]:
    """(dataset, method) → constant rate of the convergence experiment.

    Example:
        >>> learning_rates()["usps_3vs5", "slang_5"]
        0.0215
    """
    return {
        (line["dataset"], method): float(rate)
        for line in _lines("logreg_convergence_learning_rates")
        for method, rate in line.items()
        if method != "dataset"
    }


def _lines(table: str) -> list[dict[str, str]]:
    text = (files(__name__) / f"{table}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
