"""How fast networks converge on one split: the right half of the paper's convergence figure, ten seeds each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slangvi_reproduction.data.libsvm import LIBSVM, load_libsvm
from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._bnn_cells import METRICS, PRIOR_PRECISION, settings_of
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._logistic import DATASETS as SETS
from slangvi_reproduction.experiments._logistic_tables import TRACE_COLUMNS, Outcome
from slangvi_reproduction.experiments._task import BIAS_PRECISION
from slangvi_reproduction.experiments._uci_tables import run_table
from slangvi_reproduction.experiments.results import read_rows, read_table
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "run", "section"]

NAME = "bnn-convergence"
TITLE = "Convergence of networks"
DATASETS = tuple(PRIOR_PRECISION)
METHODS = ("bbb", "bbb_narrow", "slang_8", "slang_16", "slang_32")
# What differs between methods beside the learner, where it is not the method's namesake.
OWN: dict[str, dict[str, Any]] = {"bbb_narrow": {"learner": "bbb", "adam_init_precision": 100.0}}
TRACES = dict(zip(METRICS, ("trace_elbo", "trace_nll"), strict=True))
SEEDS = 10
# Of a step of SLANG with ten seeds and 20 draws.
STEP_SECONDS = {"usps_3vs5": 1.5, "breast_cancer": 0.8, "australian": 0.4}
# Raised when the same settings would give other numbers.
EDITION = 1
ABOUT = """\
Classifiers with one hidden layer of 50 rectified units on the first split of three data sets, 500 epochs of shuffled
minibatches (32 examples, 64 on USPS), ten seeds. The settings are the paper's: constant rates, $\\alpha = \\beta =
0.02154435$ for SLANG, with momentum 0.9 and without a warm-up of the precision, and 0.01 for Adam, by which Bayes by
Backprop is trained; 20 draws a step; $\\lambda = 8$, on USPS 32. Biases have the prior precision $10^{-6}$, as those of
all networks here, though the paper calls the prior isotropic: −ELBO/N is therefore higher by up to 1.2, on USPS 0.6.
All methods start from the same Gaussian, torch's own initial weights with σ = 1. The paper does not tell where Bayes by
Backprop began, and Adam with this rate takes hundreds of steps to make σ small: `bbb_narrow`, which is not in the
paper, starts with σ = 0.1.

Along the way −ELBO/N is estimated on the whole training part and the NLL on the test part, with the same 100 draws of
the weights, which training does not see, and with the KL divergence from the prior in closed form. Lines are means over
seeds, bands are ± 2 standard deviations. Where the lines end is in the tables; the paper shows a figure only.
"""


def chosen(settings: Settings) -> dict[str, Any]:
    """The experiment's settings, and those of --quick."""
    quick = settings.quick
    return {
        "edition": EDITION,
        "splits": [1] * (settings.splits or (2 if quick else SEEDS)),
        "epochs": settings.epochs or (3 if quick else 500),
        "hidden": 50,
        "mc_samples": 4 if quick else 20,
        "lr": 0.02154435,
        "precision_lr": 0.02154435,
        "falls": [],
        "precision_warmup": False,
        "init_precision": 1.0,
        "adam_lr": 0.01,
        "adam_init_precision": 1.0,
        "bias_precision": BIAS_PRECISION,
        "draws": 20 if quick else 100,
        "trace_points": 8 if quick else 80,
        "seed": settings.seed,
        "device": settings.device,
    }


def plan(common: dict[str, Any], datasets: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """A cell for every data set and method."""
    work = "slangvi_reproduction.experiments._bnn_cells:compute_cell"
    return [
        Cell(
            NAME,
            dataset,
            method,
            settings_of(dataset, common | OWN.get(method, {})),
            work,
            _seconds(dataset, method, common),
        )
        for dataset in datasets
        for method in methods
    ]


def _seconds(dataset: str, method: str, common: dict[str, Any]) -> float:
    """A guess at the time of one core that a cell takes, from a few that were timed."""
    steps = common["epochs"] * (LIBSVM[dataset].num_train // SETS[dataset].batch_size)
    share = len(common["splits"]) / SEEDS * common["mc_samples"] / 20
    return float(steps * share * STEP_SECONDS[dataset] * (0.05 if method.startswith("bbb") else 1.0))


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    common = chosen(settings)
    datasets = choose("dataset", settings.datasets, DATASETS)
    methods = choose("method", settings.methods, METHODS)
    cells = plan(common, datasets, methods), plan(common, DATASETS, METHODS)
    told = common | {"prior_precision": PRIOR_PRECISION, "batch": {name: SETS[name].batch_size for name in DATASETS}}
    return run_table(NAME, *cells, METRICS, told, settings, progress, TRACES, load_libsvm)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows, traces = read_rows(results / f"{NAME}.csv"), read_table(results / f"{NAME}-trace.csv", TRACE_COLUMNS)
    parts, pictures = [ABOUT, pages.made_by(results / f"{NAME}.json", "seeds")], list[Path]()
    for metric, short in zip(METRICS, ("elbo", "nll"), strict=True):
        label, picture = pages.METRICS[metric], docs / "images" / f"results-{NAME}-{short}.png"
        pages.panels([line for line in traces if line["metric"] == metric], METHODS, label, picture)
        parts.append(pages.image(picture, f"{label} of networks against iterations for three data sets."))
        parts.append(pages.ends([row for row in rows if row.metric == metric], f"{label} at the end"))
        pictures.append(picture)
    return "\n".join(parts), pictures
