"""Protocol of all methods' states, and the check that names a parameter that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.params.spec import ParamSpec

__all__ = ["FlatState", "require_finite", "state_dtype", "tensors_of"]


class FlatState(Protocol):
    """A dataclass of flat (..., P) tensors, with the step count and the layout."""

    @property
    def loc(self) -> Tensor:
        """The mean, (P,)."""

    @property
    def step(self) -> int:
        """Steps taken."""

    @property
    def spec(self) -> ParamSpec:
        """Layout."""


def tensors_of(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor fields of a state with their names."""
    for item in fields(state):
        value = getattr(state, item.name)
        if isinstance(value, Tensor):
            yield item.name, value


def state_dtype(params: list[Tensor]) -> torch.dtype:
    """Return float64 if any parameter has it, else float32, whatever the model computes in."""
    return torch.float64 if any(p.dtype is torch.float64 for p in params) else torch.float32


def require_finite(what: str, step: int, spec: ParamSpec, remedy: str, *vectors: Tensor) -> None:
    """Raise `NumericalError` naming the first parameter in which a tensor is not finite.

    Args:
        what: is looked at.
        step: number of the step, for the message.
        spec: layout.
        remedy: what to do about it.
        vectors: (..., P); leading dimensions of the first one are a batch, of which the first bad member is named.
    """
    # NaN and Inf survive a sum, which is one pass without temporaries; only a suspicious sum is looked into.
    total = vectors[0].sum()
    for other in vectors[1:]:
        total = total + other.sum()
    if math.isfinite(total):
        return
    if all(bool(torch.isfinite(v).all()) for v in vectors):
        return
    batch = vectors[0].shape[:-1]
    bad = torch.stack([~torch.isfinite(v).reshape(*batch, -1, v.shape[-1]).all(-2) for v in vectors]).any(0)
    member = tuple(bad.nonzero()[0, :-1].tolist())
    first = bad[member]
    name, count = next((n, int(first[s].sum())) for n, s in spec.slices.items() if bool(first[s].any()))
    where = f" in member {', '.join(map(str, member))} of the batch" if batch else ""
    raise NumericalError(
        f"step {step}: {what} of parameter {name!r} is not finite ({count} of {first[spec.slices[name]].numel()} "
        f"entries){where}. The state is unchanged. {remedy}"
    )
