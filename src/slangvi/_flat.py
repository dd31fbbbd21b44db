"""Between a model's parameters and the flat vectors of a state: writing, noticing changes, packing, checking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slangvi.types import ParamSpec

__all__ = [
    "FlatState",
    "Mirror",
    "check_packed",
    "layout_mismatch",
    "pack",
    "possible",
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


class Mirror:
    """A model's parameters seen as one flat vector.

    Args:
        named: canonical name → parameter.
        spec: layout.
    """

    def __init__(self, named: Mapping[str, Tensor], spec: ParamSpec) -> None:
        self.named = dict(named)
        places: dict[int, str] = {}
        for name, param in self.named.items():
            twin = places.setdefault(param.data_ptr(), name) if param.numel() else name
            if twin != name:
                raise ValueError(
                    f"parameters {twin!r} and {name!r} share their memory without being one parameter. "
                    "Tie the parameters themselves (b.weight = a.weight), or give each its own values."
                )
        self.spec = spec
        self._params = list(self.named.values())
        self._seen = self._marks()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.named.values())).device

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in flat order."""
        return self._params

    def mark(self) -> None:
        """Note that what the parameters hold now is known."""
        self._seen = self._marks()

    def changed(self, loc: Tensor, contents: bool = True) -> bool:
        """Whether somebody else wrote to a parameter, replaced its data or moved it since `loc` was written.

        Args:
            loc: what was written, (P,).
            contents: also compare the numbers, on a GPU; on a CPU that is always done.
        """
        if self._seen != self._marks():
            return True
        if not contents and loc.device.type != "cpu":
            return False
        # Writes through p.data leave no mark. One comparison for all spares a GPU many waits, and costs a CPU a copy.
        if loc.device.type != "cpu" and all(param.dtype is loc.dtype for param in self._params):
            return not torch.equal(torch.cat([param.detach().reshape(-1) for param in self._params]), loc)
        return any(not torch.equal(part, param) for param, part in self._pairs(loc))

    def check(self, model: nn.Module) -> None:
        """Refuse to go on with parameters that were frozen, or that are no longer the model's."""
        for name, param in self.named.items():
            if self._owned(model, name) is not param:
                raise ValueError(f"parameter {name!r} was replaced in the model. Build the optimizer anew.")
            if not param.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen after the optimizer was built. Unfreeze it, or build the optimizer "
                    "anew without it."
                )

    def _owned(self, model: nn.Module, name: str) -> Tensor | None:
        """What the model has under a name, without walking through all of it."""
        *path, local = name.split(".")
        module: nn.Module | None = model
        for part in path:
            module = None if module is None else module._modules.get(part)
        return None if module is None else module._parameters.get(local)

    def write(self, flat: Tensor) -> None:
        """Put a flat vector into the parameters."""
        pieces = flat.split(self.spec.numels)
        views = [piece.view(param.shape) for piece, param in zip(pieces, self._params, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self._params, views)
        self._seen = self._marks()

    def read(self, loc: Tensor) -> Tensor:
        """The mean with parameters that were changed from outside taken over; `loc` is not modified."""
        new = loc.clone()
        # A half-precision copy of the mean is not news: the digits of the float32 one are kept.
        for (name, param), (_, part) in zip(self.named.items(), self._pairs(loc), strict=True):
            if not torch.equal(part, param):
                new[self.spec.slices[name]] = param.detach().flatten().to(new.dtype)
        self._seen = self._marks()
        return new

    def _pairs(self, loc: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter beside what the mean says it is, in the parameter's dtype."""
        for name, param in self.named.items():
            yield param.detach(), loc[self.spec.slices[name]].view(param.shape).to(param.dtype)

    def _marks(self) -> list[tuple[int, int]]:
        """The place and version of every parameter's data."""
        return [(param.data_ptr(), param._version) for param in self._params]


def tensors_of(state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensor fields of a state."""
    for item in fields(state):
        value = getattr(state, item.name)
        if isinstance(value, Tensor):
            yield item.name, value


def state_dtype(params: list[Tensor]) -> torch.dtype:
    """float64 if any parameter is, else float32, whatever the model computes in."""
    return torch.float64 if any(p.dtype is torch.float64 for p in params) else torch.float32


def pack(method: str, state: FlatState, generator: torch.Generator | None, num_data: int) -> dict[str, Any]:
    """A state as plain containers and tensors."""
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
    """The first parameter in which a saved layout is not this one, in words; empty if there is none."""
    mine = list(zip(spec.names, map(list, spec.shapes), strict=True))
    theirs = list(zip(names, map(list, shapes), strict=True))
    for ours, other in zip(mine, theirs, strict=False):
        if ours != other:
            return f"expected parameter {ours[0]!r} of shape {ours[1]}, found {other[0]!r} of shape {other[1]}"
    if len(mine) != len(theirs):
        return f"it has {len(theirs)} parameters, and {len(mine)} are expected"
    return ""


def possible(name: str, found: Tensor) -> bool:
    """Whether a tensor of a precision, of mean squares or of rates may be one; others always may."""
    if name == "prec_matrix":
        return not bool(torch.linalg.cholesky_ex(found).info.any())
    if name == "prec_diag":
        return bool((found > 0).all())
    if name == "rates":
        return bool(((found >= 0) & (found < 1)).all())
    return not name.endswith("square") or bool((found >= 0).all())


def _words(state: Any) -> dict[str, str]:
    """What a state says in words, such as how its numbers are to be read."""
    return {item.name: value for item in fields(state) if isinstance(value := getattr(state, item.name), str)}
