"""One data set with one method: a search for (τ, λ) on every split, then a run with the best, all in lockstep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing import current_process
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slangvi_reproduction.data import Regression, folds, load_uci, standardise
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments._learners import LEARNERS
from slangvi_reproduction.experiments._lockstep import seed_of, trace_steps
from slangvi_reproduction.experiments._regression import (
    Problems,
    Scores,
    batches,
    network,
    scores,
    side_by_side,
    starts,
)
from slangvi_reproduction.experiments._search import Box, propose_all
from slangvi_reproduction.experiments._task import Task
from slangvi_reproduction.experiments._watch import Watch

__all__ = [
    "METRICS",
    "SETS",
    "Set",
    "compute_borrowed",
    "compute_cell",
    "compute_recipe",
    "compute_trace",
    "settings_of",
]

METRICS = ("test_rmse", "test_log_likelihood")
# What lies further below the best is as bad as that: a failure must not bend the Gaussian process.
_WORST = 5.0


class Set(NamedTuple):
    """One row of the table of data sets.

    Args:
        box: where to search, as in the authors' settings.
        batch: M.
    """

    box: Box
    batch: int


SETS = {
    "boston": Set(Box((-2.6, -2.2), (-2.0, 2.0)), 10),
    "concrete": Set(Box((-3.7, -2.7), (-2.0, 2.0)), 10),
    "energy": Set(Box((-0.3, 0.1), (-4.0, 0.0)), 10),
    "kin8nm": Set(Box((4.8, 5.3), (-2.0, 2.0)), 100),
    "naval": Set(Box((10.9, 11.4), (-4.0, 0.0)), 100),
    "power": Set(Box((-3.1, -2.5), (-2.0, 2.0)), 100),
    "wine": Set(Box((0.8, 1.1), (0.0, 4.0)), 10),
    "yacht": Set(Box((-1.6, -0.6), (-2.0, 2.0)), 10),
}


def compute_cell(cell: Cell, attempt: Attempt) -> Arrays:
    """Search in rounds, then train on whole training parts and test."""
    run = _Run(cell, attempt)
    for number in range(run.done, run.rounds):
        run.search(number)
    return run.final(run.best) | {"search_points": run.points, "search_values": run.values}


def compute_borrowed(cell: Cell, attempt: Attempt) -> Arrays:
    """No search either: τ and λ of every split are those that another method found."""
    found = attempt.needed(cell.settings["points_of"])
    return _Run(cell, attempt).final(np.stack([found["log_tau"], found["log_lambda"]], -1))


def compute_recipe(cell: Cell, attempt: Attempt) -> Arrays:
    """No search: train on four fifths of every training part at the cell's point, and test on the last fifth."""
    run = _Run(cell, attempt)
    settings = cell.settings
    pairs = [folds(run.data.splits[split].train, split, settings["folds"])[0] for split in run.splits]
    problems = side_by_side([standardise(run.data, pair) for pair in pairs], settings["device"])
    found = run.trained(0, problems, run.everywhere(settings["point"]), settings["test_draws"])
    return {
        "validation_rmse": found.rmse.double().cpu().numpy(),
        "validation_log_likelihood": found.log_likelihood.double().cpu().numpy(),
    }


def compute_trace(cell: Cell, attempt: Attempt) -> Arrays:
    """No search: train on whole training parts at the middle of the box, and test along the way."""
    run = _Run(cell, attempt)
    problems = run.whole()
    marks = trace_steps(run.steps(problems), cell.settings["trace_points"])
    watch = Watch(marks, lambda step: run.seed(f"look {step}"))
    run.trained(0, problems, run.middle, cell.settings["test_draws"], watch)
    values = {"trace_rmse": watch.values("rmse"), "trace_log_likelihood": watch.values("log_likelihood")}
    return {"trace_steps": np.array(marks), **values}


class _Run:
    """The moving parts.

    Args:
        cell: data set, method and settings.
        attempt: where progress is told and checkpoints are kept.
    """

    def __init__(self, cell: Cell, attempt: Attempt) -> None:
        self.cell, self.attempt, self.settings = cell, attempt, cell.settings
        self.data = load_uci(cell.dataset)
        self.splits: Sequence[int] = self.settings["splits"]
        self.rounds = self.settings["evaluations"] // self.settings["at_once"]
        self.points: NDArray[np.float64] = np.zeros((0, len(self.splits), 2))  # (log τ, log λ) of every split
        self.values: NDArray[np.float64] = np.zeros((0, len(self.splits)))
        self.kept = attempt.restored() or {}
        if self.kept:
            self.points, self.values = self.kept.pop("points"), self.kept.pop("values")

    @property
    def done(self) -> int:
        """Rounds of the search that are over."""
        return len(self.values) // int(self.settings["at_once"])

    @property
    def middle(self) -> NDArray[np.float64]:
        """(log τ, log λ) in the middle of the box, (1, splits, 2)."""
        return self.everywhere([sum(bounds) / 2 for bounds in SETS[self.cell.dataset].box])

    def everywhere(self, point: Sequence[float]) -> NDArray[np.float64]:
        """The same (log τ, log λ) for all splits, (1, splits, 2)."""
        return np.tile(np.array(point), (1, len(self.splits), 1))

    def whole(self) -> Problems:
        """All of the training parts, with the test parts beside them."""
        parts = [standardise(self.data, self.data.splits[split]) for split in self.splits]
        return side_by_side(parts, self.settings["device"])

    def batch(self, problems: Problems) -> int:
        """M."""
        return min(SETS[self.cell.dataset].batch, problems.least)

    def steps(self, problems: Problems) -> int:
        """Of all epochs."""
        return int(self.settings["epochs"]) * (problems.least // self.batch(problems))

    def search(self, number: int) -> None:
        """One round: some points for every split, each with cross-validation."""
        count, parts = self.settings["at_once"], self.settings["folds"]
        points = self._proposed(number, count)
        problems = _folded(self.data, self.splits, parts, self.settings["device"])
        found = self.trained(number, problems, points.repeat(parts, axis=1), self.settings["search_draws"])
        values = found.log_likelihood.cpu().double().view(count, len(self.splits), parts).mean(-1).numpy()
        self.points = np.concatenate([self.points, points])
        self.values = np.concatenate([self.values, np.nan_to_num(values, nan=-np.inf)])

    def _proposed(self, number: int, count: int) -> NDArray[np.float64]:
        """Points of a round, (count, splits, 2)."""
        floor = self.values.max(0, initial=-np.inf) - _WORST
        good = np.maximum(self.values, np.where(np.isfinite(floor), floor, 0.0))
        pairs = [
            [((float(p[0]), float(p[1])), float(v)) for p, v in zip(self.points[:, k], good[:, k], strict=True)]
            for k in range(len(self.splits))
        ]
        seeds = [self.seed(f"search {number} {split}") % 2**31 for split in self.splits]
        found = propose_all(SETS[self.cell.dataset].box, pairs, count, seeds, self._spare_cores)
        return np.array(found).transpose(1, 0, 2)

    @property
    def _spare_cores(self) -> int:
        """For proposals: on a CPU every core has a cell of its own, and so it is when several share a GPU."""
        if current_process().daemon:  # one of several workers, which may not start processes of their own
            return 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // 3) if str(self.settings["device"]).startswith("cuda") else 1

    @property
    def best(self) -> NDArray[np.float64]:
        """The best point of every split, (splits, 2)."""
        found: NDArray[np.float64] = self.points[self.values.argmax(0), np.arange(len(self.splits))]
        return found

    def final(self, points: NDArray[np.float64]) -> Arrays:
        """Train with a point for every split, (splits, 2), on all of its training part, and test."""
        found = self.trained(self.rounds, self.whole(), points[None], self.settings["test_draws"])
        return {
            "test_rmse": found.rmse.double().cpu().numpy(),
            "test_log_likelihood": found.log_likelihood.double().cpu().numpy(),
            "log_tau": points[:, 0],
            "log_lambda": points[:, 1],
        }

    def trained(
        self, number: int, problems: Problems, points: NDArray[np.float64], draws: int, watch: Watch | None = None
    ) -> Scores:
        """Train networks for points (count, B, 2) on B problems, from where an earlier attempt stopped; test them."""
        watch = watch or Watch()
        generator = torch.Generator(problems.y_scale.device).manual_seed(self.seed(f"round {number}"))
        task = self._task(problems, torch.from_numpy(points), generator)
        learner, first = LEARNERS[self.settings.get("learner", self.cell.method)](task), 0
        if self.kept and int(self.kept["round"]) == number:
            first = int(self.kept["epoch"])
            generator.set_state(torch.from_numpy(self.kept["random"]))
            learner.restore(self.kept)
            watch.restore(self.kept)
        self.kept = {}
        count, epochs = len(points), self.settings["epochs"]

        def capture() -> Arrays:
            place = {"round": np.array(number), "epoch": np.array(epoch), "random": generator.get_state().numpy()}
            return learner.arrays() | watch.arrays() | place | {"points": self.points, "values": self.values}

        def look() -> Scores:
            return scores(task.model, learner.draw, draws, _repeated(problems, count), task.tau)

        for epoch in range(first + 1, epochs + 1):
            for x, y in batches(problems, task.batch, generator):
                learner.step(x.repeat(count, 1, 1), y.repeat(count, 1))
                watch.step(generator, look)
            self.attempt.tick(self._ticks(number, epoch), self._ticks(self.rounds, epochs), capture)
        return look()

    def _ticks(self, number: int, epoch: int) -> int:
        return number * int(self.settings["epochs"]) + epoch

    def _task(self, problems: Problems, points: Tensor, generator: torch.Generator) -> Task:
        device, count = problems.y_scale.device, len(points)
        log_tau, log_lambda = points.reshape(-1, 2).to(device, torch.float32).unbind(-1)
        inputs, hidden = problems.x_train.shape[2], self.settings["hidden"]
        size = len(problems.y_scale) * count

        def begin(member: int) -> dict[str, Tensor]:
            seeds = [self.seed(f"start {member} {k}") % 2**31 for k in range(size)]
            return {name: value.to(device) for name, value in starts(inputs, hidden, seeds).items()}

        return Task(
            network(inputs, hidden).to(device),
            begin,
            problems.num_train.repeat(count),
            log_tau.exp() * problems.y_scale.repeat(count).square(),
            log_lambda.exp(),
            self.batch(problems),
            self.steps(problems),
            self.settings,
            generator,
        )

    def seed(self, what: str) -> int:
        """Of its own for everything that is random."""
        return seed_of(self.settings["seed"], self.cell.dataset, self.cell.method, what)


def _folded(data: Regression, splits: Sequence[int], count: int, device: str) -> Problems:
    """All folds of all training parts, fold by fold within a split."""
    pairs = [pair for split in splits for pair in folds(data.splits[split].train, split, count)]
    return side_by_side([standardise(data, pair) for pair in pairs], device)


def _repeated(problems: Problems, count: int) -> Problems:
    """The problems over and over, for as many points; nothing is copied that is not needed to test."""
    x, y, real, scale = problems.x_test, problems.y_test, problems.real, problems.y_scale
    many = {"x_test": x.repeat(count, 1, 1), "y_test": y.repeat(count, 1)}
    many |= {"real": real.repeat(count, 1), "y_scale": scale.repeat(count)}
    return Problems(problems.x_train, problems.y_train, problems.num_train, **many)


def settings_of(dataset: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a cell, as JSON can hold it."""
    row = SETS[dataset]
    return {**chosen, "box": [list(row.box.log_tau), list(row.box.log_lambda)], "batch": row.batch}
