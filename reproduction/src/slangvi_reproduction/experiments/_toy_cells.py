"""One method on the noisy cubic: several seeds in lockstep, and the best Gaussian of each by its ELBO."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments._cubic import Problem, elbo, predict, problem
from slangvi_reproduction.experiments._lockstep import seed_of
from slangvi_reproduction.experiments._logistic import Gaussian
from slangvi_reproduction.experiments._regression import network, starts
from slangvi_reproduction.experiments._task import Task
from slangvi_reproduction.experiments._toy_learners import LEARNERS, moments

__all__ = ["compute_fit", "generator_of", "problem_of"]


def problem_of(cell: Cell) -> Problem:
    """Data, network and prior of a cell."""
    chosen = cell.settings
    return problem(chosen["num_data"], chosen["data_seed"], chosen["hidden"], chosen["prior_precision"])


def generator_of(cell: Cell, what: str) -> torch.Generator:
    """A source of randomness of its own for every purpose."""
    return torch.Generator().manual_seed(seed_of(cell.settings["seed"], cell.dataset, cell.method, what))


def compute_fit(cell: Cell, attempt: Attempt) -> Arrays:
    """Train on all data at every step, look at the ELBO now and then, and predict with the best of each seed."""
    run = _Fit(cell)
    kept = attempt.restored()
    if kept is not None:
        run.restore(kept)
    while run.done < run.steps:
        run.block()
        attempt.tick(run.done, run.steps, run.capture)
    return run.result()


class _Fit:
    """The moving parts.

    Args:
        cell: method and settings.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell, self.settings, self.problem = cell, cell.settings, problem_of(cell)
        self.steps, self.every, self.done = int(self.settings["epochs"]), int(self.settings["trace_every"]), 0
        self.seeds = len(self.settings["splits"])
        self.generator = generator_of(cell, "training")
        self.learner = LEARNERS[cell.method](self._task())
        # The noise of the ELBO is the same all along, so that states are compared and not draws.
        shape = (self.settings["elbo_draws"], self.problem.num_params)
        self.noise = torch.randn(shape, generator=generator_of(cell, "elbo"), dtype=torch.float64)
        self.trace: list[Tensor] = []
        self.best = moments(self.learner)
        self.best_elbo = torch.full((self.seeds,), -torch.inf, dtype=torch.float64)

    def _task(self) -> Task:
        hidden, ones = self.problem.hidden, torch.ones(self.seeds)
        seeds = [seed_of(self.settings["seed"], "start", str(k)) % 2**31 for k in self.settings["splits"]]
        return Task(
            network(1, hidden),
            lambda member: starts(1, hidden, seeds),
            self.num_data * torch.ones(self.seeds, dtype=torch.int64),
            self.problem.tau * ones,
            self.problem.prior_precision * ones,
            self.num_data,
            self.steps,
            {**self.settings, "bias_precision": self.problem.prior_precision},
            self.generator,
        )

    @property
    def num_data(self) -> int:
        """N, which is also the size of every batch."""
        return len(self.problem.y)

    def block(self) -> None:
        """Steps up to the next look at the ELBO."""
        x = self.problem.x.float().view(1, -1, 1).repeat(self.seeds, 1, 1)
        y = self.problem.y.float().repeat(self.seeds, 1)
        for _ in range(min(self.every, self.steps - self.done)):
            self.learner.step(x, y)
            self.done += 1
        self._look()

    def _look(self) -> None:
        now = moments(self.learner)
        found = elbo(now, self.problem, self.noise)
        better = found > self.best_elbo
        self.trace.append(found)
        self.best_elbo = torch.where(better, found, self.best_elbo)
        loc = torch.where(better[:, None], now.loc, self.best.loc)
        self.best = Gaussian(loc, torch.where(better[:, None, None], now.covariance, self.best.covariance))

    def result(self) -> Arrays:
        """Predictions of the best, and an ELBO from draws that had no part in choosing it."""
        fresh, draws = generator_of(self.cell, "test"), self.settings["test_draws"]
        noise = torch.randn((draws, self.problem.num_params), generator=fresh, dtype=torch.float64)
        trace = torch.stack(self.trace)
        curves = predict(self.best, self.problem, draws, fresh)
        found = {
            "mean": curves.mean,
            "sd": curves.sd,
            "elbo": torch.cat([elbo(_one(self.best, k), self.problem, noise) for k in range(self.seeds)]),
            "trace_elbo": trace,
            "best_step": self._steps()[trace.nan_to_num(nan=-torch.inf).argmax(0)],
            "trace_steps": self._steps(),
        }
        return {name: value.numpy() for name, value in found.items()}

    def _steps(self) -> Tensor:
        """At which the ELBO was looked at."""
        return (self.every * torch.arange(1, len(self.trace) + 1)).clamp(max=self.steps)

    def capture(self) -> Arrays:
        """All that the next block depends on."""
        mine = {"trace": torch.stack(self.trace), "random": self.generator.get_state(), "best_elbo": self.best_elbo}
        mine |= {"best_loc": self.best.loc, "best_covariance": self.best.covariance}
        arrays = {f"learner_{name}": value for name, value in self.learner.arrays().items()}
        return arrays | {name: value.numpy() for name, value in mine.items()} | {"done": np.array(self.done)}

    def restore(self, kept: Arrays) -> None:
        """Go back to what `capture` returned."""
        self.done = int(kept["done"])
        self.trace = list(torch.from_numpy(kept["trace"]))
        self.generator.set_state(torch.from_numpy(kept["random"]))
        self.best_elbo = torch.from_numpy(kept["best_elbo"])
        self.best = Gaussian(*(torch.from_numpy(kept[f"best_{name}"]) for name in ("loc", "covariance")))
        mine = {name: value for name, value in kept.items() if name.startswith("learner_")}
        self.learner.restore({name.removeprefix("learner_"): value for name, value in mine.items()})


def _one(q: Gaussian, k: int) -> Gaussian:
    return Gaussian(q.loc[k : k + 1], q.covariance[k : k + 1])
