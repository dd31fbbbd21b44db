"""The section of docs/results.md on MNIST: tables and pictures from the files of the experiment."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slangvi import plots
from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._image_tuning import chosen
from slangvi_reproduction.experiments._mnist_recipes import NAME, OURS, RANKS
from slangvi_reproduction.experiments._mnist_tables import COLUMNS, TRACE_COLUMNS, TUNING_COLUMNS
from slangvi_reproduction.experiments.paper import Printed, printed
from slangvi_reproduction.experiments.results import read_table

__all__ = ["section"]

ABOUT = """\
Two hidden layers of 400 rectified units, pixels divided by 255, minibatches of 200, four draws a step. `slang_L` is the
paper's recipe: $\\alpha_t = \\beta_t = 0.1 / (1 + t^\\omega)$, momentum 0.9, $d = 1$ at the start, and $(-\\log\\sigma,
\\omega) \\in \\{0, 1, 2\\} \\times \\{0.52, 0.54, 0.56, 0.58, 0.60\\}$ for the prior's standard deviation σ; 100
epochs on 50,000 images, the setting with the lowest error on the other 10,000, then 300 more epochs on all 60,000.
Biases have the prior precision $10^{-6}$. Ranks 1, 4 and 8 were searched; where there are others, they have what was
chosen for rank 8.

`slang_L_slow` is ours: the precision starts high, at $10^4/T$, and learns slowly, with the β of
`slangvi.slow_precision`, 10/steps, so that draws stay close and steps short until the mean has settled. Both rates fall
along half a cosine, and biases have the prior precision 1. The posterior may be cooled: likelihood and prior are raised
to the power $1/T$, which leaves the most probable weights where they are and multiplies variances by about $T$. α from
0.03 or 0.1 and $T \\in \\{0.3, 0.2, 0.1, 0.03\\}$ were searched at $-\\log\\sigma = 1$ and L = 8, on 100 epochs, and
taken over by all ranks; then 100 epochs on all 60,000 images. The grid was placed after six runs of 10 epochs on the
same 50,000 images, judged by the same 10,000, of which those with $T = 1$ were worse; α = 0.01 was searched as well,
and had 1.48 to 1.50 % of validation errors. Bayes by Backprop (`bbb`) and maximum a posteriori (`map`) are trained by
Adam in the same way, with 15 settings to choose from: the paper's three priors and five learning rates. `ensemble_5` is
five networks with the setting of `map`. Ten thousand images tell errors apart by 0.11 % at best: of all settings of
ours and of these three that are within one standard error of the lowest validation error, the one with the lowest NLL
is taken.

Predictions average 1,000 draws of the weights, in validation and in test. *Error* is in percent, *NLL* in nats, *ECE*
with 15 bins, *Brier* the squared distance to the truth. Where there are several seeds a number is their mean ± its
standard error.
"""
BEST = 1.6
# From light to dark as the rank grows; the others as everywhere.
COLORS = pages.COLORS | {
    f"slang_{rank}": color
    for rank, color in zip(RANKS, ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b"), strict=True)
}
Line = Mapping[str, str]


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    lines = read_table(results / f"{NAME}.csv", COLUMNS)
    paper = printed(NAME)
    parts = [ABOUT, pages.made_by(results / f"{NAME}.json", "seeds"), _table(lines, paper)]
    parts += ["### What holds on MNIST\n", *(f"- {line}" for line in verdicts(lines, paper)), ""]
    parts += [
        "### Settings that were chosen\n",
        chosen(read_table(results / f"{NAME}-tuning.csv", TUNING_COLUMNS), "ω or rate"),
    ]
    pictures = _pictures(results, docs / "images")
    parts += [pages.image(path, alt) for path, alt in pictures]
    return "\n".join(parts), [path for path, _ in pictures]


# ---- tables ----


def means(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Method → metric → mean over seeds."""
    return {
        method: {
            name: statistics.fmean(float(line[name]) for line in lines if line["method"] == method) for name in METRICS
        }
        for method in dict.fromkeys(line["method"] for line in lines)
    }


def _table(lines: Sequence[Line], paper: Mapping[tuple[str, str, str], Printed]) -> str:
    found = []
    for method in dict.fromkeys(line["method"] for line in lines):
        mine = [line for line in lines if line["method"] == method]
        there = paper.get((NAME, METRICS[0], method.removesuffix(OURS)))
        cells = [method, "" if there is None else pages.number(there.mean, None, there.unit)]
        for name, unit in zip(METRICS, (0.01, 1e-4, 1e-4, 1e-4), strict=True):
            cells.append(pages.mean_number([float(line[name]) for line in mine], unit))
        found.append([*cells, mine[0]["epochs"], str(len(mine))])
    header = ["method", "paper, error", *(pages.METRICS[name] for name in METRICS), "epochs", "seeds"]
    return pages.markdown(header, found)


