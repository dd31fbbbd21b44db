"""From finished cells of logistic regression to the files of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slangvi_reproduction.data.libsvm import load_libsvm
from slangvi_reproduction.experiments._about import about_run
from slangvi_reproduction.experiments._cells import Cell, Stored, read_cell
from slangvi_reproduction.experiments._earlier import Earlier
from slangvi_reproduction.experiments._lockstep import METHODS
from slangvi_reproduction.experiments._logistic import DATASETS, METRICS
from slangvi_reproduction.experiments._logistic_cells import Recipe, plan
from slangvi_reproduction.experiments.results import (
    Posterior,
    Row,
    aggregate,
    read_about,
    refuse_shorter,
    write_about,
    write_posteriors,
    write_rows,
    write_table,
)
from slangvi_reproduction.experiments.runner import Progress, run_cells
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = [
    "LR",
    "TRACE_COLUMNS",
    "Computed",
    "Finished",
    "Outcome",
    "compute",
    "finished",
    "main_recipe",
    "metric_rows",
    "posteriors",
    "require_data",
    "save",
    "trace_lines",
]

LR, DECAY = 0.05, 0.51
SPLIT_COLUMNS = ("dataset", "method", "split", *METRICS)
TRACE_COLUMNS = ("dataset", "metric", "method", "step", "epoch", "mean", "standard_error", "median", "worst", "n")


class Outcome(NamedTuple):
    """What an experiment did.

    Args:
        rows: its table.
        files: what it wrote.
    """

    rows: list[Row]
    files: list[Path]


class Finished(NamedTuple):
    """A finished cell with its result."""

    cell: Cell
    stored: Stored


class Computed(NamedTuple):
    """All cells of a table that are finished, those beside it, and what earlier results say of the others."""

    cells: list[Finished]
    besides: list[Finished]
    earlier: Earlier


def main_recipe(settings: Settings) -> Recipe:
    """The settings of the paper's tables: 10,000 epochs on all splits; --quick takes 500 on five."""
    count = settings.splits or (5 if settings.quick else max(row.splits for row in DATASETS.values()))
    return Recipe(
        group="logreg",
        epochs=settings.epochs or (500 if settings.quick else 10_000),
        splits=lambda dataset: range(1, min(count, DATASETS[dataset].splits) + 1),
        seed=settings.seed,
        lr=lambda dataset, method: LR,
        decay=DECAY,
        device=settings.device,
        single=_single,
    )


def _single(dataset: str, method: str) -> bool:
    """Twenty precisions of USPS are 10 MB to average and factorise at every step; their digits are not needed there."""
    return dataset == "usps_3vs5" and METHODS[method].module == "full"


def require_data(datasets: Iterable[str]) -> None:
    """Read every data set once, so that a missing or damaged file is told before anything is computed."""
    for dataset in datasets:
        load_libsvm(dataset)


def compute(
    name: str,
    recipe: Recipe,
    table: tuple[Sequence[str], Sequence[str]],
    settings: Settings,
    progress: Progress,
    besides: Sequence[Cell] = (),
    train: bool = True,
) -> Computed:
    """Compute the chosen cells of a table, and return all of its cells that are finished.

    Args:
        name: of the experiment.
        recipe: how cells are trained.
        table: data sets and methods of the experiment.
        settings: what was chosen.
        progress: told what happens.
        besides: cells to compute that are not of the table, where their data set is chosen.
        train: whether anything is computed; if not, this only says what is there.
    """
    datasets = choose("dataset", settings.datasets, table[0]) if train else ()
    methods = choose("method", settings.methods, table[1])
    wanted = [*plan(recipe, datasets, methods), *(cell for cell in besides if cell.dataset in datasets)]
    about, every = settings.out / f"{name}.json", plan(recipe, *table)
    refuse_shorter(about, recipe.epochs, _most_splits(recipe))
    there = (cell for cell, _ in finished([*every, *besides], settings.cells))
    earlier = Earlier(about, _told(recipe), [*every, *besides], [*wanted, *there])
    require_data(datasets)
    run_cells(wanted, settings.cells, jobs=settings.jobs, force=settings.force, progress=progress)
    cells, more = (finished(each, settings.cells) for each in (every, besides))
    earlier.forget(cell for cell, _ in (*cells, *more))  # what is finished here counts more
    return Computed(cells, more, earlier)


def _most_splits(recipe: Recipe) -> int:
    return max(len(recipe.splits(dataset)) for dataset in DATASETS)


