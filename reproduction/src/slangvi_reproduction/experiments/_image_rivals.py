"""Rivals of SLANG for any network on images: MAP and dropout by Adam, IVON, and Laplace on the last layer."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slangvi import mc_dropout
from slangvi_reproduction.experiments._adam_learners import ByAdam, call_of
from slangvi_reproduction.experiments._cells import Arrays
from slangvi_reproduction.experiments._task import Task

__all__ = ["Ivon", "LastLayer", "Masked", "last_layer_precision"]


class Masked(ByAdam):
    """MC dropout for any network, with a mask for each draw that the whole minibatch shares.

    Args:
        task: what to learn.
        rate: p, of all weights but those of the first layer, which would drop the image itself; 0 trains by maximum a
            posteriori, from one draw.
    """

    _NAMES = ("loc", "momentum", "square")

    def __init__(self, task: Task, rate: float) -> None:
        self.dropped = rate
        super().__init__(task)
        first = {name: value[0] for name, value in task.starts(0).items()}
        matrices = [name for name, value in first.items() if value.ndim > 1]
        state = mc_dropout.init(first, {name: rate if k else 0.0 for k, name in enumerate(matrices)})
        zeros = torch.zeros_like(task.loc)
        self.state = replace(state, loc=zeros, momentum=zeros, square=zeros, rates=state.rates.expand(len(zeros), -1))
        self.decay = mc_dropout.decays(self.state, self.prior.precision, "gal")
        self.kept = {name: zeros.clone() for name in self._NAMES}
        self.kept["loc"].copy_(task.loc)

    @property
    def draws(self) -> int:
        """S; one where all are the same."""
        return super().draws if self.dropped else 1

    def chance(self) -> list[Tensor]:
        """What the weights are multiplied by, (S, K, P)."""
        if not self.dropped:
            return []
        return [mc_dropout.multipliers(mc_dropout.draw_masks(self.state, (self.draws,), self.generator), self.spec)]

    def advance(self) -> None:
        """See `ByAdam`."""
        x, y, *factors = self.given
        weights = mc_dropout.Moving(*(self.kept[name] for name in self._NAMES))
        factor = factors[0] if factors else torch.ones_like(weights.value).unsqueeze(0)
        call = torch.func.vmap(torch.func.vmap(call_of(self.task.model, self.spec)), in_dims=(0, None))
        gradient = self.gradient(weights.value, lambda at: self.misfit(call(at * factor, x), y))
        self.count += 1
        new = mc_dropout.advanced(weights, gradient, weight=self.weight, decay=self.decay, lr=self.lr, step=self.count)
        self.put(self._NAMES, tuple(new))

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`."""
        drawn = mc_dropout.sample(replace(self.state, loc=self.kept["loc"]), (count,), self.generator)
        return {name: value.transpose(0, 1) for name, value in drawn.items()}


