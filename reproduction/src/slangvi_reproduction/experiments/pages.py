"""What the sections of docs/results.md share: colours, tables in Markdown, figures."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slangvi.environment import PLATFORM
from slangvi_reproduction.experiments._agreement import Verdict
from slangvi_reproduction.experiments._names import DATASETS, METRICS
from slangvi_reproduction.experiments.results import Row, mean_and_error, read_about

__all__ = [
    "COLORS",
    "DATASETS",
    "METRICS",
    "comparison",
    "curve",
    "ends",
    "figure",
    "image",
    "made_by",
    "markdown",
    "mean_number",
    "number",
    "panels",
    "save",
]

# Mean field in reds, SLANG from light to dark blue as its rank grows, OnlineEig in greens, full Gaussians in greys.
COLORS = {
    "mf_ef": "#fc8d59",
    "mf_hess": "#d7301f",
    "mf_exact": "#7f0000",
    "bbb": "#d7301f",
    "bbb_narrow": "#fc8d59",
    "slang_1": "#6baed6",
    "slang_2": "#4292c6",
    "slang_4": "#2171b5",
    "slang_5": "#2171b5",
    "slang_10": "#08306b",
    "slang_8": "#6baed6",
    "slang_16": "#2171b5",
    "slang_32": "#08306b",
    "online_eig_1": "#74c476",
    "online_eig_2": "#31a354",
    "online_eig_5": "#006d2c",
    "map": "#969696",
    "ensemble_5": "#525252",
    "full_ef": "#969696",
    "full_hess": "#525252",
    "full_exact": "#000000",
}


def made_by(path: Path, repeats: str = "splits") -> str:
    """The command and the machine behind results, from their JSON.

    Args:
        path: of the JSON.
        repeats: what differs between runs of one method.
    """
    about = read_about(path)
    wall = about["wall_seconds"] / 60
    words, chosen = {"epochs": "epochs", "splits": repeats}, about["settings"]
    lengths = [_counted(chosen[key], word) for key, word in words.items() if key in chosen]
    facts = ", ".join([*lengths, *_spent(about)])
    # A command that finds everything finished only writes the tables, and its time says nothing.
    took = f"The last command took {wall:.1f} minutes, {about['jobs']} at a time.\n" if wall >= 1.0 else ""
    return f"`{about['command']}` on {about['date']}, slangvi {about['slangvi']}: {facts}.\n{took}"


def _counted(count: int, plural: str) -> str:
    return f"{count:,} {plural if count != 1 else plural.removesuffix('s')}"


def _spent(about: Mapping[str, Any]) -> list[str]:
    """Minutes of processes by machine and versions; a table may have been made in several places."""
    seconds: dict[str, float] = {}
    for cell in about["cells"].values():
        facts = {name: cell.get(name, about[name]) for name in PLATFORM}
        place = "{device} (Python {python}, torch {torch})".format(**facts)
        seconds[place] = seconds.get(place, 0.0) + cell["seconds"]
    return [f"{spent / 60:.1f} process minutes on {place}" for place, spent in seconds.items()]


def image(path: Path, alt: str) -> str:
    """A picture of the page."""
    return f"```{{image}} images/{path.name}\n:alt: {alt}\n```\n"


def comparison(verdicts: Sequence[Verdict]) -> str:
    """Paper and ours side by side, for one data set and metric."""
    metric = METRICS[verdicts[0].row.metric]
    distances = any(verdict.is_distance for verdict in verdicts)
    header = [metric, "paper", "ours", *(["paper, distance", "ours, distance"] if distances else [])]
    header += ["difference", "in standard errors", "agrees"]
    lines = []
    for verdict in verdicts:
        row, paper = verdict.row, verdict.paper
        apart = verdict.ours - verdict.theirs
        cells = [row.method, number(paper.mean, paper.standard_error, paper.unit)]
        cells.append(number(row.mean, row.standard_error, paper.unit))
        if distances:
            cells += [number(verdict.theirs, None, paper.unit), number(verdict.ours, None, paper.unit)]
        share = f"{_signed(100 * apart / abs(verdict.theirs))} %" if verdict.theirs else ""
        cells.append(share or number(apart, None, paper.unit))
        cells.append(_signed(apart / paper.standard_error) if paper.standard_error else "")
        cells.append({True: "✓", False: "✗", None: verdict.why}[verdict.agrees])
        lines.append(cells)
    return markdown(header, lines)


def _signed(value: float) -> str:
    """With its sign, unless there is nothing left of it."""
    text = f"{value:+.1f}"
    return "0.0" if float(text) == 0 else text


def number(value: float, error: float | None, unit: float) -> str:
    """A number with as many decimals as the paper prints, and a standard error if there is one.

    Example:
        >>> number(0.57441, 0.00551, 1e-4), number(22398.4, 3459.0, 1.0), number(0.00012, None, 1e-3)
        ('0.5744 ± 0.0055', '22398 ± 3459', '0.00012')
    """
    decimals = max(0, -_exponent(unit))
    tiny = value != 0 and abs(value) < unit
    text = f"{value:.2g}" if tiny else f"{value:.{decimals}f}"
    return text if not error else f"{text} ± {error:.2g}" if tiny else f"{text} ± {error:.{decimals}f}"


def mean_number(values: Sequence[float], unit: float) -> str:
    """The mean of some numbers, and where there are several its standard error.

    Example:
        >>> mean_number([0.5, 0.7], 0.01), mean_number([0.5], 0.01)
        ('0.60 ± 0.10', '0.50')
    """
    return number(*mean_and_error(values), unit)


def _exponent(unit: float) -> int:
    return int(f"{unit:e}".split("e")[1])


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; every column but the first to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)) + "\n"


def figure(width: float, height: float) -> Any:
    """An empty figure that needs no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the pictures need matplotlib: pip install 'slangvi[plot]'") from error
    empty = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(empty)
    return empty


