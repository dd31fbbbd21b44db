"""Small networks trained in lockstep by Adam: Bayes by Backprop, MC dropout, ensembles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slangvi import bbb, mc_dropout
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.methods.compiled.capture import aside, capture_graph
from slangvi.params import ParamSpec
from slangvi_reproduction.experiments._cells import Arrays
from slangvi_reproduction.experiments._task import Task

__all__ = ["ByAdam", "Dropped", "Ensemble", "Reparameterised", "call_of"]


class ByAdam:
    """What methods trained by Adam share: tensors that keep their place, so that a step can be captured."""

    def __init__(self, task: Task) -> None:
        self.task, self.generator, self.spec = task, task.generator, task.spec
        self.prior, self.rate = task.prior, task.rate("adam_lr")
        self.weight = (task.num_data.to(task.device) / (task.batch * self.draws)).to(task.tau.dtype).unsqueeze(1)
        self.taken = 0
        self.lr = torch.zeros((), device=task.device)
        self.count = torch.zeros((), device=task.device)
        self.kept: dict[str, Tensor] = {}
        self.given: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False

    @property
    def draws(self) -> int:
        """S."""
        return int(self.task.settings["mc_samples"])

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`."""
        self.taken += 1
        self.lr.fill_(self.rate(self.taken) if callable(self.rate) else self.rate)
        given = [x, y, *self.chance()]
        if not self.given:
            self.given = [torch.empty_like(value) for value in given]
        for mine, value in zip(self.given, given, strict=True):
            mine.copy_(value)
        if self.task.device.type == "cuda":  # pragma: no cover
            self._replay()
        else:
            self.advance()

    def _replay(self) -> None:  # pragma: no cover
        """The first step eagerly, beside the graph, as CUDA asks for; so is the first after a restart."""
        if not self.warm:
            with aside(self.task.device):
                self.advance()
            self.warm = True
            return
        if self.graph is None:
            self.graph = capture_graph(self.advance, self.task.device)
        self.graph.replay()

    def chance(self) -> list[Tensor]:
        """Random numbers of one step."""
        raise NotImplementedError

    def advance(self) -> None:
        """One step, from what was given, in place."""
        raise NotImplementedError

    def gradient(self, at: Tensor, energy: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the summed negative log-likelihood."""
        with torch.enable_grad():
            leaf = at.detach().requires_grad_()
            return torch.autograd.grad(energy(leaf).sum(), leaf)[0]

    def misfit(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood, for outputs (..., K, M)."""
        return -self.task.log_prob(outputs, y, self.task.tau.unsqueeze(1))

    def arrays(self) -> Arrays:
        """See `Learner`."""
        values = {name: value.cpu().numpy() for name, value in self.kept.items()}
        return values | {"taken": np.array(self.taken), "count": self.count.cpu().numpy()}

    def restore(self, arrays: Arrays) -> None:
        """See `Learner`."""
        self.taken = int(arrays["taken"])
        self.count.fill_(float(arrays["count"]))
        for name, value in self.kept.items():
            value.copy_(torch.from_numpy(arrays[name]))

    def put(self, names: tuple[str, ...], values: tuple[Tensor, ...]) -> None:
        """Write new values where the old ones are."""
        for name, value in zip(names, values, strict=True):
            self.kept[name].copy_(value)


class Reparameterised(ByAdam):
    """Bayes by Backprop."""

    _LOC, _RHO = ("loc", "loc_momentum", "loc_square"), ("rho", "rho_momentum", "rho_square")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        first = {name: value[0] for name, value in task.starts(0).items()}
        state = bbb.init(first, task.settings["adam_init_precision"])
        zeros = torch.zeros_like(task.loc)
        self.kept = {name: zeros.clone() for name in (*self._LOC, *self._RHO)}
        self.kept["loc"].copy_(task.loc)
        self.kept["rho"].copy_(state.rho.expand_as(zeros))

    def chance(self) -> list[Tensor]:
        """Noise of S draws, (S, K, P)."""
        shape = (self.draws, *self.kept["loc"].shape)
        return [torch.randn(shape, generator=self.generator, device=self.task.device)]

    def advance(self) -> None:
        """See `ByAdam`."""
        x, y, noise = self.given
        loc, rho = (bbb.Moving(*(self.kept[name] for name in names)) for names in (self._LOC, self._RHO))
        thetas = loc.value + bbb.stddev_of(rho.value, "softplus") * noise
        call = torch.func.vmap(torch.func.vmap(call_of(self.task.model, self.spec)), in_dims=(0, None))
        gradients = self.gradient(thetas, lambda at: self.misfit(call(at, x), y))
        self.count += 1
        rates: dict[str, Any] = {"weight": self.weight, "prior": self.prior, "lr": self.lr, "step": self.count}
        new = bbb.advanced(loc, rho, gradients, noise, **rates)
        self.put((*self._LOC, *self._RHO), (*new[0], *new[1]))

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`."""
        loc, sigma = self.kept["loc"], bbb.stddev_of(self.kept["rho"], "softplus")
        noise = torch.randn((count, *loc.shape), generator=self.generator, device=loc.device)
        return self.spec.unflatten((loc + sigma * noise).transpose(0, 1))

    def posterior(self) -> LowRankPrecisionNormal:
        """See `GaussianLearner`."""
        return bbb.posterior(bbb.State(**self.kept, step=self.taken, spec=self.spec, scale="softplus"))


class Dropped(ByAdam):
    """MC dropout, a mask for each example in training as in Gal's code.

    Args:
        task: what to learn.
        rate: p; 0 trains by maximum a posteriori.
    """

    _NAMES = ("loc", "momentum", "square")

    def __init__(self, task: Task, rate: float) -> None:
        super().__init__(task)
        first = {name: value[0] for name, value in task.starts(0).items()}
        state, zeros = mc_dropout.init(first, rate), torch.zeros_like(task.loc)
        rates = state.rates.expand(len(zeros), -1)
        self.state = replace(state, loc=zeros, momentum=zeros, square=zeros, rates=rates)
        self.decay = mc_dropout.decays(self.state, self.prior.precision, "gal")
        self.kept = {name: zeros.clone() for name in self._NAMES}
        self.kept["loc"].copy_(task.loc)

    @property
    def draws(self) -> int:
        """One mask for each example."""
        return 1

    def chance(self) -> list[Tensor]:
        """Masks of the inputs of every layer, (K, M, in)."""
        masks = mc_dropout.draw_masks(self.state, (self.task.batch,), self.generator)
        return [mask.transpose(0, 1).contiguous() for mask in masks.values()]

    def advance(self) -> None:
        """See `ByAdam`."""
        x, y, *masks = self.given
        weights = mc_dropout.Moving(*(self.kept[name] for name in self._NAMES))
        call = torch.func.vmap(_masked_call(self.task.model, self.spec))
        gradient = self.gradient(weights.value, lambda at: self.misfit(call(at, x, masks), y))
        self.count += 1
        new = mc_dropout.advanced(weights, gradient, weight=self.weight, decay=self.decay, lr=self.lr, step=self.count)
        self.put(self._NAMES, tuple(new))

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`."""
        state = replace(self.state, loc=self.kept["loc"])
        drawn = mc_dropout.sample(state, (count,), self.generator)
        return {name: value.transpose(0, 1) for name, value in drawn.items()}


class Ensemble:
    """Networks from several starts, each trained by maximum a posteriori, as equally likely draws.

    Args:
        task: what to learn.
        members: networks for each problem.
        make: a task → what trains a network by maximum a posteriori.
    """

    def __init__(self, task: Task, members: int, make: Callable[[Task], ByAdam] | None = None) -> None:
        self.members = members
        each = [task.starts(member) for member in range(members)]
        starts = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        many = {key: getattr(task, key).repeat(members) for key in ("num_data", "tau", "prior_precision")}
        inner = replace(task, starts=lambda _: starts, **many)
        self.inner = Dropped(inner, 0.0) if make is None else make(inner)
        self.arrays, self.restore = self.inner.arrays, self.inner.restore

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`."""
        self.inner.step(x.repeat(self.members, *(1 for _ in x.shape[1:])), y.repeat(self.members, 1))

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`; members over and over."""
        loc = self.inner.kept["loc"].unflatten(0, (self.members, -1)).transpose(0, 1)
        return self.inner.spec.unflatten(loc[:, torch.arange(count, device=loc.device) % self.members])


def call_of(model: nn.Module, spec: ParamSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """Flat weights (P,) and inputs → outputs of any network."""

    def call(theta: Tensor, x: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, spec.unflatten(theta), (x,))
        return outputs

    return call


def _masked_call(model: nn.Module, spec: ParamSpec) -> Callable[[Tensor, Tensor, list[Tensor]], Tensor]:
    """Layer by layer, inputs of linear ones multiplied by masks (M, in)."""

    def call(theta: Tensor, x: Tensor, masks: list[Tensor]) -> Tensor:
        params, rest = spec.unflatten(theta), list(masks)
        for name, layer in model.named_children():
            if isinstance(layer, nn.Linear):
                x = nn.functional.linear(x * rest.pop(0), params[f"{name}.weight"], params[f"{name}.bias"])
            else:
                x = layer(x)
        return x

    return call
