"""Forward and backward of the user's own loop as CUDA graphs.

Inside `sampled_params(train=True)` a call of the model whose like was seen, and whose gradients the layers' rules can
read, is replayed: one node in autograd's graph, whose backward is a graph as well and leaves the rows behind. What is
captured is the model's own `forward` under the hooks that serve otherwise. Every other call runs as it always does.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from slangvi.errors import user_stacklevel
from slangvi.grads import GradientCapture, RowGroup
from slangvi.grads.assemble import Uses
from slangvi.grads.blocks import Block
from slangvi.grads.overlapping import Overlapping
from slangvi.grads.rules.registry import is_patched
from slangvi.methods._appearance import appearance
from slangvi.methods._row_leaves import Key, ReplayedBlocks, key_of, leaves_of, rebuilt, too_large
from slangvi.methods.graph_capture import aside, capture_graph, randomness_kept
from slangvi.methods.graph_runner import MOST_GRAPHS, why_not_captured

__all__ = ["CapturedPass", "PassRunner"]

_tokens = itertools.count()
# Kinds of call that are remembered, and calls after which a graph that was not used may go.
_MOST_KINDS, _LONG_AGO = 256, 64
# Steps in a row that leave memory for rows unused, after which it is given up.
_STEPS = 8
# How far outputs of a graph may be from the model's, relative to their size: rounding and a few units at a kink.
_ALIKE = 1e-2
Kind = tuple[object, ...]


class _Threads(threading.local):
    """Of autograd: a replayed pass is one node, and handing it to its device's thread takes as long as launching it."""

    def __init__(self) -> None:
        self.one = Overlapping(lambda: torch.autograd.set_multithreading_enabled(False))


_THREADS = _Threads()


