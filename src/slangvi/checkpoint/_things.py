"""What can be saved: how it is described, and whether what comes back fits where it is to go."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from slangvi import __version__
from slangvi.checkpoint._plain import RECORDS, encode, record_of
from slangvi.errors import CheckpointError
from slangvi.optimizer import VariationalOptimizer
from slangvi.params import ParamSpec
from slangvi.params.state import layout_mismatch, possible

__all__ = ["described", "misfit", "taken_apart", "unlike_model"]


def taken_apart(thing: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
    """Return what the header says about a thing, and the thing as JSON with its tensors elsewhere."""
    if isinstance(thing, VariationalOptimizer):
        if thing.has_gradients:
            raise CheckpointError(
                "the optimizer holds gradients collected since the last step, and they are not saved. Save after "
                "step(), or call discard_gradients() first."
            )
        content = thing.state_dict()
        parts = content["slangvi"]["tensors"]
    elif (record_of(thing) or "layout") != "layout":
        content = thing
        parts = {name: getattr(thing, name) for name in RECORDS[str(record_of(thing))].fields}
    else:
        raise CheckpointError(
            f"a {type(thing).__name__} cannot be saved. Give an optimizer of slangvi, a state of the functional "
            "interface or of replicas, or a posterior; other things go in by name: save(path, opt, scheduler=sched)."
        )
    for name, value in parts.items():
        if isinstance(value, Tensor) and not _good(name, value):
            raise CheckpointError(
                f"{name!r} holds NaN, Inf or values out of its range, which is no state to go on from. Nothing was "
                "written, and the file that is there stays."
            )
    return described(thing), encode(content, tensors, "run")


def described(thing: Any) -> dict[str, Any]:
    """Return what a header says about a thing besides its values: versions, kind, method and sizes."""
    if isinstance(thing, VariationalOptimizer):
        thing = thing._own()
        thing._sync()
        state, kind = thing._state, "optimizer"
        method, dtypes = type(thing).__name__, [str(p.dtype) for p in thing._mirror.params]
    else:
        state, method = thing, str(record_of(thing))
        kind, dtypes = "state" if hasattr(thing, "spec") else "posterior", None
    versions = {"slangvi": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {**versions, "kind": kind, "method": method, **_numbers(state, dtypes)}


def _numbers(state: Any, dtypes: list[str] | None) -> dict[str, Any]:
    """Return sizes, dtypes and the step of a state or posterior; `dtypes` are those of the parameters."""
    spec: ParamSpec | None = getattr(state, "spec", getattr(state, "param_spec", None))
    loc, factor, step = state.loc, getattr(state, "prec_factor", None), getattr(state, "step", None)
    names, shapes = ((), ()) if spec is None else (spec.names, spec.shapes)
    parameters = zip(names, shapes, dtypes or [str(loc.dtype)] * len(names), strict=True)
    return {
        "num_params": loc.shape[-1],
        "rank": None if factor is None else factor.shape[-1 if hasattr(state, "param_spec") else -2],
        "dtype": str(loc.dtype),
        "device": loc.device.type,
        "step": step.tolist() if isinstance(step, Tensor) else step,
        "parameters": [{"name": name, "shape": list(shape), "dtype": dtype} for name, shape, dtype in parameters],
    }


def unlike_model(about: dict[str, Any], here: dict[str, Any], across_devices: bool) -> str:
    """Say what differs first between the header of a file and the description of a thing; empty if nothing does."""
    for key, word in (("kind", "of kind"), ("method", "of method"), ("rank", "of rank L =")):
        if about[key] != here[key]:
            return f"it is {word} {about[key]!r}, and this is {word} {here[key]!r}"
    for told, own in zip(about["parameters"], here["parameters"], strict=False):
        if told != own:
            return f"parameter {_parameter(told)} is saved where this has {_parameter(own)}"
    if about["num_params"] != here["num_params"] or len(about["parameters"]) != len(here["parameters"]):
        return (
            f"it has P = {about['num_params']} in {len(about['parameters'])} parameter tensors, and this has "
            f"P = {here['num_params']} in {len(here['parameters'])}"
        )
    if about["dtype"] != here["dtype"]:
        return f"its state is {about['dtype']}, and this is {here['dtype']}"
    if about["device"] != here["device"] and not across_devices:
        return (
            f"it was saved on {about['device']!r}, and this is on {here['device']!r}, where the run would not go on "
            "bit by bit; across_devices=True takes it over all the same, random states apart"
        )
    return ""


def _parameter(entry: dict[str, Any]) -> str:
    return f"{entry['name']!r} of shape {tuple(entry['shape'])} and {entry['dtype']}"


def misfit(saved: Any, here: Any, name: str = "") -> str:
    """Say in which field a state or posterior differs first from one it should be like; empty if in none."""
    if type(saved) is not type(here):
        return f"{name or 'it'} is a {type(saved).__name__}, and this has a {type(here).__name__}"
    if isinstance(saved, Tensor):
        if (saved.shape, saved.dtype) != (here.shape, here.dtype):
            return (
                f"{name} is {tuple(saved.shape)} {saved.dtype}, and this has {tuple(here.shape)} {here.dtype}. Use the "
                "same rank, dtype and data"
            )
        return "" if _good(name, saved) else f"{name} holds NaN, Inf or values out of its range"
    if isinstance(saved, ParamSpec):
        return layout_mismatch(saved.names, saved.shapes, here)
    if isinstance(saved, str):
        return "" if saved == here else f"it was made with {name}={saved!r}, and this has {name}={here!r}"
    kind = record_of(saved)
    fields = RECORDS[kind].fields if kind else ()
    return next(filter(None, (misfit(getattr(saved, f), getattr(here, f), f) for f in fields)), "")


def _good(name: str, value: Tensor) -> bool:
    return bool(torch.isfinite(value).all()) and possible(name, value)
