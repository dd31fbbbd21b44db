"""Training of one method on K splits in lockstep: every step is one call of the method's own `update` for all of them.

All that is random in a cell comes from one generator, seeded by the seed and the names of data set and method: first
the minibatches of 64 steps, drawn with replacement for all splits at once, then the draws of these steps. A split
therefore depends on how many others run beside it. Between two blocks a run can be kept and taken up again to the last
bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slangvi.priors import Prior
from slangvi.rows.linear_predictor import LinearPredictorGradients
from slangvi.schedules import Rate, inverse_time
from slangvi_reproduction.experiments._cells import Arrays, Attempt
from slangvi_reproduction.experiments._logistic import Gaussian, Problem, negative_elbo_per_example, symmetric_kl

__all__ = ["BLOCK", "METHODS", "Method", "Trained", "seed_of", "trace_steps", "train"]

BLOCK = 64
NAME = "weights"


@dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    Args:
        module: in `slangvi.methods`.
        rank: L, where there is one.
        momentum: γ.
        curvature: "ef" or "hessian".
    """

    module: str
    rank: int | None = None
    momentum: float = 0.0
    curvature: str = "ef"


METHODS = {
    "mf_ef": Method("mean_field"),
    "mf_hess": Method("mean_field", curvature="hessian"),
    **{f"slang_{rank}": Method("slang", rank, momentum=0.9) for rank in (1, 2, 5, 10)},
    "full_ef": Method("full"),
    "full_hess": Method("full", curvature="hessian"),
    **{f"online_eig_{rank}": Method("online_eig", rank, momentum=0.9) for rank in (1, 2, 5)},
}


@dataclass(frozen=True)
class Trained:
    """What training leaves.

    Args:
        q: the final Gaussians.
        steps: at which the trace was taken, (T,).
        elbo: −ELBO/N along the way, (T, K).
        kl: symmetric divergence from the exact Gaussian along the way, (T, K).
    """

    q: Gaussian
    steps: Tensor
    elbo: Tensor
    kl: Tensor


def trace_steps(total: int, points: int) -> list[int]:
    """About so many steps from 1 to the last, evenly spread in the logarithm.

    Example:
        >>> trace_steps(1000, 4)
        [1, 10, 100, 1000]
    """
    return sorted({round(step) for step in np.geomspace(1, total, points)})


def seed_of(seed: int, *names: str) -> int:
    """A seed of its own for every name.

    Example:
        >>> seed_of(0, "a1a", "slang_1") == seed_of(0, "a1a", "slang_2")
        False
    """
    return int.from_bytes(hashlib.sha256("/".join([str(seed), *names]).encode()).digest()[:7], "little")


def train(
    method: Method, problem: Problem, exact: Gaussian, settings: Mapping[str, Any], seed: int, attempt: Attempt
) -> Trained:
    """Train all splits, from where an earlier attempt stopped if there is one.

    Args:
        method: a row of the table.
        problem: the splits.
        exact: the best full Gaussian of each, for the trace.
        settings: `epochs`, `batch_size`, `mc_samples`, `lr`, `decay` (None holds the rate constant), `trace_points`,
            and `dtype` where that is not "float64"; metrics are taken in float64 whatever it is.
        seed: of minibatches and draws.
        attempt: where progress is told and checkpoints are kept.
    """
    run = _Run(method, problem, exact, settings, seed)
    kept = attempt.restored()
    if kept is not None:
        run.restore(kept)
    while run.state.step < run.total:
        run.block()
        attempt.tick(run.state.step, run.total, run.capture)
    return Trained(run.gaussian(), torch.tensor(run.marks), torch.stack(run.elbo), torch.stack(run.kl))


