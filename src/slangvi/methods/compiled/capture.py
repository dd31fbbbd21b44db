"""Needs of CUDA while graphs are captured: a stream of its own, an undisturbed random source, no collection."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from slangvi.errors import user_stacklevel

__all__ = ["aside", "capture_graph", "has_graphs", "keep_randomness", "warn_eager"]


def has_graphs(device: torch.device) -> bool:
    """Tell whether work on a device can be captured."""
    return device.type == "cuda"


def warn_eager(reason: str) -> None:
    """Warn that steps run eagerly, and why."""
    warnings.warn(
        f"compile=True replays no steps: {reason}. Steps run eagerly.", UserWarning, stacklevel=user_stacklevel()
    )


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that graphs are captured on; libraries keep a workspace for every stream, so there is one."""
    return torch.cuda.Stream(device)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run the block on the stream that graphs are captured on."""
    side, here = _stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@contextmanager
def keep_randomness(device: torch.device) -> Iterator[None]:
    """Leave the device's own source of random numbers where it was, and usable even if a capture fails."""
    default = torch.cuda.default_generators[device.index or 0]
    before = default.get_state()
    try:
        yield
    except BaseException:
        fresh = torch.Generator(device)
        fresh.set_state(before)
        default.graphsafe_set_state(fresh)
        raise
    default.set_state(before)


def capture_graph(
    work: Callable[[], None], device: torch.device, generator: torch.Generator | None = None
) -> torch.cuda.CUDAGraph:
    """Return a graph of what a function does; it is run once beforehand, since libraries set themselves up then.

    Args:
        work: reads and writes tensors that stay where they are.
        device: of these tensors.
        generator: source of random numbers that it draws from; its state moves on with every replay.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    collecting = gc.isenabled()
    gc.disable()  # what it frees may be a graph or a generator, and CUDA does not allow that while capturing
    try:
        with torch.cuda.graph(graph, stream=_stream(device)):
            work()
    finally:
        if collecting:
            gc.enable()
    return graph
