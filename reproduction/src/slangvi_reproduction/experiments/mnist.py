"""The paper's table on MNIST: networks with two hidden layers of 400, six ranks, tuned and then tested."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from slangvi_reproduction.data import load_mnist
from slangvi_reproduction.experiments import _mnist_pages
from slangvi_reproduction.experiments._earlier import Earlier, known_cells
from slangvi_reproduction.experiments._image_tables import all_finished
from slangvi_reproduction.experiments._logistic_tables import Outcome
from slangvi_reproduction.experiments._mnist_recipes import METHODS as RECIPES
from slangvi_reproduction.experiments._mnist_recipes import NAME, table
from slangvi_reproduction.experiments._mnist_tables import TUNING, save
from slangvi_reproduction.experiments.results import refuse_shorter
from slangvi_reproduction.experiments.runner import Progress, run_cells
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "run", "section"]

TITLE = "Digits (MNIST)"
DATASETS = (NAME,)
METHODS = tuple(RECIPES)
# Raised when the same settings would give other numbers.
EDITION = 1


def chosen(settings: Settings) -> dict[str, Any]:
    """The experiment's settings, and those of --quick."""
    quick = settings.quick
    held = 2_000 if quick else 10_000
    return {
        "edition": EDITION,
        "epochs": settings.epochs or (4 if quick else 100),
        "seeds": settings.splits or (1 if quick else 0),  # 0: as many as the method's row says
        "data": NAME,
        "network": "mlp",
        "hidden": [400, 400],
        "num_images": {
            "tuning": 6_000 if quick else 50_000,
            "train": 8_000 if quick else 60_000,
            "validation": held,
            "test": held,
        },
        "batch": 200,
        "mc_samples": 4,
        "draws": 50 if quick else 1_000,
        "trace_draws": 10 if quick else 32,
        "trace_points": 8 if quick else 30,
        "seed": settings.seed,
        "device": settings.device,
    }


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    start, common, about = perf_counter(), chosen(settings), settings.out / f"{NAME}.json"
    rows = table(common, settings.quick)
    names = tuple(rows.recipes)
    choose("dataset", settings.datasets, DATASETS)
    picked, every = (rows.finals(NAME, each) for each in (choose("method", settings.methods, names), names))
    refuse_shorter(about, common["epochs"], rows.most_seeds)
    common |= {"splits": rows.most_seeds}
    wanted = TUNING.missing(picked, known_cells(about, common, every), settings) if settings.extend else picked
    there = (done.cell for done in all_finished(every, settings.cells))
    earlier = Earlier(about, common, every, [*wanted, *there])
    for part in ("train", "test"):
        load_mnist(part)  # a missing or damaged file is told before anything is computed
    run_cells(wanted, settings.cells, jobs=settings.jobs, force=settings.force, progress=progress)
    return save(every, common, settings, start, earlier)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    return _mnist_pages.section(results, docs)