def finished(cells: Iterable[Cell], folder: Path) -> list[Finished]:
    """Those cells that are finished, with their results."""
    found = ((cell, read_cell(cell, folder)) for cell in cells)
    return [Finished(cell, stored) for cell, stored in found if stored is not None]


# ---- what they hold ----


def metric_rows(name: str, done: Computed, settings: Settings) -> list[Row]:
    """The three metrics of every cell over its splits, of those in earlier results too."""
    fresh = [
        aggregate(cell.dataset, metric, cell.method, stored.arrays[metric])
        for metric in METRICS
        for cell, stored in done.cells
    ]
    return done.earlier.rows(settings.out / f"{name}.csv", fresh)


def split_lines(cells: Sequence[Finished]) -> list[tuple[Any, ...]]:
    """The three metrics of every cell on every split."""
    return [
        (cell.dataset, cell.method, split, *(float(stored.arrays[metric][k]) for metric in METRICS))
        for cell, stored in cells
        for k, split in enumerate(cell.settings["splits"])
    ]


def trace_lines(
    cells: Sequence[Finished], metric: str, array: str, worst: Callable[[list[float]], float] = max
) -> list[tuple[Any, ...]]:
    """One metric along the way, over splits or seeds; `worst` is min where higher is better."""
    lines = []
    for cell, stored in cells:
        final = int(stored.arrays["trace_steps"][-1])
        for step, values in zip(stored.arrays["trace_steps"], stored.arrays[array], strict=True):
            row = aggregate(cell.dataset, metric, cell.method, values, worst)
            epoch = float(step) * cell.settings["epochs"] / final
            lines.append((*row[:3], int(step), epoch, *row[3:]))
    return lines


def posteriors(cells: Sequence[Finished]) -> dict[str, Posterior]:
    """Mean and covariance of the first split of every cell, by "dataset/method"."""
    return {
        f"{cell.dataset}/{cell.method}": Posterior(stored.arrays["loc"][0], stored.arrays["covariance"][0])
        for cell, stored in cells
    }


# ---- files ----


def save(
    name: str,
    rows: list[Row],
    done: Computed,
    recipe: Recipe,
    settings: Settings,
    start: float,
    traces: Sequence[Sequence[Any]] = (),
    keep_splits: bool = True,
    keep_posteriors: bool = True,
) -> Outcome:
    """Write the files of an experiment; the JSON, which stands for all of them, last.

    Args:
        name: of the experiment.
        rows: its table.
        done: what it was made of, and what stays of earlier results.
        recipe: how they were trained.
        settings: what was chosen.
        start: of the run, by `perf_counter`.
        traces: lines of a second table, of metrics along the way.
        keep_splits: write the metrics of every split too.
        keep_posteriors: write the Gaussians of the first split too.
    """
    cells, besides, earlier = done
    about, paths = settings.out / f"{name}.json", [settings.out / f"{name}.csv"]
    write_rows(paths[0], rows)
    for kind, header, lines in (
        ("splits", SPLIT_COLUMNS, split_lines(cells) if keep_splits else []),
        ("trace", TRACE_COLUMNS, traces),
    ):
        path = settings.out / f"{name}-{kind}.csv"
        if lines or (earlier.cells and path.is_file()):
            write_table(path, header, earlier.merged(path, header, lines))
            paths.append(path)
    if keep_posteriors:
        paths.append(settings.out / f"{name}-posteriors.npz")
        write_posteriors(paths[-1], earlier.posteriors(paths[-1]) | posteriors(cells))
    told = about_run(name, [*cells, *besides], _told(recipe), settings, start, _about_cell, earlier.cells)
    _write_about(about, told)
    return Outcome(rows, [*paths, about])


def _write_about(path: Path, about: dict[str, Any]) -> None:
    """Keep what is there when no cell was computed since: command and time are those of the run that did the work."""
    there = read_about(path) if path.is_file() else {}
    alike = all(there.get(key) == about[key] for key in ("settings", "seed"))
    if not (alike and about["cells"] in ({}, there.get("cells"))):
        write_about(path, about | {"threads": 1})


def _told(recipe: Recipe) -> dict[str, Any]:
    """Settings that all cells share."""
    chosen: dict[str, Any] = {"epochs": recipe.epochs, "splits": _most_splits(recipe)}
    return chosen | {"mc_samples": recipe.mc_samples, "decay": recipe.decay}


def _about_cell(cell: Cell, stored: Stored) -> dict[str, Any]:
    """Settings, and for exact methods how exact they are on the worst split."""
    about: dict[str, Any] = {"settings": dict(cell.settings)}
    if "gradient_norm" in stored.arrays:
        about["gradient_norm"] = float(stored.arrays["gradient_norm"].max())
    return about
