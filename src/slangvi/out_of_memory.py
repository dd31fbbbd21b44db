"""What to say when memory runs out: which quantity took it, and which argument makes it smaller."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from slangvi.errors import MemoryExceededError

__all__ = ["human", "out_of_memory_advice", "storage_bytes", "tensors_in"]

# How allocators say it where they do not raise torch.OutOfMemoryError: torch on a CPU, Windows, CUDA's own calls.
SHORTAGE = re.compile("can't allocate memory|not enough memory|out of memory|CU(BLAS|SOLVER)_STATUS_ALLOC_FAILED")
KNOBS = {
    "rank": "lower rank: the factor, the new one and temporaries of the update are (L, P) each",
    "matrix": "use slangvi.SLANG or slangvi.slang, whose precision is linear in P: here it is (P, P), several times",
    "rows": "lower the batch size or the number of draws (mc_samples): what is kept for the step grows with R",
    "limit": "give a memory_limit, which bounds the per-example gradients that are formed",
    "precision": "keep the model in bfloat16 or float32 rather than float64, or freeze part of it",
}


@contextmanager
def out_of_memory_advice(doing: str, state: Any, kept: Any = ()) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into one that says what to change; costs nothing otherwise.

    The message says what the block was `doing`, such as "in the update", and what the method's state takes; `kept` are
    row groups kept for the step, or anything that holds tensors.
    """
    try:
        yield
    except MemoryExceededError:
        raise
    except (RuntimeError, MemoryError) as error:
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (is_known or SHORTAGE.search(str(error))):
            raise
        raise MemoryExceededError(_message(doing, state, kept, error)) from error


def _message(doing: str, state: Any, kept: Any, error: Exception) -> str:
    factor, matrix = getattr(state, "prec_factor", None), getattr(state, "prec_matrix", None)
    rank = 0 if factor is None else factor.shape[-2]
    what, largest = ("matrix", matrix) if factor is None else ("factor", factor)
    what, largest = ("mean", state.loc) if largest is None else (what, largest)
    factor_bytes = storage_bytes([largest])
    groups = [group for group in kept if hasattr(group, "num_rows")] if isinstance(kept, Iterable) else []
    count, kept_bytes = sum(group.num_rows for group in groups), storage_bytes(tensors_in(kept))
    sizes = f"P = {state.spec.num_params:,} parameters" + (f", rank L = {rank}" if factor is not None else "")
    sizes += f", R = {count:,} gradient rows of {len(groups)} backward passes" if groups else ""
    takes = f"The {what} takes {human(factor_bytes)}"
    takes += f", what was kept of the passes for the step {human(kept_bytes)}" if kept_bytes else ""
    size = "rank" if matrix is None else "matrix"
    order = (size, "rows") if factor_bytes > kept_bytes else ("rows", size)
    knobs = "; ".join(KNOBS[key] for key in (*order, "limit", "precision") if key != "rank" or rank)
    return (
        f"memory ran out {doing}, with {sizes}. {takes}. State and weights are as they were. What helps, the largest "
        f"first: {knobs}. slangvi.estimate_memory(model, batch, rank, mc_samples) tells the bytes of each part "
        f"beforehand. The error was: {error}"
    )


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers and dataclasses, cached properties included."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        yield from tensors_in(list(thing.values()))
    elif isinstance(thing, list | tuple | set | frozenset):
        for part in thing:
            yield from tensors_in(part)
    elif is_dataclass(thing) and not isinstance(thing, type):
        yield from tensors_in(vars(thing))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind tensors, each piece counted once however many tensors share it."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def human(nbytes: float) -> str:
    """Format a number of bytes in the unit a reader likes, such as 4.7 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
