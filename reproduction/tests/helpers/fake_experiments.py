"""Small stand-ins for experiments, importable in new processes: work that takes no time, and a tiny problem."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from slangvi_reproduction.experiments import report
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments.settings import Settings

if TYPE_CHECKING:
    import pytest

    from slangvi_reproduction.experiments._logistic import Problem

STEPS = 6


def cell(method: str, work: str = "count", cost: float = 1.0, needs: tuple[Cell, ...] = (), **settings: object) -> Cell:
    return Cell("toy", "data", method, settings, f"helpers.fake_experiments:{work}", cost, needs)


def count(cell: Cell, attempt: Attempt) -> Arrays:
    """Adds up the numbers from 1 to 6, one in each step; `log` is a file that every step is written to."""
    kept = attempt.restored()
    done, total = (int(kept["done"]), int(kept["total"])) if kept else (0, 0)
    while done < STEPS:
        done, total = done + 1, total + done + 1
        if log := cell.settings.get("log"):
            with Path(str(log)).open("a") as file:
                file.write(f"{cell.method} {done}\n")
        if cell.settings.get("interrupt") == done and kept is None:
            os.kill(os.getpid(), signal.SIGINT)
        state = {"done": np.array(done), "total": np.array(total)}
        attempt.tick(done, STEPS, lambda state=state: state)
    needed = sum(int(attempt.needed(need.method)["total"]) for need in cell.needs)
    return {"total": np.array(total + needed)}


def fail(cell: Cell, attempt: Attempt) -> Arrays:
    raise ArithmeticError("numbers ran out")


def die(cell: Cell, attempt: Attempt) -> Arrays:
    os._exit(3)


def wait(cell: Cell, attempt: Attempt) -> Arrays:
    """Goes on until told to stop, unless it was stopped before."""
    if attempt.restored() is not None:
        return {"total": np.array(1)}
    for step in range(1, 3000):
        attempt.tick(step, 3000, lambda: {"total": np.array(0)})
        time.sleep(0.02)
    raise AssertionError("nobody stopped it")


def problem(dataset: str = "breast_cancer", splits: tuple[int, ...] = (1, 2), num_params: int = 4) -> Problem:
    """24 examples to train on and 24 to test on; each number of a split has data of its own."""
    import torch

    from slangvi_reproduction.experiments._logistic import Problem, prior_of

    parts = []
    for split in splits:
        generator = torch.Generator().manual_seed(split)
        x = torch.randn(48, num_params, generator=generator, dtype=torch.float64)
        x[:, 0] = 1.0
        y = (x.sum(-1) + torch.randn(48, generator=generator, dtype=torch.float64) > 0.5).double()
        parts.append((x[:24], y[:24], x[24:], y[24:]))
    x_train, y_train, x_test, y_test = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return Problem(x_train, y_train, x_test, y_test, prior_of(dataset, num_params))


def inject(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let experiments on logistic regression see tiny problems; returns the labels of cells as they are computed."""
    from slangvi_reproduction.experiments import _logistic_cells, _logistic_tables

    computed: list[str] = []

    def load(dataset: str, splits: tuple[int, ...]) -> Problem:
        return problem(dataset, splits)

    def spy(work: Callable[[Cell, Attempt], Arrays]) -> Callable[[Cell, Attempt], Arrays]:
        def spied(cell: Cell, attempt: Attempt) -> Arrays:
            computed.append(cell.label)
            return work(cell, attempt)

        return spied

    monkeypatch.setattr(_logistic_cells, "load_problem", load)
    monkeypatch.setattr(_logistic_tables, "require_data", lambda datasets: None)
    for name in ("compute_exact", "compute_trained"):
        monkeypatch.setattr(_logistic_cells, name, spy(getattr(_logistic_cells, name)))
    return computed


def page_of(name, out, folder):
    """What `report` writes from a quick run's files, given out for full ones: the page's text and the pictures."""
    results, docs = folder / "results", folder / "docs"
    docs.mkdir()
    shutil.copytree(out, results)
    about = json.loads((results / f"{name}.json").read_text())
    about["settings"]["quick"] = False
    (results / f"{name}.json").write_text(json.dumps(about))
    page, *pictures = report.write(results, docs)
    return page.read_text(), pictures


def assert_alike_in_two_places(
    experiment: ModuleType, settings: Settings, first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Run a part of a table, then another in a clone, which has no cells: all is as if they had been kept."""
    whole, parts = (replace(settings, out=settings.out / name) for name in ("whole", "parts"))
    for chosen in (first, second):
        expected = experiment.run(replace(whole, **chosen))
        found = experiment.run(replace(parts, **chosen))
        shutil.rmtree(parts.cells)
    assert [row[:3] for row in found.rows] == [row[:3] for row in expected.rows]
    assert [path.name for path in found.files] == [path.name for path in expected.files]
    for path in found.files:
        other = whole.out / path.name
        if path.suffix == ".csv":
            assert path.read_text() == other.read_text(), path.name
        if path.suffix == ".json":
            told, made = (json.loads(each.read_text())["cells"] for each in (path, other))
            assert all({"device", "python", "torch"} <= facts.keys() for facts in told.values())
            assert {name: facts["fingerprint"] for name, facts in told.items()} == {
                name: facts["fingerprint"] for name, facts in made.items()
            }
    return whole.out, parts.out
