"""What is saved beside a run: schedulers, generators, modules, and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from slangvi.checkpoint._plain import decode, encode
from slangvi.errors import CheckpointError

__all__ = ["check_extras", "encode_extras", "plain_values", "restored"]


def encode_extras(extras: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Each by its name, with how it is to be put back."""
    return {name: _encode(name, value, tensors) for name, value in extras.items()}


def _encode(name: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Generator):
        return {"how": "generator", "class": value.device.type, "value": encode(value.get_state(), tensors, name)}
    if _are_generators(value):
        parts = [_encode(f"{name}.{k}", one, tensors) for k, one in enumerate(value)]
        return {"how": "generators", "class": f"{len(parts)} generators", "value": parts}
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return {"how": "state_dict", "class": type(value).__name__, "value": encode(value.state_dict(), tensors, name)}
    return {"how": "value", "class": type(value).__name__, "value": encode(value, tensors, name)}


def _are_generators(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, torch.Generator) for one in value)


def plain_values(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Those that are values, not the state of something."""
    return {name: decode(entry["value"], tensors) for name, entry in saved.items() if entry["how"] == "value"}


def check_extras(saved: Mapping[str, Any], given: Mapping[str, Any], across_devices: bool) -> str:
    """The first of the things beside the run for which a file has nothing, or nothing that fits; empty if all fit."""
    for name, value in given.items():
        if name not in saved:
            return f"it holds no {name!r}; beside the run it holds {sorted(saved) or 'nothing'}"
        if value is not None and (problem := _unfit(name, saved[name], value, across_devices)):
            return problem
    for name, entry in saved.items():
        if entry["how"] != "value" and name not in given:
            return (
                f"it also holds {name!r} ({entry['class']}), without which the run would not go on as it was. Pass "
                f"{name}=..., or {name}=None to leave it out"
            )
    return ""


def _unfit(name: str, entry: Mapping[str, Any], value: Any, across_devices: bool) -> str:
    if entry["how"] == "value":
        return f"{name!r} is a plain value; slangvi.checkpoint.describe(path)['values'] has it"
    is_generator = isinstance(value, torch.Generator)
    how = "generator" if is_generator else "generators" if _are_generators(value) else "state_dict"
    kind = type(value).__name__
    if how != "state_dict":
        kind = value.device.type if is_generator else f"{len(value)} generators"
    if how == "generators" and entry["how"] == how and len(value) == len(entry["value"]):
        pairs = zip(entry["value"], value, strict=True)
        return next(filter(None, (_unfit(name, part, one, across_devices) for part, one in pairs)), "")
    if how == entry["how"] == "generator" and across_devices:
        return ""
    if how != entry["how"] or kind != entry["class"]:
        return f"{name!r} is {entry['class']!r} ({entry['how']}), and this is {kind!r} ({how})"
    return ""


class restored:
    """Puts things beside a run back as they were saved, and again as they were before if anything fails in the block.

    Args:
        saved: as `encode_extras` made it.
        tensors: of the file.
        given: where it is to go; None is passed over.
    """

    def __init__(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
        self.saved, self.tensors = saved, tensors
        self.given = {name: value for name, value in given.items() if value is not None}
        self.before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        try:
            for name, value in self.given.items():
                self._put(name, self.saved[name], value)
        except BaseException:
            self._undo()
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._undo()

    def _put(self, name: str, entry: Mapping[str, Any], value: Any) -> None:
        if entry["how"] == "generators":
            for part, one in zip(entry["value"], value, strict=True):
                self._put(name, part, one)
            return
        content = decode(entry["value"], self.tensors)
        try:
            if isinstance(value, torch.Generator):
                if value.device.type == entry["class"]:
                    self.before.append((value, value.get_state()))
                    value.set_state(content)
                return
            # The states of schedulers hold references to what they change.
            self.before.append((value, deepcopy(value.state_dict())))
            with torch.no_grad():
                value.load_state_dict(content)
        except Exception as error:
            raise CheckpointError(f"{name!r} could not be put back: {error}") from error

    def _undo(self) -> None:
        for value, state in reversed(self.before):
            with suppress(Exception):  # what came first is told
                value.set_state(state) if isinstance(value, torch.Generator) else value.load_state_dict(state)
