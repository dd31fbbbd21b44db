"""What both kinds of step share about graphs: which are kept, which holds the latest state, and what is said."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slangvi.errors import user_stacklevel
from slangvi.methods._awaited import settle
from slangvi.methods._graph import Captured
from slangvi.methods._launched import Launched, Numbers

__all__ = ["MOST_GRAPHS", "Runner", "Shelf", "has_graphs", "packed", "why_not_captured"]

# Graphs hold memory of their own; models that see many shapes of batch keep the latest few.
MOST_GRAPHS = 4
CapturedT = TypeVar("CapturedT", bound=Captured)
GraphT = TypeVar("GraphT")


class Shelf(Generic[GraphT]):
    """Keeps the latest graphs by what they were captured for; says once why when nothing can be captured."""

    def __init__(self) -> None:
        self.graphs: dict[object, GraphT] = {}
        self._given_up = False

    @cached_property
    def pool(self) -> Any:
        """Memory of all graphs: one step is over when the next begins."""
        return torch.cuda.graph_pool_handle()

    def _declined(self, device: torch.device) -> bool:
        """Whether graphs are out of the question there, which is said once."""
        if has_graphs(device):
            return False
        return self._give_up(f"parameters are on {device.type}, and only CUDA devices have graphs")

    def _give_up(self, reason: str) -> bool:
        self._given_up = True
        text = f"compile=True has no effect: {reason}. Steps run eagerly."
        warnings.warn(text, UserWarning, stacklevel=user_stacklevel())
        return True

    def _kept(self, key: object, capture: Callable[[], GraphT]) -> GraphT | None:
        """The graph of a key, captured when it is new; None when that fails, for good."""
        if key not in self.graphs:
            while len(self.graphs) >= MOST_GRAPHS:
                self.graphs.pop(next(iter(self.graphs)))
            try:
                self.graphs[key] = capture()
            except Exception as error:
                self._give_up(why_not_captured(error))
                return None
        return self.graphs[key]


class Runner(Shelf[CapturedT]):
    """Keeps graphs and advances states with them."""

    def __init__(self) -> None:
        super().__init__()
        # The state a graph has just made: it need not be copied back to it, and can be drawn from.
        self._made: tuple[weakref.ref[Any], Launched] | None = None

    def remember(self, state: Any, step: Launched) -> None:
        """Note that this state comes out of that step: its graph still holds it."""
        self._made = (weakref.ref(state), step)

    def like(self, state: Any) -> Tensor:
        """A vector such as the state's mean, without waiting for it."""
        made = self._made
        return made[1].graph.state[0] if made is not None and made[0]() is state else state.loc

    def _advanced(
        self,
        graph: CapturedT,
        state: Any,
        feed: Callable[[], None],
        generator: torch.Generator | None,
        numbers: Numbers,
        check: Callable[..., None],
    ) -> Launched:
        """One step of a state by a graph, which is handed the state unless it holds it, and then its data."""
        made, self._made = self._made, None
        maker = made[1] if made is not None and made[0]() is state and made[1].graph is graph else None

        def reload() -> None:
            graph.load(packed(state))  # its draws go by numbers that were sent before the step, and are there still

        def before() -> None:
            graph.finish()
            if maker is None or maker.failed:
                settle(state)  # raises what went wrong in the step that made it
                graph.load(packed(state), state.precision)
            feed()

        running = graph.advance(generator, numbers, reload, check, before)
        settle(state)  # only now, while the device works; unsettled it would hold the state before it, and so on
        return running


def has_graphs(device: torch.device) -> bool:
    """Whether anything can be captured there."""
    return device.type == "cuda"


def why_not_captured(error: BaseException) -> str:
    """What went wrong first: a capture that fails fails again when it is closed."""
    torch.cuda.synchronize()
    while error.__context__ is not None:
        error = error.__context__
    return f"the step could not be captured ({type(error).__name__}: {error})"


def packed(state: Any) -> Tensor:
    """μ, d, m and the rows of U in one tensor, (3 + L, P)."""
    return torch.cat([torch.stack([state.loc, state.prec_diag, state.momentum]), state.prec_factor])
