"""Python values as JSON and tensors, and back: what JSON lacks has a tag, and what has none is refused.

| value                                   | as JSON                                      |
|-----------------------------------------|----------------------------------------------|
| None, bool, int, str, finite float      | itself                                       |
| inf, nan                                | {"$float": "inf"}                            |
| list; dict with text for keys           | itself                                       |
| tuple                                   | {"$tuple": [...]}                            |
| other dicts; Counter                    | {"$dict": [[key, value], ...]}; {"$counter"} |
| tensor                                  | {"$tensor": name}, the numbers elsewhere     |
| a state, a posterior, a layout: RECORDS | {"$record": [kind, {field: value}]}          |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi.checkpoint._format import DTYPES
from slangvi.errors import CheckpointError


class Record(NamedTuple):
    """A class, as "module:name", whose values are made of attributes that are arguments too, and other arguments.

    Attributes in `extra` are left out of a file where they are None.
    """

    home: str
    needed: tuple[str, ...]
    options: Mapping[str, Any] = {}
    extra: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """All attributes."""
        return (*self.needed, *self.extra)

    @property
    def kind(self) -> Callable[..., Any]:
        """The class, imported when it is needed."""
        kind: Callable[..., Any] = resolve_name(self.home)
        return kind


_ENDS = ("step", "spec")
_LASTS, _LEARNT = ("momentum", *_ENDS), ("learnt",)
_PLACES = ("loc", "weights", "matrix", "gradient", "wanted", "expected_log_likelihood", "kl", "gradient_norm")
_ADAMS = ("loc", "rho", "loc_momentum", "loc_square", "rho_momentum", "rho_square")
_UNCHECKED = {"validate_args": False}
RECORDS = {
    "layout": Record("slangvi.params.spec:ParamSpec", ("names", "shapes", "aliases")),
    "low-rank": Record("slangvi.methods.slang:State", ("loc", "prec_factor", "prec_diag", *_LASTS), extra=_LEARNT),
    "mean_field": Record("slangvi.methods.mean_field:State", ("loc", "prec_diag", *_LASTS), extra=_LEARNT),
    "full": Record("slangvi.methods.full:State", ("loc", "prec_matrix", *_LASTS), extra=_LEARNT),
    "bbb": Record("slangvi.methods.bbb:State", (*_ADAMS, *_ENDS, "scale")),
    "mc_dropout": Record("slangvi.methods.mc_dropout:State", ("loc", "momentum", "square", "rates", *_ENDS)),
    "exact": Record("slangvi.methods.exact:State", ("point", "damping", "newton_damping", *_ENDS, "family")),
    "exact-point": Record("slangvi.methods.exact:Point", _PLACES),
    "replicas": Record(
        "slangvi.replicas:State",
        ("loc", "prec_factor", "prec_diag", "momentum", "step", "failed", "spec"),
        extra=_LEARNT,
    ),
    "LowRankPrecisionNormal": Record(
        "slangvi.distributions:LowRankPrecisionNormal", ("loc", "prec_factor", "prec_diag", "param_spec"), _UNCHECKED
    ),
    "DensePrecisionNormal": Record(
        "slangvi.distributions:DensePrecisionNormal", ("loc", "precision_matrix", "param_spec"), _UNCHECKED
    ),
    "DroppedWeights": Record("slangvi.methods.mc_dropout:DroppedWeights", ("loc", "rates", "param_spec")),
}


@cache
def _names() -> dict[Any, str]:
    return {record.kind: name for name, record in RECORDS.items()}


def record_of(value: Any) -> str | None:
    """Return the name of a value's class in `RECORDS`, or None."""
    return _names().get(type(value))


def encode(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """Return a value as JSON can hold it, and put tensors in it into a dict under names that begin with its place.

    Example:
        >>> tensors = {}
        >>> encode({"best": float("inf"), "betas": (0.9, 0.999), "w": torch.zeros(2)}, tensors, "run")
        {'best': {'$float': 'inf'}, 'betas': {'$tuple': [0.9, 0.999]}, 'w': {'$tensor': 'run.w'}}
        >>> tensors
        {'run.w': tensor([0., 0.])}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{place} is a tensor of {value.dtype} and layout {value.layout}, which a checkpoint cannot hold. "
                "Convert it to a dense tensor of real numbers."
            )
        while place in tensors:  # names may hold dots
            place += "'"
        tensors[place] = value
        return {"$tensor": place}
    name = record_of(value)
    if name is not None:
        parts = {field: getattr(value, field) for field in RECORDS[name].fields}
        parts = {field: part for field, part in parts.items() if part is not None or field in RECORDS[name].needed}
        return {"$record": [name, {key: encode(part, tensors, f"{place}.{key}") for key, part in parts.items()}]}
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{place}.{k}") for k, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [[encode(k, tensors, f"{place} key"), encode(v, tensors, f"{place}.{k}")] for k, v in value.items()]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return {key: item for key, item in pairs} if plain else {"$dict": pairs}  # noqa: C416  # pairs of lists
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold. It holds numbers, text, tensors, lists, "
        "dicts, generators, and what has a state_dict of these. Leave it out, or save it by other means."
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was encoded.

    Example:
        >>> decode({"a": {"$tuple": [1, {"$float": "-inf"}]}}, {})
        {'a': (1, -inf)}
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    return _TAGS[tag](value[tag], tensors)


def _record(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    name, parts = content
    fields = {key: decode(part, tensors) for key, part in parts.items()}
    if name == "layout":
        fields["shapes"] = tuple(map(torch.Size, fields["shapes"]))
    if set(fields) - set(RECORDS[name].extra) != set(RECORDS[name].needed):
        raise ValueError(f"a {name!r} has the fields {RECORDS[name].needed}, not {tuple(fields)}")
    return RECORDS[name].kind(**fields, **RECORDS[name].options)


_TAGS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$float": lambda text, _: float(text),
    "$tuple": lambda items, tensors: tuple(decode(items, tensors)),
    "$dict": lambda pairs, tensors: {decode(k, tensors): decode(v, tensors) for k, v in pairs},
    "$counter": lambda pairs, _: Counter({decode(k, {}): n for k, n in pairs}),
    "$tensor": lambda name, tensors: tensors[name],
    "$record": _record,
}
