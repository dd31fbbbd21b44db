"""Parts of saving an optimizer: torch's hooks around a `state_dict`, and the generator's state."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slangvi.errors import user_stacklevel

__all__ = [
    "call_hooks",
    "hold_hooks",
    "require_same_prior",
    "restored_random_state",
    "warn_of_other_data",
    "warn_of_other_ways",
]


@contextmanager
def hold_hooks(optimizer: Optimizer, name: str) -> Iterator[list[Callable[..., Any]]]:
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


def call_hooks(hooks: list[Callable[..., Any]], optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Call hooks that may return another `state_dict`."""
    for hook in hooks:
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def restored_random_state(saved: Tensor | None, generator: torch.Generator | None) -> Tensor | None:
    """Return a saved state of a generator, checked before anything is changed; None if there is no use for it."""
    if saved is None:
        return None
    if generator is None:
        warnings.warn(
            "state_dict holds the state of a generator, and this optimizer has none: its draws will be others. "
            "Build it with generator=torch.Generator() to go on with the same draws.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
        return None
    try:
        torch.Generator(generator.device).set_state(saved.cpu())
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"state_dict['generator'] is no state of a generator on {generator.device}: {error}"
        ) from error
    return saved.cpu()


def require_same_prior(then: str | None, now: str | None) -> None:
    """Raise ValueError unless a posterior as the prior, by its fingerprint, is the one of the saved run."""
    if then != now:
        told, own = ("no posterior" if x is None else f"posterior {x[:8]}" for x in (then, now))
        raise ValueError(
            f"state_dict was made with {told} as its prior, and this optimizer has {own}. A state does not hold "
            "its prior: build the optimizer with the same prior=, which slangvi.save(path, prior) keeps."
        )


def warn_of_other_data(then: int, now: int) -> None:
    """Warn if the size of the training set has changed."""
    if then != now:
        warnings.warn(
            f"state_dict was made with num_data={then}, this optimizer has num_data={now}; the posterior will change "
            "width.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def warn_of_other_ways(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Warn of settings by which a run goes on in another way than the one that was saved."""
    unlike = [name for name, value in saved.items() if own.get(name, value) != value]
    if unlike:
        before, now = (", ".join(f"{name}={ways[name]}" for name in unlike) for ways in (saved, own))
        warnings.warn(
            f"state_dict was saved with {before}, and this optimizer has {now}: its steps will be others.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
