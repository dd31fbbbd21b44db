"""The paper's UCI table: networks with one hidden layer on eight regression sets, twenty splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._logistic_tables import Outcome
from slangvi_reproduction.experiments._uci_cells import METRICS, SETS, settings_of
from slangvi_reproduction.experiments._uci_pages import Paper, said, table
from slangvi_reproduction.experiments._uci_tables import run_table
from slangvi_reproduction.experiments.paper import printed
from slangvi_reproduction.experiments.results import read_rows
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "run", "section"]

NAME = "uci"
TITLE = "Regression with networks (UCI)"
DATASETS = tuple(SETS)
METHODS = ("slang_1", "slang_1_cold", "slang_8", "slang_32", "bbb", "mc_dropout", "ensemble_5")
SPLITS = 20
# Methods that take τ and λ from another one's search, so that they differ from it by their rank alone.
BORROWERS = {"slang_8": "slang_1", "slang_32": "slang_1", "online_eig_1": "slang_1"}
# Temperature of a cold posterior.
COLD = 0.2
# Methods that are another one with other settings; the paper's number is that of the other one.
VARIANTS = {"slang_1_cold": {"learner": "slang_1", "temperature": COLD}}
COLUMNS = (*METRICS, "log_tau", "log_lambda")
# Raised when the same settings would give other numbers.
EDITION = 2
# At the start, for all sets, unless α would add up to more than TOTAL; β and d are those of `slow_precision`.
LR, TOTAL = 0.4, 520.0
# Noise precision at the start, at most, on standardised targets, and the share of all steps after which it is its own.
NOISE_START, NOISE_FALL = 30.0, 0.1
ADAM_LR = 0.01
# Settings that only some methods have.
OF_SLANG = ("lr", "precision_lr", "total", "init_precision", "precision_warmup", "noise_start", "noise_fall")
OF_ADAM = ("adam_lr", "adam_init_precision", "dropout_rate")
ABOUT = f"""\
One hidden layer of 50 rectified units on eight sets of the UCI collection, with the twenty splits of Gal and
Ghahramani. For every split the noise precision τ and the prior precision λ of the weights (biases: $10^{{-6}}$) are
searched by Bayesian optimisation: 30 evaluations of the log-likelihood in five-fold cross-validation of the training
part, five at a time, the first five at random. The network is then trained once more on the whole training part.
Every network is trained for 120 epochs with minibatches of 10 (100 on the three large sets). *RMSE* and
*log-likelihood* are those of the average over draws of the weights, on the test part, in the targets' own units.

