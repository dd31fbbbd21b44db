"""Models under `torch.compile` run as they were written while hooks are to be called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import torch

__all__ = ["eager"]

_COMPILED_LOOP = (
    "a block with gradients began inside code under torch.compile, which would not call the hooks that tell examples "
    "apart. Compile the model alone, torch.compile(model), and not the loop around it: train(), "
    "sampled_params(train=True) and step(closure) stay outside."
)


class _Blocks:
    """Open blocks of all optimizers, which may end in any order: the first sets the stance, the last sets it back."""

    def __init__(self) -> None:
        self.count = 0
        self.stance: AbstractContextManager[Any] | None = None
        self.lock = Lock()

    def enter(self) -> None:
        with self.lock:
            if self.count == 0:
                self.stance = torch.compiler.set_stance("force_eager")
                self.stance.__enter__()
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0 and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


_BLOCKS = _Blocks()


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
