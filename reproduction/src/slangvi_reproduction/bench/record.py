"""What a benchmark leaves behind: rows, the machine they were measured on, and the file they are kept in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slangvi_reproduction.bench.limits import Rates

__all__ = ["Record", "Row", "Settings", "left_out", "load", "save", "table", "text"]


@dataclass(frozen=True)
class Settings:
    """What the command line chooses.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes, to see that it runs; the numbers mean nothing.
        repeats: timed samples of each contender.
        say: called with a line about what is being measured.
    """

    device: str = "cpu"
    quick: bool = False
    repeats: int = 3
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Row:
    """One contender, measured or skipped.

    Args:
        name: of the contender.
        settings: what tells the rows of a benchmark apart: network, P, L.
        milliseconds: median of one step; None when skipped.
        ratio: the same relative to Adam.
        peak_mb: all memory the contender holds at the peak of a step (parameters, state, activations; data excepted),
            in 10⁶ bytes.
        extra_mb: the same beyond a plain forward and backward pass.
        share: time the machine needs at its measured rates, relative to the time taken.
        target: what the row was asked to reach, each with ✓ or ✗.
        met: whether it reached all of it; None where nothing was asked.
        note: what was timed, where that needs saying.
        skipped: why nothing was measured.
        loss: of the last step, where the benchmark looks at it.
        bound_mb: most that peak_mb may be, where there is such a bound.
    """

    name: str
    settings: Mapping[str, int | str] = field(default_factory=dict)
    milliseconds: float | None = None
    ratio: float | None = None
    peak_mb: float | None = None
    extra_mb: float | None = None
    share: float | None = None
    target: str = ""
    met: bool | None = None
    note: str = ""
    skipped: str = ""
    loss: float | None = None
    bound_mb: float | None = None


# Words that many names of devices have, and that tell none apart.
_COMMON = re.compile(r"(?i)nvidia|geforce|tesla|\b(amd|intel|cpu|processor|\d+-cores?)\b|\((r|tm)\)")


@dataclass(frozen=True)
class Record:
    """One run of one benchmark.

    Args:
        bench: its name.
        environment: command, versions, device, threads, date, seconds it took.
        rates: what the machine can do.
        rows: what was measured.
    """

    bench: str
    environment: Mapping[str, Any]
    rates: Rates
    rows: Sequence[Row]

    @property
    def label(self) -> str:
        """Device in a file name: "h200", "epyc", "xeon"; "cpu" where nothing tells the processor."""
        name = _COMMON.sub(" ", self.environment["device"].partition("@")[0]).lower()
        return "-".join(re.findall(r"[a-z0-9_-]+", name)) or self.environment["device_type"]


def save(record: Record, path: Path) -> None:
    """Write a record as JSON, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Record:
    """Read a record; a file of another make is refused by name."""
    data = json.loads(path.read_text(encoding="utf-8"))
    try:
        rows = [Row(**row) for row in data["rows"]]
        return Record(data["bench"], data["environment"], Rates(**data["rates"]), rows)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name} was not written by this version of `slangvi bench`. Run it again.") from error


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the measured rows as text; columns that no row fills are left out."""
    rows = [row for row in rows if not row.skipped]
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    columns: dict[str, Callable[[Row], str]] = {"contender": lambda row: row.name}
    columns |= {key: lambda row, key=key: text(row.settings.get(key)) for key in keys}  # type: ignore[misc]
    columns |= {
        "ms": lambda row: text(row.milliseconds),
        "× Adam": lambda row: text(row.ratio),
        "peak MB": lambda row: text(row.peak_mb),
        "bound MB": lambda row: text(row.bound_mb),
        "extra MB": lambda row: text(row.extra_mb),
        "share of the limit": lambda row: "" if row.share is None else f"{100 * row.share:.1f} %",
        "target": lambda row: row.target,
        "note": lambda row: row.note,
    }
    filled = {title: cells for title, cell in columns.items() if any(cells := [cell(row) for row in rows])}
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def text(value: float | str | None) -> str:
    """A number in the three digits that a median of a few repeats is worth; counts in full.

    Example:
        >>> text(1234.5), text(0.012345), text(478410), text(None)
        ('1234', '0.0123', '478,410', '')
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def left_out(rows: Sequence[Row]) -> list[str]:
    """Return a line for each reason why rows were skipped, with the settings if others of the name were measured."""
    measured = {row.name for row in rows if not row.skipped}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.skipped:
            reasons.setdefault(row.skipped, []).append(_described(row) if row.name in measured else row.name)
    return [f"Not measured: {', '.join(dict.fromkeys(names))} ({reason})." for reason, names in reasons.items()]


def _described(row: Row) -> str:
    options = (f"{key}={row.settings[key]}" for key in ("L", "K") if key in row.settings)
    place = f" on {row.settings['network']}" if "network" in row.settings else ""
    return " ".join((row.name, *options)) + place
