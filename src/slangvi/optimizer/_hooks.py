"""Hooks of torch's optimizers around what our optimizers save besides torch's own part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["called", "held"]


@contextmanager
def held(optimizer: Optimizer, name: str) -> Iterator[list[Callable[..., Any]]]:
    """Keep one kind of hooks from firing inside the block.

    Torch fires them around its own part of a state, when ours is not there yet.

    Args:
        optimizer: whose hooks.
        name: attribute of `torch.optim.Optimizer` that holds them.

    Returns:
        The hooks, to be called when everything is there.
    """
    hooks = getattr(optimizer, name)
    setattr(optimizer, name, OrderedDict())
    try:
        yield list(hooks.values())
    finally:
        setattr(optimizer, name, hooks)


def called(hooks: list[Callable[..., Any]], optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Call hooks that may return another `state_dict`."""
    for hook in hooks:
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict
