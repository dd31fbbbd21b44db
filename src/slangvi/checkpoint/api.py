"""Save and load: everything is checked before a file or a run is changed."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slangvi import __version__, checks
from slangvi.checkpoint._beside import check_extras, encode_extras, restored
from slangvi.checkpoint._format import VERSION, DamagedError, ForeignError, read, write
from slangvi.checkpoint._plain import RECORDS, decode, encode, record_of
from slangvi.errors import CheckpointError
from slangvi.files import put
from slangvi.optimizer import VariationalOptimizer
from slangvi.params import ParamSpec
from slangvi.params.state import layout_mismatch, possible

__all__ = ["describe", "from_state_dict", "load", "previous_path", "save", "state_dict"]

_RESERVED = ("fallback", "across_devices")


def save(path: str | os.PathLike[str], thing: Any, /, **extras: Any) -> None:
    """Save a run, so that it can go on as if it had not been interrupted.

    The file is written under another name and renamed when all of it is on the disk; the file that was there is kept as
    `<path>.previous`. A process that is killed at any moment leaves a checkpoint that loads.

    Args:
        path: of the file; missing folders are made.
        thing: an optimizer of slangvi, a state of the functional interface or of replicas, or a posterior.
        extras: what else the run consists of, by any name: schedulers and all that has a `state_dict` and a
            `load_state_dict`, torch generators or lists of them, and plain values such as `epoch=3`.

    Raises:
        CheckpointError: the run is not in a state to be saved, something cannot be held, or the disk refused.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> import slangvi, torch
        >>> opt = slangvi.SLANG(torch.nn.Linear(2, 1), num_data=10, rank=1)
        >>> slangvi.save(folder / "run.safetensors", opt, epoch=3)
        >>> about = slangvi.checkpoint.describe(folder / "run.safetensors")
        >>> about["method"], about["num_params"], about["rank"], about["step"], about["values"]
        ('SLANG', 3, 1, 0, {'epoch': 3})
    """
    target = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    if os.path.exists(target) and not os.path.isfile(target):
        raise CheckpointError(f"{path} is not a file and cannot be replaced by one. Give the path of a file.")
    for name in extras:
        if name in _RESERVED:
            raise CheckpointError(f"{name!r} is an argument of slangvi.load. Give it another name.")
    tensors: dict[str, Tensor] = {}
    about, run = _take_apart(thing, tensors)
    header = {**about, "run": run, "extras": encode_extras(extras, tensors)}
    try:
        put(target, lambda file: write(file, header, tensors), _backup_path(target))
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}. What was there before is unchanged."
        ) from error


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    /,
    *,
    fallback: bool = False,
    across_devices: bool = False,
    **extras: Any,
) -> Any:
    """Go on with a run that was saved.

    Everything is checked before anything is changed: if this raises, all is as it was.

    Args:
        path: of the file.
        into: an optimizer, which is changed; or a state or posterior like the one that was saved, or None, for which a
            new one is returned, on the device of `into` or on the CPU.
        fallback: if the file is missing or damaged take the one saved before it, with a warning.
        across_devices: allow a run saved on another type of device. It then goes on with the same numbers, but not
            bit by bit, and generators keep the state they have.
        extras: what was saved beside it, under the same names; None leaves one out.

    Returns:
        The optimizer, or the state or posterior that was saved.

    Raises:
        CheckpointError: the file is missing, damaged, not a checkpoint or of something else; the message names the
            first thing that is wrong, and what to do.
    """
    checks.flag("fallback", fallback)
    checks.flag("across_devices", across_devices)
    source, header, tensors = _open(Path(path), fallback)
    try:
        return _restore(header, tensors, into, extras, across_devices)
    except CheckpointError as error:
        raise CheckpointError(f"{source} does not fit: {error}") from error


def state_dict(thing: Any, /) -> dict[str, Any]:
    """Return a state, posterior or optimizer as plain containers and tensors, for files of your own.

    `torch.save` writes it, and `torch.load(path, weights_only=True)` reads it; it has no checksums.

    Args:
        thing: as in `save`.

    Example:
        >>> import slangvi, torch
        >>> state = slangvi.slang.init({"w": torch.zeros(3)}, rank=1)
        >>> saved = state_dict(state)
        >>> saved["method"], saved["step"], sorted(saved["tensors"])
        ('low-rank', 0, ['run.loc', 'run.momentum', 'run.prec_diag', 'run.prec_factor'])
        >>> from_state_dict(saved, state).loc
        tensor([0., 0., 0.])
    """
    tensors: dict[str, Tensor] = {}
    about, run = _take_apart(thing, tensors)
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    return {**about, "format_version": VERSION, "run": run, "tensors": copies}


def from_state_dict(saved: dict[str, Any], into: Any = None, /, *, across_devices: bool = False) -> Any:
    """Return what `state_dict` took apart: the optimizer `into`, or the state or posterior that was saved.

    Args:
        saved: as `state_dict` returned it.
        into: as in `load`.
        across_devices: as in `load`.
    """
    if not isinstance(saved, dict) or saved.get("format_version") != VERSION:
        raise CheckpointError("this was not made by slangvi.checkpoint.state_dict of this version.")
    return _restore({"extras": {}, **saved}, saved["tensors"], into, {}, across_devices)


def _restore(
    header: dict[str, Any], tensors: dict[str, Tensor], into: Any, extras: dict[str, Any], across_devices: bool
) -> Any:
    """Check everything, then put it in its place."""
    if into is not None and not isinstance(into, VariationalOptimizer) and record_of(into) is None:
        raise TypeError(
            f"into must be an optimizer of slangvi, a state or a posterior like the saved one, or None, got "
            f"{type(into).__name__}."
        )
    try:
        if into is not None:
            _check_header(header, _describe(into), across_devices)
        elif header["kind"] == "optimizer":
            raise CheckpointError(
                "it is of an optimizer. Build one on the model like the one that was saved, and pass it as `into`."
            )
        check_extras(header["extras"], extras, across_devices)
        run: Any = decode(header["run"], tensors)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"its header cannot be understood ({type(error).__name__}: {error}).") from error
    try:
        with restored(header["extras"], tensors, extras):
            if isinstance(into, VariationalOptimizer):
                if header["device"] != _describe(into)["device"]:
                    run["slangvi"]["generator"] = None  # a state of another device's generator means nothing
                into.load_state_dict(run)
                return into
            if into is None:
                return run
            _check_fields(run, into)
            return _on_devices_of(into, run)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a checkpoint says about itself, without loading it.

    Args:
        path: of the file.

    Returns:
        `format_version`; versions of `slangvi`, `torch` and `python`; `kind` ("optimizer", "state" or "posterior"),
        `method`, `num_params` (P), `rank` (L), `dtype`, `device`, `step`; `parameters` with name, shape and dtype;
        `extras`, name → class; and the plain `values` that were saved beside.
    """
    header, tensors = read(Path(path))
    hidden = ("run", "extras", "tensors")
    about = {"format_version": VERSION} | {key: value for key, value in header.items() if key not in hidden}
    extras = header["extras"].items()
    about["extras"] = {name: entry["class"] for name, entry in extras if entry["how"] != "value"}
    about["values"] = {name: decode(entry["value"], tensors) for name, entry in extras if entry["how"] == "value"}
    return about


