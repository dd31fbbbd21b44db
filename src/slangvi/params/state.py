"""States of all methods: their protocol, checks of their numbers, and their form in a `state_dict`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.params.spec import ParamSpec

__all__ = [
    "FlatState",
    "check_packed",
    "layout_mismatch",
    "learnt_in",
    "pack",
    "possible",
    "require_finite",
    "state_dtype",
    "tensors_of",
]


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

    The vectors are (..., P); leading dimensions of the first one are a batch, of which the first bad member is named.
    """
    # NaN and Inf survive a sum, which is one pass without temporaries; only a suspicious sum is looked into.
    if math.isfinite(sum(v.sum() for v in vectors)) or all(bool(torch.isfinite(v).all()) for v in vectors):
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


def pack(method: str, state: FlatState, generator: torch.Generator | None, num_data: int) -> dict[str, Any]:
    """Return a state as plain containers and tensors."""
    return {
        "method": method,
        "num_data": num_data,
        "names": list(state.spec.names),
        "shapes": [list(shape) for shape in state.spec.shapes],
        "step": state.step,
        "tensors": dict(tensors_of(state)),
        "words": _words(state),
        "generator": None if generator is None else generator.get_state(),
    }


def check_packed(packed: Mapping[str, Any] | None, method: str, state: FlatState) -> None:
    """Raise ValueError naming the first thing in which a packed state does not fit this one."""
    if packed is None:
        raise ValueError("state_dict has no 'slangvi' entry: it was not written by a slangvi optimizer.")
    missing = {"method", "num_data", "names", "shapes", "step", "tensors", "generator"} - packed.keys()
    if missing:
        raise ValueError(f"state_dict['slangvi'] has no {sorted(missing)[0]!r}: it is incomplete.")
    if packed["method"] != method:
        raise ValueError(f"state_dict is of method {packed['method']!r}, this optimizer is {method!r}.")
    unlike = layout_mismatch(packed["names"], packed["shapes"], state.spec)
    if unlike:
        raise ValueError(f"state_dict does not fit the model: {unlike}.")
    for name, word in _words(state).items():
        said = packed.get("words", {}).get(name)
        if said != word:
            raise ValueError(
                f"state_dict was made with {name}={said!r}, this optimizer has {name}={word!r}, under which its "
                f"numbers mean something else. Build the optimizer with {name}={said!r}."
            )
    theirs, ours = learnt_in(packed["tensors"].get("learnt")), learnt_in(getattr(state, "learnt", None))
    if theirs != ours:
        raise ValueError(
            f"state_dict is of a run that learns {theirs}, and this optimizer learns {ours}. Build it with the same "
            "noise_precision and prior_precision."
        )
    unknown = packed["tensors"].keys() - dict(tensors_of(state)).keys()
    if unknown:
        raise ValueError(f"state_dict has a tensor {min(unknown)!r} that this method does not know: it is damaged.")
    for name, value in tensors_of(state):
        found = packed["tensors"].get(name)
        if found is None or found.shape != value.shape or found.dtype != value.dtype:
            what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise ValueError(
                f"state_dict[{name!r}] must be {tuple(value.shape)} {value.dtype}, found {what}. "
                "Build the optimizer with the same rank and dtype."
            )
        if not bool(torch.isfinite(found).all()) or not possible(name, found):
            raise ValueError(f"state_dict[{name!r}] holds NaN, Inf or values out of its range: it is damaged.")


def learnt_in(numbers: Tensor | None) -> str:
    """Describe what a vector of learnt numbers holds; its second one is τ, 0 where noise is not learnt."""
    if numbers is None:
        return "neither noise nor prior"
    noise = "the noise precision" if numbers.ndim == 1 and float(numbers[1:2].sum()) else "no noise precision"
    return f"{noise} and {numbers.numel() - 2} prior precisions"


def layout_mismatch(names: Sequence[str], shapes: Sequence[Sequence[int]], spec: ParamSpec) -> str:
    """Describe the first parameter in which a saved layout differs from this one; empty if none does."""
    mine = list(zip(spec.names, map(list, spec.shapes), strict=True))
    theirs = list(zip(names, map(list, shapes), strict=True))
    for ours, other in zip(mine, theirs, strict=False):
        if ours != other:
            return f"expected parameter {ours[0]!r} of shape {ours[1]}, found {other[0]!r} of shape {other[1]}"
    if len(mine) != len(theirs):
        return f"it has {len(theirs)} parameters, and {len(mine)} are expected"
    return ""


def possible(name: str, found: Tensor) -> bool:
    """Tell whether a tensor has values that its name allows: positive precisions, squares and rates in range."""
    if name == "prec_matrix":
        return not bool(torch.linalg.cholesky_ex(found).info.any())
    if name == "prec_diag":
        return bool((found > 0).all())
    if name == "learnt":
        return bool((found[:2] >= 0).all()) and bool((found[2:] > 0).all())
    if name == "rates":
        return bool(((found >= 0) & (found < 1)).all())
    return not name.endswith("square") or bool((found >= 0).all())


def _words(state: Any) -> dict[str, str]:
    """Return the text fields of a state, such as the scale its numbers are on."""
    return {item.name: value for item in fields(state) if isinstance(value := getattr(state, item.name), str)}
