"""Models under `torch.compile` run as they were written while hooks are to be called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from slangvi.rows.overlapping import Overlapping

__all__ = ["eager"]

_COMPILED_LOOP = (
    "a block with gradients began inside code under torch.compile, which would not call the hooks that tell examples "
    "apart. Compile the model alone, torch.compile(model), and not the loop around it: train(), "
    "sampled_params(train=True) and step(closure) stay outside."
)


# Not a lambda, into which the compiler would look, and fail in words of its own.
_BLOCKS = Overlapping(partial(torch.compiler.set_stance, "force_eager"))


@contextmanager
def eager() -> Iterator[None]:
    """Compiled models run as they were written inside the block: compiled code calls no hook it did not know of."""
    # Where the compiler was never imported nothing is compiled; importing it takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # The compiler lets go of code that raises, which is then run, and comes here again.
    if torch.compiler.is_compiling():
        raise RuntimeError(_COMPILED_LOOP)
    try:
        _BLOCKS.enter()
    except RuntimeError as error:
        raise RuntimeError(_COMPILED_LOOP) from error
    try:
        yield
    finally:
        _BLOCKS.leave()
