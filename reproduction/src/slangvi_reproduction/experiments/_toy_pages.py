"""The section about the noisy cubic: its words, its table and its two figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._cubic import INSIDE, problem
from slangvi_reproduction.experiments.results import Row, read_table

__all__ = ["ABOUT", "GRID_COLUMNS", "TRACE_COLUMNS", "figures", "said", "table"]

GRID_COLUMNS = ("method", "seed", "x", "mean", "sd", "y_sd")
TRACE_COLUMNS = ("method", "seed", "step", "elbo", "selected")
# Columns of the table on the page: what stands behind "inside" and "outside".
WHERE, ENDS = ("inside", "outside"), {"sd_log_ratio": "", "y_sd_log_ratio": ", with noise", "sd_log_bias": ", signed"}
TITLES = {"slang_1": "SLANG-1", "slang_5": "SLANG-5", "bbb": "BBB", "full": "full Gaussian", "hmc": "HMC"}
COLORS = {**pages.COLORS, "bbb": "#d7301f", "full": "#737373", "hmc": "#000000"}
ABOUT = """\
A network of ten rectified units fitted to 30 points of $y = x^3 + \\varepsilon$, $x \\sim U[-4, 4]$,
$\\varepsilon \\sim N(0, 9)$, as in the paper's appendix. All data and 100 draws in every step, rates of mean and
precision that fall, and the state with the best ELBO along the way, looked at every 20 steps with 1,000 draws, the
same ones each time. The paper shows curves only; here is a reference for them, Hamiltonian Monte Carlo, and a full
Gaussian trained as SLANG is, which tells what rank leaves out. What the paper leaves open was chosen: standardised
inputs and targets, prior $N(0, 1)$ for all weights and biases on that scale, noise of known size, 3,000 steps,
$\\alpha = 0.5$ and $\\beta = 0.05$ along half cosines, Adam at 0.02 for BBB. The rates were chosen by the ELBO, and are
as large as that because far from the optimum the empirical Fisher is: with the usual ones the mean freezes before it
has arrived.

The table has the mean over a grid of $|\\log \\mathrm{sd} / \\mathrm{sd}_\\mathrm{HMC}|$, for the function inside the
data's range, $|x| \\le 4$, and outside, $4 < |x| \\le 6$; the same for an observation, noise included; and the
function's without the absolute value, negative where a method is too sure. Mean ± standard error over seeds of
training on the same data. The line of HMC is a quarter of its chains against the others, about twice the error of all
of them together.
"""


def table(rows: Sequence[Row], cells: Mapping[str, Any]) -> str:
    """A line for each method."""
    found = {row[:3]: row for row in rows}
    places = [(f"cubic_{where}", metric, f"{where}{end}") for metric, end in ENDS.items() for where in WHERE]
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = [found[region, metric, method] for region, metric, _ in places]
        elbo = cells[f"cubic {method}"].get("elbo")
        numbers = [f"{row.mean:.3f} ± {row.standard_error:.3f}" for row in mine]
        lines.append([method, *numbers, f"{statistics.fmean(elbo):.2f}" if elbo else ""])
    return pages.markdown(["method", *(title for *_, title in places), "ELBO"], lines)


def said(rows: Sequence[Row], cells: Mapping[str, Any]) -> list[str]:
    """Whether the chains mixed, and whether SLANG at rank 5 is nearer to them than BBB."""
    chains = cells["cubic hmc"]
    lines = [
        f"- HMC: accepted {chains['acceptance']:.2f}, the chain that accepted least {chains['least_acceptance']:.2f}; "
        f"split $\\hat R$ of the function at most {chains['rhat']:.3f} on the grid, of the log density "
        f"{chains['rhat_density']:.3f}."
    ]
    found = {(row.dataset, row.method): row.mean for row in rows if row.metric == "sd_log_ratio"}
    for region in dict.fromkeys(row.dataset for row in rows):
        mine, theirs = found.get((region, "slang_5")), found.get((region, "bbb"))
        if mine is not None and theirs is not None:
            verdict = "nearer to HMC than" if mine < theirs else "not nearer to HMC than"
            lines.append(f"- {pages.DATASETS[region]}: slang_5 is {verdict} bbb, {mine:.3f} against {theirs:.3f}.")
    return lines


# ---- pictures ----


def figures(results: Path, docs: Path, name: str, settings: Mapping[str, Any]) -> tuple[str, list[Path]]:
    """Draw both figures, and say where they are."""
    grid = read_table(results / f"{name}-grid.csv", GRID_COLUMNS)
    traces = read_table(results / f"{name}-trace.csv", TRACE_COLUMNS)
    paths = [docs / "images" / f"results-{name}{end}.png" for end in ("", "-trace")]
    _draw_curves(grid, _best_seeds(traces), settings, paths[0])
    _draw_traces(traces, paths[1])
    alts = ["Data, means and bands of every method beside those of HMC.", "ELBO against steps for every seed."]
    return "\n".join(pages.image(path, alt) for path, alt in zip(paths, alts, strict=True)), paths


def _best_seeds(traces: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Method → the seed with the best ELBO, which is drawn."""
    chosen = sorted((line for line in traces if line["selected"] == "1"), key=lambda line: float(line["elbo"]))
    return {line["method"]: line["seed"] for line in chosen}