All sets are trained by the same recipe, with rates that fall along a half cosine. SLANG's begin at
$\\alpha = \\min({LR}, {2 * TOTAL:g}/T)$ and $\\beta = 10/T$, four draws a step, where $T$ is the number of steps: all
networks move by the same $\\sum_t \\alpha_t \\le {TOTAL:g}$, and the precision is slow, as `slangvi.slow_precision`
makes it and the estimators have it: it begins at $d_0 = N\\tau$, without a warm-up. The noise precision begins at
{NOISE_START:g} at most, on standardised targets, and is the searched one after the first {NOISE_FALL:.0%} of all steps;
that concerns Energy and Yacht, whose τ is larger. The others' Adam begins at {ADAM_LR}.
`slang_1_cold` has the same rates and a cold posterior, $p(\\theta \\mid \\text{{data}})^{{1/\\mathcal T}}$ with
$\\mathcal T = {COLD}$ on all sets: likelihood, prior and the precision at the start count {1 / COLD:g} times. Its τ and
λ are searched for it; beside it stand the paper's numbers of `slang_1`, which was not cold. On Energy, Naval and Yacht
τ is at the upper edge of its box on nearly every split, and a cold posterior makes up for some of what the box takes:
[below](#what-cold-posteriors-and-a-search-of-the-prior-were-for). `slang_8`, `slang_32` and
`ensemble_5` (five networks, maximum a posteriori) are not in the paper; the first two take τ and λ from the search of
`slang_1` and differ from it by their rank alone.

A number is the mean over splits ± its standard error. ✓ means at least as good as the paper's, up to one standard
error of its own; *better* that it is strictly better.
"""


def chosen(settings: Settings) -> dict[str, Any]:
    """The experiment's settings, and those of --quick."""
    quick = settings.quick
    count = settings.splits or (2 if quick else SPLITS)
    return {
        "edition": EDITION,
        "splits": list(range(min(count, SPLITS))),
        "epochs": settings.epochs or (20 if quick else 120),
        "evaluations": 4 if quick else 30,
        "at_once": 2 if quick else 5,
        "folds": 5,
        "hidden": 50,
        "mc_samples": 4,
        "lr": LR,
        "precision_lr": "slow",
        "total": TOTAL,
        "init_precision": "curvature",
        "precision_warmup": False,
        "noise_start": NOISE_START,
        "noise_fall": NOISE_FALL,
        "adam_lr": ADAM_LR,
        "adam_init_precision": 100.0,
        "dropout_rate": 0.05,
        "search_draws": 100,
        "test_draws": 1000,
        "seed": settings.seed,
        "device": settings.device,
    }


def plan(
    common: dict[str, Any], datasets: Sequence[str], methods: Sequence[str], lender: dict[str, Any] | None = None
) -> list[Cell]:
    """A cell for every data set and method.

    Args:
        common: settings that all cells share.
        datasets: which.
        methods: which.
        lender: settings of methods whose τ and λ are taken over, where they are others.
    """
    return [_cell(common, dataset, method, lender or common) for dataset in datasets for method in methods]


def _cell(common: dict[str, Any], dataset: str, method: str, lending: dict[str, Any]) -> Cell:
    foreign = OF_ADAM if method.startswith(("slang", "online_eig")) else OF_SLANG
    own = {name: value for name, value in common.items() if name not in foreign}
    own |= VARIANTS.get(method, {})
    settings, work, cost = (
        settings_of(dataset, own),
        "slangvi_reproduction.experiments._uci_cells:",
        _cost(dataset, method),
    )
    if method not in BORROWERS:
        return Cell(NAME, dataset, method, settings, work + "compute_cell", cost)
    lender = _cell(lending, dataset, BORROWERS[method], lending)
    settings |= {"evaluations": 0, "points_of": lender.method}
    return Cell(NAME, dataset, method, settings, work + "compute_borrowed", cost / 10, (lender,))


def _cost(dataset: str, method: str) -> float:
    """Seconds, roughly, up to a factor that all share."""
    rows = SETS[dataset].batch
    return (2.0 if method.startswith(("slang", "online_eig")) else 1.0) * (1.0 if rows == 10 else 3.0)


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    common = chosen(settings)
    datasets = choose("dataset", settings.datasets, DATASETS)
    methods = choose("method", settings.methods, METHODS)
    cells = plan(common, datasets, methods), plan(common, DATASETS, METHODS)
    return run_table(NAME, *cells, COLUMNS, common, settings, progress)


# ---- the page


def _paper() -> Paper:
    """The paper's numbers, those of a method beside its variants too."""
    known = printed(NAME)
    lent = {
        (dataset, metric, name): number
        for name, own in VARIANTS.items()
        for (dataset, metric, method), number in known.items()
        if method == own["learner"]
    }
    return {**known, **lent}


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows, paper = read_rows(results / f"{NAME}.csv"), _paper()
    parts = [ABOUT, pages.made_by(results / f"{NAME}.json")]
    for metric in METRICS:
        parts.append(f"### {pages.METRICS[metric]}\n")
        parts.append(table([row for row in rows if row.metric == metric], paper))
    lines = [line for method in METHODS for line in said(method, rows, paper)]
    parts += ["### What holds for networks\n", *(f"- {line}" for line in lines), ""]
    return "\n".join(parts), []
