"""What CUDA asks of those who capture graphs: a stream of its own, an undisturbed random source, no collection."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from slangvi.linalg.constants import handed_out
from slangvi.live_bytes import LiveBytes

__all__ = ["aside", "beside", "capture_graph", "joined", "randomness_kept", "rehearsing", "reserved"]

# Torch's allocator takes tensors up to the first size from pieces of 2 MB, and up to the second from pieces of 20 MB.
_SMALL, _LARGE, _PIECE = 1 << 20, 10 << 20, 20 << 20


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """The device's own source is left where it was, and usable even when a capture fails."""
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


@lru_cache(maxsize=16)
def _stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """One for each use: "side" is what graphs are captured on, "branch" what runs beside that."""
    return torch.cuda.Stream(device)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On the stream that graphs are captured on; one for all, since libraries keep a workspace for every stream."""
    side, here = _stream(device, "side"), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


class _Taken(LiveBytes):
    """Memory of a device's tensors that are not small, but for that of the branch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._branch, self._largest = device, _stream(device, "branch"), 0

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is taken where graphs are captured; branches have memory of their own, and so has the host."""
        large = storage.device == self._device and storage.nbytes() > _SMALL
        counts = large and torch.cuda.current_stream(self._device) != self._branch
        if counts:
            self._largest = max(self._largest, storage.nbytes())
        return counts

    @property
    def needed(self) -> int:
        """Bytes for all, and some for what finds no place between others that are in use."""
        return self.peak + min(self._largest, _PIECE)


@contextmanager
def rehearsing(device: torch.device) -> Iterator[_Taken]:
    """Aside, with a count of the memory that the same will need in a graph."""
    with aside(device), _Taken(device) as taken:
        yield taken


def reserved(size: int, pool: Any, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """Memory for graphs to come, in one piece: tensors of some megabytes leave much of pieces of 20 MB unused.

    Args:
        size: bytes that they need at the worst moment.
        pool: of the graphs; what is free in it already is not reserved again.
        device: theirs.

    Returns:
        What holds the memory, to be kept until they are captured; None where there is enough.
    """
    try:
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    except RuntimeError:  # of another allocator, which has no pieces
        return None
    free = sum(int(s["total_size"]) - int(s["allocated_size"]) for s in segments if s["total_size"] > _LARGE)
    if size - free < _LARGE:
        return None

    def take() -> None:
        torch.empty(size - free, dtype=torch.uint8, device=device)[:1].zero_()  # a graph of nothing is warned of

    return capture_graph(take, pool, device)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is in the block runs beside what follows it, until that is `joined`.

    For work that leaves most of a GPU idle and is not needed at once. Everything it reads must be held on to until it
    has been joined: memory that is given up before may be written by what runs beside it.
    """
    branch = _stream(device, "branch")
    branch.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(branch):
        yield


def joined(device: torch.device) -> None:
    """Go on when what runs `beside` is done."""
    torch.cuda.current_stream(device).wait_stream(_stream(device, "branch"))


def capture_graph(
    piece: Callable[[], None], pool: Any, device: torch.device, generator: torch.Generator | None = None
) -> torch.cuda.CUDAGraph:
    """A graph of what a method does, in memory shared with others that never run at the same time."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    collecting = gc.isenabled()
    gc.disable()  # what it frees may be a graph or a generator, and CUDA does not allow that while capturing
    try:
        with handed_out() as constants, torch.cuda.graph(graph, pool=pool, stream=_stream(device, "side")):
            piece()
        graph.constants = constants  # type: ignore[attr-defined]  # read by every replay
    finally:
        if collecting:
            gc.enable()
    return graph
