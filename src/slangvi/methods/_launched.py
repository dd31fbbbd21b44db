"""What goes into a captured step and what comes out of it, once it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slangvi.priors import Prior

if TYPE_CHECKING:
    from slangvi.methods._graph import Captured

__all__ = ["Launched", "Numbers", "Outcome", "Setup"]


class Numbers(NamedTuple):
    """What changes from step to step.

    Args:
        lr: α.
        precision_lr: β.
        correction: 1 − γᵗ.
    """

    lr: float
    precision_lr: float
    correction: float


@dataclass
class Outcome:
    """What a finished step can tell.

    Args:
        ritz: leading eigenvalues (L,), or a matrix that has them (L, L).
        residual: of their pairs, relative to the largest.
        total: trace of (1−β)UUᵀ + βĜ.
        clipped: Σ of what rounding would have taken from d⁺ below its bound.
        mean_log_likelihood: over all rows.
        num_rows: R.
    """

    ritz: Tensor
    residual: float
    total: float
    clipped: float
    mean_log_likelihood: float
    num_rows: int


class Launched:
    """A step under way, or over.

    Args:
        graph: what runs it.
        source: where its draws come from.
        before: the source's state before them.
        reload: calls `graph.load` with the state before the step.
        check: `check(what, *vectors)` raises when a vector is not finite.
    """

    def __init__(
        self,
        graph: Captured,
        source: torch.Generator,
        before: Tensor,
        reload: Callable[[], None],
        check: Callable[..., None],
    ) -> None:
        self.graph, self.source, self.before, self.reload, self.check = graph, source, before, reload, check
        self.stream = torch.cuda.current_stream(graph.state.device)
        self.tensors: Tensor | None = None  # see `kept`
        self._done: Outcome | None = None
        self._error: Exception | None = None

    def end(self, how: Callable[[Launched], Outcome]) -> None:
        """Find out how it went; an error is kept until the outcome is asked for."""
        try:
            self._done = how(self)
        except Exception as error:
            self._error = error
        del self.reload  # with it goes the state before

    def kept(self) -> Tensor:
        """The state after it in memory of its own: loc, prec_diag, momentum and the factor's rows, (3 + L, P).

        Copied when it is first asked for, at the latest by its graph, before that overwrites it: while a step runs
        there is one copy less.
        """
        if self.tensors is None:
            with torch.cuda.stream(self.stream):  # of the steps, whoever asks: the next one must not overtake the copy
                self.tensors = self.graph.state.clone()
        return self.tensors

    @property
    def failed(self) -> bool:
        """Whether it is known to have failed."""
        return self._error is not None

    def outcome(self) -> Outcome:
        """How it went, once it is over; raises what a step that waits would have raised."""
        if self.graph.running is self:
            self.graph.finish()
        if self._error is not None:
            raise self._error
        assert self._done is not None
        return self._done


class Setup(NamedTuple):
    """What every captured step starts from.

    Args:
        state: μ, d, m and U by rows in one tensor, (3 + L, P); copied.
        prior: λ and μ₀.
        num_data: N over the temperature.
        momentum: γ.
        generator: source of the draws; None is the device's own.
        pool: memory that is shared with graphs that never run at the same time.
    """

    state: Tensor
    prior: Prior
    num_data: float
    momentum: float
    generator: torch.Generator | None
    pool: Any
