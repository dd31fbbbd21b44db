"""A module's parameters as one flat vector: writing to them, and noticing when somebody else does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from slangvi.params.spec import ParamSpec

__all__ = ["Mirror"]


class Mirror:
    """A model's parameters, by their canonical names, seen as one flat vector."""

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
        self.params = list(self.named.values())
        self._seen = self._marks()

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.named.values())).device

    def changed(self, loc: Tensor, contents: bool = True) -> bool:
        """Tell whether somebody else wrote to a parameter, replaced its data or moved it since `loc` was written.

        On a CPU the numbers are always compared, on a GPU only with `contents`.
        """
        if self._seen != self._marks():
            return True
        if not contents and loc.device.type != "cpu":
            return False
        # Writes through p.data leave no mark. One comparison for all spares a GPU many waits, and costs a CPU a copy.
        if loc.device.type != "cpu" and all(param.dtype is loc.dtype for param in self.params):
            return not torch.equal(torch.cat([param.detach().reshape(-1) for param in self.params]), loc)
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
        """Return the parameter of a model by its name, without walking through all of them."""
        *path, local = name.split(".")
        module: nn.Module | None = model
        for part in path:
            module = None if module is None else module._modules.get(part)
        return None if module is None else module._parameters.get(local)

    def write(self, flat: Tensor) -> None:
        """Put a flat vector into the parameters."""
        pieces = flat.split(self.spec.numels)
        views = [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self.params, views)
        self._seen = self._marks()

    def read(self, loc: Tensor) -> Tensor:
        """Return the mean with the values of parameters that were changed from outside; `loc` is not modified."""
        new = loc.clone()
        # A half-precision copy of the mean is not news: the digits of the float32 one are kept.
        for (name, param), (_, part) in zip(self.named.items(), self._pairs(loc), strict=True):
            if not torch.equal(part, param):
                new[self.spec.slices[name]] = param.detach().flatten().to(new.dtype)
        self._seen = self._marks()
        return new

    def _pairs(self, loc: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its part of the mean, in the parameter's dtype."""
        for name, param in self.named.items():
            yield param.detach(), loc[self.spec.slices[name]].view(param.shape).to(param.dtype)

    def _marks(self) -> list[tuple[int, int]]:
        """Return the address and version of every parameter's data."""
        return [(param.data_ptr(), param._version) for param in self.params]
