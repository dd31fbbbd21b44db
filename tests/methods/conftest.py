"""CUDA graphs on a CPU: capturing keeps the function, replaying calls it again; everything else does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from slangvi import likelihoods
from slangvi.methods import _graph
from slangvi.methods._graph_functional import GraphRunner
from slangvi.methods._graph_loop import LoopRunner


class FakeCuda:
    """What was captured and replayed, and whether that goes on right now: no value may be looked at then."""

    def __init__(self) -> None:
        self.replayed, self.captured, self.busy = [], [], False

    @contextmanager
    def working(self) -> Iterator[None]:
        self.busy = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.busy = False

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object = None) -> Iterator[None]:
        """Unlike the real one this runs the block, so what it changes is put back: random state, state, parameters."""
        caller = sys._getframe(2).f_locals  # behind contextlib, the method that captures
        owner, graph.piece, graph.cuda = caller["self"], caller["piece"], self
        changed = [owner.state, *getattr(owner, "params", [])]
        kept, random = [x.clone() for x in changed], torch.get_rng_state()
        with self.working():
            yield
            torch._foreach_copy_(changed, kept)
        torch.set_rng_state(random)
        self.captured.append(graph.piece.__name__)


class FakeGraph:
    def pool(self, *generators: torch.Generator) -> object:
        return self

    register_generator_state = pool

    def replay(self) -> None:
        self.cuda.replayed.append(self.piece.__name__)
        with self.cuda.working():
            self.piece()


class FakeStream:
    """Streams and events: all work is done when it is asked for."""

    def __init__(self, *args: object, **options: object) -> None:
        self.record = self.synchronize = self.wait_stream = lambda *others: None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Steps with compile=True are captured and replayed, on the CPU."""
    fake = FakeCuda()
    replacements = {"CUDAGraph": FakeGraph, "graph": fake.graph, "Event": FakeStream, "Stream": FakeStream}
    replacements |= {"stream": nullcontext, "current_stream": FakeStream, "synchronize": lambda: None}
    # The device's own source is torch's global one here.
    own = SimpleNamespace(get_state=torch.get_rng_state, set_state=torch.set_rng_state)
    own.graphsafe_set_state = lambda other: torch.set_rng_state(other.get_state())
    for name, value in (replacements | {"default_generators": (own,)}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_graph, "_pinned", lambda size: torch.zeros(size, dtype=torch.float64))
    monkeypatch.setattr(likelihoods, "_capturing", lambda values: fake.busy)
    for runner in (GraphRunner, LoopRunner):
        monkeypatch.setattr(runner, "_declined", lambda self, _, ask=runner._declined: ask(self, torch.device("cuda")))
    return fake
