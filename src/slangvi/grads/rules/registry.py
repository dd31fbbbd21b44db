"""The table of layer rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from slangvi.grads.blocks import Block

__all__ = ["Rule", "find_rule", "register_rule"]

Rule = Callable[[Any, Tensor, Tensor], dict[str, Block] | None]
_RULES: dict[type[nn.Module], Rule] = {}


def register_rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register a rule for module classes whose forward takes one tensor and returns one tensor.

    The rule gets the module, its input (M, ...) and the gradient of its output (M, ...), and returns per-example
    gradients by local parameter name, e.g. `{"weight": Outer(...), "bias": Formed(...)}`. It returns None when this
    particular input cannot be handled; the module then falls back to the dense engine.

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

    def add(rule: Rule) -> Rule:
        for kind in kinds:
            _RULES[kind] = rule
        return rule

    return add


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of a module, if its forward really is the forward the rule was written for."""
    for kind in type(module).__mro__:
        if kind in _RULES:
            # A subclass with its own forward may compute anything: the rule would be a guess.
            return _RULES[kind] if type(module).forward is kind.forward else None
    return None
