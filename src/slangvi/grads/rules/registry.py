"""The table of layer rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from slangvi.grads.blocks import Block, Unopened

__all__ = ["Rule", "find_rule", "register_rule", "shares_inputs"]

Rule = Callable[[Any, Tensor, Tensor], Mapping[str, Block | Unopened] | None]
_RULES: dict[type[nn.Module], Rule] = {}
_SHARING: set[Rule] = set()


def register_rule(*kinds: type[nn.Module], shares_inputs: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for module classes whose forward takes one tensor and returns one tensor.

    The rule gets the module, its input (M, ...) and the gradient of its output (M, ...), and returns per-example
    gradients by local parameter name, e.g. `{"weight": Outer(...), "bias": Formed(...)}`. It returns None when this
    particular input cannot be handled; the module then falls back to the dense engine.

    Args:
        kinds: module classes.
        shares_inputs: whether the rule also takes S·M output gradients with M inputs that S draws of the weights had in
            common, row r of the former belonging to row r mod M of the latter.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gain = nn.Parameter(torch.ones(()))
        ...     def forward(self, x):
        ...         return x * self.gain
        >>> @register_rule(Scale)
        ... def scale(module, x, delta):
        ...     return {"gain": Formed((x * delta).flatten(1).sum(1, keepdim=True))}
    """
    for kind in kinds or (None,):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(
                f"register_rule takes classes of modules, got {kind!r}. Write @register_rule(MyLayer) above the rule."
            )
    if not isinstance(shares_inputs, bool):
        raise TypeError(f"shares_inputs must be True or False, got {shares_inputs!r}.")

    def add(rule: Rule) -> Rule:
        if not callable(rule):
            raise TypeError(f"a rule must be a function (module, x, delta) → gradients by name, got {rule!r}.")
        for kind in kinds:
            _RULES[kind] = rule
        if shares_inputs:
            _SHARING.add(rule)
        return rule

    return add


def is_patched(module: nn.Module) -> bool:
    """Whether the instance has a forward that is not that of its class."""
    own = module.__dict__.get("forward")
    return own is not None and not (getattr(own, "__self__", None) is module and own.__func__ is type(module).forward)


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of a module, if its forward really is the forward the rule was written for."""
    if is_patched(module):
        return None
    for kind in type(module).__mro__:
        if kind in _RULES:
            # A subclass with its own forward may compute anything: the rule would be a guess.
            return _RULES[kind] if type(module).forward is kind.forward else None
    return None


def shares_inputs(module: nn.Module) -> bool:
    """Whether the module's rule takes inputs that several draws had in common."""
    return find_rule(module) in _SHARING
