"""Run models as they were written, and backward in the calling thread, while hooks are to be called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, local
from typing import Any

import torch

__all__ = ["backward_in_this_thread", "run_eagerly"]

_COMPILED_LOOP = (
    "a block with gradients began inside code under torch.compile, which would not call the hooks that tell examples "
    "apart. Compile the model alone, torch.compile(model), and not the loop around it: train(), "
    "sampled_params(train=True) and step(closure) stay outside."
)
_lock = Lock()
_blocks = local()  # blocks that are open in a thread, and what was set there before the first
_open: list[AbstractContextManager[Any]] = []  # the stance, once for each block that has begun and not ended


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled models as they were written inside the block: compiled code calls no hook it did not know of.

    The first of several blocks to begin tells the compiler so, the last to end takes it back.
    """
    # Where the compiler was never imported nothing is compiled; importing it takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # The compiler lets go of code that raises, which is then run, and comes here again.
    if torch.compiler.is_compiling():
        raise RuntimeError(_COMPILED_LOOP)
    with _lock:
        if not _open:
            try:
                stance = torch.compiler.set_stance("force_eager")
                stance.__enter__()
            except RuntimeError as error:
                raise RuntimeError(_COMPILED_LOOP) from error
        _open.append(_open[0] if _open else stance)
    try:
        yield
    finally:
        with _lock:
            stance = _open.pop()
            if not _open:
                stance.__exit__(None, None, None)


@contextmanager
def backward_in_this_thread() -> Iterator[None]:
    """Let backward passes of a GPU run in the calling thread: one of their own would wait for Python at every hook.

    Blocks may overlap without being nested; the last to end in a thread restores what was set before the first.
    """
    if not getattr(_blocks, "count", 0):
        _blocks.count, _blocks.setting = 0, torch.autograd.set_multithreading_enabled(False)
    _blocks.count += 1
    try:
        yield
    finally:
        if getattr(_blocks, "count", 0):  # not so where another thread ends the block
            _blocks.count -= 1
            if not _blocks.count:
                _blocks.setting.__exit__(None, None, None)
