"""Hyper-parameters of param groups, read at every step: schedulers and users may have changed them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slangvi import checks
from slangvi.params import ParamSpec
from slangvi.params.values import per_parameter
from slangvi.priors import Prior
from slangvi.schedules import Rate, warmed_up

__all__ = ["JOINED", "GroupValues", "check_group"]

# Entry of a group: steps that had been taken when it was added.
JOINED = "joined_at_step"


class GroupValues:
    """Hyper-parameters of all groups, as numbers where all agree and flat vectors where they differ.

    Args:
        groups: torch's param_groups.
        spec: layout of all groups' parameters, in the groups' order.
        name_of: id of a parameter → its name.
        like: tensor whose dtype and device the vectors have.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], spec: ParamSpec, name_of: Mapping[int, str], like: Tensor
    ) -> None:
        self.groups = groups
        self.spec = spec
        self.name_of = name_of
        self.like = like
        self._prior_values: list[Any] = []
        self._prior: Prior | None = None

    def lr(self) -> Rate:
        """Return α. Schedulers may lower it to 0; above 1 it cannot also be β."""
        tied = any(_tied(group) for group in self.groups)
        hint = "precision_lr follows lr; give precision_lr if lr must exceed 1." if tied else ""
        high = 1.0 if tied else math.inf
        return self._spread([checks.number("lr", g["lr"], 0.0, high, "low high", hint) for g in self.groups])

    def precision_lr(self, step: int | None = None) -> Rate | None:
        """Return β, warmed up if the number of the step is given; None if every group ties it to lr and nothing is."""
        if step is None and all(_tied(group) for group in self.groups):
            return None
        values = [group["lr" if _tied(group) else "precision_lr"] for group in self.groups]
        rates = [checks.number("precision_lr", value, 0.0, 1.0, "low high") for value in values]
        if step is not None:
            rates = [warmed_up(rate, own) for rate, own in zip(rates, self._own_steps(step), strict=True)]
        return self._spread(rates)

    def momentum(self) -> float | Tensor:
        """Return γ."""
        values = [checks.number("momentum", group["momentum"], 0.0, 1.0, closed="low") for group in self.groups]
        return self._spread(values).value

    def adam(self) -> tuple[tuple[float | Tensor, float | Tensor], float | Tensor]:
        """Return β₁ and β₂, and ε of Adam."""
        betas = [checks.betas(group["betas"]) for group in self.groups]
        first, second = (self._spread([pair[k] for pair in betas]).value for k in (0, 1))
        return (first, second), self._spread([checks.number("eps", group["eps"], 0.0) for group in self.groups]).value

    def ages(self, step: int) -> Tensor | None:
        """Return which step of its own every entry is about to take, (P,); None where it makes no difference.

        Args:
            step: of the whole run, counted from 1.
        """
        own = self._own_steps(step)
        if min(own) == step:
            return None
        memory = max(max(group.get("betas", (group.get("momentum", 0.0),))) for group in self.groups)
        faded = memory ** min(own) < 0.1 * torch.finfo(self.like.dtype).eps
        return None if faded else self.spec.expand(self._per_tensor(own), self.like)

    def _own_steps(self, step: int) -> list[int]:
        """Return the number of the step, counted from when each group was added."""
        return [step - group.get(JOINED, 0) for group in self.groups]

    def _spread(self, values: list[float]) -> Rate:
        """Return a number of each group as one number, or as one for every parameter tensor where they differ."""
        return Rate(values[0]) if len(set(values)) == 1 else Rate.of(self._per_tensor(values), self.spec, self.like)

    def _per_tensor(self, values: Sequence[Any]) -> list[Any]:
        """Return a value of each group, once for every parameter tensor."""
        return [value for value, group in zip(values, self.groups, strict=True) for _ in group["params"]]

    def prior(self) -> Prior:
        """λ and μ₀, which is 0 where a method has none; made again when a group's entry was replaced or changed."""
        values = [group.get(key, 0.0) for group in self.groups for key in ("prior_precision", "prior_mean")]
        now = [_contents(value) for value in values]
        if self._prior is None or not _all_same(self._prior_values, now):
            self._prior = Prior(self.per_parameter("prior_precision"), self.per_parameter("prior_mean", positive=False))
            self._prior_values = now
        return self._prior

    def per_parameter(self, key: str, positive: bool = True) -> Tensor:
        """A number, dict or tensor per group, as one number per parameter entry, (P,)."""
        parts = []
        for inner, given in self.per_group(key):
            whole = isinstance(given, Tensor) and given.shape == (self.spec.num_params,)
            value = torch.cat([given[self.spec.slices[name]] for name in inner.names]) if whole else given
            parts.append(per_parameter(key, value, inner, self.like, positive, known=self.spec))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def per_group(self, key: str) -> Iterator[tuple[ParamSpec, Any]]:
        """The layout of each group, and what it says; 0 where it says nothing."""
        shapes = dict(zip(self.spec.names, self.spec.shapes, strict=True))
        for group in self.groups:
            names = tuple(self.name_of[id(p)] for p in group["params"])
            yield ParamSpec(names, tuple(shapes[name] for name in names)), group.get(key, 0.0)


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a new group's impossible values at once rather than at the first step."""
    for param in group["params"]:
        if not param.requires_grad:
            raise ValueError(
                "params holds a tensor with requires_grad=False. Leave frozen parameters out, or unfreeze it."
            )
    tied = _tied(group)
    hint = "precision_lr follows lr, so lr may not exceed 1; give precision_lr to separate them." if tied else ""
    checks.rate("lr", group["lr"], 1.0 if tied else math.inf, hint)
    if group.get("precision_lr") is not None:
        checks.rate("precision_lr", group["precision_lr"], 1.0)
    if "momentum" in group:
        checks.number("momentum", group["momentum"], 0.0, 1.0, closed="low")
    if "betas" in group:
        checks.betas(group["betas"])
        checks.number("eps", group["eps"], 0.0)


def _tied(group: Mapping[str, Any]) -> bool:
    """Tell whether a method has a rate for the precision, and this group takes lr for it."""
    return "precision_lr" in group and group["precision_lr"] is None


def _contents(value: Any) -> tuple[Any, ...]:
    """Return a prior in a form that later changes do not reach: numbers, and tensors with their versions."""
    if isinstance(value, Mapping):
        return tuple((name, *_contents(each)) for name, each in value.items())
    return (value, value._version) if isinstance(value, Tensor) and not value.is_inference() else (value,)


def _all_same(then: Sequence[tuple[Any, ...]], now: Sequence[tuple[Any, ...]]) -> bool:
    return len(then) == len(now) and all(_same(a, b) for a, b in zip(then, now, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _all_same(a, b)
    return a is b or (isinstance(a, float | int | str) and isinstance(b, float | int | str) and a == b)
