"""Argument checks whose messages say the argument, what is allowed, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from slangvi.types import ParamSpec

__all__ = ["betas", "choice", "count", "device", "flag", "number", "per_parameter", "per_tensor", "rate", "tensors"]

PerParameter = float | Tensor | Mapping[str, float]


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


def betas(value: Any) -> tuple[float, float]:
    """Adam's two averaging weights."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(
            f"betas must be a pair of numbers in [0, 1), got {value!r}. Adam's usual ones are (0.9, 0.999)."
        )
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
    """A device of torch that is there, or the name of one.

    Example:
        >>> device("device", "cpu:0")
        device(type='cpu', index=0)
    """
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


def per_parameter(
    name: str,
    value: Any,
    spec: ParamSpec,
    like: Tensor,
    positive: bool = True,
    known: ParamSpec | None = None,
) -> Tensor:
    """A float, a dict of names or globs, or a flat tensor, as one number per parameter entry (P,).

    In a dict an exact name wins over globs, and globs are tried in the dict's order. Its keys must match a parameter
    of `known`, the whole model, when `spec` is one group of it. A float is held once, whatever P.
    """
    low = 0.0 if positive else -math.inf
    if isinstance(value, Mapping):
        wide = torch.empty(0, dtype=torch.float64, device="cpu")
        result = spec.expand(_from_patterns(name, value, spec, known or spec, low), wide)
    elif isinstance(value, Tensor) and value.numel() != 1:
        result = _from_tensor(name, value, spec, positive)
    else:
        result = torch.full((1,), number(name, value, low), dtype=torch.float64, device="cpu")
    converted = result.to(like, copy=True)
    lost = ~torch.isfinite(converted) | (positive & (converted <= 0))
    if bool(lost.any()):
        kind = "finite and > 0" if positive else "finite"
        given = float(result[lost.to(result.device)][0])
        raise ValueError(f"{name} must be {kind} in {like.dtype}, the dtype of the state, got {given:g}.")
    return converted.expand(spec.num_params)


def per_tensor(
    name: str, value: Any, spec: ParamSpec, known: ParamSpec, low: float, high: float, closed: str = ""
) -> list[float]:
    """A number between two bounds, or a dict of names or globs to such, as one number per parameter tensor."""
    if isinstance(value, Mapping):
        return _from_patterns(name, value, spec, known, low, high, closed)
    return [number(name, value, low, high, closed)] * len(spec.names)


def _from_patterns(
    name: str,
    patterns: Mapping[str, Any],
    spec: ParamSpec,
    known: ParamSpec,
    low: float,
    high: float = math.inf,
    closed: str = "",
) -> list[float]:
    values = {str(key): number(f"{name}[{key!r}]", value, low, high, closed) for key, value in patterns.items()}
    for key in values:
        if not any(fnmatchcase(param, key) for param in known.canonical):
            raise ValueError(
                f"{name} names {key!r}, which matches no parameter. Parameters are: {', '.join(known.names[:8])}"
                f"{', …' if len(known.names) > 8 else ''}. Correct the name or remove the entry."
            )
    result = []
    for param in spec.names:
        names = [param, *(alias for alias, name in known.aliases if name == param)]
        exact = next((key for key in names if key in values), None)
        match = exact or next((key for key in values if any(fnmatchcase(n, key) for n in names)), None)
        if match is None:
            raise ValueError(
                f"{name} has no entry for parameter {param!r}: its keys are {sorted(values)}. "
                'Add the name, a glob that matches it, or "*" for all others.'
            )
        result.append(values[match])
    return result


def _from_tensor(name: str, value: Tensor, spec: ParamSpec, positive: bool) -> Tensor:
    if value.shape != (spec.num_params,):
        raise ValueError(
            f"{name} must be a number, a dict, or a tensor of shape ({spec.num_params},) with one entry per "
            f"parameter, got shape {tuple(value.shape)}."
        )
    if value.is_complex() or value.dtype is torch.bool:
        raise TypeError(f"{name} must hold real numbers, got dtype {value.dtype}.")
    bad = ~torch.isfinite(value) if not positive else ~(torch.isfinite(value) & (value > 0))
    if bool(bad.any()):
        place = int(bad.nonzero()[0, 0])
        kind = "finite and > 0" if positive else "finite"
        raise ValueError(f"{name} must be {kind} everywhere, got {value[place].item()} at entry {place}.")
    return value.detach()