class Ivon:
    """IVON by its own package, `ivon-opt`.

    Args:
        task: what to learn, K = 1.
    """

    def __init__(self, task: Task) -> None:
        try:
            package = import_module("ivon")
        except ImportError as error:
            raise ImportError("IVON is a package of its own: pip install 'slangvi[rivals]'") from error
        self.task, self.generator, self.rate = task, task.generator, task.rate("ivon_lr")
        self.model, self.spec = task.model, task.spec
        self.loc = nn.ParameterList(value[0].clone() for value in task.starts(0).values())
        size = float(task.num_data[0])
        self.opt = package.IVON(
            self.loc.parameters(),
            lr=1.0,
            ess=size,
            weight_decay=float(task.prior_precision[0]) / size,
            **task.settings["ivon"],
        )

    @property
    def group(self) -> dict[str, Any]:
        """Where IVON keeps what it learns."""
        found: dict[str, Any] = self.opt.param_groups[0]
        return found

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Learner`; IVON draws from torch's own source, which is lent a seed of ours."""
        self.group["lr"] = self.rate(self.opt.current_step + 1) if callable(self.rate) else self.rate
        device = self.task.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(torch.randint(2**31, (), generator=self.generator, device=device)))
            for _ in range(self.task.settings["mc_samples"]):
                with self.opt.sampled_params(train=True):
                    self.opt.zero_grad()
                    self._loss(x[0], y[0]).backward()
            self.opt.step()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        params = dict(zip(self.spec.names, self.loc.parameters(), strict=True))
        return -self.task.log_likelihood(params, (x, y), self.task.tau).mean()

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`; by the density that IVON says it has, with our source."""
        group = self.group
        loc = torch.cat([value.detach().flatten() for value in self.loc.parameters()])
        scale = (group["ess"] * (group["hess"] + group["weight_decay"])).rsqrt()
        noise = torch.randn(count, len(loc), generator=self.generator, device=loc.device)
        return self.spec.unflatten((loc + scale * noise).unsqueeze(0))

    def arrays(self) -> Arrays:
        """See `Learner`."""
        loc = torch.cat([value.detach().flatten() for value in self.loc.parameters()])
        values = {"loc": loc, "momentum": self.group["momentum"], "hess": self.group["hess"]}
        return {name: value.cpu().numpy() for name, value in values.items()} | {"step": np.array(self.opt.current_step)}

    def restore(self, arrays: Arrays) -> None:
        """See `Learner`."""
        device = self.task.device
        loc = self.spec.unflatten(torch.from_numpy(arrays["loc"]).to(device))
        for mine, value in zip(self.loc.parameters(), loc.values(), strict=True):
            mine.data.copy_(value)
        for name in ("momentum", "hess"):
            self.group[name] = torch.from_numpy(arrays[name]).to(device)
        self.opt.current_step = int(arrays["step"])


class LastLayer:
    """Laplace's approximation for the last layer of a network trained by maximum a posteriori.

    Args:
        task: what to learn, K = 1; the model is a sequence that ends in a linear layer.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.generator, self.inner = task, task.generator, Masked(task, 0.0)
        self.step, self.arrays, self.restore = self.inner.step, self.inner.arrays, self.inner.restore
        self.factor: Tensor | None = None

    def settle(self, x: Tensor) -> None:
        """See what the training images (n, ...) say about the last layer; to be called when training is over."""
        self.factor = torch.linalg.cholesky(last_layer_precision(self.task, self.inner.kept["loc"][0], x))

    def draw(self, count: int) -> dict[str, Tensor]:
        """See `Learner`; before it is settled, the network itself."""
        drawn = self.inner.draw(count)
        if self.factor is None:
            return drawn
        weight, bias = self.task.spec.names[-2:]
        noise = torch.randn(
            len(self.factor), count, generator=self.generator, device=self.factor.device, dtype=self.factor.dtype
        )
        moves = torch.linalg.solve_triangular(self.factor.mT, noise, upper=True).mT.to(drawn[weight].dtype)
        moves = moves.unflatten(1, (drawn[bias].shape[-1], -1)).unsqueeze(0)
        return drawn | {weight: drawn[weight] + moves[..., :-1], bias: drawn[bias] + moves[..., -1]}


@torch.no_grad()
def last_layer_precision(task: Task, loc: Tensor, x: Tensor, rows: int = 2_000) -> Tensor:
    r"""Hessian of the negative log posterior by the last layer's weights and biases, class by class.

    $$ \sum_n (\mathrm{diag}\,p_n - p_n p_n^\top) \otimes \tilde\phi_n \tilde\phi_n^\top + \mathrm{diag}\,\lambda $$

    Args:
        task: network and prior.
        loc: all weights, flat, (P,).
        x: training inputs, (n, ...).
        rows: looked at together.

    Returns:
        (C·(D+1), C·(D+1)) float64; within a class the D weights come first, then the bias.
    """
    model, spec = task.model, task.spec
    assert isinstance(model, nn.Sequential)
    names = spec.names[-2:]
    params, lam = spec.unflatten(loc), spec.unflatten(task.prior.precision[0])
    body = {name: value for name, value in params.items() if name not in names}
    classes, width = params[names[0]].shape
    total = torch.zeros(classes, width + 1, classes, width + 1, dtype=torch.float64, device=x.device)
    for part in x.split(rows):
        features: Tensor = torch.func.functional_call(model[:-1], body, (part,))
        probs = nn.functional.linear(features, params[names[0]], params[names[1]]).softmax(-1).double()
        inputs = nn.functional.pad(features.double(), (0, 1), value=1.0)
        for a in range(classes):
            for b in range(classes):
                share = probs[:, a] * (float(a == b) - probs[:, b])
                total[a, :, b] += (inputs * share.unsqueeze(1)).mT @ inputs
    prior = torch.cat([lam[names[0]], lam[names[1]].unsqueeze(1)], 1).double()
    return total.flatten(0, 1).flatten(1) + torch.diag(prior.flatten())
