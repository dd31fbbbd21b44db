"""Methods that train one network on images, one row each, behind the interface of `_learners`.

A network of this size fills a GPU by itself, so that SLANG takes its steps alone and not in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slangvi import slang
from slangvi_reproduction.experiments._adam_learners import Ensemble, Reparameterised
from slangvi_reproduction.experiments._cells import Arrays
from slangvi_reproduction.experiments._image_rivals import Ivon, LastLayer, Masked
from slangvi_reproduction.experiments._learners import Learner
from slangvi_reproduction.experiments._task import Task

__all__ = ["IMAGE_LEARNERS", "Alone"]


class Alone:
    """SLANG on one network, with the step as one captured graph on a GPU.

    Args:
        task: what to learn, K = 1.
        rank: L.
    """

    _KEPT = ("loc", "prec_factor", "prec_diag", "momentum")

    def __init__(self, task: Task, rank: int) -> None:
        self.generator, settings = task.generator, task.settings
        self.run = slang.build(
            lambda params, batch: task.log_likelihood(params, batch, task.tau),
            num_data=int(task.num_data[0]),
            rank=rank,
            lr=task.rate("lr"),
            precision_lr=task.rate("precision_lr"),
            precision_warmup=settings["precision_warmup"],
            prior_precision=task.prior.precision[0],
            mc_samples=settings["mc_samples"],
            init_precision=task.init_precision,
            temperature=task.temperature,
            model=task.model,
            compile=task.device.type == "cuda",
        )
        self.state = self.run.init({name: value[0] for name, value in task.starts(0).items()})

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`."""
        self.state, _ = self.run.update(self.state, (x[0], y[0]), self.generator)

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`."""
        drawn = self.run.sample(self.state, (count,), self.generator)
        return {name: value.unsqueeze(0) for name, value in drawn.items()}

    def arrays(self) -> Arrays:
        """See `Learner`."""
        values = {name: getattr(self.state, name).cpu().numpy() for name in self._KEPT}
        return values | {"step": np.array(self.state.step)}

    def restore(self, arrays: Arrays) -> None:
        """See `Learner`."""
        device = self.state.loc.device
        new: dict[str, Any] = {name: torch.from_numpy(arrays[name]).to(device) for name in self._KEPT}
        self.state = replace(self.state, **new, step=int(arrays["step"]))


IMAGE_LEARNERS: dict[str, Callable[[Task], Learner]] = {
    **{f"slang_{rank}": partial(Alone, rank=rank) for rank in (1, 2, 4, 8, 16, 32)},
    "bbb": Reparameterised,
    "map": partial(Masked, rate=0.0),
    "ensemble_5": partial(Ensemble, members=5, make=partial(Masked, rate=0.0)),
    "mc_dropout": lambda task: Masked(task, task.settings["dropout_rate"]),
    "ivon": Ivon,
    "laplace": LastLayer,
}
