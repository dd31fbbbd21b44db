"""States as plain containers of tensors for a `state_dict`, and whether one fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from slangvi.params.spec import ParamSpec
from slangvi.params.state import FlatState, tensors_of

__all__ = ["check_packed", "layout_mismatch", "pack", "possible"]


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
    if name == "rates":
        return bool(((found >= 0) & (found < 1)).all())
    return not name.endswith("square") or bool((found >= 0).all())


def _words(state: Any) -> dict[str, str]:
    """Return the text fields of a state, such as the scale its numbers are on."""
    return {item.name: value for item in fields(state) if isinstance(value := getattr(state, item.name), str)}
