"""Layout of the flat parameter vector, and checks of tensors that are to be parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slangvi.errors import UnsupportedModuleError

__all__ = ["ParamSpec", "Params", "check_parameter", "uncompiled"]


Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class ParamSpec:
    """Layout of named tensors in the flat parameter vector of length P.

    Args:
        names: canonical parameter names, in flat order.
        shapes: shape of each tensor.
        aliases: other names of tied tensors, each mapped to its canonical name.

    Example:
        >>> spec = ParamSpec.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
        >>> spec.num_params, spec.slices["b"]
        (8, slice(6, 8, None))
        >>> {k: tuple(v.shape) for k, v in spec.unflatten(torch.zeros(5, 8)).items()}
        {'w': (5, 2, 3), 'b': (5, 2)}
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a layout is looked up several times a step."""
        return hash((self.names, self.shapes, self.aliases))

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other hashes of the same strings.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def of(cls, params: Params) -> ParamSpec:
        """Layout of a dict of tensors, in its own order."""
        for name, value in params.items():
            check_parameter(name, value)
        if not params:
            raise ValueError("params is empty: there is nothing to infer. Give at least one tensor.")
        return cls(tuple(params), tuple(value.shape for value in params.values()))

    @classmethod
    def of_module(cls, module: nn.Module, chosen: Iterable[Tensor] | None = None) -> ParamSpec:
        """Layout of the trainable parameters of a module (or of the `chosen` ones, in their order)."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, value in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
        order = [key for key, value in tensors.items() if value.requires_grad]
        if chosen is not None:
            order = [id(value) for value in chosen]
        unknown = [key for key in order if key not in tensors]
        if unknown:
            raise ValueError(
                f"params holds {len(unknown)} tensor(s) that are not parameters of the model. "
                "Pass tensors from model.parameters()."
            )
        spec = cls.of({names[key][0]: tensors[key] for key in order})
        aliases = tuple((alias, names[key][0]) for key in order for alias in names[key][1:])
        return cls(spec.names, spec.shapes, aliases)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of entries of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def num_params(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.numels)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Place of each canonical name in the flat vector."""
        places, start = {}, 0
        for name, numel in zip(self.names, self.numels, strict=True):
            places[name] = slice(start, start + numel)
            start += numel
        return places

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Every known name, tied ones included, to its canonical name."""
        return {name: name for name in self.names} | dict(self.aliases)

    def flatten(self, params: Params, dtype: torch.dtype | None = None) -> Tensor:
        """Concatenate named tensors into one vector (P,); leading dimensions they share stay in front."""
        parts = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            value = params[name]
            lead = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*lead, shape.numel()).to(dtype or value.dtype))
        return torch.cat(parts, dim=-1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat (..., P) tensor, each with the shape of its parameter behind the leading dimensions."""
        return {
            name: flat[..., self.slices[name]].unflatten(-1, shape or (1,)).reshape(flat.shape[:-1] + shape)
            for name, shape in zip(self.names, self.shapes, strict=True)
        }

    def expand(self, values: Iterable[float], like: Tensor) -> Tensor:
        """One number per tensor, repeated over its entries: (P,)."""
        per_tensor = torch.tensor(list(values), dtype=like.dtype, device=like.device)
        repeats = torch.tensor(self.numels, dtype=torch.long, device=like.device)
        return per_tensor.repeat_interleave(repeats, output_size=self.num_params)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile`, or the module itself if it is not compiled."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


# Tensors of torch.distributed, by name: importing it takes time.
_SHARDED = {"DTensor", "FlatParameter"}


def check_parameter(name: str, value: Any) -> None:
    """Refuse tensors that have no Gaussian posterior here: not a tensor, not real, not dense, not yet made."""
    if is_lazy(value):
        raise UnsupportedModuleError(
            f"parameter {name!r} is not initialised (lazy module). Run one forward pass before building the optimizer."
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"parameter {name!r} must be a torch.Tensor, got {type(value).__name__}.")
    if value.is_complex():
        raise UnsupportedModuleError(
            f"parameter {name!r} is complex ({value.dtype}), but the posterior is over real numbers. "
            "Store its real and imaginary parts (torch.view_as_real) as the parameter."
        )
    if not value.is_floating_point():
        raise UnsupportedModuleError(
            f"parameter {name!r} has dtype {value.dtype}; only floating point can be inferred."
        )
    if value.layout is not torch.strided:
        raise UnsupportedModuleError(
            f"parameter {name!r} has layout {value.layout}, but only dense (strided) parameters are supported. "
            "Convert it with .to_dense(), or freeze it with requires_grad_(False)."
        )
    if any(kind.__name__ in _SHARDED for kind in type(value).__mro__):
        raise UnsupportedModuleError(
            f"parameter {name!r} is spread over processes ({type(value).__name__}), and so would be its posterior, "
            "which is not supported. Build the optimizer on the whole model, in one process."
        )
    if value.device.type == "meta":
        raise UnsupportedModuleError(
            f"parameter {name!r} is on the meta device and has no values. Materialise the module with to_empty()."
        )
