"""Results that are computed once, whoever asks first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch

__all__ = ["kept"]

T = TypeVar("T")


def kept(method: Callable[[Any], T]) -> cached_property[T]:
    """A cached property that whoever asks later can differentiate, though it was first asked for where nobody can.

    Under `no_grad` or in inference mode a plain `cached_property` would keep a tensor without its history.

    Example:
        >>> class Root:
        ...     def __init__(self, x):
        ...         self.x = x
        ...     @kept
        ...     def root(self):
        ...         return self.x.sqrt()
        >>> four = Root(torch.tensor(4.0, requires_grad=True))
        >>> with torch.no_grad():
        ...     print(four.root)
        tensor(2., grad_fn=<SqrtBackward0>)
    """

    @wraps(method)
    def compute(self: Any) -> T:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return method(self)
        with torch.inference_mode(False), torch.enable_grad():
            return method(self)

    return cached_property(compute)
