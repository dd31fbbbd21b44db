"""One data set with one method: classifiers with one hidden layer, all seeds in lockstep, measured along the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.priors import Prior
from slangvi_reproduction.data import Standardised
from slangvi_reproduction.data.libsvm import libsvm_splits
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments._learners import GAUSSIANS
from slangvi_reproduction.experiments._lockstep import seed_of, trace_steps
from slangvi_reproduction.experiments._logistic import DATASETS
from slangvi_reproduction.experiments._regression import (
    Problems,
    batches,
    network,
    outputs_of,
    portions,
    side_by_side,
    starts,
)
from slangvi_reproduction.experiments._task import Task, bernoulli

__all__ = ["METRICS", "PRIOR_PRECISION", "compute_cell", "load", "measure", "settings_of"]

METRICS = ("negative_elbo_per_example", "test_nll_nats")
# λ, which the authors chose by cross-validation, the same for SLANG and Bayes by Backprop.
PRIOR_PRECISION = {"usps_3vs5": 32.0, "breast_cancer": 8.0, "australian": 8.0}


class Measured(NamedTuple):
    """How good K Gaussians over weights are.

    Args:
        negative_elbo: −ELBO/N, (K,).
        test_nll: mean of −log E_q[p(y | x)] over test examples, nats, (K,).
    """

    negative_elbo: Tensor
    test_nll: Tensor


def settings_of(dataset: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a cell, as JSON can hold it."""
    return {**chosen, "prior_precision": PRIOR_PRECISION[dataset], "batch": DATASETS[dataset].batch_size}


def load(dataset: str, splits: list[int], device: str) -> Problems:
    """Splits side by side; without the column of ones, since networks have biases."""
    x_train, y_train, x_test, y_test = libsvm_splits(dataset, splits)
    mean, scale = torch.tensor(0.0), torch.tensor(1.0)  # classes are left as they are
    rows = zip(x_train[..., 1:], y_train, x_test[..., 1:], y_test, strict=True)
    return side_by_side([Standardised(*row, mean, scale) for row in rows], device)


def compute_cell(cell: Cell, attempt: Attempt) -> Arrays:
    """Train all seeds, from where an earlier attempt stopped if there is one."""
    run = _Run(cell)
    run.restore(attempt.restored() or {})
    epochs = cell.settings["epochs"]
    for epoch in range(run.epoch + 1, epochs + 1):
        run.advance(epoch)
        attempt.tick(epoch, epochs, run.capture)
    trace = {name: np.stack([getattr(one, name) for one in run.seen]) for name in Measured._fields}
    final = dict(zip(METRICS, (values[-1] for values in trace.values()), strict=True))
    steps = np.array(run.marks)
    return {"trace_steps": steps, "trace_elbo": trace["negative_elbo"], "trace_nll": trace["test_nll"], **final}


class _Run:
    """The moving parts."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.settings = cell, cell.settings
        self.problems = load(cell.dataset, self.settings["splits"], self.settings["device"])
        self.generator = torch.Generator(self.settings["device"]).manual_seed(self._seed(cell.method))
        self.task = self._task()
        self.learner = GAUSSIANS[self.settings.get("learner", cell.method)](self.task)
        self.marks = trace_steps(self.task.steps, self.settings["trace_points"])
        self.epoch = self.step = 0
        self.seen: list[Measured] = []

    def _task(self) -> Task:
        problems, settings = self.problems, self.settings
        inputs, hidden, size = problems.x_train.shape[2], settings["hidden"], len(problems.num_train)
        # All methods start from the same weights.
        seeds = [self._seed(f"start {k}") % 2**31 for k in range(size)]
        first = {name: value.to(settings["device"]) for name, value in starts(inputs, hidden, seeds).items()}
        batch, ones = min(settings["batch"], problems.least), torch.ones(size, device=settings["device"])
        return Task(
            network(inputs, hidden).to(settings["device"]),
            lambda member: first,
            problems.num_train,
            ones,
            settings["prior_precision"] * ones,
            batch,
            settings["epochs"] * (problems.least // batch),
            settings,
            self.generator,
            bernoulli,
        )

    def advance(self, epoch: int) -> None:
        """One epoch."""
        for x, y in batches(self.problems, self.task.batch, self.generator):
            self.learner.step(x, y)
            self.step += 1
            if self.step in self.marks:
                self.seen.append(self._measured())
        self.epoch = epoch

    def _measured(self) -> Measured:
        """With draws of their own, so that training does not depend on how often one looks."""
        seed = self._seed(f"{self.cell.method} at {self.step}")
        source = torch.Generator(self.settings["device"]).manual_seed(seed)
        found = measure(self.learner.posterior(), self.task, self.problems, self.settings["draws"], source)
        return Measured(*(value.cpu() for value in found))

    def capture(self) -> Arrays:
        """All that the next epoch depends on."""
        seen = torch.stack([torch.stack(list(one)) for one in self.seen]) if self.seen else torch.zeros(0)
        place = {"at_epoch": np.array(self.epoch), "at_step": np.array(self.step), "seen": seen.numpy()}
        return self.learner.arrays() | place | {"random": self.generator.get_state().numpy()}

    def restore(self, kept: Arrays) -> None:
        """Go back to what `capture` returned, if it did."""
        if kept:
            self.epoch, self.step = int(kept["at_epoch"]), int(kept["at_step"])
            self.seen = [Measured(*torch.from_numpy(one)) for one in kept["seen"]]
            self.generator.set_state(torch.from_numpy(kept["random"]))
            self.learner.restore(kept)

    def _seed(self, what: str) -> int:
        return seed_of(self.settings["seed"], self.cell.dataset, what)


@torch.no_grad()
def measure(
    q: LowRankPrecisionNormal, task: Task, problems: Problems, draws: int, generator: torch.Generator
) -> Measured:
    """−ELBO/N on the training part and the predictive negative log-likelihood on the test part, from the same draws.

    Args:
        q: of K networks.
        task: network, prior and likelihood.
        problems: K of one size.
        draws: of the weights of each network; the divergence from the prior is in closed form.
        generator: source of the draws.
    """
    y_train, y_test, tau = problems.y_train.unsqueeze(1), problems.y_test.unsqueeze(1), task.tau[:, None, None]
    fit = torch.zeros(len(task.tau), dtype=torch.float64, device=task.device)
    density = torch.full(problems.y_test.shape, -torch.inf, dtype=torch.float64, device=task.device)
    for count in portions(task.model, max(y_train, y_test, key=Tensor.numel), draws):
        weights = task.spec.unflatten(q.sample((count,), generator).transpose(0, 1))
        seen, asked = (outputs_of(task.model, weights, x) for x in (problems.x_train, problems.x_test))
        fit += task.log_prob(seen, y_train, tau).sum((1, 2), dtype=torch.float64)
        density = torch.logaddexp(density, task.log_prob(asked, y_test, tau).double().logsumexp(1))
    elbo = fit / draws - _kl(q, task.prior)
    return Measured(-elbo / y_train.shape[-1], math.log(draws) - density.mean(1))


def _kl(q: LowRankPrecisionNormal, prior: Prior) -> Tensor:
    """KL(q ‖ prior) in float64, (K,): a sum over many weights of terms that nearly cancel."""
    exact = LowRankPrecisionNormal(q.loc.double(), q.prec_factor.double(), q.prec_diag.double(), validate_args=False)
    scale = prior.precision.double().rsqrt()
    found: Tensor = kl_divergence(exact, Independent(Normal(prior.mean.double(), scale, validate_args=False), 1))
    return found
