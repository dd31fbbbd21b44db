"""The paper's regression curves: how uncertain a small network is about a noisy cubic, against a long run of HMC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi_reproduction.experiments import _toy_pages, pages
from slangvi_reproduction.experiments._about import about_run
from slangvi_reproduction.experiments._cells import Arrays, Cell, Stored
from slangvi_reproduction.experiments._cubic import GRID, INSIDE, NOISE
from slangvi_reproduction.experiments._earlier import Earlier
from slangvi_reproduction.experiments._logistic_tables import Finished, Outcome, finished
from slangvi_reproduction.experiments._toy_learners import LEARNERS
from slangvi_reproduction.experiments.results import (
    Row,
    aggregate,
    read_about,
    read_rows,
    refuse_shorter,
    write_about,
    write_rows,
    write_table,
)
from slangvi_reproduction.experiments.runner import Progress, run_cells
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "METRICS", "REGIONS", "run", "section"]

NAME = "toy"
TITLE = "Regression curves"
DATASETS = ("cubic",)
REFERENCE = "hmc"
METHODS = (*LEARNERS, REFERENCE)
METRICS = ("sd_log_ratio", "y_sd_log_ratio", "sd_log_bias")
REGIONS: dict[str, NDArray[np.bool_]] = {
    "cubic_inside": (GRID.abs() <= INSIDE).numpy(),
    "cubic_outside": (GRID.abs() > INSIDE).numpy(),
}
# Raised when the same settings would give other numbers.
EDITION = 1


def chosen(settings: Settings) -> dict[str, dict[str, Any]]:
    """What all cells share, what those of Gaussians have besides, and what HMC has."""
    quick = settings.quick
    return {
        "common": {
            "edition": EDITION,
            "num_data": 30,
            "data_seed": 0,
            "hidden": 10,
            "prior_precision": 1.0,
            "seed": settings.seed,
        },
        "fit": {
            "splits": list(range(settings.splits or (2 if quick else 5))),
            "epochs": settings.epochs or (60 if quick else 3000),
            "mc_samples": 10 if quick else 100,
            "lr": 0.5,
            "precision_lr": 0.05,
            "init_precision": 10.0,
            "adam_lr": 0.02,
            "adam_init_precision": 100.0,
            "trace_every": 20,
            "elbo_draws": 100 if quick else 1000,
            "test_draws": 1000 if quick else 10_000,
        },
        "hmc": {
            "chains": 8 if quick else 32,
            "warmup": 100 if quick else 1000,
            "draws": 100 if quick else 4000,
            "thin": 5 if quick else 10,
            "longest": 40,
            "target": 0.8,
            "groups": 4,
        },
    }


def plan(options: dict[str, dict[str, Any]], methods: Sequence[str]) -> list[Cell]:
    """A cell for every method, and always the reference."""
    common, cells = options["common"], []
    for method in METHODS:
        if method == REFERENCE:
            work = "slangvi_reproduction.experiments._toy_chains:compute_chains"
            cells.append(Cell(NAME, *DATASETS, method, common | options["hmc"], work, cost=1.0))
        elif method in methods:
            work = "slangvi_reproduction.experiments._toy_cells:compute_fit"
            cells.append(Cell(NAME, *DATASETS, method, common | options["fit"], work, cost=_cost(method)))
    return cells


def _cost(method: str) -> float:
    """Relative to HMC's."""
    return 0.5 if method == "bbb" else 1.5


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what is not trained yet, and write the tables."""
    start, about, options = perf_counter(), settings.out / f"{NAME}.json", chosen(settings)
    if settings.device != "cpu":
        raise ValueError(f"{NAME} has networks of 31 weights, for which a GPU is of no use. Use --device cpu.")
    wanted, every = plan(options, choose("method", settings.methods, METHODS)), plan(options, METHODS)
    refuse_shorter(about, options["fit"]["epochs"], len(options["fit"]["splits"]))
    here = [*wanted, *(cell for cell, _ in finished(every, settings.cells))]
    earlier = Earlier(about, _told(options), every, here)
    run_cells(wanted, settings.cells, jobs=settings.jobs, force=settings.force, progress=progress)
    return _save(finished(every, settings.cells), options, settings, start, earlier)


# ---- tables ----


def _told(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    fit = options["fit"] | {"splits": len(options["fit"]["splits"])}
    return {**options["common"], **fit, "hmc": options["hmc"]}


def _save(
    cells: Sequence[Finished], options: dict[str, dict[str, Any]], settings: Settings, start: float, earlier: Earlier
) -> Outcome:
    earlier.forget(cell for cell, _ in cells)
    paths = [settings.out / f"{NAME}{end}" for end in (".csv", "-grid.csv", "-trace.csv", ".json")]
    rows = earlier.rows(paths[0], table_rows(cells), label=_label, by=("dataset", "metric"))
    write_rows(paths[0], rows)
    for path, header, lines_of in (
        (paths[1], _toy_pages.GRID_COLUMNS, _grid_lines),
        (paths[2], _toy_pages.TRACE_COLUMNS, _trace_lines),
    ):
        write_table(path, header, earlier.merged(path, header, [x for done in cells for x in lines_of(done)], _label))
    write_about(paths[3], about_run(NAME, cells, _told(options), settings, start, _about_cell, earlier.cells))
    return Outcome(rows, paths)


def _label(line: Mapping[str, Any]) -> str:
    """The cell behind a line of any table; those of metrics name a region where others name the data set."""
    return f"{DATASETS[0]} {line['method']}"


def table_rows(cells: Sequence[Finished]) -> list[Row]:
    """Every method's standard deviation against the reference's, by region; the reference's chains against others."""
    reference = next(stored.arrays["sd"][0] for cell, stored in cells if cell.method == REFERENCE)
    found = []
    for region, where in REGIONS.items():
        for metric in METRICS:
            for cell, stored in cells:
                mine, theirs = _compared(cell.method, stored.arrays, reference)
                values = measured(metric, mine[:, where], theirs[:, where])
                found.append(aggregate(region, metric, cell.method, values, lambda all_: max(all_, key=abs)))
    return found


