"""The paper's main table: ten methods on four data sets, three metrics over twenty splits."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from slangvi_reproduction.experiments import _logistic, pages
from slangvi_reproduction.experiments._agreement import judge, orders, summary
from slangvi_reproduction.experiments._logistic_tables import Outcome, compute, main_recipe, metric_rows, save
from slangvi_reproduction.experiments.paper import printed
from slangvi_reproduction.experiments.results import Row, read_about, read_rows
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["DATASETS", "METHODS", "run", "section"]

NAME = "logreg"
TITLE = "Logistic regression"
DATASETS = tuple(_logistic.DATASETS)
METHODS = (
    *("mf_ef", "mf_hess", "mf_exact"),
    *("slang_1", "slang_2", "slang_5", "slang_10"),
    *("full_ef", "full_hess", "full_exact"),
)
ABOUT = """\
Ten Gaussian approximations of the posterior of logistic regression, on four data sets of the LIBSVM collection, as in
the paper's main table and its two detailed ones: 10,000 epochs, 12 draws a step, rates $0.05/(1 + t^{0.51})$, twenty
random halves of the data (a1a: its own split). *−ELBO/N* leaves out $\\tfrac12\\log\\lambda$ of the bias, as the paper
does. *NLL* is that of the exact predictive integral on test data, in nats. *KL* is the mean of both divergences between
a method and the best full Gaussian (`full_exact`), which is found by optimisation without sampling. Lower is better.

A number is the mean over splits ± its standard error. The difference is ours minus the paper's, in percent of the
paper's and in the paper's standard errors. ✓ means within 2 %, or one standard error, or half a unit of the last digit
that the paper prints, whichever is largest.
"""
ABOUT_USPS = """\
The authors used a copy of USPS, resampled, that is not published. On the standard files all values are shifted, so here
the distances are compared: each method's value minus that of `full_exact`. ✓ means that it differs from the paper's by
at most 15 %, or by the rounding of the two printed numbers.

`full_ef` and `full_hess` are trained in float32 here, all else in float64, and all is measured in float64. The same
10,000 epochs in float64 gave the same means to four digits or more: a KL of 2.70251 for `full_ef` in both, and 0.009141
for `full_hess`.
"""


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    start = perf_counter()
    recipe = main_recipe(settings)
    done = compute(NAME, recipe, (DATASETS, METHODS), settings, progress)
    return save(NAME, metric_rows(NAME, done, settings), done, recipe, settings, start)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows = read_rows(results / f"{NAME}.csv")
    picture = docs / "images" / "results-logreg.png"
    _plot(rows, picture)
    parts = [ABOUT, pages.made_by(results / f"{NAME}.json"), pages.image(picture, "Paper and ours, all metrics.")]
    for dataset in dict.fromkeys(row.dataset for row in rows):
        parts.append(f"### {pages.DATASETS[dataset]}\n")
        if dataset == "usps_3vs5":
            parts.append(ABOUT_USPS)
        mine = [row for row in rows if row.dataset == dataset]
        verdicts = judge(mine, printed(NAME))
        for metric in dict.fromkeys(row.metric for row in mine):
            parts.append(pages.comparison([v for v in verdicts if v.row.metric == metric]))
    said = [*summary(judge(rows, printed(NAME))), *orders(rows), *_exactness(results / f"{NAME}.json")]
    parts += ["### What holds\n", *(f"- {line}" for line in said), ""]
    return "\n".join(parts), [picture]


def _exactness(path: Path) -> list[str]:
    """How well the exact methods were optimised."""
    norms = [cell["gradient_norm"] for cell in read_about(path)["cells"].values() if "gradient_norm" in cell]
    return [f"The exact methods ended with gradient norms of at most {max(norms):.1e}."] if norms else []


def _plot(rows: list[Row], path: Path) -> None:
    """A panel for each data set and metric: ours as dots with standard errors, the paper's as rings."""
    paper = printed(NAME)
    datasets, metrics = (
        list(dict.fromkeys(values)) for values in zip(*((r.dataset, r.metric) for r in rows), strict=True)
    )
    figure = pages.figure(10, 0.6 + 2.3 * len(datasets))
    grid = figure.subplots(len(datasets), len(metrics), squeeze=False)
    for line, dataset in zip(grid, datasets, strict=True):
        for axes, metric in zip(line, metrics, strict=True):
            mine = [row for row in rows if (row.dataset, row.metric) == (dataset, metric)]
            if metric == "symmetric_kl":
                mine = [row for row in mine if row.method != "full_exact"]
                axes.set_xscale("log")
            places = range(len(mine), 0, -1)
            colors = [pages.COLORS[row.method] for row in mine]
            axes.scatter([paper[row[:3]].mean for row in mine], places, s=42, facecolors="none", edgecolors="0.4")
            axes.scatter([row.mean for row in mine], places, s=12, c=colors)
            axes.hlines(
                places,
                [row.mean - row.standard_error for row in mine],
                [row.mean + row.standard_error for row in mine],
                colors=colors,
            )
            axes.set_yticks(places, [row.method for row in mine], fontsize=7)
            axes.tick_params(axis="x", labelsize=7)
            axes.set_title(f"{pages.DATASETS[dataset]}: {pages.METRICS[metric]}", fontsize=8)
            axes.grid(alpha=0.3)
    figure.supxlabel("dots and lines: ours ± standard error; rings: paper", fontsize=8)
    pages.save(figure, path)
