"""Networks with convolutions on images, past the paper: SLANG and its rivals, turned images, and strangers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from slangvi_reproduction.experiments import _images_pages
from slangvi_reproduction.experiments._about import about_run
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._earlier import Earlier, known_cells
from slangvi_reproduction.experiments._image_cells import LOADERS
from slangvi_reproduction.experiments._image_recipes import Grid, Recipe, Table
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._image_tables import all_finished, means_over_seeds
from slangvi_reproduction.experiments._images_pages import COLUMNS, NAME, STRANGER_COLUMNS, TUNING, TURNED_COLUMNS
from slangvi_reproduction.experiments._logistic_tables import Finished, Outcome, finished
from slangvi_reproduction.experiments.results import refuse_shorter, write_about, write_table
from slangvi_reproduction.experiments.runner import Progress, run_cells
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "run", "section"]

TITLE = "Images: convolutions, shift and strangers"
# Who is a stranger to whom.
_OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
# Raised when the same settings would give other numbers.
EDITION = 2
_SIGMAS = (1.0, 2.0)


def _recipes(precision_lr: float, temperatures: Sequence[float], adam_lr: Sequence[float]) -> dict[str, Recipe]:
    """The methods for one data set. The seconds of a step are guesses: only the order of cells depends on them.

    Args:
        precision_lr: β of SLANG. The precision starts high, and what is left of it after all steps is about
            exp(−β·steps/2): with β at 10/steps or a little more it guards the mean early and is forgotten late.
        temperatures: that SLANG's are chosen from.
        adam_lr: three rates for methods that use Adam; on Fashion-MNIST the one in the middle is the best of `map`.
    """
    adam: dict[str, Sequence[float]] = {"adam_lr": adam_lr}
    slang: dict[str, Any] = {"precision_lr": precision_lr, "precision_warmup": False, "init_precision": 1e4}
    searched: dict[str, Sequence[float]] = {"lr": (0.03, 0.1), "temperature": temperatures}
    ivon: dict[str, Any] = {"ivon": {"hess_init": 0.1, "beta2": 0.9999}}
    bbb: dict[str, Any] = {"adam_init_precision": 2500.0}
    return {
        "slang_8": Recipe("slang_8", slang, searched, 0.004, neg_log_sigma=_SIGMAS[:1]),
        "map": Recipe("map", {"distinct": 1}, adam, 0.001, neg_log_sigma=_SIGMAS),
        "ivon": Recipe("ivon", ivon, {"ivon_lr": (0.3, 1.0, 3.0)}, 0.01, neg_log_sigma=_SIGMAS),
        "bbb": Recipe("bbb", bbb, adam, 0.002, neg_log_sigma=_SIGMAS),
        "mc_dropout": Recipe("mc_dropout", {"dropout_rate": 0.1}, adam, 0.002, neg_log_sigma=_SIGMAS),
        "ensemble_5": Recipe("ensemble_5", {"distinct": 5}, adam, 0.003, tuned_as="map", neg_log_sigma=_SIGMAS),
        "laplace": Recipe("laplace", {}, adam, 0.001, tuned_as="map", neg_log_sigma=_SIGMAS),
    }


_PAIRS = {f"{data}_{network}": (data, network) for data in _OTHER for network in ("lenet", "resnet")}
DATASETS = tuple(_PAIRS)
_LENET = ((1.0, 0.3, 0.1), (1e-3, 3e-3, 1e-2))
_RESNET = ((0.3, 0.1, 0.03), (3e-3, 1e-2, 3e-2))
RECIPES: dict[str, dict[str, Recipe]] = {
    "mnist_lenet": _recipes(0.002, *_LENET),
    "mnist_resnet": _recipes(0.005, *_RESNET),
    "fashion_mnist_lenet": _recipes(0.002, *_LENET),
    "fashion_mnist_resnet": _recipes(0.002, *_RESNET),
}
METHODS = tuple(RECIPES[DATASETS[0]])
# A residual network learns digits in half as many epochs; on clothes SLANG's goes on improving.
_SHARE = {"mnist_resnet": 2}
# What --quick trains, and with which setting; in its 180 steps a precision that starts high would not be forgotten.
_QUICK_SLANG = {"lr": 0.03, "temperature": 0.1, "precision_lr": 0.02, "precision_warmup": True, "init_precision": 1e3}
QUICK: dict[str, Grid] = {
    "slang_8": [{"neg_log_sigma": 1.0, **_QUICK_SLANG}],
    "map": [{"neg_log_sigma": 1.0, "adam_lr": 3e-3}],
    "laplace": [{"neg_log_sigma": 1.0, "adam_lr": 3e-3}],
}


def chosen(settings: Settings) -> dict[str, Any]:
    """The experiment's settings, and those of --quick."""
    quick = settings.quick
    held = 500 if quick else 10_000
    return {
        "edition": EDITION,
        "chosen_by": "test_nll",
        "epochs": settings.epochs or (3 if quick else 20),
        "seeds": settings.splits or (1 if quick else 3),
        "num_images": {
            "tuning": 4_000 if quick else 50_000,
            "train": 6_000 if quick else 60_000,
            "validation": held,
            "test": held,
        },
        "batch": 100 if quick else 200,
        "mc_samples": 2 if quick else 4,
        "bias_precision": 1.0,
        "draws": 8 if quick else 64,
        "trace_draws": 4 if quick else 16,
        "trace_points": 3 if quick else 10,
        "degrees": [0, 30, 60, 90] if quick else list(range(0, 181, 15)),
        "seed": settings.seed,
        "device": settings.device,
    }