def _draw_curves(
    grid: Sequence[Mapping[str, str]], seeds: Mapping[str, str], settings: Mapping[str, Any], path: Path
) -> None:
    """A panel for each method, and one with all standard deviations."""
    curves: dict[str, list[list[float]]] = {}
    for method in dict.fromkeys(line["method"] for line in grid):
        lines = [line for line in grid if (line["method"], line["seed"]) == (method, seeds.get(method, "0"))]
        curves[method] = [[float(line[name]) for line in lines] for name in ("x", "mean", "sd")]
    figure = pages.figure(11.0, 6.4)
    panels = list(figure.subplots(2, 3).flat)
    data = problem(settings["num_data"], settings["data_seed"], settings["hidden"], settings["prior_precision"])
    points = (data.x * data.scale[0] + data.centre[0]).tolist(), data.unscaled(data.y).tolist()
    for axes, method in zip(panels, curves, strict=False):
        _draw_bands(axes, method, curves[method], curves["hmc"])
        axes.plot(*points, "o", color="#2b8cbe", ms=3, zorder=5)
    for axes in panels[len(curves) : -1]:
        axes.axis("off")
    _draw_deviations(panels[-1], curves)
    pages.save(figure, path)


def _draw_bands(axes: Any, method: str, curve: list[list[float]], reference: list[list[float]]) -> None:
    x, mean, _ = curve
    for deviations, alpha in ((3.0, 0.2), (2.0, 0.25)):
        axes.fill_between(x, *_band(curve, deviations), color=COLORS[method], alpha=alpha, lw=0)
    axes.plot(x, mean, color=COLORS[method], lw=1.4)
    if method != "hmc":
        for edge, label in zip(_band(reference, 2.0), ("HMC ± 2 sd", None), strict=True):
            axes.plot(x, edge, color="black", lw=0.8, ls="--", label=label)
        axes.legend(fontsize=7, loc="upper left")
    axes.set(title=f"{TITLES[method]}, mean ± 2 and 3 sd", xlim=(x[0], x[-1]), ylim=(-160, 160))
    for end in (-INSIDE, INSIDE):
        axes.axvline(end, color="0.8", lw=0.8, zorder=0)


def _band(curve: list[list[float]], deviations: float) -> list[list[float]]:
    """The lower and the upper edge."""
    _, mean, sd = curve
    return [[m + sign * deviations * s for m, s in zip(mean, sd, strict=True)] for sign in (-1, 1)]


def _draw_deviations(axes: Any, curves: Mapping[str, list[list[float]]]) -> None:
    for method, (x, _, sd) in curves.items():
        axes.plot(x, sd, color=COLORS[method], lw=2.0 if method == "hmc" else 1.2, label=TITLES[method])
    axes.set(title="standard deviation of the function", yscale="log")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3, which="both")


def _draw_traces(traces: Sequence[Mapping[str, str]], path: Path) -> None:
    """Every seed, a star where it was selected; a panel for each method, on one scale."""
    methods = list(dict.fromkeys(line["method"] for line in traces))
    figure = pages.figure(2.8 * len(methods), 3.0)
    best = max(float(line["elbo"]) for line in traces)
    for axes, method in zip(figure.subplots(1, len(methods), squeeze=False, sharey=True)[0], methods, strict=True):
        mine = [line for line in traces if line["method"] == method]
        for seed in dict.fromkeys(line["seed"] for line in mine):
            lines = [line for line in mine if line["seed"] == seed]
            axes.plot(*_columns(lines), color=COLORS[method], lw=0.8, alpha=0.7)
            axes.plot(*_columns([line for line in lines if line["selected"] == "1"]), "*", color="black", ms=7)
        axes.set(title=TITLES[method], xlabel="steps", ylim=(best - 25.0, best + 1.0))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("ELBO")
    pages.save(figure, path)


def _columns(lines: Sequence[Mapping[str, str]]) -> tuple[list[float], list[float]]:
    return [float(line["step"]) for line in lines], [float(line["elbo"]) for line in lines]
