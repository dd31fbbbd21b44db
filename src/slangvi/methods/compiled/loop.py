"""Steps of an optimizer by replaying graphs: rows of the user's own passes are copied in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision
from slangvi.methods.compiled.capture import has_graphs, warn_eager
from slangvi.methods.compiled.captured import CapturedStep, Numbers, Replayed
from slangvi.priors import Prior
from slangvi.rows.factored import FactoredGradients, RowGroup
from slangvi.types import Routes

__all__ = ["LoopSteps"]

MOST_GRAPHS = 8


class LoopSteps:
    """Takes steps of an optimizer by graphs where it can: the second step of each kind of rows is captured.

    Args:
        rank: L.
        routes: what to form.
        num_data: N, divided by the temperature.
    """

    def __init__(self, rank: int, routes: Routes, num_data: float) -> None:
        self.rank, self.routes, self.num_data = rank, routes, num_data
        self._graphs: OrderedDict[Any, tuple[CapturedStep, list[Tensor]]] = OrderedDict()
        self._seen: set[Any] = set()
        self._warned = False

    def step(self, state: Any, groups: Sequence[RowGroup], numbers: Numbers | None, prior: Prior) -> Replayed | None:
        """Return the step by graphs; None if it has to be taken eagerly.

        Args:
            state: before the step, a `slang.State`.
            groups: rows, one group for each backward pass.
            numbers: rates of the step; None where groups of parameters differ.
            prior: λ and μ₀.
        """
        device = state.loc.device
        if not has_graphs(device):
            self._warn(f"it needs a CUDA device, and the parameters are on {device.type}")
            return None
        if numbers is None:
            self._warn("parameter groups differ in lr, precision_lr or momentum")
            return None
        tensors: dict[Any, Tensor] = {}
        kind = (state.spec, state.loc.dtype, device, prior.precision.data_ptr(), describe(list(groups), tensors))
        if kind not in self._seen:
            self._seen.add(kind)
            return None
        if kind not in self._graphs:
            try:
                self._capture(kind, state, groups, tensors, prior)
            except NumericalError:  # the eager step says what is wrong
                self._seen.discard(kind)
                return None
            except (RuntimeError, TypeError) as error:
                self._seen.discard(kind)
                self._warn(f"the step cannot be captured ({type(error).__name__}: {str(error).splitlines()[0]})")
                return None
        self._graphs.move_to_end(kind)
        graph, places = self._graphs[kind]
        for place, value in zip(places, tensors.values(), strict=True):
            place.copy_(value)
        return graph.replay(state.tensors, state.precision, numbers)

    def _capture(
        self, kind: Any, state: Any, groups: Sequence[RowGroup], tensors: dict[Any, Tensor], prior: Prior
    ) -> None:
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        places = {key: value.clone() for key, value in tensors.items()}
        static = rebuild(list(groups), places)

        def gather(precision: LowRankPrecision, loc: Tensor, frozen: bool) -> tuple[FactoredGradients, None]:
            # Blocks keep what they have made of their tensors, so that the graph needs blocks of its own.
            return FactoredGradients(state.spec, rebuild(static, None), loc, self.routes), None

        graph = CapturedStep(state.tensors, state.precision, state.spec, prior, self.num_data, gather)
        self._graphs[kind] = (graph, list(places.values()))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warn_eager(reason)


def memory_key(tensor: Tensor) -> Any:
    """Return what tells tensors over the same memory: a weight and its bias may share their δ."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.numel(), tensor.dtype
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def describe(thing: Any, tensors: dict[Any, Tensor]) -> Any:
    """Return the structure of rows without addresses or values, and note their tensors, each memory once.

    Args:
        thing: groups, blocks, or what they are made of.
        tensors: gets memory → tensor.
    """
    if isinstance(thing, Tensor):
        tensors.setdefault(memory_key(thing), thing)
        return tuple(thing.shape), thing.dtype, list(tensors).index(memory_key(thing))
    if isinstance(thing, list | tuple):
        return tuple(describe(each, tensors) for each in thing)
    if isinstance(thing, dict):
        return tuple((name, describe(each, tensors)) for name, each in thing.items())
    if is_dataclass(thing):
        return type(thing).__name__, *(describe(getattr(thing, item), tensors) for item in _arguments(thing))
    return repr(thing) if not callable(thing) else repr(getattr(thing, "keywords", thing))


def rebuild(thing: Any, places: dict[Any, Tensor] | None) -> Any:
    """Return rows anew over other memory, or over their own."""
    if isinstance(thing, Tensor):
        return thing if places is None else places[memory_key(thing)].view(thing.shape)
    if isinstance(thing, list | tuple):
        return type(thing)(rebuild(each, places) for each in thing)
    if isinstance(thing, dict):
        return {name: rebuild(each, places) for name, each in thing.items()}
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{item: rebuild(getattr(thing, item), places) for item in _arguments(thing)})
    return thing


def _arguments(thing: Any) -> list[str]:
    """Return the fields a dataclass is made from, without what it keeps for later."""
    return [item.name for item in fields(thing) if item.init]
