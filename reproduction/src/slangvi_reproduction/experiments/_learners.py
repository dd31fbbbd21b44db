"""Methods that train K small networks in lockstep, one row each, behind one interface.

On a GPU a step is replayed from a CUDA graph: thousands of steps of networks this small are otherwise spent launching.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from slangvi import replicas
from slangvi.distributions import LowRankPrecisionNormal
from slangvi_reproduction.experiments._adam_learners import Dropped, Ensemble, Reparameterised
from slangvi_reproduction.experiments._cells import Arrays
from slangvi_reproduction.experiments._task import Task

__all__ = ["GAUSSIANS", "LEARNERS", "GaussianLearner", "Learner", "LowRank"]


class Learner(Protocol):
    """K networks in training."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on minibatches (K, M, D) and (K, M)."""

    def draw(self, count: int) -> dict[str, Tensor]:
        """Draws of the weights to predict with, name → (K, count, ...)."""

    def arrays(self) -> Arrays:
        """All that training changes, to go on from."""

    def restore(self, arrays: Arrays) -> None:
        """Go on from there."""


class GaussianLearner(Learner, Protocol):
    """K networks in training, each with a Gaussian over its weights."""

    def posterior(self) -> LowRankPrecisionNormal:
        """All q, with batch shape (K,); their means are NaN where training met NaN or Inf."""


class LowRank:
    """SLANG and SLANG-OnlineEig.

    Args:
        task: what to learn.
        rank: L.
        method: of `slangvi.replicas`.
    """

    def __init__(self, task: Task, rank: int, method: Literal["slang", "online_eig"] = "slang") -> None:
        self.generator, settings = task.generator, task.settings
        self.runs = replicas.build(
            task.log_likelihood,
            num_replicas=len(task.tau),
            num_data=task.num_data.tolist(),
            rank=rank,
            lr=task.rate("lr"),
            precision_lr=task.rate("precision_lr"),
            precision_warmup=settings.get("precision_warmup", True),
            prior_precision=task.prior.precision,
            mc_samples=settings["mc_samples"],
            init_precision=task.init_precision,
            temperature=task.temperature,
            constants=task.noise,
            method=method,
            on_divergence="ignore",  # a search is to try what does not work, too
        )
        self.state = self.runs.init(task.starts(0), stacked=True)

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`."""
        self.state, _ = self.runs.update(self.state, (x, y), self.generator)

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`."""
        return self.runs.sample(self.state, (count,), self.generator)

    def posterior(self) -> LowRankPrecisionNormal:
        """See `GaussianLearner`."""
        q, lost = self.runs.posterior(self.state), self.state.failed.unsqueeze(1)
        loc = q.loc.masked_fill(lost.to(q.loc.device), torch.nan)  # they stand still, which would look like an end
        return LowRankPrecisionNormal(loc, q.prec_factor, q.prec_diag, validate_args=False)

    _KEPT = ("loc", "prec_factor", "prec_diag", "momentum", "step", "failed")

    def arrays(self) -> Arrays:
        """See `Learner`."""
        return {name: getattr(self.state, name).cpu().numpy() for name in self._KEPT}

    def restore(self, arrays: Arrays) -> None:
        """See `Learner`."""
        old = {name: getattr(self.state, name) for name in self._KEPT}
        new: dict[str, Any] = {name: torch.from_numpy(arrays[name]).to(value.device) for name, value in old.items()}
        self.state = replace(self.state, **new)


GAUSSIANS: dict[str, Callable[[Task], GaussianLearner]] = {
    **{f"slang_{rank}": partial(LowRank, rank=rank) for rank in (1, 8, 16, 32)},
    "bbb": Reparameterised,
}
LEARNERS: dict[str, Callable[[Task], Learner]] = {
    **{name: GAUSSIANS[name] for name in ("slang_1", "slang_8", "slang_32", "bbb")},
    "mc_dropout": lambda task: Dropped(task, task.settings["dropout_rate"]),
    "ensemble_5": lambda task: Ensemble(task, 5),
    **{f"online_eig_{rank}": partial(LowRank, rank=rank, method="online_eig") for rank in (1, 2, 5)},
}