def tables(common: Mapping[str, Any], quick: bool = False) -> dict[str, Table]:
    """The methods of each data set; for --quick only those with a setting of their own."""
    found = {}
    for dataset, recipes in RECIPES.items():
        own = {**common, "epochs": max(1, common["epochs"] // _SHARE.get(dataset, 1))}
        picked = {name: recipes[name] for name in QUICK} if quick else recipes
        found[dataset] = Table(NAME, picked, own, QUICK if quick else None)
    return found


def plan(rows: Mapping[str, Table], datasets: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """The final cells of some data sets, with those they need."""
    found = []
    for name in datasets:
        data, network = _PAIRS[name]
        own = {"data": data, "network": network, "strangers": [_OTHER[data], "letters"]}
        found += rows[name].finals(name, methods, own)
    return found


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    start, common, about = perf_counter(), chosen(settings), settings.out / f"{NAME}.json"
    rows, every_set = tables(common, settings.quick), DATASETS[:1] if settings.quick else DATASETS
    first = rows[DATASETS[0]]
    datasets = choose("dataset", settings.datasets, every_set)
    picked = plan(rows, datasets, choose("method", settings.methods, tuple(first.recipes)))
    every = plan(rows, every_set, tuple(first.recipes))
    refuse_shorter(about, common["epochs"], first.most_seeds)
    common |= {"splits": first.most_seeds}
    wanted = TUNING.missing(picked, known_cells(about, common, every), settings) if settings.extend else picked
    there = (done.cell for done in all_finished(every, settings.cells))
    earlier = Earlier(about, common, every, [*wanted, *there])
    for data in dict.fromkeys(_PAIRS[name][0] for name in datasets):
        for source, part in ((data, "train"), (data, "test"), (_OTHER[data], "test")):
            LOADERS[source](part)  # a missing or damaged file is told before anything is computed
    run_cells(wanted, settings.cells, jobs=settings.jobs, force=settings.force, progress=progress)
    return _save(every, common, settings, start, earlier)


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    return _images_pages.section(results, docs)


# ---- files ----


def _save(every: Sequence[Cell], common: dict[str, Any], settings: Settings, start: float, earlier: Earlier) -> Outcome:
    """The tables of what is finished; the JSON, which stands for all of them, last."""
    tested, done = finished(every, settings.cells), all_finished(every, settings.cells)
    earlier.forget(cell for cell, _ in done)
    ends = (".csv", "-tuning.csv", "-turned.csv", "-strangers.csv", ".json")
    paths, label = [settings.out / f"{NAME}{end}" for end in ends], partial(_label, common["seed"])
    turned, strangers = (
        [line for each in tested for line in _lines(each, over, array)]
        for over, array in (("degrees", "turned"), ("strangers", "strangers"))
    )
    for path, columns, label_of, lines in (
        (paths[0], COLUMNS, label, [_line(each) for each in tested]),
        (paths[1], TUNING.columns, TUNING.labels(every), TUNING.lines(every, done, paths[1])),
        (paths[2], TURNED_COLUMNS, label, turned),
        (paths[3], STRANGER_COLUMNS, label, strangers),
    ):
        write_table(path, columns, sorted([*earlier.lines(path, columns, label_of), *lines], key=_place))
    write_about(paths[4], about_run(NAME, done, common, settings, start, kept=earlier.cells))
    return Outcome(means_over_seeds(paths[0], COLUMNS, _dataset_of), paths)


def _label(first_seed: int, line: Mapping[str, str]) -> str:
    """The cell behind a line."""
    return f"{_dataset_of(line)} {line['method']}-seed{int(line['seed']) - first_seed}"


def _dataset_of(line: Mapping[str, str]) -> str:
    return f"{line['data']}_{line['network']}"


def _place(line: Sequence[Any]) -> tuple[int, int]:
    """Where a line belongs, whenever it was made: by data and network, then by method."""
    data, network, method = line[:3]
    return DATASETS.index(f"{data}_{network}"), METHODS.index(method)


def _line(done: Finished) -> tuple[Any, ...]:
    cell, stored = done
    epochs = sum(epochs for _, epochs in cell.settings["stages"])
    return (*TUNING.key(cell), cell.settings["seed"], *(float(stored.arrays[name][0]) for name in METRICS), epochs)


def _lines(done: Finished, over: str, array: str) -> list[tuple[Any, ...]]:
    """One for each angle, or for each kind of strangers; none for a run that was lost."""
    cell, stored = done
    if array not in stored.arrays:
        return []
    labelled = zip(cell.settings[over], stored.arrays[array], strict=True)
    return [(*TUNING.key(cell), cell.settings["seed"], label, *map(float, row)) for label, row in labelled]
