"""What a model looks like from outside: everything that its forward could have read when it was captured."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from slangvi.grads.capture import foreign_hooks

__all__ = ["appearance"]

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Same:
    """Equal to itself only; holding it keeps its address from being given away."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _UnfitError(Exception):
    """The model must not be replayed."""


def appearance(model: nn.Module, inferred: Collection[int]) -> tuple[object, ...] | None:
    """Modules, flags, attributes, and where tensors lie; None for a model that must not be replayed.

    Two looks that are equal mean that a graph captured at the first does what `forward` would do at the second, as
    far as the model itself is concerned. A replay would call no hooks, and bring no gradient to other tensors.

    Args:
        model: the model.
        inferred: ids of the parameters that a replay has gradients for.
    """
    try:
        return tuple(look for module in model.modules() for look in _of_module(module, inferred))
    except _UnfitError:
        return None


def _of_module(module: nn.Module, inferred: Collection[int]) -> Iterator[object]:
    if foreign_hooks(module):
        raise _UnfitError
    yield module
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            yield _place(tensor, inferred)
    for name, value in module.__dict__.items():
        if name not in _INTERNAL and name != "forward":
            yield value if type(value) in _PLAIN else _look(value)


def _place(tensor: Tensor | None, inferred: Collection[int] = ()) -> object:
    """Where numbers lie and how they are to be read; contents may change."""
    if tensor is None:
        return None
    if tensor.requires_grad and id(tensor) not in inferred:
        raise _UnfitError
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _look(value: object) -> object:
    """An attribute that is not plain: tensors by place, containers by their parts, all else by identity."""
    if isinstance(value, Tensor):
        return _place(value)
    if isinstance(value, list | tuple):
        return tuple(part if type(part) in _PLAIN else _look(part) for part in value)
    if isinstance(value, dict):
        return tuple((key if type(key) in _PLAIN else _Same(key), _look(part)) for key, part in value.items())
    return value if type(value) in _PLAIN else _Same(value)