def previous_path(path: str | os.PathLike[str]) -> Path:
    """Return where the checkpoint before this one is kept."""
    target = Path(path)
    return target.with_name(target.name + ".previous")


def _backup_path(target: Path) -> Path | None:
    """Return where to keep the file that is there: a damaged one never replaces a backup."""
    previous = previous_path(target)
    try:
        read(target, with_tensors=False)
    except DamagedError as error:
        if os.path.isfile(previous) and not isinstance(error, ForeignError):
            return None
    except CheckpointError:
        pass  # of a newer version, or not ours to read, but perhaps whole
    return previous


def _open(path: Path, fallback: bool) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Read the file, or the one before it if that is allowed and necessary."""
    previous = previous_path(Path(os.path.realpath(path)))
    try:
        return path, *read(path)
    except DamagedError as error:
        if not os.path.isfile(previous):
            raise
        try:
            found = read(previous)
        except CheckpointError as other:
            raise CheckpointError(f"{error} The one saved before it cannot be read either: {other}") from error
        if not fallback:
            raise CheckpointError(
                f"{error} The one saved before it, {previous}, is whole (step {found[0]['step']}): pass fallback=True "
                "to go on from there."
            ) from error
        warnings.warn(
            f"{error} Going on from the one saved before it, {previous}, at step {found[0]['step']}.",
            UserWarning,
            stacklevel=3,
        )
        return previous, *found


def _on_devices_of(like: Any, thing: Any) -> Any:
    """Move every tensor of a state or posterior to the device it has in another."""
    if isinstance(thing, Tensor):
        return thing.to(like.device)
    kind = record_of(thing)
    if kind is None or kind == "layout":
        return thing
    record = RECORDS[kind]
    fields = {name: _on_devices_of(getattr(like, name), getattr(thing, name)) for name in record.fields}
    return record.kind(**fields, **record.options)


def _take_apart(thing: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
    """Return what the header says about a thing, and the thing as JSON with its tensors elsewhere."""
    kind = record_of(thing)
    if isinstance(thing, VariationalOptimizer):
        if thing.has_gradients:
            raise CheckpointError(
                "the optimizer holds gradients collected since the last step, and they are not saved. Save after "
                "step(), or call discard_gradients() first."
            )
        content = thing.state_dict()
        parts = content["slangvi"]["tensors"]
    elif kind is not None and kind != "layout":
        content, parts = thing, {name: getattr(thing, name) for name in RECORDS[kind].fields}
    else:
        raise CheckpointError(
            f"a {type(thing).__name__} cannot be saved. Give an optimizer of slangvi, a state of the functional "
            "interface or of replicas, or a posterior; other things go in by name: save(path, opt, scheduler=sched)."
        )
    for name, value in parts.items():
        if isinstance(value, Tensor) and not _is_possible(name, value):
            raise CheckpointError(
                f"{name!r} holds NaN, Inf or values out of its range, which is no state to go on from. Nothing was "
                "written, and the file that is there stays."
            )
    return _describe(thing), encode(content, tensors, "run")


def _describe(thing: Any) -> dict[str, Any]:
    """Return what a header says about a thing besides its values: versions, kind, method and sizes."""
    if isinstance(thing, VariationalOptimizer):
        thing = thing._own()
        thing._sync()
        state, kind = thing._state, "optimizer"
        method, dtypes = type(thing).__name__, [str(p.dtype) for p in thing._mirror.params]
    else:
        state, method = thing, str(record_of(thing))
        kind, dtypes = "state" if hasattr(thing, "spec") else "posterior", None
    spec: ParamSpec | None = getattr(state, "spec", getattr(state, "param_spec", None))
    loc, factor, step = state.loc, getattr(state, "prec_factor", None), getattr(state, "step", None)
    names, shapes = ((), ()) if spec is None else (spec.names, spec.shapes)
    parameters = zip(names, shapes, dtypes or [str(loc.dtype)] * len(names), strict=True)
    return {
        "slangvi": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kind": kind,
        "method": method,
        "num_params": loc.shape[-1],
        "rank": None if factor is None else factor.shape[-1 if hasattr(state, "param_spec") else -2],
        "dtype": str(loc.dtype),
        "device": loc.device.type,
        "step": step.tolist() if isinstance(step, Tensor) else step,
        "parameters": [{"name": name, "shape": list(shape), "dtype": dtype} for name, shape, dtype in parameters],
    }


def _check_header(about: dict[str, Any], here: dict[str, Any], across_devices: bool) -> None:
    """Raise a `CheckpointError` on the first difference between the header of a file and the description of a thing."""
    for key, word in (("kind", "of kind"), ("method", "of method"), ("rank", "of rank L =")):
        if about[key] != here[key]:
            raise CheckpointError(f"it is {word} {about[key]!r}, and this is {word} {here[key]!r}.")
    told, own = about["parameters"], here["parameters"]
    for entry, other in zip(told, own, strict=False):
        if entry != other:
            a, b = (f"{x['name']!r} of shape {tuple(x['shape'])} and {x['dtype']}" for x in (entry, other))
            raise CheckpointError(f"parameter {a} is saved where this has {b}.")
    if about["num_params"] != here["num_params"] or len(told) != len(own):
        raise CheckpointError(
            f"it has P = {about['num_params']} in {len(told)} parameter tensors, and this has P = {here['num_params']} "
            f"in {len(own)}."
        )
    if about["dtype"] != here["dtype"]:
        raise CheckpointError(f"its state is {about['dtype']}, and this is {here['dtype']}.")
    if about["device"] != here["device"] and not across_devices:
        raise CheckpointError(
            f"it was saved on {about['device']!r}, and this is on {here['device']!r}, where the run would not go on "
            "bit by bit; across_devices=True takes it over all the same, random states apart."
        )


def _check_fields(saved: Any, here: Any, name: str = "") -> None:
    """Raise a `CheckpointError` on the first field in which a state or posterior differs from one it should be like."""
    problem = ""
    if type(saved) is not type(here):
        problem = f"{name or 'it'} is a {type(saved).__name__}, and this has a {type(here).__name__}"
    elif isinstance(saved, Tensor):
        if (saved.shape, saved.dtype) != (here.shape, here.dtype):
            problem = (
                f"{name} is {tuple(saved.shape)} {saved.dtype}, and this has {tuple(here.shape)} {here.dtype}. Use the "
                "same rank, dtype and data"
            )
        elif not _is_possible(name, saved):
            problem = f"{name} holds NaN, Inf or values out of its range"
    elif isinstance(saved, ParamSpec):
        problem = layout_mismatch(saved.names, saved.shapes, here)
    elif isinstance(saved, str) and saved != here:
        problem = f"it was made with {name}={saved!r}, and this has {name}={here!r}"
    elif kind := record_of(saved):
        for field in RECORDS[kind].fields:
            _check_fields(getattr(saved, field), getattr(here, field), field)
    if problem:
        raise CheckpointError(f"{problem}.")


def _is_possible(name: str, value: Tensor) -> bool:
    return bool(torch.isfinite(value).all()) and possible(name, value)
