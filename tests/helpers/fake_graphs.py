"""CUDA graphs on a CPU: capturing keeps the function, replaying calls it again; everything else does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from helpers.fake_cuda import Tape
from slangvi import likelihoods
from slangvi.linalg import lowrank, noise, products
from slangvi.methods import _graph, _graph_host, _graph_loop, _graph_pieces, graph_runner


class FakeCuda:
    """What was captured and replayed, and whether that goes on right now: no value may be looked at then."""

    def __init__(self) -> None:
        self.replayed, self.captured, self.busy = [], [], False
        self.ways = []  # by which of several graphs those steps went that are replayed in one go

    @contextmanager
    def working(self) -> Iterator[None]:
        self.busy = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.busy = False

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object = None, stream: object = None) -> Iterator[None]:
        """Unlike the real one this runs the block, so what it changes is put back: random state, state, parameters."""
        graph.piece, graph.cuda = sys._getframe(2).f_locals["piece"], self  # behind contextlib, who captures
        owner = getattr(graph.piece, "__self__", None)
        changed = [owner.state, owner.squares, *getattr(owner, "params", [])] if hasattr(owner, "state") else []
        kept, random = [x.clone() for x in changed], torch.get_rng_state()
        with self.working(), FakeStream.capturing(stream):
            yield
            for x, before in zip(changed, kept, strict=True):
                x.copy_(before)
        torch.set_rng_state(random)
        name = graph.piece.__name__
        self.captured.append("whole" if name in _graph._WAYS else name)


class FakeGraph:
    def pool(self, *generators: torch.Generator) -> object:
        return self

    register_generator_state = pool

    def replay(self) -> None:
        name = self.piece.__name__
        whole = name in _graph._WAYS
        self.cuda.ways += [name] * whole
        self.cuda.replayed.append("whole" if whole else name)
        with self.cuda.working():
            self.piece()


class TapedGraph:
    """A graph of operations, and not of Python."""

    def __init__(self) -> None:
        self.generators = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.cuda.replayed.append(self.name)
        self.tape.play()


class TapedCuda(FakeCuda):
    @contextmanager
    def graph(self, graph: TapedGraph, pool: list[Tape], stream: FakeStream) -> Iterator[None]:
        graph.name, graph.cuda = sys._getframe(2).f_locals["piece"].__name__, self
        graph.tape, self.busy = Tape(graph.generators, pool), True
        try:
            with graph.tape, FakeStream.capturing(stream):
                yield
        finally:
            self.busy = False
        self.captured.append(graph.name)


def one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    """Without a look at the numbers, which torch takes on a CPU only."""
    return index.new_zeros(*index.shape, size).scatter_(-1, index.unsqueeze(-1), 1)


class FakeStream:
    """Streams and events: all work is done when it is asked for. What may wait for what in a capture is watched."""

    now: ClassVar[list[FakeStream]] = []  # the current one is the last
    captured: ClassVar[set[FakeStream] | None] = None  # those that take part in the capture that goes on
    alone: ClassVar[set[FakeStream]] = set()  # those of them that nobody has waited for since

    def __init__(self, *args: object, **options: object) -> None:
        self.record = self.synchronize = lambda *others: None

    def wait_stream(self, other: FakeStream) -> None:
        if FakeStream.captured is None:
            return
        if other not in FakeStream.captured:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        FakeStream.captured.add(self)
        FakeStream.alone.add(self)
        FakeStream.alone.discard(other)

    @staticmethod
    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        FakeStream.now.append(stream)
        try:
            yield
        finally:
            FakeStream.now.pop()

    @staticmethod
    @contextmanager
    def capturing(stream: FakeStream) -> Iterator[None]:
        FakeStream.captured, FakeStream.alone = {stream}, set()
        try:
            with FakeStream.on(stream):
                yield
            if FakeStream.alone - {stream}:
                raise RuntimeError("capture was not joined to the original stream")
        finally:
            FakeStream.captured = None


def pretend(fake: FakeCuda, graph: type, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    replacements = {"CUDAGraph": graph, "graph": fake.graph, "Event": FakeStream, "Stream": FakeStream}
    first = FakeStream()
    monkeypatch.setattr(FakeStream, "now", [first])
    replacements |= {"stream": FakeStream.on, "current_stream": lambda device=None: FakeStream.now[-1]}
    replacements["synchronize"] = lambda: None
    replacements["memory_snapshot"] = list
    replacements["graph_pool_handle"] = tuple
    # The device's own source is torch's global one here.
    own = SimpleNamespace(get_state=torch.get_rng_state, set_state=torch.set_rng_state)
    own.graphsafe_set_state = lambda other: torch.set_rng_state(other.get_state())
    own.manual_seed = lambda seed: own  # where there is a GPU, torch.manual_seed comes by, the global source seeded
    for name, value in (replacements | {"default_generators": (own,)}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (_graph_pieces, _graph_host):
        monkeypatch.setattr(module, "pinned", lambda size: torch.zeros(size, dtype=torch.float64))
    monkeypatch.setattr(likelihoods, "_capturing", lambda values: fake.busy)
    for module in (graph_runner, _graph_loop):
        monkeypatch.setattr(module, "has_graphs", lambda device: True)
    return fake


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Steps with compile=True are captured and replayed, on the CPU."""
    return pretend(FakeCuda(), FakeGraph, monkeypatch)


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> TapedCuda:
    """The same with graphs that are memory and operations alone: slower, and as forgetful as on a device."""
    monkeypatch.setattr(F, "one_hot", one_hot)
    fake = pretend(TapedCuda(), TapedGraph, monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", list)
    monkeypatch.setattr(noise, "MUCH", 1 << 62)  # no tape sees what other threads do
    # On a CPU it is looked at whether a factorisation went well.
    monkeypatch.setattr(lowrank, "is_plain", lambda x, ask=products.is_plain: not fake.busy and ask(x))
    return fake


@pytest.fixture
def replays(taped):
    """How many backward passes have been replayed since it was asked last."""
    asked = [0]

    def count():
        before, asked[0] = asked[0], taped.replayed.count("go_back")
        return asked[0] - before

    return count