class CapturedPass:
    """Forward and backward of a model for one kind of input.

    Args:
        model: the model.
        params: canonical name → parameter; what they hold when a pass is replayed counts.
        recorder: reads the layers while the passes are captured.
        x: an example of the inputs to come; copied.
        pool: memory that is shared with graphs that never run between forward and backward.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, Tensor], recorder: GradientCapture, x: Tensor, pool: Any
    ) -> None:
        self.token = next(_tokens)
        self.model, self.recorder = model, recorder
        self.params = dict(params)
        self.x = x.detach().clone()
        self.ticket: object = None  # given to the forward pass whose backward is to come
        # Memory of rows and who has it; how much was in use since the first was lent again, and in the steps before.
        self._lent: list[tuple[list[Tensor], weakref.ref[ReplayedBlocks]]] = []
        self._most, self._needed = 0, deque[int](maxlen=_STEPS)
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        with randomness_kept(x.device), _buffers_kept(model):
            self._rehearse()
            for piece in (self.go_forward, self.go_back):
                self.graphs[piece.__name__] = capture_graph(piece, pool, x.device)

    def _rehearse(self) -> None:
        """Both beside the graphs: libraries set themselves up on first use."""
        with aside(self.x.device):
            self.go_forward()
            self.cotangent = torch.zeros_like(self.output)
            self.go_back()
        del self.flats, self.group, self.gradient  # before the same is made in the graphs' memory

    # ---- what is captured

    def go_forward(self) -> None:
        """Outputs at what the parameters hold."""
        # Leaves over the same memory: autograd's bookkeeping of the parameters, by stream, stays out of the graphs.
        self.leaves = {name: param.detach().requires_grad_() for name, param in self.params.items()}
        version = self.x._version
        with torch.enable_grad(), self.recorder.recording():
            self.output: Tensor = torch.func.functional_call(self.model, self.leaves, (self.x,))
        if not isinstance(self.output, Tensor) or self.output.shape[:1] != self.x.shape[:1]:
            raise TypeError("the model's output is no tensor with the batch as first dimension")
        if self.x._version != version:
            raise TypeError("the model changes its input in place")

    def go_back(self) -> None:
        """Rows and gradients from the output's gradient.

        Of all that is made on the way only these are held on to, in a few flat tensors: with autograd's graph go the
        inputs of the layers, and other graphs may use their memory.
        """
        with torch.enable_grad(), self.recorder.listening():
            grads = torch.autograd.grad(self.output, list(self.leaves.values()), self.cotangent, allow_unused=True)
        self.output = self.output.detach()
        totals = {name: g for name, g in zip(self.leaves, grads, strict=True) if g is not None}
        with torch.no_grad():
            self.reached = list(totals)
            self.gradient = torch.cat([g.flatten() for g in totals.values()])
            (found,) = self.recorder.collect(self.leaves, totals, len(self.x))
            group = replace(found, totals={})
            parts = self._by_dtype(group)
            self.flats = [torch.cat([x.flatten() for x in each]) for each in parts]
            self.group = rebuilt(group, self._places(parts, self.x, self.flats))

    def _by_dtype(self, group: RowGroup) -> list[list[Tensor]]:
        """What rows are made of, but for the input, which several passes may share."""
        found: dict[torch.dtype, list[Tensor]] = {}
        for key, leaf in leaves_of([group])[1].items():
            if key != key_of(self.x):
                found.setdefault(leaf.dtype, []).append(leaf)
        return list(found.values())

    def _places(self, parts: list[list[Tensor]], x: Tensor, flats: list[Tensor]) -> dict[Key, Tensor]:
        """For all that rows are made of, the same of an input and of flat tensors."""
        places: dict[Key, Tensor] = {key_of(self.x): x}
        for flat, each in zip(flats, parts, strict=True):
            pieces = flat.split([part.numel() for part in each])
            places |= {key_of(part): piece.view(part.shape) for part, piece in zip(each, pieces, strict=True)}
        return places

    # ---- what runs

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, in memory of their own."""
        self.versions = self._versions()
        self.x.copy_(x)
        self.graphs["go_forward"].replay()
        return self.output.detach().clone()

    def says(self, output: Any, x: Tensor, default: Any, before: Any) -> bool:
        """Whether the graph gives the same outputs as the model gave, on the same random numbers."""
        after = default.get_state()
        default.set_state(before)
        with torch.no_grad(), _buffers_kept(self.model):
            mine = self.forward(x)
        default.set_state(after)
        alike = isinstance(output, Tensor) and output.shape == mine.shape
        return alike and bool((output - mine).norm() <= _ALIKE * mine.norm())

    def backward(self, cotangent: Tensor) -> list[Tensor | None]:
        """Gradients of the parameters, in memory of their own; `rows` are there then."""
        if self.versions != self._versions():
            raise RuntimeError("parameters were changed in place between forward and backward.")
        self.cotangent.copy_(cotangent)
        self.graphs["go_back"].replay()
        pieces = self.gradient.clone().split([self.params[name].numel() for name in self.reached])
        found = dict(zip(self.reached, pieces, strict=True))
        return [found[name].view(p.shape) if name in found else None for name, p in self.params.items()]

    def _versions(self) -> list[int]:
        return [param._version for param in self.params.values()]

    def rows(self, x: Tensor) -> RowGroup:
        """Rows of the latest backward pass, given a copy of its input."""
        place, flats = self._room()
        torch._foreach_copy_(flats, self.flats)
        blocks = ReplayedBlocks(self, x, flats)
        self._lent[place : place + 1] = [(flats, weakref.ref(blocks))]
        self._most = max(self._most, place + 1)
        return RowGroup(len(x), blocks, {})

    def _room(self) -> tuple[int, list[Tensor]]:
        """Memory for rows, and its number: the first of those whose rows are gone, or new.

        The rows of one step then lie where those of the step before lay, and a graph can read them there. Rows are gone
        when nobody holds them; what was taken out of them must be copied before. What some steps in a row did not need
        is given up; in one of them passes may have been checked, and not replayed.
        """
        place = next((k for k, (_, holder) in enumerate(self._lent) if holder() is None), len(self._lent))
        if place == 0:
            self._needed.append(self._most)
            self._most = 0
            if len(self._needed) == _STEPS:
                del self._lent[max(self._needed) :]
        if place < len(self._lent):
            return place, self._lent[place][0]
        return place, [torch.empty_like(flat) for flat in self.flats]

    def blocks(self, x: Tensor, flats: list[Tensor]) -> Mapping[str, Block]:
        """The blocks over other memory of the same make."""
        return rebuilt(self.group, self._places(self._by_dtype(self.group), x, flats)).blocks


