"""Small tables as CSV files, and models fitted on them."""

from __future__ import annotations

import random
from pathlib import Path

from slangvi.tabular.fitting import Settings, fit
from slangvi.tabular.model import Model
from slangvi.tabular.reading import read_csv

EVIL = "<script>alert(1)</script>"


def houses(path: Path, rows: int = 60) -> Path:
    """Numbers with some missing, towns, a useless column; the target is a number."""
    source = random.Random(0)
    lines = ["size,town,same,price"]
    for k in range(rows):
        size, town = source.uniform(20, 200), source.choice(["Bern", "Basel"])
        price = 3 * size + 50 * (town == "Bern") + source.gauss(0, 10)
        lines.append(f"{'' if k % 12 == 0 else round(size, 2)},{town},x,{price:.2f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def kinds(path: Path, rows: int = 60) -> Path:
    """Names, levels and labels that try to become HTML or formulas; the target is one of three labels."""
    source = random.Random(1)
    lines = [f'a;"b{EVIL}";=kind']
    for _ in range(rows):
        a = source.gauss(0, 1)
        label = "=cmd()" if a < -0.4 else "-1" if a < 0.4 else f"{EVIL}"
        lines.append(f'{a:.3f};"{source.choice([EVIL, "&amp;", "plain"])}";{label}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def fitted(path: Path, target: str, **settings: object) -> Model:
    """A short fit; the record is as complete as a folder's."""
    options = {"epochs": 2, "hidden": (4,), "rank": 2, **settings}
    model = fit(read_csv(path), Settings(target, **options), lambda label, done, total: None)
    model.record.update(data=path.name, environment={"slangvi": "0"})
    return model
