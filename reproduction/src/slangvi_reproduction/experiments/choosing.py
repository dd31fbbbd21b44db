"""The tables of docs/which-method.md: read from the results, put between two marks of the page."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slangvi_reproduction.experiments import _images_pages, _mnist_tables, pages
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._mnist_recipes import OURS
from slangvi_reproduction.experiments.results import Row, read_about, read_rows, read_table

__all__ = ["fill", "tables"]

STRANGE = "AUROC of strangers, by predictive entropy"
MARK = "<!-- {} written by slangvi reproduce report -->"
# Methods of the table of posteriors, in the order of what they hold.
GAUSSIANS = ("mf_ef", "mf_exact", "online_eig_1", "slang_1", "online_eig_5", "slang_5", "slang_10", "full_ef")
# Contenders of the benchmark of one step, and their names on the page.
COSTS = {
    "adam": "Adam",
    "ivon": "IVON",
    "bayes by backprop": "Bayes by Backprop",
    "laplace, diagonal": "Laplace, diagonal (a fit afterwards)",
    "laplace, last layer": "Laplace, last layer (a fit afterwards)",
    "pyro low-rank": "Pyro, low-rank covariance",
    "slang functional": "SLANG",
    "slang functional, compiled": "SLANG, `compile=True`",
}


def tables(results: Path, benchmarks: Path) -> dict[str, str]:
    """The tables by name, each with the words that say where its numbers come from.

    Args:
        results: folder that `slangvi reproduce` writes to.
        benchmarks: folder that `slangvi bench` writes to.
    """
    return {
        "divergences": _posteriors(results, "symmetric_kl"),
        "likelihoods": _posteriors(results, "test_nll_nats"),
        "curves": _curves(results),
        "networks": _networks(results),
        "images": _images(results),
        "costs": _costs(benchmarks),
    }


def fill(page: Path, found: Mapping[str, str]) -> None:
    """Put tables between their marks.

    Args:
        page: with two lines of marks for every table.
        found: tables by name.
    """
    text = page.read_text(encoding="utf-8")
    for name, table in found.items():
        start, stop = (re.escape(MARK.format(word)) for word in (name, f"end of {name},"))
        new = table.replace("\\", r"\\")  # a replacement, in which a backslash would mean something
        text, times = re.subn(f"({start}\n).*?({stop})", rf"\g<1>\n{new}\n\g<2>", text, flags=re.S)
        if times != 1:
            raise ValueError(f"{page} must have the marks of the table {name!r} once, has them {times} times.")
    page.write_text(text, encoding="utf-8")


def _rows(results: Path, *names: str) -> list[Row]:
    """Rows of experiments that were run in full."""
    return [row for name in names if _is_full(results, name) for row in read_rows(results / f"{name}.csv")]


def _is_full(results: Path, name: str) -> bool:
    path = results / f"{name}.json"
    return path.is_file() and not read_about(path)["settings"]["quick"]


def _posteriors(results: Path, metric: str) -> str:
    """Logistic regression: a line for each method, a column for each data set."""
    rows = [row for row in _rows(results, "logreg", "logreg-online-eig") if row.metric == metric]
    return _grid(rows, [*GAUSSIANS, "full_exact"] if metric != "symmetric_kl" else GAUSSIANS, "logreg")


def _curves(results: Path) -> str:
    """How far the widths of bands on the noisy cubic are from those of HMC."""
    rows = [row for row in _rows(results, "toy") if row.metric == "sd_log_ratio"]
    return _grid(rows, tuple(dict.fromkeys(row.method for row in rows)), "toy")


def _networks(results: Path) -> str:
    """Regression with networks, a line for each data set: log-likelihoods, then errors."""
    parts = []
    for metric in ("test_log_likelihood", "test_rmse"):
        rows = [row for row in _rows(results, "uci") if row.metric == metric]
        if rows:
            parts.append(f"{pages.METRICS[metric]} on test data:\n")
        parts.append(_grid(rows, tuple(dict.fromkeys(row.method for row in rows)), "uci"))
    return "\n".join(dict.fromkeys(parts))  # without results both say the same


def _images(results: Path) -> str:
    """Classes of images, a line for each network: errors, NLL and calibration; then strangers by entropy."""
    lines = _classified(results)
    if not lines:
        return "Not run yet: `slangvi reproduce images`.\n"
    places = dict.fromkeys(place for _, place, *_ in lines)
    methods = sorted(dict.fromkeys(method for *_, method, _ in lines), key=list(_images_pages.COLORS).index)
    parts = []
    for metric, unit in zip((*METRICS[:3], STRANGE), (0.01, 1e-4, 1e-4, 1e-3), strict=True):
        found: dict[tuple[str, str], list[float]] = {}
        for name, place, method, value in lines:
            if name == metric:
                found.setdefault((place, method), []).append(value)
        shown = [place for place in places if any(place == key for key, _ in found)]
        means = {key: pages.number(statistics.fmean(values), None, unit) for key, values in found.items()}
        cells = [[place, *(means.get((place, method), "") for method in methods)] for place in shown]
        header = ["data", *(f"`{method}`" for method in methods)]
        parts += [f"{pages.METRICS.get(metric, metric)}:\n", pages.markdown(header, cells)]
    return "\n".join(parts)


def _classified(results: Path) -> list[tuple[str, str, str, float]]:
    """Metric, network, method and value, from the tables of two experiments; on MNIST, rank 8 by our recipe."""
    found = []
    if _is_full(results, "mnist"):
        names = {f"slang_8{OURS}": "slang_8", "map": "map", "bbb": "bbb", "ensemble_5": "ensemble_5"}
        for line in read_table(results / "mnist.csv", _mnist_tables.COLUMNS):
            if method := names.get(line["method"]):
                found += [(name, "MNIST, 400-400", method, float(line[name])) for name in METRICS[:3]]
    if _is_full(results, "images"):
        for line in read_table(results / "images.csv", _images_pages.COLUMNS):
            found += [(name, _place(line), line["method"], float(line[name])) for name in METRICS[:3]]
        for line in read_table(results / "images-strangers.csv", _images_pages.STRANGER_COLUMNS):
            place = f"{_place(line)}: {_images_pages.SETS[line['strangers']]}"
            found.append((STRANGE, place, line["method"], float(line["entropy_auroc"])))
    return found


def _place(line: Mapping[str, str]) -> str:
    return f"{_images_pages.SETS[line['data']]}, {_images_pages.NETWORKS[line['network']]}"


def _grid(rows: Sequence[Row], methods: Iterable[str], name: str) -> str:
    if not rows:
        return f"Not run yet: `slangvi reproduce {name}`.\n"
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    found = {(row.dataset, row.method): _short(row) for row in rows}
    names, labels = list(methods), [pages.DATASETS[dataset] for dataset in datasets]
    if len(datasets) > len(names):  # many data sets would make the table too wide
        lines = [[label, *(found.get((d, m), "") for m in names)] for d, label in zip(datasets, labels, strict=True)]
        return pages.markdown(["data", *(f"`{m}`" for m in names)], lines)
    lines = [[f"`{m}`", *(found.get((d, m), "") for d in datasets)] for m in names]
    return pages.markdown(["method", *labels], lines)


def _short(row: Row) -> str:
    """Three digits, four where methods hardly differ, and the standard error to the same decimals."""
    digits = 3 if row.metric in ("symmetric_kl", "sd_log_ratio") else 4
    size = math.floor(math.log10(abs(row.mean))) if row.mean else 0
    return pages.number(row.mean, row.standard_error, min(1.0, 10.0 ** (size - digits + 1)))


def _costs(benchmarks: Path) -> str:
    """One step of a small network: times Adam and megabytes, on every machine it was measured on."""
    machines = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(benchmarks.glob("step-*.json"))]
    if not machines:
        return "Not measured yet: `slangvi bench step`.\n"
    machines.sort(key=lambda machine: machine["environment"]["device_type"])  # CPUs first
    header = ["method", "rank"]
    for machine in machines:
        about = machine["environment"]
        threads = f", {about['threads']} threads" if about["device_type"] == "cpu" else ""
        header += [f"{about['device']}{threads}: × Adam", "extra MB"]
    found = [{_key(row): row for row in machine["rows"] if row["milliseconds"]} for machine in machines]
    keys = list(dict.fromkeys(key for rows in found for key in rows if key[0] in COSTS))
    lines = []
    for key in sorted(keys, key=lambda key: (list(COSTS).index(key[0]), key[1] or 0)):
        cells = [COSTS[key[0]], "" if key[1] is None else str(key[1])]
        for rows in found:
            cells += [_size(rows[key][what]) for what in ("ratio", "extra_mb")] if key in rows else ["", ""]
        lines.append(cells)
    return pages.markdown(header, lines)


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _key(row: Mapping[str, Any]) -> tuple[str, int | None]:
    return row["name"], row["settings"].get("L")