def verdicts(lines: Sequence[Line], paper: Mapping[tuple[str, str, str], Printed]) -> list[str]:
    """Sentences on the paper's errors, the best error, and NLL and ECE against those of maximum a posteriori."""
    found, told = means(lines), []
    for kind, end in (("the paper's recipe", ""), ("ours", OURS)):
        ranks = [rank for rank in RANKS if f"slang_{rank}{end}" in found]
        if not ranks:
            continue
        error = {rank: found[f"slang_{rank}{end}"][METRICS[0]] for rank in ranks}
        good = [rank for rank in ranks if error[rank] <= paper[NAME, METRICS[0], f"slang_{rank}"].mean]
        best = min(ranks, key=lambda rank: error[rank])
        reach = "at or below" if error[best] <= BEST else "above"
        told.append(
            f"SLANG by {kind}: at or below the paper's error at {_listed(good)} of L = {_listed(ranks)}; the best, "
            f"{error[best]:.2f} % at L = {best}, is {reach} {BEST} %."
        )
        if "map" in found:
            for name in METRICS[1:3]:
                below = [rank for rank in ranks if found[f"slang_{rank}{end}"][name] < found["map"][name]]
                told.append(
                    f"SLANG by {kind}: {pages.METRICS[name]} below that of `map`, {found['map'][name]:.4f}, at "
                    f"{_listed(below)} of L = {_listed(ranks)}."
                )
    return told


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


# ---- pictures ----


def _pictures(results: Path, images: Path) -> list[tuple[Path, str]]:
    found = [(_draw_curves(results, images), "Test error and NLL against epochs.")]
    with np.load(results / f"{NAME}-predictions.npz", allow_pickle=False) as file:
        kept = {name: torch.from_numpy(file[name]) for name in file.files}
    probs = {name.removesuffix("/probs"): value for name, value in kept.items() if name.endswith("/probs")}
    if probs:
        path = images / f"results-{NAME}-uncertainty.png"
        _draw_uncertainty(kept, {name: _normalised(value) for name, value in probs.items()}, path)
        found.append((path, "Reliability, confidence, risk against coverage, and the most uncertain digits."))
    return found


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    """Half precision rounds; sums are 1 again."""
    exact = probs.double()
    return exact / exact.sum(-1, keepdim=True)


def _draw_curves(results: Path, images: Path) -> Path:
    """Means over seeds; the paper's recipe in solid lines, ours dashed."""
    lines = read_table(results / f"{NAME}-trace.csv", TRACE_COLUMNS)
    drawn = pages.figure(9.6, 3.8)
    for axes, name in zip(drawn.subplots(1, 2), TRACE_COLUMNS[3:], strict=True):
        for method in dict.fromkeys(line["method"] for line in lines):
            points: dict[int, list[float]] = {}
            for line in lines:
                if line["method"] == method:
                    points.setdefault(int(line["epoch"]), []).append(float(line[name]))
            style = "--" if method.endswith(OURS) else "-"
            color = COLORS[method.removesuffix(OURS)]
            axes.plot(
                list(points), list(map(statistics.fmean, points.values())), style, color=color, lw=1.2, label=method
            )
        axes.set(xscale="log", yscale="log", xlabel="epochs", ylabel=pages.METRICS[name])
        axes.grid(alpha=0.3, which="both")
    drawn.legend(*axes.get_legend_handles_labels(), fontsize=7, ncols=9, loc="outside upper center")
    path = images / f"results-{NAME}-curves.png"
    pages.save(drawn, path)
    return path


def _draw_uncertainty(kept: Mapping[str, Any], probs: Mapping[str, torch.Tensor], path: Path) -> None:
    labels = kept["labels"].long()
    drawn = pages.figure(9.6, 8.4)
    axes = drawn.subplots(2, 2).ravel()
    for method, each in probs.items():
        plots.reliability_diagram(each, labels, ax=axes[0], label=method)
        plots.risk_coverage_curve(each, labels, ax=axes[2], label=method)
    for method in list(probs)[:1] + [name for name in ("map",) if name in probs and name != next(iter(probs))]:
        plots.confidence_histogram(probs[method], labels, ax=axes[1], label=method)
    axes[1].set_yscale("log")
    shown = next(iter(probs))
    index = kept["uncertain"].long()
    plots.most_uncertain(kept["images"], probs[shown][index], labels[index], count=len(index), ax=axes[3])
    axes[3].set_title(f"least certain of {shown}: predicted (true)", fontsize=9)
    pages.save(drawn, path)
