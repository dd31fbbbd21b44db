"""Settings of replicas: what may differ between them is one value for all, or a sequence of K values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slangvi import checks
from slangvi.divergence import REACTIONS
from slangvi.params import ParamSpec
from slangvi.params.values import per_parameter
from slangvi.schedules import Schedule
from slangvi.settings import CheckedFields

__all__ = ["Rates", "ReplicaSettings", "listed", "numbers", "per_replica", "pick"]


def pick(x: Tensor, index: Tensor) -> Tensor:
    """The entries of some replicas, given in order; all of them as they are."""
    return x if len(index) == len(x) else x[index.to(x.device)]


def listed(name: str, value: Any, count: int) -> list[Any] | None:
    """The K values of a sequence, or None for one value that all replicas share."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    if len(value) != count:
        raise ValueError(
            f"{name} must be one value, or a sequence with one for each of the {count} replicas, got {len(value)}."
        )
    return list(value)


def numbers(name: str, value: Any, count: int, check: Callable[[str, Any], float]) -> Tensor:
    """A number, or K of them in a sequence or a (K,) tensor, each checked: float64, (K,)."""
    many = listed(name, value.tolist() if isinstance(value, Tensor) and value.ndim == 1 else value, count)
    if many is None:
        return torch.full((count,), check(name, value), dtype=torch.float64)
    return torch.tensor([check(f"{name}[{k}]", one) for k, one in enumerate(many)], dtype=torch.float64)


def per_replica(name: str, value: Any, spec: ParamSpec, like: Tensor, positive: bool = True) -> Tensor:
    """What a single run takes, once for all replicas or in a sequence of K or a (K, P) tensor, as (K, P).

    Args:
        name: of the argument.
        value: number, dict of names or globs, (P,) tensor; or K of these.
        spec: layout.
        like: (K, P), whose dtype and device the result has.
        positive: whether numbers must be above zero.
    """
    many = listed(name, value.unbind(0) if isinstance(value, Tensor) and value.ndim == 2 else value, len(like))
    if many is None:
        return per_parameter(name, value, spec, like[0], positive).expand_as(like)
    rows = (per_parameter(f"{name}[{k}]", one, spec, like[0], positive) for k, one in enumerate(many))
    return torch.stack(list(rows))


class Rates:
    """A rate for each replica: a number or a function of the step, once for all or in a sequence of K.

    Args:
        name: of the argument.
        value: what was passed.
        count: K.
        high: largest rate allowed.
    """

    def __init__(self, name: str, value: Schedule | Sequence[Schedule] | Tensor, count: int, high: float) -> None:
        plain = value.tolist() if isinstance(value, Tensor) and value.ndim == 1 else value
        many = listed(name, plain, count)
        self.high = high
        self._names = [name] * count if many is None else [f"{name}[{k}]" for k in range(count)]
        self._schedules: list[Any] = [plain] * count if many is None else many
        for label, one in zip(self._names, self._schedules, strict=True):
            if not callable(one):
                self._checked(label, one)
        numbers = [one for one in self._schedules if not callable(one)]
        self._fixed = torch.tensor(numbers, dtype=torch.float64) if len(numbers) == count else None
        self._shared = many is None

    def at(self, steps: Tensor, index: Tensor) -> Tensor:
        """The rates of some replicas at their own steps, counted from 1: float64, (k,)."""
        if self._fixed is not None:
            return pick(self._fixed, index)
        times = steps.tolist()
        if self._shared and times.count(times[0]) == len(times):
            return torch.full(steps.shape, self._one(0, times[0]), dtype=torch.float64)
        found = [self._one(k, step) for k, step in zip(index.tolist(), times, strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    def _one(self, k: int, step: int) -> float:
        schedule = self._schedules[k]
        return self._checked(self._names[k], schedule(step) if callable(schedule) else schedule)

    def _checked(self, name: str, value: Any) -> float:
        # The check proper takes longer than a step of a small replica can afford.
        if type(value) is float and 0.0 < value <= self.high < math.inf:
            return value
        return checks.rate(name, value, self.high)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaSettings(CheckedFields):
    """Settings of `slangvi.replicas.build`.

    Args:
        num_replicas: K.
        num_data: N, examples in the training set.
        rank: L ≥ 0, columns of U.
        lr: α, a number or a function of the step counted from 1.
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor; K in a sequence, or (K, P).
        prior_mean: μ₀, likewise.
        precision_lr: β, at most 1; None follows `lr`.
        momentum: γ.
        mc_samples: S, draws of the weights per step.
        init_precision: d at the start; given like `prior_precision`.
        temperature: the likelihood is weighed by 1/temperature.
        precision_warmup: let the first steps average the curvature they see, βₜ = max(β, 1/(t+1)); for all replicas.
        constants: any nesting of tensors (K, ...), of which each likelihood sees its own entry: a noise precision, say.
            Or a function that makes it from the steps the replicas are about to take, counted from 1, (K,) on the CPU:
            a noise that falls while a network learns.
        memory_limit: bytes that rows may take; replicas beyond it wait for their turn, at least one is advanced at a
            time.
        on_failure: a replica that meets NaN or Inf is left where it was, told in `info`, and the others go on
            ("freeze"); or the step raises `NumericalError` ("raise").
        on_divergence: what to do when the mean of a replica keeps going to and fro by more than a posterior standard
            deviation in a step, as with rates that are far too large: "warn", "raise" or "ignore".
        method: "slang", or "online_eig" for SLANG-OnlineEig, whose replicas are what `online_eig.build` makes of them.
    """

    num_replicas: int
    num_data: int | Sequence[int]
    rank: int
    lr: Schedule | Sequence[Schedule]
    prior_precision: Any = 1.0
    prior_mean: Any = 0.0
    precision_lr: Schedule | Sequence[Schedule] | None = None
    momentum: float | Sequence[float] = 0.9
    mc_samples: int = 1
    init_precision: Any = 1.0
    temperature: float | Sequence[float] = 1.0
    precision_warmup: bool = True
    constants: Any = None
    memory_limit: int | None = None
    on_failure: str = "freeze"
    on_divergence: str = "warn"
    method: Literal["slang", "online_eig"] = "slang"

    def __post_init__(self) -> None:
        self._check("num_replicas", checks.count)
        self._check("rank", checks.rank)
        self._check("mc_samples", checks.count)
        self._check("precision_warmup", checks.flag)
        self._check("on_failure", checks.choice, ("freeze", "raise"))
        self._check("on_divergence", checks.choice, REACTIONS)
        self._check("method", checks.choice, ("slang", "online_eig"))
        if self.memory_limit is not None:
            self._check("memory_limit", checks.count, hint="It is a number of bytes.")
