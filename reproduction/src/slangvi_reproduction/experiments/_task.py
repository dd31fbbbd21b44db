"""What many small networks are to learn, in lockstep: data sizes, noise, prior, rates, likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.schedules import Cosine, InverseTime, by_equal_factors, slow_precision

__all__ = ["BIAS_PRECISION", "FALLS", "Cosine", "LogProb", "Task", "bernoulli", "categorical", "gaussian"]

# Prior precision of biases, as in the paper.
BIAS_PRECISION = 1e-6
# Rates that fall unless a method's settings say which do.
FALLS = ("lr", "precision_lr", "adam_lr", "ivon_lr")
# Outputs, targets and noise precision, of shapes that broadcast → log-likelihood of each.
LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]


def gaussian(outputs: Tensor, y: Tensor, tau: Tensor) -> Tensor:
    """Real targets around the outputs, with variance 1/τ."""
    return 0.5 * (tau.log() - math.log(2 * math.pi) - tau * (y - outputs).square())


def bernoulli(outputs: Tensor, y: Tensor, tau: Tensor) -> Tensor:
    """Classes 0 and 1 from logits, which have no noise beside them: τ is not looked at."""
    return -F.softplus((1.0 - 2.0 * y) * outputs)


def categorical(outputs: Tensor, y: Tensor, tau: Tensor) -> Tensor:
    """Classes from logits (..., C), for labels of the shape in front; τ is not looked at.

    Example:
        >>> categorical(torch.tensor([[0.0, 0.0], [0.0, 3.0]]), torch.tensor([1, 1]), torch.ones(1))
        tensor([-0.6931, -0.0486])
    """
    labels = y.expand(outputs.shape[:-1]).unsqueeze(-1)
    return outputs.log_softmax(-1).gather(-1, labels).squeeze(-1)


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
        log_prob: how outputs explain targets; with `bernoulli` and `categorical`, `tau` is ones.
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
    def temperature(self) -> float:
        """T of a cold posterior, p(θ | data)^(1/T): the likelihood is weighed by 1/T, and so is the prior."""
        return float(self.settings.get("temperature", 1.0))

    @property
    def prior(self) -> Prior:
        """λ/T for weights, next to nothing for biases and scales unless the settings say otherwise, (K, P)."""
        spec, own = self.spec, self.settings.get("bias_precision", BIAS_PRECISION)
        bias = torch.cat([torch.full((shape.numel(),), len(shape) < 2) for shape in spec.shapes])
        bias = bias.to(self.device)
        lam = torch.where(bias, own, self.prior_precision.unsqueeze(1)) / self.temperature
        return Prior(lam, torch.zeros_like(lam))

    def log_likelihood(self, params: Any, batch: Any, tau: Tensor) -> Tensor:
        """Of the examples of one network, (M,)."""
        x, y = batch
        outputs: Tensor = torch.func.functional_call(self.model, dict(params), (x,))
        return self.log_prob(outputs, y, tau)

    def noise(self, steps: Tensor) -> Tensor:
        """Noise precision at steps (K,) counted from 1, (K,): at first `noise_start` at most, in the end τ.

        It rises over a share f, `noise_fall`, of all T steps: τₜ = τ₀ (τ/τ₀)^(t/(fT)). The empirical Fisher of an
        example is r²τ² JJᵀ for a residual r, where the curvature is τ JJᵀ: as long as residuals are ten times the
        noise, precisions are a hundred times too large, and the mean crawls.
        """
        least = self.settings.get("noise_start")
        if least is None or int(steps.min()) >= self.settings["noise_fall"] * self.steps:
            return self.tau
        first = self.tau.clamp(max=float(least))
        share = (steps / (self.settings["noise_fall"] * self.steps)).clamp(max=1.0).to(self.tau)
        return by_equal_factors(first, self.tau, share)

    @property
    def init_precision(self) -> float | list[float]:
        """The diagonal at the start, over T; "curvature" is Nτ, what all examples say of an output, for each one."""
        own = self.settings["init_precision"]
        if own == "curvature":
            return (self.num_data * self.tau.cpu() / self.temperature).tolist()
        return float(own) / self.temperature

    @property
    def _share(self) -> float:
        """What α and β are multiplied by, so that α, falling to nothing, adds up to `total` at most."""
        total = self.settings.get("total")
        return 1.0 if total is None else min(1.0, 2.0 * float(total) / (float(self.settings["lr"]) * self.steps))

    def rate(self, name: str) -> Cosine | InverseTime | float:
        """A rate of the method's: constant, falling over all steps, or by the paper's schedule where `decay` is set.

        "slow" is the β of `slow_precision`.
        """
        own, decay = self.settings[name], self.settings.get("decay")
        lr = float(slow_precision(1, self.steps)["precision_lr"] if own == "slow" else own)
        if name in ("lr", "precision_lr") and own != "slow":
            lr *= self._share
        if name not in self.settings.get("falls", FALLS):
            return lr
        return Cosine(lr, self.steps) if decay is None else InverseTime(lr, float(decay))
