"""Methods that train K small networks in lockstep, one row each, behind one interface.

On a GPU a step is replayed from a CUDA graph: thousands of steps of networks this small are otherwise spent launching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi import bbb, mc_dropout, replicas
from slangvi._steps import Prior
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.experiments._cells import Arrays
from slangvi.methods._graph_capture import aside, capture_graph
from slangvi.types import ParamSpec

__all__ = ["GAUSSIANS", "LEARNERS", "Cosine", "GaussianLearner", "Learner", "Task", "bernoulli", "gaussian"]

# Prior precision of biases, as in the paper.
BIAS_PRECISION = 1e-6
# Rates that fall unless a method's settings say which do.
FALLS = ("lr", "precision_lr", "adam_lr")
# Outputs, targets and noise precision, of shapes that broadcast → log-likelihood of each.
LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]


def gaussian(outputs: Tensor, y: Tensor, tau: Tensor) -> Tensor:
    """Real targets around the outputs, with variance 1/τ."""
    return 0.5 * (tau.log() - math.log(2 * math.pi) - tau * (y - outputs).square())


def bernoulli(outputs: Tensor, y: Tensor, tau: Tensor) -> Tensor:
    """Classes 0 and 1 from logits, which have no noise beside them: τ is not looked at."""
    return -F.softplus((1.0 - 2.0 * y) * outputs)


class Cosine:
    """A rate that falls from `lr` to nearly nothing over so many steps, αₜ = α₀ (1 + cos(πt/T))/2.

    Example:
        >>> rate = Cosine(0.2, 100)
        >>> rate(1), rate(50), rate(100)
        (0.199..., 0.1, 0.0002)
    """

    def __init__(self, lr: float, steps: int) -> None:
        self.lr, self.steps = lr, steps

    def __call__(self, step: int) -> float:
        """Rate at a step counted from 1."""
        return self.lr * max(0.5 * (1.0 + math.cos(math.pi * min(step, self.steps) / self.steps)), 1e-3)


@dataclass(frozen=True)
class Task:
    """What K networks are to learn.

    Args:
        model: the network, on the device.
        starts: (member of an ensemble, from 0) → initial weights, name → (K, ...) on the device.
        num_data: N of each, (K,).
        tau: noise precision on the standardised scale, (K,).
        prior_precision: λ of the weights, (K,).
        batch: M.
        steps: in all.
        settings: rates and the like, of the method.
        generator: source of all that is random, on the device.
        log_prob: how outputs explain targets; with `bernoulli`, `tau` is ones.
    """

    model: nn.Module
    starts: Callable[[int], dict[str, Tensor]]
    num_data: Tensor
    tau: Tensor
    prior_precision: Tensor
    batch: int
    steps: int
    settings: Mapping[str, Any]
    generator: torch.Generator
    log_prob: LogProb = gaussian

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.tau.device

    @property
    def spec(self) -> ParamSpec:
        """Layout of one network."""
        return ParamSpec.of_module(self.model)

    @property
    def loc(self) -> Tensor:
        """Initial weights, flat, (K, P)."""
        return self.spec.flatten(self.starts(0))

    @property
    def prior(self) -> Prior:
        """λ for weights, next to nothing for biases unless the settings say otherwise, (K, P)."""
        spec, own = self.spec, self.settings.get("bias_precision", BIAS_PRECISION)
        bias = torch.cat([torch.full((s.stop - s.start,), name.endswith("bias")) for name, s in spec.slices.items()])
        bias = bias.to(self.device)
        lam = torch.where(bias, own, self.prior_precision.unsqueeze(1))
        return Prior(lam, torch.zeros_like(lam))

    def log_likelihood(self, params: Any, batch: Any, tau: Tensor) -> Tensor:
        """Of the examples of one network, (M,)."""
        x, y = batch
        outputs: Tensor = torch.func.functional_call(self.model, dict(params), (x,))
        return self.log_prob(outputs, y, tau)

    def rate(self, name: str) -> Cosine | float:
        """A rate of the method's: constant, or falling over all steps."""
        lr = float(self.settings[name])
        return Cosine(lr, self.steps) if name in self.settings.get("falls", FALLS) else lr


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
    """SLANG.

    Args:
        task: what to learn.
        rank: L.
    """

    def __init__(self, task: Task, rank: int) -> None:
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
            init_precision=settings["init_precision"],
            constants=task.tau,
            model=task.model,
            compile=task.device.type == "cuda",
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


class _ByAdam:
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
        """The first step eagerly, beside the graph, as CUDA asks for."""
        if self.taken == 1:
            with aside(self.task.device):
                self.advance()
            return
        if self.graph is None:
            self.graph = capture_graph(self.advance, torch.cuda.graph_pool_handle(), self.task.device)
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


class Reparameterised(_ByAdam):
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
        """See `_ByAdam`."""
        x, y, noise = self.given
        loc, rho = (bbb.Moving(*(self.kept[name] for name in names)) for names in (self._LOC, self._RHO))
        thetas = loc.value + bbb.stddev_of(rho.value, "softplus") * noise
        call = torch.func.vmap(torch.func.vmap(_call(self.task.model, self.spec)), in_dims=(0, None))
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


class Dropped(_ByAdam):
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
        """See `_ByAdam`."""
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
    """

    def __init__(self, task: Task, members: int) -> None:
        self.members = members
        each = [task.starts(member) for member in range(members)]
        starts = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        many = {key: getattr(task, key).repeat(members) for key in ("num_data", "tau", "prior_precision")}
        self.inner = Dropped(replace(task, starts=lambda _: starts, **many), 0.0)
        self.arrays, self.restore = self.inner.arrays, self.inner.restore

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`."""
        self.inner.step(x.repeat(self.members, 1, 1), y.repeat(self.members, 1))

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`; members over and over."""
        loc = self.inner.kept["loc"].unflatten(0, (self.members, -1)).transpose(0, 1)
        return self.inner.spec.unflatten(loc[:, torch.arange(count, device=loc.device) % self.members])


def _call(model: nn.Module, spec: ParamSpec) -> Callable[[Tensor, Tensor], Tensor]:
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


GAUSSIANS: dict[str, Callable[[Task], GaussianLearner]] = {
    **{f"slang_{rank}": partial(LowRank, rank=rank) for rank in (1, 8, 16, 32)},
    "bbb": Reparameterised,
}
LEARNERS: dict[str, Callable[[Task], Learner]] = {
    **{name: GAUSSIANS[name] for name in ("slang_1", "slang_8", "slang_32", "bbb")},
    "mc_dropout": lambda task: Dropped(task, task.settings["dropout_rate"]),
    "ensemble_5": lambda task: Ensemble(task, 5),
}