class PassRunner:
    """Replays the calls of a model where that is possible, and says once why when nothing can be captured.

    Args:
        model: the model.
        params: canonical name → parameter.
        main: what records the passes that are not replayed, and collects all of them.
        recorder: what reads the layers while passes are captured.
        pool: gives the memory that graphs share.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        main: GradientCapture,
        recorder: GradientCapture,
        pool: Callable[[], Any],
    ) -> None:
        self.model, self.params, self.main, self.recorder = model, dict(params), main, recorder
        self._pool = pool
        self._tensors = list(self.params.values())
        self._inferred = {id(param) for param in self._tensors}
        self.passes: dict[Kind, CapturedPass] = {}
        self._patterns: dict[Kind, tuple[Uses, int]] = {}  # uses of a pattern, and how often rules could read it
        self._latest: tuple[Kind, CapturedPass, Uses] | None = None
        self._asked: list[Kind] = []  # calls of this block that were not replayed; () for those that never can be
        self._used: dict[Kind, int] = {}
        self._calls = 0
        self._given_up = False

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Calls of the model inside the block are replayed where that is possible."""
        if self._given_up or is_patched(self.model):
            yield
            return
        self._asked.clear()
        patch = self.model.__dict__["forward"] = _Forward(self)
        self.main.announcer = patch
        try:
            with _THREADS.one.block() if self.passes else nullcontext():
                yield
        finally:
            if self.model.__dict__.get("forward") is patch:
                del self.model.__dict__["forward"]
            self.main.announcer = None
            for known in self.passes.values():
                known.ticket = None

    def note(self, groups: list[RowGroup]) -> None:
        """See what the passes of a block were served by."""
        asked, self._asked = self._asked, []
        assembler = self.main.assembler
        if assembler.rules_failed:
            assembler.rules_failed = False
            self.passes.clear()
            self._patterns.clear()
            self._latest = None
            return
        told = asked and len(asked) == len(groups) == len(assembler.recent)  # else some were replayed
        if told and not too_large(leaves_of(groups)[1]):
            self._learn(asked, assembler.recent)

    def _learn(self, kinds: list[Kind], recent: list[Uses]) -> None:
        """Rules could read these calls."""
        if len(self._patterns) > _MOST_KINDS:
            self._patterns = {kind: self._patterns[kind] for kind in self.passes if kind in self._patterns}
        for kind, uses in zip(kinds, recent, strict=True):
            if kind:
                self._patterns[kind] = (uses, self._patterns.get(kind, (None, 0))[1] + 1)
        self._latest = None

    def call(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What is done in place of the model's forward."""
        # Rows of a pass that is not replayed are read off by hooks, which a replay takes away.
        self._calls += 1
        listening = self.main.active and torch.is_grad_enabled()
        kind = self._kind(args, kwargs) if listening and not self._asked else None
        latest = self._latest
        if kind is not None and (latest is None or latest[0] != kind):
            latest = self._latest = self._known(kind, args[0])
        # A second call before the first has gone back would take its memory, which all graphs share.
        busy = any(known.ticket for known in self.passes.values())
        if kind is None or latest is None or busy or not self.main.assembler.unchecked(latest[2]):
            return self._recorded(kind, original, args, kwargs) if listening else original(*args, **kwargs)
        known = latest[1]
        known.ticket = object()
        self._used[kind] = self._calls
        self.main.listen_at_leaves(False)
        output = _Replayed.apply(self.main, known, known.ticket, args[0], *self._tensors)  # type: ignore[no-untyped-call]
        self.main.replayed_output = output
        return output

    def _recorded(self, kind: Kind | None, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that is not replayed."""
        self._asked.append(())
        self.main.note_surroundings("", announced=True)
        known = None if kind is None or any(p.ticket for p in self.passes.values()) else self.passes.get(kind)
        default = None if known is None else torch.cuda.default_generators[args[0].device.index or 0]
        before = None if default is None else default.get_state()
        output = original(*args, **kwargs)
        if known is not None and not known.says(output, args[0], default, before):
            self._forget(kind)
        # A forward that leaves its mark on the model has to run every time.
        elif kind is not None and self._kind(args, kwargs) == kind:
            self._asked[-1] = kind
        return output

    def _forget(self, kind: Kind | None) -> None:
        """A graph that no longer does what the model does; what the model reads elsewhere has changed."""
        for known in (self.passes, self._patterns, self._used):
            known.pop(kind, None)  # type: ignore[arg-type]
        self._latest = None

    def _kind(self, args: Any, kwargs: Any) -> Kind | None:
        """What must agree for a call to fit a graph; None for calls that never do."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is not Tensor or x.requires_grad or x.layout is not torch.strided or x.is_inference():
            return None
        if torch.is_autocast_enabled(x.device.type) or _has_any_global_hook():
            return None
        if not (x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))):
            return None
        look = appearance(self.model, self._inferred)
        return None if look is None else (x.shape, x.stride(), x.dtype, x.device, *look)

    def _known(self, kind: Kind, x: Tensor) -> tuple[Kind, CapturedPass, Uses] | None:
        """The pass of a kind, captured when it is the third of it."""
        uses, read = self._patterns.get(kind, (Uses(), 0))
        if kind not in self.passes and (read < 2 or not self._captured(kind, x)):
            return None
        return kind, self.passes[kind], uses

    def _captured(self, kind: Kind, x: Tensor) -> bool:
        """Capture a pass; False when there is no room, or when that fails, which is for good."""
        if len(self.passes) >= MOST_GRAPHS:
            oldest = min(self.passes, key=lambda known: self._used.get(known, 0))
            if self._calls - self._used.get(oldest, 0) < _LONG_AGO:
                return False  # they take turns; capturing over and over would cost more than it saves
            self.passes.pop(oldest)
            self._used.pop(oldest, None)
        patch = self.model.__dict__.pop("forward")
        try:
            with self.main.listening(False):
                self.passes[kind] = CapturedPass(self.model, self.params, self.recorder, x, self._pool())
        except Exception as error:
            self._given_up = True
            text = f"compile=True replays the step, but not forward and backward: {why_not_captured(error)}."
            warnings.warn(text, UserWarning, stacklevel=user_stacklevel())
        finally:
            self.model.__dict__["forward"] = patch
        return kind in self.passes


