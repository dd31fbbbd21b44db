"""Settings that may differ by parameter: a number, a dict of names or globs, or a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from slangvi.checks import number
from slangvi.params.spec import ParamSpec

__all__ = ["LEARN", "LEARN_EACH", "learnt_members", "per_parameter", "per_tensor", "with_numbers"]

# What stands in a setting for a number that the run learns: one for all, or one for each parameter tensor.
LEARN, LEARN_EACH = "learn", "learn-each"


def learnt_members(name: str, value: Any, spec: ParamSpec, known: ParamSpec) -> tuple[int, list[int]]:
    """Return how many numbers of a setting are learnt, and which of them each parameter tensor has; -1 for none.

    A dict may say "learn" beside its numbers: each such name or glob has one of its own. They are counted in the order
    of the parameters, whatever that of the dict.
    """
    if isinstance(value, str) and value in (LEARN, LEARN_EACH):
        each = value == LEARN_EACH
        return len(spec.names) if each else 1, [place * each for place in range(len(spec.names))]
    if not isinstance(value, Mapping) or not any(map(_is_learnt, value.values())):
        return 0, [-1] * len(spec.names)
    keys, owners = _learnt_keys(name, value, spec, known)
    return len(keys), [keys.index(owner) if owner in keys else -1 for owner in owners]


def with_numbers(name: str, value: Any, spec: ParamSpec, known: ParamSpec, numbers: Sequence[float]) -> Any:
    """Return a setting with the learnt numbers in the place of words, in the order of `learnt_members`."""
    if isinstance(value, Mapping):
        keys, _ = _learnt_keys(name, value, spec, known)
        return {**value, **dict(zip(keys, numbers, strict=True))}
    if isinstance(value, str) and value == LEARN_EACH:
        return dict(zip(spec.names, numbers, strict=True))
    return numbers[0] if _is_learnt(value) else value


def _learnt_keys(name: str, value: Mapping[str, Any], spec: ParamSpec, known: ParamSpec) -> tuple[list[str], list[str]]:
    """Return the keys that say "learn", in the order of the first tensor of each, and the key of each tensor."""
    every = list(value)
    places = _from_patterns(name, {key: float(place) for place, key in enumerate(every)}, spec, known, -math.inf)
    owners = [every[int(place)] for place in places]
    return [key for key in dict.fromkeys([*owners, *every]) if _is_learnt(value[key])], owners


def _is_learnt(value: Any) -> bool:
    return isinstance(value, str) and value == LEARN


def per_parameter(
    name: str,
    value: Any,
    spec: ParamSpec,
    like: Tensor,
    positive: bool = True,
    known: ParamSpec | None = None,
) -> Tensor:
    """Return a float, a dict of names or globs, or a flat tensor as one number per parameter entry, (P,).

    In a dict an exact name wins over globs, and globs are tried in the dict's order. Its keys must match a parameter
    of `known`, the whole model, when `spec` is one group of it. A float is held once, whatever P.
    """
    low = 0.0 if positive else -math.inf
    words = value.values() if isinstance(value, Mapping) else [value]
    if any(isinstance(word, str) and word in (LEARN, LEARN_EACH) for word in words):
        raise ValueError(
            f"{name} must be a number here, got {value!r}: the prior_precision of SLANG, VOGN, FullGaussian and "
            f'OnlineEig (optimizers and build functions) can be "{LEARN}" or "{LEARN_EACH}", or a dict of names or '
            f'globs to numbers or "{LEARN}".'
        )
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
    """Return a number between two bounds, or a dict of names or globs to such, as one number per tensor."""
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
