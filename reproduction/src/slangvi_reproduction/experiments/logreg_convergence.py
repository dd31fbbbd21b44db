"""How fast the methods converge on one split: the left half of the paper's convergence figure, ten seeds each."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._logistic_cells import Recipe
from slangvi_reproduction.experiments._logistic_tables import (
    TRACE_COLUMNS,
    Outcome,
    compute,
    metric_rows,
    save,
    trace_lines,
)
from slangvi_reproduction.experiments.paper import learning_rates
from slangvi_reproduction.experiments.results import read_rows, read_table
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["DATASETS", "METHODS", "run", "section"]

NAME = "logreg-convergence"
TITLE = "Convergence"
DATASETS = ("usps_3vs5", "breast_cancer", "australian")
METHODS = ("mf_ef", "mf_hess", "slang_1", "slang_2", "slang_5", "slang_10", "full_ef", "full_hess")
# As in the paper's figure; the others are in the tables.
DRAWN = ("mf_hess", "slang_1", "slang_5", "slang_10", "full_hess")
ABOUT = """\
The first split of three data sets, 2,000 epochs with constant rates, ten seeds. The rates are those the authors chose
for each method and data set. Lines are means over seeds, bands are ± 2 standard deviations. Where the lines end is in
the table; the paper shows a figure only.
"""


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    start = perf_counter()
    seeds = settings.splits or (3 if settings.quick else 10)
    rates = learning_rates()
    recipe = Recipe(
        group=NAME,
        epochs=settings.epochs or (100 if settings.quick else 2000),
        splits=lambda dataset: [1] * seeds,
        seed=settings.seed,
        lr=lambda dataset, method: rates[dataset, method],
        decay=None,
        trace_points=120,
        device=settings.device,
    )
    done = compute(NAME, recipe, (DATASETS, METHODS), settings, progress)
    traces = trace_lines(done.cells, "negative_elbo_per_example", "trace_elbo")
    rows = metric_rows(NAME, done, settings)
    return save(NAME, rows, done, recipe, settings, start, traces, keep_splits=False, keep_posteriors=False)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the picture it wrote."""
    rows = [row for row in read_rows(results / f"{NAME}.csv") if row.metric == "negative_elbo_per_example"]
    picture = docs / "images" / "results-logreg-convergence.png"
    pages.panels(read_table(results / f"{NAME}-trace.csv", TRACE_COLUMNS), DRAWN, "−ELBO/N", picture)
    table = pages.ends(rows, "−ELBO/N at the end")
    image = pages.image(picture, "Negative ELBO against iterations for three data sets.")
    return "\n".join([ABOUT, pages.made_by(results / f"{NAME}.json"), image, table]), [picture]
