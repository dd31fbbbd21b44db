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
        self._paths = [(name, *_split(name), param) for name, param in self.named.items()]
        self._places: list[int] = []
        self._look()

    @property
    def device(self) -> torch.device:
        """The device that the parameters are on now."""
        return self.params[0].device

    def _look(self) -> None:
        """Remember where the parameters are, and their versions, by which writes of others are noticed."""
        self._versions = [param._version for param in self.params]
        places = [param.data_ptr() for param in self.params]
        if places != self._places:
            self._places = places
            self._is_flat = all(param.is_contiguous() for param in self.params)
            self._vectors = [param.detach().view(-1) for param in self.params] if self._is_flat else []

    def changed(self, loc: Tensor, contents: bool = True) -> bool:
        """Tell whether somebody else wrote to a parameter, replaced its data or moved it since `loc` was written.

        On a CPU the numbers are always compared, on a GPU only with `contents`.
        """
        params = self.params
        if self._versions != [p._version for p in params] or self._places != [p.data_ptr() for p in params]:
            return True
        on_cpu = loc.device.type == "cpu"
        if not (contents or on_cpu):
            return False
        # Writes through p.data leave no mark. One comparison for all spares a GPU many waits, and costs a CPU a copy.
        if self._is_flat and all(param.dtype is loc.dtype for param in params):
            if on_cpu:
                return not all(map(torch.equal, loc.split(self.spec.numels), self._vectors))
            return not torch.equal(torch.cat(self._vectors), loc)
        return any(not torch.equal(part, param) for param, part in self._pairs(loc))

    def check(self, model: nn.Module) -> None:
        """Refuse to go on with parameters that were frozen, or that are no longer the model's."""
        for name, path, local, param in self._paths:
            module: nn.Module | None = model
            for part in path:  # without walking through all modules
                module = None if module is None else module._modules.get(part)
            if module is None or module._parameters.get(local) is not param:
                raise ValueError(f"parameter {name!r} was replaced in the model. Build the optimizer anew.")
            if not param.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen after the optimizer was built. Unfreeze it, or build the optimizer "
                    "anew without it."
                )

    def write(self, flat: Tensor) -> None:
        """Put a flat vector into the parameters."""
        if self._places != [param.data_ptr() for param in self.params]:
            self._look()
        pieces = flat.split(self.spec.numels)
        with torch.no_grad():
            if self._is_flat:
                torch._foreach_copy_(self._vectors, pieces)
            else:
                pairs = zip(pieces, self.params, strict=True)
                torch._foreach_copy_(self.params, [piece.view(param.shape) for piece, param in pairs])
        self._versions = [param._version for param in self.params]

    def read(self, loc: Tensor) -> Tensor:
        """Return the mean with the values of parameters that were changed from outside; `loc` is not modified."""
        new = loc.clone()
        # A half-precision copy of the mean is not news: the digits of the float32 one are kept.
        for (name, param), (_, part) in zip(self.named.items(), self._pairs(loc), strict=True):
            if not torch.equal(part, param):
                new[self.spec.slices[name]] = param.detach().flatten().to(new.dtype)
        self._look()
        return new

    def _pairs(self, loc: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its part of the mean, in the parameter's dtype."""
        for name, param in self.named.items():
            yield param.detach(), loc[self.spec.slices[name]].view(param.shape).to(param.dtype)


def _split(name: str) -> tuple[list[str], str]:
    """Return the modules on the way to a parameter, and its own name."""
    *path, local = name.split(".")
    return path, local
