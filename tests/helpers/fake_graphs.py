"""CUDA graphs on a CPU: graphs are operations that were written down, and streams and events do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.fake_cuda import Tape
from slangvi.methods.compiled import capture, loop, pure


class TapedGraph:
    """A graph of operations, and not of Python."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.replays = 0
        TapedGraph.made.append(self)

    made: ClassVar[list[TapedGraph]] = []
    capturing: ClassVar[bool] = False

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.replays += 1
        self.tape.play()


@contextmanager
def record_tape(graph: TapedGraph, stream: object = None) -> Iterator[None]:
    graph.tape, TapedGraph.capturing = Tape(graph.generators, []), True
    try:
        with graph.tape:
            yield
    finally:
        TapedGraph.capturing = False


class Unwritten(TorchDispatchMode):
    """Operations as a tape sees them: with any mode, torch writes views of vmapped tensors in another way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TapedGraph]]:
    """Steps with compile=True are captured and replayed on the CPU; returns the graphs that were made."""
    monkeypatch.setattr(TapedGraph, "made", [])
    stream = SimpleNamespace(wait_stream=lambda other: None)
    own = SimpleNamespace(get_state=torch.get_rng_state, set_state=torch.set_rng_state)
    own.graphsafe_set_state = lambda other: torch.set_rng_state(other.get_state())
    own.manual_seed = lambda seed: own
    for name, value in {
        "CUDAGraph": TapedGraph,
        "graph": record_tape,
        "Stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_generators": (own,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (loop, pure):
        monkeypatch.setattr(module, "has_graphs", lambda device: True)
    capture._stream.cache_clear()
    with Unwritten():
        yield TapedGraph.made
