"""Argument checks whose messages say the argument, what is allowed, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

__all__ = ["betas", "choice", "count", "device", "flag", "number", "rank", "rate", "tensors"]


def count(name: str, value: Any, least: int = 1, hint: str = "") -> int:
    """A whole number not below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number ≥ {least}, got {value!r}. {hint}".rstrip())
    if value < least:
        raise ValueError(f"{name} must be ≥ {least}, got {value}. {hint}".rstrip())
    return int(value)


def number(name: str, value: Any, low: float, high: float = math.inf, closed: str = "", hint: str = "") -> float:
    """A finite number between two bounds; `closed` may hold "low" and "high" to include them."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}). {hint}".rstrip())
    result = float(value)
    above = result >= low if "low" in closed else result > low
    below = result <= high if "high" in closed else result < high
    if not (math.isfinite(result) and above and below):
        left, right = "[(]"["low" not in closed], "])"["high" not in closed]
        raise ValueError(f"{name} must be finite and in {left}{low:g}, {high:g}{right}, got {result}. {hint}".rstrip())
    return result


def rate(name: str, value: Any, high: float = math.inf, hint: str = "") -> float:
    """A learning rate: positive; at most 1 where it is an averaging weight."""
    advice = f"Typical values lie between 1e-3 and 0.1. {hint}".rstrip()
    return number(name, value, 0.0, high, closed="high" if math.isfinite(high) else "", hint=advice)


def rank(name: str, value: Any) -> int:
    """The number of columns of a factor."""
    return count(name, value, least=0, hint="0 keeps the diagonal only; 1 to 32 is usual.")


def betas(value: Any) -> tuple[float, float]:
    """Adam's two averaging weights."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"betas must be a pair of numbers in [0, 1), got {value!r}. Adam's usual ones: (0.9, 0.999).")
    first, second = (number("betas", x, 0.0, 1.0, closed="low", hint="Adam's are (0.9, 0.999).") for x in value)
    return first, second


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    """One of a few words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def device(name: str, value: Any) -> torch.device:
    """A device of torch that is there, or the name of one."""
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} must be a device such as 'cpu' or 'cuda:0', got {value!r}.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name} is {str(found)!r}, but torch sees no GPU. Use 'cpu', or install torch with CUDA.")
    return found


def tensors(**values: Any) -> None:
    """Real tensors, each by its name.

    Example:
        >>> tensors(x=[1.0])
        Traceback (most recent call last):
        TypeError: x must be a tensor of real numbers, got list. Convert it with torch.as_tensor.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.is_complex():
            got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            hint = "" if isinstance(value, Tensor) else " Convert it with torch.as_tensor."
            raise TypeError(f"{name} must be a tensor of real numbers, got {got}.{hint}")
