"""One rule per layer type: from a layer's input and its output's gradient to per-example gradients of its weights."""

from slangvi.grads.rules import conv as _conv  # noqa: F401 - registers its rules
from slangvi.grads.rules import embedding as _embedding  # noqa: F401
from slangvi.grads.rules import linear as _linear  # noqa: F401
from slangvi.grads.rules import norm as _norm  # noqa: F401
from slangvi.grads.rules.registry import Rule as Rule
from slangvi.grads.rules.registry import find_rule as find_rule
from slangvi.grads.rules.registry import register_rule as register_rule
from slangvi.grads.rules.registry import shares_inputs as shares_inputs

__all__ = ["Rule", "find_rule", "register_rule", "shares_inputs"]
