"""SLANG-OnlineEig on logistic regression: the paper's table, and convergence and spread of the divergence on USPS."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from slangvi_reproduction.experiments import _logistic, logreg, pages
from slangvi_reproduction.experiments._agreement import REFERENCE, Verdict, judge, summary
from slangvi_reproduction.experiments._logistic_cells import plan
from slangvi_reproduction.experiments._logistic_tables import (
    SPLIT_COLUMNS,
    TRACE_COLUMNS,
    Outcome,
    compute,
    main_recipe,
    metric_rows,
    save,
    trace_lines,
)
from slangvi_reproduction.experiments.paper import printed
from slangvi_reproduction.experiments.results import Row, read_rows, read_table
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["DATASETS", "METHODS", "run", "section"]

NAME = "logreg-online-eig"
TITLE = "SLANG-OnlineEig"
DATASETS = tuple(_logistic.DATASETS)
METHODS = ("online_eig_1", "online_eig_2", "online_eig_5")
DRAWN, BASELINE = "usps_3vs5", "mf_ef"
ABOUT = """\
The paper's first attempt at SLANG averages the leading eigenvectors of the empirical Fisher themselves instead of the
matrix. Data, settings and metrics are those above. The paper prints three digits and no standard errors; ✓ means within
2 % or half a unit of the last digit printed. On USPS, whose data differ, distances to `full_exact` are compared as
above.
"""


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    start = perf_counter()
    recipe = main_recipe(settings)
    baseline = plan(recipe, [DRAWN], [BASELINE])
    done = compute(NAME, recipe, (DATASETS, METHODS), settings, progress, besides=baseline)
    drawn = [*(cell for cell in done.cells if cell.cell.dataset == DRAWN), *done.besides]
    traces = trace_lines(drawn, "symmetric_kl", "trace_kl")
    return save(NAME, metric_rows(NAME, done, settings), done, recipe, settings, start, traces)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows = read_rows(results / f"{NAME}.csv")
    parts = [ABOUT, pages.made_by(results / f"{NAME}.json")]
    pictures = []
    if (results / f"{NAME}-trace.csv").is_file():
        pictures.append(docs / "images" / "results-logreg-online-eig.png")
        _plot(results, pictures[0])
        parts.append(pages.image(pictures[0], "KL on USPS along the way, and over splits at the end."))
        parts.append(
            "*USPS. Left: symmetric KL to `full_exact` along the way, mean over splits. Right: the same at the end, "
            "over splits.*\n"
        )
    every = _judged(rows, results)
    for dataset in dict.fromkeys(row.dataset for row in rows):
        parts.append(f"### OnlineEig on {pages.DATASETS[dataset]}\n")
        verdicts = [verdict for verdict in every if verdict.row.dataset == dataset]
        for metric in dict.fromkeys(verdict.row.metric for verdict in verdicts):
            parts.append(pages.comparison([v for v in verdicts if v.row.metric == metric]))
    parts += ["### What holds for OnlineEig\n", *(f"- {line}" for line in summary(every)), ""]
    return "\n".join(parts), pictures


def _judged(rows: list[Row], results: Path) -> list[Verdict]:
    """Compared with the paper, by distance to the exact answer of `logreg` where that is needed and there."""
    path = results / f"{logreg.NAME}.csv"
    exact = [row for row in read_rows(path) if row.method == REFERENCE] if path.is_file() else []
    paper = printed(logreg.NAME) | printed("logreg_online_eig")
    return [verdict for verdict in judge([*rows, *exact], paper) if verdict.row.method != REFERENCE]


def _plot(results: Path, path: Path) -> None:
    traces = read_table(results / f"{NAME}-trace.csv", TRACE_COLUMNS)
    splits = [line for line in read_table(results / f"{NAME}-splits.csv", SPLIT_COLUMNS) if line["dataset"] == DRAWN]
    figure = pages.figure(9, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for method in dict.fromkeys(line["method"] for line in traces):
        pages.curve(left, [line for line in traces if line["method"] == method], method)
    left.set(xscale="log", yscale="log", xlabel="iterations", ylabel="symmetric KL")
    left.legend(fontsize=8)
    _boxes(right, splits)
    pages.save(figure, path)


def _boxes(axes: Any, splits: list[dict[str, str]]) -> None:
    methods = list(dict.fromkeys(line["method"] for line in splits))
    values = [[float(line["symmetric_kl"]) for line in splits if line["method"] == method] for method in methods]
    axes.boxplot(values, tick_labels=[method.removeprefix("online_eig_") for method in methods])
    axes.set(xlabel="rank L", ylabel="symmetric KL")
    axes.grid(alpha=0.3)
