"""What an experiment leaves in the folder of results: tables as CSV, posteriors as npz, and a JSON that says how."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slangvi.files import put

__all__ = [
    "Posterior",
    "Row",
    "aggregate",
    "mean_and_error",
    "read_about",
    "read_posteriors",
    "read_rows",
    "read_table",
    "refuse_shorter",
    "write_about",
    "write_posteriors",
    "write_rows",
    "write_table",
]

LARGE = 100


class Row(NamedTuple):
    """One line of `results/<name>.csv`: a metric of a method on a data set, over n splits or seeds.

    Args:
        dataset: name of the data set.
        metric: name of the metric.
        method: name of the method.
        mean: over splits.
        standard_error: of the mean; 0 for one split.
        median: over splits.
        worst: the largest, or the smallest where higher is better.
        n: splits.
    """

    dataset: str
    metric: str
    method: str
    mean: float
    standard_error: float
    median: float
    worst: float
    n: int

    @classmethod
    def read(cls, values: Sequence[Any]) -> Row:
        """From a line of the table, as text or not."""
        dataset, metric, method, mean, error, median, worst, n = values
        return cls(dataset, metric, method, float(mean), float(error), float(median), float(worst), int(n))


def aggregate(
    dataset: str,
    metric: str,
    method: str,
    values: Iterable[float],
    worst: Callable[[list[float]], float] = max,
) -> Row:
    """Mean, standard error, median and worst of the values of all splits; `worst` is min where higher is better.

    Example:
        >>> aggregate("a1a", "symmetric_kl", "slang_1", [1.0, 2.0, 6.0])[3:]
        (3.0, 1.527..., 2.0, 6.0, 3)
    """
    found = [float(value) for value in values]
    return Row(dataset, metric, method, *mean_and_error(found), statistics.median(found), worst(found), len(found))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error; 0 for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


# ---- tables ----


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A table of metrics."""
    write_table(path, Row._fields, rows)


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote."""
    return [Row.read(tuple(line.values())) for line in read_table(path, Row._fields)]


def write_table(path: Path, header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Any table, numbers with eight digits, all or nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.8g}" if isinstance(cell, float) else cell for cell in line] for line in lines)
    put(path, lambda file: file.write(text.getvalue().encode()))


def read_table(path: Path, header: Sequence[str]) -> list[dict[str, str]]:
    """Lines by column; a table with other columns is refused by name."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != tuple(header):
            raise ValueError(
                f"{path.name} does not have the columns {','.join(header)}. Run `slangvi reproduce` again."
            )
        return list(reader)


# ---- how they were made ----


def write_about(path: Path, about: Mapping[str, Any]) -> None:
    """Command, settings, environment and times as JSON."""
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    put(path, lambda file: file.write(text.encode()))


def read_about(path: Path) -> dict[str, Any]:
    """What `write_about` wrote."""
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return about | {"settings": about["settings"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by `slangvi reproduce` ({error}). Remove it.") from error


def refuse_shorter(path: Path, epochs: int, splits: int) -> None:
    """Refuse to put a shorter run where the results of a longer one are."""
    if not path.is_file():
        return
    there = read_about(path)["settings"]
    if epochs < there["epochs"] or splits < there["splits"]:
        raise ValueError(
            f"{path} is from a run of {there['epochs']} epochs and {there['splits']} splits, and would be replaced by "
            f"one of {epochs} and {splits}. Choose another folder with --out."
        )


# ---- posteriors ----


class Posterior(NamedTuple):
    """One Gaussian.

    Args:
        loc: μ, (P,).
        covariance: Σ, (P, P).
    """

    loc: NDArray[np.float64]
    covariance: NDArray[np.float64]


def write_posteriors(path: Path, posteriors: Mapping[str, Posterior]) -> None:
    """Gaussians by name; of each covariance the lower triangle, row by row, in float32 from 100 parameters on."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, q in posteriors.items():
        dtype = np.float32 if len(q.loc) >= LARGE else np.float64
        arrays[f"{name}/loc"] = q.loc.astype(np.float64)
        arrays[f"{name}/covariance_tril"] = q.covariance[np.tril_indices(len(q.loc))].astype(dtype)
    put(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))


def read_posteriors(path: Path) -> dict[str, Posterior]:
    """What `write_posteriors` wrote, with whole covariances."""
    found = {}
    with np.load(path, allow_pickle=False) as file:
        for name in [key.removesuffix("/loc") for key in file.files if key.endswith("/loc")]:
            loc = file[f"{name}/loc"]
            lower = np.zeros((len(loc), len(loc)))
            lower[np.tril_indices(len(loc))] = file[f"{name}/covariance_tril"]
            found[name] = Posterior(loc, lower + np.tril(lower, -1).T)
    return found