def save(made: Any, path: Path) -> None:
    """Write a small PNG of 256 colours, the same bytes for the same figure."""
    from PIL import Image  # comes with matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = io.BytesIO()
    made.savefig(pixels, dpi=100, format="png")
    Image.open(pixels).convert("RGB").quantize(256).save(path, format="PNG", optimize=True)


def curve(axes: Any, lines: Sequence[Mapping[str, str]], method: str, deviations: float = 0.0) -> None:
    """A metric along the way: mean, and a band of so many standard deviations.

    Args:
        axes: to draw on.
        lines: of a table of traces, for one data set and method.
        method: its name.
        deviations: half the width of the band; 0 draws none.
    """
    steps, mean, error = ([float(line[name]) for line in lines] for name in ("step", "mean", "standard_error"))
    axes.plot(steps, mean, color=COLORS[method], lw=1.3, label=method)
    if deviations:
        half = [deviations * e * int(line["n"]) ** 0.5 for e, line in zip(error, lines, strict=True)]
        low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=COLORS[method], alpha=0.2, lw=0)


def panels(traces: Sequence[Mapping[str, str]], methods: Sequence[str], label: str, path: Path) -> None:
    """Convergence on every data set side by side: means, and bands of ± 2 standard deviations.

    Args:
        traces: lines of a table of traces, of one metric.
        methods: those to draw.
        label: of the metric.
        path: of the picture.
    """
    datasets = list(dict.fromkeys(line["dataset"] for line in traces))
    drawn = figure(3.6 * len(datasets), 3.4)
    for axes, dataset in zip(drawn.subplots(1, len(datasets), squeeze=False)[0], datasets, strict=True):
        for method in methods:
            mine = [line for line in traces if (line["dataset"], line["method"]) == (dataset, method)]
            if mine:
                curve(axes, mine, method, deviations=2.0)
        means = (float(line["mean"]) for line in traces if line["dataset"] == dataset)
        lowest = min(filter(math.isfinite, means), default=1.0)
        axes.set(xscale="log", yscale="log", xlabel="iterations", title=DATASETS[dataset])
        axes.set_ylim(bottom=0.9 * lowest)  # a band may reach below zero, where a logarithm does not
        axes.grid(alpha=0.3, which="both")
    drawn.axes[0].set_ylabel(label)
    drawn.axes[0].legend(fontsize=8)
    save(drawn, path)


def ends(rows: Sequence[Row], label: str) -> str:
    """Where all methods ended with one metric, a line for every data set."""
    methods = list(dict.fromkeys(row.method for row in rows))
    found = {(row.dataset, row.method): number(row.mean, row.standard_error, 1e-4) for row in rows}
    lines = [
        [DATASETS[dataset], *(found.get((dataset, method), "") for method in methods)]
        for dataset in dict.fromkeys(row.dataset for row in rows)
    ]
    return markdown([label, *methods], lines)