class _Run:
    """The moving parts of a training run."""

    def __init__(
        self, method: Method, problem: Problem, exact: Gaussian, settings: Mapping[str, Any], seed: int
    ) -> None:
        self.method, self.problem, self.exact = method, problem, exact
        self.module = import_module(f"slangvi.methods.{method.module}")
        splits, num_data, num_params = problem.shape
        device = problem.x_train.device
        self.batch, self.draws = int(settings["batch_size"]), int(settings["mc_samples"])
        self.total = int(settings["epochs"] * num_data // self.batch)
        self.rate = _schedule(settings["lr"], settings["decay"])
        self.marks = trace_steps(self.total, settings["trace_points"])
        self.elbo: list[Tensor] = []
        self.kl: list[Tensor] = []
        # p(y | x) depends on ±x only: with the sign of its label in every row no step has to look labels up.
        signs = 2.0 * problem.y_train.unsqueeze(-1) - 1.0
        dtype = getattr(torch, settings.get("dtype", "float64"))
        self.rows = (signs * problem.x_train).reshape(splits * num_data, num_params).to(dtype)
        self.prior = Prior(problem.prior.precision.to(dtype), problem.prior.mean.to(dtype))
        self.starts = num_data * torch.arange(splits, device=device).unsqueeze(-1)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.state = self._initial()

    def _initial(self) -> Any:
        """The method's own start, once for every split."""
        splits, _, num_params = self.problem.shape
        zeros = {NAME: self.rows.new_zeros(num_params)}
        rank = self.method.rank
        state = self.module.init(zeros) if rank is None else self.module.init(zeros, rank)
        return _mapped(state, lambda x: x.expand(splits, *x.shape))

    @torch.inference_mode()
    def block(self) -> None:
        """At most 64 steps."""
        splits, num_data, _ = self.problem.shape
        count = min(BLOCK, self.total - self.state.step)
        shape = (count, splits, self.batch)
        picks = torch.randint(num_data, shape, generator=self.generator, device=self.rows.device) + self.starts
        for index in picks.view(count, -1):
            self.state = self._step(self.state, index)
            if self.state.step in self.marks:
                q = self.gaussian()
                self.elbo.append(negative_elbo_per_example(q, self.problem))
                self.kl.append(symmetric_kl(q, self.exact))
        # A state that was kept and read again is contiguous and owns its memory. Products may round by the layout of
        # what they multiply, so that this one has to be alike.
        self.state = _mapped(self.state, lambda x: x)

    def _step(self, state: Any, index: Tensor) -> Any:
        splits, num_data, num_params = self.problem.shape
        x = self.rows.index_select(0, index).view(splits, self.batch, num_params)
        # Noise in float32 takes a fifth of the time, and its seven digits are plenty for noise.
        shape, device = (self.draws, splits, num_params), self.rows.device
        noise = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=device).to(self.rows.dtype)
        thetas = state.precision.transform_noise(noise).add_(state.loc)
        probability = (x @ thetas.permute(1, 2, 0)).sigmoid_().mT  # of the label that was seen, (K, S, M)
        options: dict[str, Any] = {}
        if self.method.curvature == "hessian":
            gradients = LinearPredictorGradients(x, probability - 1.0, probability * (1.0 - probability))
            dense = self.method.module == "full"
            options["curvature"] = gradients.hessian() if dense else gradients.hessian_diag()
        else:
            gradients = LinearPredictorGradients(x, probability.sub_(1.0))
        rate = Rate(self.rate(state.step + 1))
        settings = {"num_data": num_data, "prior": self.prior, "lr": rate, "momentum": self.method.momentum}
        return self.module.update(state, gradients, **settings, **options)[0]

    def gaussian(self) -> Gaussian:
        """Where the splits are now."""
        posterior = self.module.posterior(_mapped(self.state, Tensor.double))
        return Gaussian(posterior.loc, posterior.covariance_matrix)

    def capture(self) -> Arrays:
        """All that the next block depends on."""
        tensors = {f"state_{name}": value for name, value in _tensors(self.state).items()}
        tensors["generator"] = self.generator.get_state()
        empty = torch.zeros(0, dtype=torch.float64)
        tensors["elbo"] = torch.stack(self.elbo) if self.elbo else empty
        tensors["kl"] = torch.stack(self.kl) if self.kl else empty
        return {name: value.cpu().numpy() for name, value in tensors.items()} | {"step": np.array(self.state.step)}

    def restore(self, kept: Arrays) -> None:
        """Go back to what `capture` returned."""
        device = self.rows.device
        tensors = {name: torch.tensor(kept[f"state_{name}"], device=device) for name in _tensors(self.state)}
        self.state = replace(self.state, step=int(kept["step"]), **tensors)
        self.generator.set_state(torch.tensor(kept["generator"]))
        self.elbo = list(torch.tensor(kept["elbo"], device=device))
        self.kl = list(torch.tensor(kept["kl"], device=device))


def _schedule(lr: float, decay: float | None) -> Callable[[int], float]:
    return (lambda step: lr) if decay is None else inverse_time(lr, decay)


def _tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by the names of its fields."""
    found = {entry.name: getattr(state, entry.name) for entry in fields(state)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A new state of contiguous tensors."""
    changed = {name: change(value) for name, value in _tensors(state).items()}
    return replace(state, **{n: x.clone(memory_format=torch.contiguous_format) for n, x in changed.items()})