def _compared(method: str, arrays: Arrays, reference: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Standard deviations and what they are measured by, (n, G) each."""
    if method == REFERENCE:
        return arrays["group_sd"], arrays["others_sd"]
    return arrays["sd"], np.broadcast_to(reference, arrays["sd"].shape)


def measured(metric: str, mine: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
    """One number for each line of standard deviations of the function, (n, G) each.

    Example:
        >>> mine, theirs = np.array([[2.0, 0.5]]), np.array([[1.0, 1.0]])
        >>> float(measured("sd_log_ratio", mine, theirs)[0]), float(measured("sd_log_bias", mine, theirs)[0])
        (0.693..., 0.0)
    """
    if metric == "y_sd_log_ratio":
        mine, theirs = _observed(mine), _observed(theirs)
    ratios = np.log(mine / theirs)
    found: NDArray[Any] = (ratios if metric == "sd_log_bias" else np.abs(ratios)).mean(1)
    return found


def _observed(sd: NDArray[Any]) -> NDArray[Any]:
    """Of an observation instead of the function."""
    return np.sqrt(sd**2 + NOISE**2)


def _grid_lines(done: Finished) -> list[tuple[Any, ...]]:
    mean, sd = done.stored.arrays["mean"], done.stored.arrays["sd"]
    return [
        (done.cell.method, seed, float(x), float(mean[seed, k]), float(sd[seed, k]), float(_observed(sd[seed, k])))
        for seed in range(len(mean))
        for k, x in enumerate(GRID)
    ]


def _trace_lines(done: Finished) -> list[tuple[Any, ...]]:
    """The ELBO along the way; nothing for the reference, which has none."""
    arrays = done.stored.arrays
    if "trace_elbo" not in arrays:
        return []
    steps, best = arrays["trace_steps"], arrays["best_step"]
    return [
        (done.cell.method, seed, int(step), float(arrays["trace_elbo"][k, seed]), int(step == best[seed]))
        for seed in range(len(best))
        for k, step in enumerate(steps)
    ]


def _about_cell(cell: Cell, stored: Stored) -> dict[str, Any]:
    """How well it went."""
    arrays = stored.arrays
    if "elbo" in arrays:
        return {"elbo": arrays["elbo"].round(3).tolist(), "best_step": arrays["best_step"].tolist()}
    extremes = {"acceptance": arrays["acceptance"].mean(), "least_acceptance": arrays["acceptance"].min()}
    extremes |= {"rhat": arrays["rhat"].max(), "rhat_density": arrays["rhat_density"]}
    return {name: round(float(value), 4) for name, value in extremes.items()}


# ---- the page ----


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows, about = read_rows(results / f"{NAME}.csv"), read_about(results / f"{NAME}.json")
    text, pictures = _toy_pages.figures(results, docs, NAME, about["settings"])
    said = _toy_pages.said(rows, about["cells"])
    made = pages.made_by(results / f"{NAME}.json")
    return "\n".join([_toy_pages.ABOUT, made, text, _toy_pages.table(rows, about["cells"]), *said, ""]), pictures
