"""Methods of the cubic: those of `_learners` with a full Gaussian beside them, and what each believes as moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slangvi import bbb, full
from slangvi.rows.dense import DenseGradients
from slangvi.schedules import Rate, warmed_up
from slangvi_reproduction.experiments._adam_learners import Reparameterised
from slangvi_reproduction.experiments._cells import Arrays
from slangvi_reproduction.experiments._learners import Learner, LowRank
from slangvi_reproduction.experiments._logistic import Gaussian
from slangvi_reproduction.experiments._task import Cosine, Task

__all__ = ["LEARNERS", "Dense", "moments"]


class Dense:
    """The full Gaussian: SLANG's step with nothing left out, momentum and rates included.

    Args:
        task: what to learn; all networks have the same number of examples.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.spec, self.num_data = task, task.spec, int(task.num_data[0])
        settings, loc = task.settings, task.loc
        self.rates = [Cosine(settings[name], task.steps) for name in ("lr", "precision_lr")]
        matrix = settings["init_precision"] * torch.eye(loc.shape[1], dtype=loc.dtype)
        self.state = full.State(loc, matrix.repeat(len(loc), 1, 1), torch.zeros_like(loc), 0, self.spec)
        example = torch.func.grad(self._loss)
        for dims in ((None, 0, 0, None), (0, None, None, None), (0, 0, 0, 0)):  # examples, draws, networks
            example = torch.func.vmap(example, in_dims=dims)
        self.rows: Callable[..., Tensor] = example

    def _loss(self, theta: Tensor, x: Tensor, y: Tensor, tau: Tensor) -> Tensor:
        """Negative log-likelihood of one example."""
        return -self.task.log_likelihood(self.spec.unflatten(theta), (x.unsqueeze(0), y.unsqueeze(0)), tau).sum()

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`."""
        step, draws = self.state.step + 1, (self.task.settings["mc_samples"],)
        thetas = self.state.precision.sample(draws, self.task.generator, self.state.loc).transpose(0, 1)
        rows = self.rows(thetas, x, y, self.task.tau).flatten(1, 2)
        lr, precision_lr = (rate(step) for rate in self.rates)
        self.state, _ = full.update(
            self.state,
            DenseGradients.from_rows(rows),
            num_data=self.num_data,
            prior=self.task.prior,
            lr=Rate(lr),
            precision_lr=Rate(warmed_up(precision_lr, step)),
            momentum=0.9,
        )

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`."""
        drawn = self.state.precision.sample((count,), self.task.generator, self.state.loc)
        return self.spec.unflatten(drawn.transpose(0, 1))

    _KEPT = ("loc", "prec_matrix", "momentum")

    def arrays(self) -> Arrays:
        """See `Learner`."""
        return {name: getattr(self.state, name).numpy() for name in self._KEPT} | {"step": np.array(self.state.step)}

    def restore(self, arrays: Arrays) -> None:
        """See `Learner`."""
        new: dict[str, Any] = {name: torch.from_numpy(arrays[name]) for name in self._KEPT}
        self.state = replace(self.state, step=int(arrays["step"]), **new)


def moments(learner: Learner) -> Gaussian:
    """What each of K networks is believed to be, in float64."""
    if isinstance(learner, LowRank):
        factor, diag = learner.state.prec_factor.double(), learner.state.prec_diag.double()
        return _inverted(learner.state.loc, factor.mT @ factor + diag.diag_embed())
    if isinstance(learner, Dense):
        return _inverted(learner.state.loc, learner.state.prec_matrix.double())
    assert isinstance(learner, Reparameterised)
    sigma = bbb.stddev_of(learner.kept["rho"].double())
    return Gaussian(learner.kept["loc"].double(), sigma.square().diag_embed())


def _inverted(loc: Tensor, precision: Tensor) -> Gaussian:
    return Gaussian(loc.double(), torch.cholesky_inverse(torch.linalg.cholesky(precision)))


LEARNERS: dict[str, Callable[[Task], Learner]] = {
    "slang_1": lambda task: LowRank(task, 1),
    "slang_5": lambda task: LowRank(task, 5),
    "bbb": Reparameterised,
    "full": Dense,
}
