"""Tables of regression with small networks beside the paper's, for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._uci_cells import METRICS
from slangvi_reproduction.experiments._uci_tables import HIGHER
from slangvi_reproduction.experiments.paper import Printed
from slangvi_reproduction.experiments.results import Row

__all__ = ["Paper", "gain", "said", "table", "verdict"]

Paper = Mapping[tuple[str, str, str], Printed]


def table(rows: Sequence[Row], paper: Paper) -> str:
    """Rows of one metric, the paper's and ours."""
    lines = []
    for row in rows:
        there = paper.get(row[:3])
        unit = 1e-4 if row.dataset == "naval" and row.metric == "test_rmse" else 1e-3
        cells = [f"{pages.DATASETS[row.dataset]}, {row.method}"]
        cells.append("" if there is None else pages.number(there.mean, there.standard_error, there.unit))
        cells += [pages.number(row.mean, row.standard_error, unit), pages.number(row.median, None, unit)]
        cells += [pages.number(row.worst, None, unit), "" if there is None else verdict(row, there)]
        lines.append(cells)
    return pages.markdown(["data, method", "paper", "ours", "median", "worst split", ""], lines)


def gain(row: Row, than: float) -> float:
    """How much better ours is than a number, in the metric's units."""
    return (row.mean - than) * (1.0 if row.metric in HIGHER else -1.0)


def verdict(row: Row, there: Printed) -> str:
    """Whether ours is at least as good as the paper's, up to one standard error of its own."""
    better = gain(row, there.mean)
    allowed = max(there.standard_error or 0.0, there.unit / 2)
    return "✓ better" if better > 0 else "✓" if better >= -allowed else "✗"


def said(method: str, rows: Sequence[Row], paper: Paper) -> list[str]:
    """How often a method is as good as the paper's, where it has one, and how bad its worst split is."""
    mine = {(row.dataset, row.metric): row for row in rows if row.method == method}
    verdicts = {key: verdict(row, paper[row[:3]]) for key, row in mine.items() if row[:3] in paper}
    found = []
    for metric in METRICS if verdicts else ():
        told = [each for key, each in verdicts.items() if key[1] == metric]
        good, better = sum("✓" in each for each in told), sum("better" in each for each in told)
        what = f"{method}, {pages.METRICS[metric]}"
        found.append(f"{what}: as good as the paper's on {good} of {len(told)} sets, better on {better}.")
    ratios = {key[0]: row.worst / row.median for key, row in mine.items() if key[1] == "test_rmse"}
    if ratios:
        most = max(ratios, key=lambda name: ratios[name])
        where = f"{ratios[most]:.2f} times the median's ({pages.DATASETS[most]})"
        found.append(f"{method}: the worst split's RMSE is at most {where}.")
    return found
