"""Hyper-parameters of param groups, read at every step: schedulers and users may have changed them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi import checks
from slangvi.params import ParamSpec
from slangvi.params.values import learnt_members, per_parameter, with_numbers
from slangvi.priors import Prior, check_plain, prior_from
from slangvi.schedules import Rate, warmed_up

__all__ = ["JOINED", "GroupRates", "GroupValues", "check_group"]

# Entry of a group: steps that had been taken when it was added.
JOINED = "joined_at_step"
# Largest α, and a hint, where the group has a rate of its own for the precision.
_FREE = math.inf, ""


class GroupRates(NamedTuple):
    """Rates of one step: numbers where all groups agree.

    Args:
        lr: α.
        precision_lr: β.
        momentum: γ; a (P,) tensor where groups differ.
        ages: t of each entry where some joined later, (P,); None where it makes no difference.
    """

    lr: Rate
    precision_lr: Rate
    momentum: float | Tensor
    ages: Tensor | None


class GroupValues:
    """Hyper-parameters of all groups, as numbers where all agree and flat vectors where they differ.

    Args:
        groups: torch's param_groups.
        spec: layout of all groups' parameters, in the groups' order.
        name_of: id of a parameter → its name.
        like: tensor whose dtype and device the vectors have.
        posterior: prior of all parameters together; None where groups say it.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        spec: ParamSpec,
        name_of: Mapping[int, str],
        like: Tensor,
        posterior: Any = None,
    ) -> None:
        self.groups = groups
        self.spec = spec
        self.name_of = name_of
        self.like = like
        self.posterior = posterior
        self.begun: tuple[int, list[int]] | None = None  # what `learnt` told when the run began
        self._prior: tuple[Any, list[Any], Prior] | None = None  # what it was made from, which is held, and λ and μ₀

    def rates(self, step: int, warms_up: bool = False) -> GroupRates:
        """Return the rates of a step, counted from 1.

        Schedulers may lower α to 0; above 1 it cannot also be β.

        Args:
            step: number of the step, of the whole run.
            warms_up: whether β is warmed up, from when each group was added.
        """
        alphas, betas, gammas = [], [], []
        for group in self.groups:
            is_tied = _tied(group)
            high, hint = (1.0, "precision_lr follows lr; give precision_lr if lr must exceed 1.") if is_tied else _FREE
            alpha = checks.number("lr", group["lr"], 0.0, high, "low high", hint)
            beta = alpha if is_tied else checks.number("precision_lr", group["precision_lr"], 0.0, 1.0, "low high")
            alphas.append(alpha)
            betas.append(warmed_up(beta, step - group.get(JOINED, 0)) if warms_up else beta)
            gammas.append(checks.number("momentum", group["momentum"], 0.0, 1.0, closed="low"))
        lr, momentum = self._spread(alphas), self._spread(gammas).value
        return GroupRates(lr, lr if betas == alphas else self._spread(betas), momentum, self.ages(step))

    def lr(self) -> Rate:
        """Return α of methods that have no rate for the precision."""
        return self._spread([checks.number("lr", group["lr"], 0.0, closed="low") for group in self.groups])

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
        own = [step - group.get(JOINED, 0) for group in self.groups]
        if min(own) == step:
            return None
        memory = max(max(group.get("betas", (group.get("momentum", 0.0),))) for group in self.groups)
        faded = memory ** min(own) < 0.1 * torch.finfo(self.like.dtype).eps
        return None if faded else self.spec.expand(self._per_tensor(own), self.like)

    def _spread(self, values: list[float]) -> Rate:
        """Return a number of each group as one number, or as one for every parameter tensor where they differ."""
        if values.count(values[0]) == len(values):
            return Rate(values[0])
        return Rate.of(self._per_tensor(values), self.spec, self.like)

    def _per_tensor(self, values: Sequence[Any]) -> list[Any]:
        """Return a value of each group, once for every parameter tensor."""
        return [value for value, group in zip(values, self.groups, strict=True) for _ in group["params"]]

    def learnt(self) -> tuple[int, list[int]]:
        """Return how many prior precisions are learnt, and which of them each parameter tensor has; -1 for none."""
        total, members = 0, list[int]()
        for inner, given in self.per_group("prior_precision"):
            count, places = learnt_members("prior_precision", given, inner, self.spec)
            members += [place if place < 0 else total + place for place in places]
            total += count
        return total, members

    def prior(self, learnt: Sequence[float] | None = None) -> Prior:
        """λ and μ₀, which is 0 where a method has none; made again when a group's entry was replaced or changed.

        Args:
            learnt: those prior precisions that are; None where a method learns none.
        """
        if self.posterior is not None:
            for group in self.groups:
                check_plain(group)
            if self._prior is None:
                self._prior = None, [], prior_from(self.posterior, self.spec, self.like)
            return self._prior[2]
        given = [group.get(key, 0.0) for group in self.groups for key in ("prior_precision", "prior_mean")]
        now = _snapshot([*given, *(learnt or [])])
        if self._prior is None or self._prior[0] != now:
            if learnt is not None and self.begun is not None and self.learnt() != self.begun:
                raise ValueError(
                    f"param groups learn {self.learnt()[0]} prior precisions of other parameters than the "
                    f"{len(learnt)} that the run began with. Set prior_precision back, or build the optimizer anew."
                )
            lam = self.per_parameter("prior_precision", learnt=learnt)
            self._prior = now, given, Prior(lam, self.per_parameter("prior_mean", positive=False))
        return self._prior[2]

    def per_parameter(self, key: str, positive: bool = True, learnt: Iterable[float] | None = None) -> Tensor:
        """A number, dict or tensor per group, as one number per parameter entry, (P,); learnt ones in their order."""
        parts, numbers = [], None if learnt is None else iter(learnt)
        for inner, given in self.per_group(key):
            if numbers is not None:
                count, _ = learnt_members(key, given, inner, self.spec)
                own = list(islice(numbers, count))
                given = with_numbers(key, given, inner, self.spec, own) if count else given  # noqa: PLW2901
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
    if "prior" in group:
        raise ValueError("prior is one posterior of all parameters, and a group has its own. Pass it to the optimizer.")
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


def _snapshot(value: Any) -> Any:
    """Return a prior in a form that later changes do not reach: numbers, and tensors by identity and version."""
    if isinstance(value, list):
        return [_snapshot(each) for each in value]
    if isinstance(value, Mapping):
        return [(name, _snapshot(each)) for name, each in value.items()]
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    return value
