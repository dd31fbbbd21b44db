"""SLANG's step as captured CUDA graphs.

A step of a small network is hundreds of kernels of a few microseconds; launched one by one they leave the GPU idle most
of the time. Captured once and replayed, they run back to back. `_graph_pieces` has what is captured.

The step exists twice: as one graph, with a fixed number of products for the eigenproblem, which suffices when the
previous factor is a good start; and in two halves with the eigenproblem solved on the CPU between them, to any
tolerance. The first is tried, and repeated the second way on the same draws when its residual or anything else is not
as it should be. A few numbers a step come back to the CPU; with them come the checks, so a step that is not finite is
refused as ever. They are waited for when the outcome is looked at, at the latest by the next step: until then Python
runs beside the device.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from slangvi.linalg import LowRankPrecision, krylov
from slangvi.linalg.products import column_squares
from slangvi.linalg.subspace import ritz
from slangvi.linalg.topk import TOLERANCE, relative_residual
from slangvi.methods._graph_host import flaws, reach, root_of
from slangvi.methods._graph_pieces import Pieces
from slangvi.methods._launched import Launched, Numbers, Outcome, Setup

__all__ = ["Captured"]

# Looks at the residual before the eigenproblem is left to the eager routes.
_LOOKS = krylov.GPU_LOOKS
# Steps in one go, by rounds of the eigenproblem; the lack of orthogonality allowed in them, and the most steps that are
# taken in halves after all have failed.
_WAYS = ("once", "twice", "thrice")
_TILT = 1e-6
# Share of the residual allowed that is aimed at when there is a choice.
_MARGIN = 0.5
_MOST_DOUBTS = 4
# Share of the largest number within which the mean is known to stay finite, whatever is rounded on the way.
_FAR = 1e-3
# What comes back of a step in one go beside its small matrices.
_TOLD = 8


class Captured(Pieces):
    """The graphs of one step for one layout, and which of them a step goes by.

    Args:
        setup: see `Setup`.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._doubts = self._failures = 0  # steps to be taken in halves before the whole is tried again
        # Rounds of the eigenproblem, steps in a row that could have done with one less, and how many of them it takes.
        self._rounds, self._good, self._patience, self._lowered = 2, 0, 1, False
        self._horizon = _FAR * torch.finfo(self.state.dtype).max
        self.default = torch.cuda.default_generators[self.state.device.index or 0]
        self.running: Launched | None = None  # the latest step, as long as nobody knows how it went
        # The step whose outcome is in `state`; if nobody else holds it, nobody can ask for that.
        self._held: Callable[[], Launched | None] = lambda: None

    def load(self, state: Tensor, precision: LowRankPrecision | None = None) -> None:
        """Start from a state that did not come from here, or once more from the one that came before a step.

        Args:
            state: packed, (3 + L, P).
            precision: what the first draw needs; None where that was sent for the same state already.
        """
        self._spare()
        self._held = lambda: None
        self.state.copy_(state)
        self.squares.copy_(column_squares(self.state[3:]))
        if precision is not None:
            self.sent.root(*(x.cpu().numpy() for x in precision.spectrum))

    def advance(
        self,
        generator: torch.Generator | None,
        numbers: Numbers,
        reload: Callable[[], None],
        check: Callable[..., None],
        before: Callable[[], None],
    ) -> Launched:
        """One step, which may still be running on return.

        Args:
            generator: source of the draws.
            numbers: rates.
            reload: calls `load` with the state before the step.
            check: `check(what, *vectors)` raises when a vector is not finite.
            before: waits for the step before, and hands over the state and the data; a device is idle from then on.
        """
        source = self.default if generator is None else generator
        step = Launched(self, source, source.get_state(), reload, check)
        self._spare()  # while the step before may still run
        before()
        assert self.running is None
        self.sent.rates(numbers, self.weight)
        if self.iterates and self._doubts == 0:
            if self._good >= self._patience and self._rounds > 1:
                self._rounds, self._good, self._lowered = self._rounds - 1, 0, True
            self._launch(step)
            self.running = step
        else:
            self._doubts = max(0, self._doubts - 1)
            step.end(self._in_halves)
        return step

    def _launch(self, step: Launched) -> None:
        self.replay(_WAYS[self._rounds - 1], step.source, step.before)
        self._hold(step)
        if self.hurries:
            step.kept()

    def _hold(self, step: Launched) -> None:
        """Note that `state` is what a step led to."""
        self._held = weakref.ref(step)

    def _spare(self) -> None:
        """Let the step whose outcome is about to be overwritten keep it."""
        held = self._held()
        if held is not None and not held.failed:
            held.kept()

    def finish(self) -> None:
        """Wait for the step that is running, if there is one, and see how it went."""
        step, self.running = self.running, None
        if step is not None:
            step.end(self._looked_at)

    def replay(self, name: str, source: torch.Generator, state: Tensor) -> None:
        """Replay a graph that draws, on the caller's random stream."""
        mine = self.default if self.generator is None else self.generator
        mine.set_state(state)
        self.graphs[name].replay()
        if mine is not source:
            source.set_state(mine.get_state())

    def _looked_at(self, step: Launched) -> Outcome:
        """The outcome of a step in one go; taken again, more carefully, when the previous factor was no good start."""
        done = self._at_once(step)
        if done is not None:
            self._failures = 0
            return done
        # Whoever owns the source may have drawn from it since; all ways take as much from it.
        now = step.source.get_state()
        try:
            return self._repeated(step)
        finally:
            step.source.set_state(now)

    def _repeated(self, step: Launched) -> Outcome:
        """The same step on the same draws."""
        if self._lowered:
            self._patience *= 8
        self._good, self._lowered = 0, False
        while self._rounds < len(_WAYS):
            self._rounds += 1
            self._begin_again(step)
            self._launch(step)
            done = self._at_once(step)
            if done is not None:
                return done
        self._begin_again(step)
        self._failures += 1
        self._doubts = min(2**self._failures, _MOST_DOUBTS) - 1
        return self._in_halves(step)

    def _begin_again(self, step: Launched) -> None:
        """From the state before a step, whose outcome is of no use."""
        self._held, step.tensors = lambda: None, None
        step.reload()

    def _at_once(self, step: Launched) -> Outcome | None:
        """None when the previous factor was no good start, or something is not finite."""
        self.gram_is_there.synchronize()
        rank, given = self.rank, self.matrices.numpy()
        left, (small, overlap, gram) = given[:rank], given[rank : rank + 3 * rank**2].reshape(3, rank, rank)
        (residual, tilt), root = flaws(small, left, overlap), root_of(gram)
        self.told_is_there.synchronize()
        known = self.told[:_TOLD].tolist()
        squares, mean, pull, pushed, least, _, total, clipped = known
        if not (all(map(math.isfinite, known)) and least > 0):
            return None
        push = self.weight * math.sqrt(self.num_rows * squares)  # ‖Σ_r g_r‖² ≤ R Σ_r ‖g_r‖²
        far = reach(self.sent.numbers, push, total, pull, pushed, least)
        allowed = TOLERANCE[self.state.dtype]
        if not (far <= self._horizon and residual <= allowed and tilt <= _TILT):
            return None
        self.sent.root(*root)
        # Every round takes the residual down by about the same factor.
        rounds = self._rounds
        enough = rounds > 1 and residual <= (allowed * _MARGIN) ** (rounds / (rounds - 1))
        self._good = self._good + 1 if enough else 0
        return Outcome(torch.from_numpy(small.copy()), residual, total, abs(clipped), mean, self.num_rows)

    def _in_halves(self, step: Launched) -> Outcome:
        """The step with the eigenproblem solved between its halves, to the tolerance whatever the start."""
        self.replay("watch", step.source, step.before)
        self._wait()
        if not all(map(math.isfinite, self.head[:2].tolist())):
            self.explain()
            step.check("the gradient", self.observed.total, self.observed.squares)
        mean = float(self.head[1])
        values, residual = self._solve()
        result = step.kept()
        self._hold(step)
        self.gram_is_there.synchronize()
        root = root_of(self.gram.view(self.rank, self.rank).numpy())
        self._wait()
        told = self.tail[:4].tolist()
        if not all(map(math.isfinite, told)):
            step.check("the new precision", result[1], result[3:])
            step.check("the new mean", result[0])
        self.sent.root(*root)
        return Outcome(values, residual, told[0], told[1], mean, self.num_rows)

    def _solve(self) -> tuple[Tensor, float]:
        """Take the second half of the step, with Ritz pairs if they are good enough and other pairs if not."""
        rank, found = self.rank, self.head[2:]
        for look in range(_LOOKS if self.iterates else 0):
            values, inner, residual, edge = ritz(found.view(3, *self._block_square), rank)
            if float(residual) <= TOLERANCE[self.state.dtype] * float(values[0]):
                self.inner.view(-1, rank)[0] = values
                self.inner.view(-1, rank)[1:] = inner
                self.graphs["move_along"].replay()
                return values, float(residual) / max(float(values[0]), sys.float_info.min)
            if look < _LOOKS - 1:
                self.edge[0] = edge
                self.graphs["sift" if float(edge) > 0 else "again"].replay()
                self._wait()
                found = self.more
        pairs = self.observed.problem.pairs(tried=self.iterates)
        self.values.copy_(pairs.values)
        self.vectors.copy_(pairs.vectors)
        self.graphs["move_to_given"].replay()
        return pairs.values, float(relative_residual(pairs))

    @property
    def _block_square(self) -> tuple[int, int]:
        return self.block.shape[1], self.block.shape[1]

    def _wait(self) -> None:
        torch.cuda.current_stream(self.state.device).synchronize()
