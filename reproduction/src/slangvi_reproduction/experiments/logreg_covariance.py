"""What the posteriors look like: off-diagonal covariances, means and variances, and the table of the bias."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from slangvi_reproduction.experiments import _logistic, logreg, pages
from slangvi_reproduction.experiments._logistic_cells import Recipe
from slangvi_reproduction.experiments._logistic_tables import Outcome, compute, main_recipe, posteriors, save
from slangvi_reproduction.experiments.paper import printed
from slangvi_reproduction.experiments.results import (
    Posterior,
    Row,
    aggregate,
    read_about,
    read_posteriors,
    read_rows,
    write_posteriors,
)
from slangvi_reproduction.experiments.runner import Progress
from slangvi_reproduction.experiments.settings import Settings, choose

__all__ = ["DATASETS", "METHODS", "bias_rows", "run", "section"]

NAME = "logreg-covariance"
TITLE = "Covariances"
DATASETS = tuple(_logistic.DATASETS)
METHODS = ("mf_exact", "slang_1", "slang_5", "slang_10", "full_exact")
POSTERIORS = f"{logreg.NAME}-posteriors.npz"
MAPS = ("slang_1", "slang_5", "slang_10", "full_exact")
ABOUT = """\
Final posteriors on the first split, as `logreg` keeps them. Left: covariances off the diagonal, on one scale of colours
for each data set. Right: means and variances of the weights. The bias, whose numbers are of another size, is left out
of the pictures and has a table of its own.
"""


def run(settings: Settings, progress: Progress = lambda status: None) -> Outcome:
    """Train what `logreg` has not trained, add it to its posteriors, and write the table of the bias."""
    start = perf_counter()
    recipe = main_recipe(settings)
    datasets = choose("dataset", settings.datasets, DATASETS)
    methods = choose("method", settings.methods, METHODS)
    wanted = [f"{dataset}/{method}" for dataset in datasets for method in methods]
    found, table = _kept(settings, recipe), (DATASETS, METHODS)
    missing = settings.force or not found.keys() >= set(wanted)
    done = compute(NAME, recipe, table, settings, progress, train=missing)
    if missing:
        found |= posteriors(done.cells)
        write_posteriors(settings.out / POSTERIORS, found)
    every = [f"{dataset}/{method}" for dataset in DATASETS for method in METHODS]
    rows = bias_rows({name: found[name] for name in every if name in found})
    outcome = save(NAME, rows, done, recipe, settings, start, keep_splits=False, keep_posteriors=False)
    return outcome._replace(files=[settings.out / POSTERIORS, *outcome.files])


def _kept(settings: Settings, recipe: Recipe) -> dict[str, Posterior]:
    """Posteriors of an earlier run with the same settings; those that `logreg` made with others are not replaced."""
    kept = settings.out / POSTERIORS
    # Once `logreg` has run, the file is its own: nobody replaces it who has other settings.
    makers = [path for name in (logreg.NAME, NAME) if (path := settings.out / f"{name}.json").is_file()]
    if not (makers and kept.is_file()):
        return {}
    about = read_about(makers[0])
    there = {name: about["settings"][name] for name in ("epochs", "splits")} | {"seed": about["seed"]}
    splits = max(len(recipe.splits(dataset)) for dataset in DATASETS)
    ours = {"epochs": recipe.epochs, "splits": splits, "seed": settings.seed}
    if there == ours:
        return read_posteriors(kept)
    if makers[0].stem == logreg.NAME:
        told = [", ".join(f"{name} {value}" for name, value in each.items()) for each in (there, ours)]
        raise ValueError(
            f"{kept} is from a run of {logreg.NAME} with {told[0]}, and this one has {told[1]}. Run `slangvi reproduce "
            f"{logreg.NAME}` with the same settings first, or choose another folder with --out."
        )
    return {}


def bias_rows(found: Mapping[str, Posterior]) -> list[Row]:
    """Mean and variance of the first weight, which belongs to the column of ones.

    Args:
        found: Gaussians by "dataset/method".
    """
    rows = []
    for name, q in found.items():
        dataset, method = name.split("/")
        rows.append(aggregate(dataset, "bias_mean", method, [q.loc[0]]))
        rows.append(aggregate(dataset, "bias_variance", method, [q.covariance[0, 0]]))
    return rows


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    rows, found = read_rows(results / f"{NAME}.csv"), read_posteriors(results / POSTERIORS)
    parts, pictures = [ABOUT, pages.made_by(results / f"{NAME}.json")], []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = {name.split("/")[1]: q for name, q in found.items() if name.startswith(f"{dataset}/")}
        pictures.append(docs / "images" / f"results-logreg-covariance-{dataset.replace('_', '-')}.png")
        _plot(dataset, {method: mine[method] for method in METHODS if method in mine}, pictures[-1])
        parts.append(pages.image(pictures[-1], f"Covariances, means and variances on {pages.DATASETS[dataset]}."))
    return "\n".join([*parts, _table(rows)]), pictures


def _table(rows: list[Row]) -> str:
    """Paper and ours, a line for each data set and method."""
    paper, ours = printed("logreg_covariance"), {row[:3]: row.mean for row in rows}
    header = ["the bias", "method", "mean, paper", "mean, ours", "variance, paper", "variance, ours"]
    lines = []
    for dataset, method in dict.fromkeys((row.dataset, row.method) for row in rows):
        line = [pages.DATASETS[dataset], method]
        for metric in ("bias_mean", "bias_variance"):
            key = (dataset, metric, method)
            line += [f"{paper[key].mean:.2f}", f"{ours[key]:.2f}"]
        lines.append(line)
    return pages.markdown(header, lines)


def _plot(dataset: str, found: Mapping[str, Posterior], path: Path) -> None:
    """Maps of covariances on the left, means above variances on the right; the bias is left out."""
    figure = pages.figure(10, 4.6)
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15])
    _maps(left, {method: found[method].covariance[1:, 1:] for method in MAPS if method in found})
    top, bottom = right.subplots(2, 1, sharex=True)
    for method, q in found.items():
        style = {"color": pages.COLORS[method], "lw": 0.9, "label": method}
        places = np.arange(1, len(q.loc))
        top.plot(places, q.loc[1:], **style)
        bottom.plot(places, np.diag(q.covariance)[1:], **style)
    top.set(ylabel="mean", title=pages.DATASETS[dataset])
    bottom.set(ylabel="variance", xlabel="weight", yscale="log")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    top.legend(fontsize=7, ncols=len(found), loc="upper center", bbox_to_anchor=(0.5, 1.32), frameon=False)
    pages.save(figure, path)


def _maps(figure: Any, covariances: Mapping[str, Any]) -> None:
    """Off-diagonal entries, all on one scale that the largest hundredth of the exact ones exceeds."""
    off = {method: matrix - np.diag(np.diag(matrix)) for method, matrix in covariances.items()}
    if not off:
        return
    limit = float(np.quantile(np.abs(list(off.values())[-1]), 0.99)) or 1.0
    grid = figure.subplots(2, 2, squeeze=False).ravel()
    for axes in grid[len(off) :]:
        axes.set_axis_off()
    for axes, (method, matrix) in zip(grid, off.items(), strict=False):
        shown = axes.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set_title(method, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    bar = figure.colorbar(shown, ax=list(grid), shrink=0.7)
    bar.ax.tick_params(labelsize=7)