class _Forward:
    """Stands in for a model's forward inside a block; in a copy of the model it is the model's own again."""

    def __init__(self, runner: PassRunner) -> None:
        self.runner, self.original = runner, runner.model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.call(self.original, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.runner.model, "forward")  # of what the model becomes elsewhere


class _Replayed(torch.autograd.Function):
    """The model as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, main: GradientCapture, known: CapturedPass, ticket: object, x: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.main, ctx.known, ctx.ticket, ctx.x = main, known, ticket, main.snapshot(x)
        return known.forward(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        if ctx.known.ticket is not ctx.ticket or torch.is_grad_enabled():
            raise RuntimeError(
                "compile=True replays forward and backward, so backward() can be called once for each forward pass, "
                "inside its sampled_params block, without create_graph. Build the optimizer with compile=False for "
                "this loop."
            )
        ctx.known.ticket = None
        grads = ctx.known.backward(cotangents[0])
        if _accumulates(ctx):
            ctx.main.current_backward().replayed.append(ctx.known.rows(ctx.x))
        return None, None, None, None, *grads


def _accumulates(node: Any) -> bool:
    """Whether gradients go on to p.grad; torch.autograd.grad is no training signal and leaves it alone."""
    try:
        return any(leaf and torch._C._will_engine_execute_node(leaf) for leaf, _ in node.next_functions)
    except RuntimeError:  # torch does not answer for leaves that torch.autograd.grad was asked about
        return False


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """What forward does to buffers inside the block is undone."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                # Nothing has happened: a pass on its way may still need them.
                with torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
                    buffer.copy_(value)
