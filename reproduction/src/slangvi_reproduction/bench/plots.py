"""Pictures of the results: step times, and growth, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slangvi_reproduction.bench.record import Record, Row, text

__all__ = ["picture"]

OURS, THEIRS, GUIDE = "#08306b", "#d94801", "0.6"
STYLES = ("o-", "s--", "^:", "d-.")


def picture(record: Record, path: Path) -> None:
    """The PNG of one record."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the pictures need matplotlib: pip install 'slangvi[plot]'") from error
    rows = [row for row in record.rows if row.milliseconds]
    tall = record.bench != "scale"
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(rows)) if tall else (9, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    if tall:
        _dots(figure.subplots(), rows)
    else:
        _growth(figure.subplots(2, 2, sharex="col"), rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _dots(axes: Any, rows: Sequence[Row]) -> None:
    """Milliseconds of each row, first row on top."""
    labels = [", ".join([row.name, *(str(v) for k, v in _shown(row))]) for row in rows]
    places = range(len(rows), 0, -1)
    times = [row.milliseconds for row in rows]
    axes.scatter(times, places, s=18, color=[OURS if _ours(row) else THEIRS for row in rows])
    for place, value in zip(places, times, strict=True):
        axes.annotate(text(value), (value, place), (6, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set(xscale="log", xlabel="milliseconds a step")
    axes.grid(alpha=0.3)
    axes.margins(x=0.12, y=0.02)


def _shown(row: Row) -> list[tuple[str, str]]:
    """What tells rows apart besides the name."""
    texts = {"L": "L = {}", "K": "K = {}", "network": "{}"}
    return [(key, texts[key].format(value)) for key, value in row.settings.items() if key in texts]


def _growth(grid: Any, rows: Sequence[Row]) -> None:
    """Time above, memory below; the sweep over P on the left, over L on the right."""
    styles = dict(zip(dict.fromkeys(row.name for row in rows), STYLES, strict=False))
    for column, kind in enumerate(("P", "L")):
        mine = [row for row in rows if row.settings["sweep"] == kind]
        for axes, quantity in zip(grid[:, column], ("milliseconds", "peak_mb"), strict=True):
            for name in dict.fromkeys(row.name for row in mine):
                points = [(row.settings[kind], getattr(row, quantity)) for row in mine if row.name == name]
                color = OURS if "slang" in name else THEIRS
                axes.plot(
                    *zip(*points, strict=True), styles.get(name, STYLES[-1]), ms=4, lw=1.2, color=color, label=name
                )
            _guide(axes, mine, kind, quantity)
            axes.set(xscale="log", yscale="log")
            axes.grid(alpha=0.3)
        grid[-1, column].set_xlabel({"P": "parameters P", "L": "rank L"}[kind])
    grid[0, 0].set_ylabel("milliseconds a step")
    grid[1, 0].set_ylabel("peak MB")
    grid[0, 0].legend(fontsize=8)


def _guide(axes: Any, rows: Sequence[Row], kind: str, quantity: str) -> None:
    """A line of slope one through the largest point of ours."""
    ours = [row for row in rows if _ours(row)]
    if ours:
        ends = [min(int(r.settings[kind]) for r in ours), max(int(r.settings[kind]) for r in ours)]
        top = getattr(max(ours, key=lambda r: int(r.settings[kind])), quantity)
        axes.plot(ends, [top * x / ends[1] for x in ends], color=GUIDE, lw=1, label="linear")


def _ours(row: Row) -> bool:
    return row.name.startswith("slang")
