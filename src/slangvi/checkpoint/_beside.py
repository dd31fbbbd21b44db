"""Things saved beside a run: schedulers, generators, modules, and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from slangvi.checkpoint._plain import decode, encode
from slangvi.errors import CheckpointError


def encode_extras(extras: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return for each name how its value is put back, what it is, and the value as JSON."""
    return {name: _encode(name, value, tensors) for name, value in extras.items()}


def _encode(name: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    how, kind = _how_and_class(value)
    if how == "generators":
        content: Any = [_encode(f"{name}.{k}", one, tensors) for k, one in enumerate(value)]
    else:
        content = encode(value if how == "value" else _state(value), tensors, name)
    return {"how": how, "class": kind, "value": content}


def _how_and_class(value: Any) -> tuple[str, str]:
    """Return how a value is put back, and what messages call it."""
    if isinstance(value, torch.Generator):
        return "generator", value.device.type
    if isinstance(value, list | tuple) and value and all(isinstance(one, torch.Generator) for one in value):
        return "generators", f"{len(value)} generators"
    stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return "state_dict" if stateful else "value", type(value).__name__


def _state(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        with torch.no_grad():
            value.load_state_dict(state)


def check_extras(saved: Mapping[str, Any], given: Mapping[str, Any], across_devices: bool) -> None:
    """Raise a `CheckpointError` unless a file has something that fits for each thing beside the run, and no more."""
    for name, value in given.items():
        if name not in saved:
            raise CheckpointError(f"it holds no {name!r}; beside the run it holds {sorted(saved) or 'nothing'}.")
        if value is not None:
            _check_extra(name, saved[name], value, across_devices)
    for name, entry in saved.items():
        if entry["how"] != "value" and name not in given:
            raise CheckpointError(
                f"it also holds {name!r} ({entry['class']}), without which the run would not go on as it was. Pass "
                f"{name}=..., or {name}=None to leave it out."
            )


def _check_extra(name: str, entry: Mapping[str, Any], value: Any, across_devices: bool) -> None:
    if entry["how"] == "value":
        raise CheckpointError(f"{name!r} is a plain value; slangvi.checkpoint.describe(path)['values'] has it.")
    how, kind = _how_and_class(value)
    if how == entry["how"] == "generators" and len(value) == len(entry["value"]):
        for part, one in zip(entry["value"], value, strict=True):
            _check_extra(name, part, one, across_devices)
    elif (how, kind) != (entry["how"], entry["class"]) and not (how == entry["how"] == "generator" and across_devices):
        raise CheckpointError(f"{name!r} is {entry['class']!r} ({entry['how']}), and this is {kind!r} ({how}).")


@contextmanager
def restored(saved: Mapping[str, Any], tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> Iterator[None]:
    """Put things beside a run back as they were saved, and again as they were before if anything fails in the block."""
    before: list[tuple[Any, Any]] = []

    def put(name: str, entry: Mapping[str, Any], value: Any) -> None:
        if entry["how"] == "generators":
            for part, one in zip(entry["value"], value, strict=True):
                put(name, part, one)
        elif entry["how"] != "generator" or value.device.type == entry["class"]:
            content = decode(entry["value"], tensors)
            try:
                before.append((value, deepcopy(_state(value))))  # states of schedulers refer to what they change
                _set_state(value, content)
            except Exception as error:
                raise CheckpointError(f"{name!r} could not be put back: {error}") from error

    try:
        for name, value in given.items():
            if value is not None:
                put(name, saved[name], value)
        yield
    except BaseException:
        for value, state in reversed(before):
            with suppress(Exception):  # the first error is the one to be told
                _set_state(value, state)
        raise
