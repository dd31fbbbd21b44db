"""SLANG's step as captured CUDA graphs.

A step of a small network is hundreds of kernels of a few microseconds; launched one by one they leave the GPU idle most
of the time. Captured once and replayed, they run back to back. What is captured is what runs otherwise: `observe`,
`propose`, and the pass over all draws.

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
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from slangvi._steps import averaged
from slangvi.linalg import LowRankPrecision, Problem, choose_route, krylov
from slangvi.linalg.krylov import iteration_pays
from slangvi.linalg.products import column_squares
from slangvi.linalg.subspace import filtered, projected, pursued, ritz, sharpened, starting_block
from slangvi.linalg.topk import TOLERANCE, relative_residual
from slangvi.methods._graph_capture import aside, beside, capture_graph, joined, randomness_kept
from slangvi.methods._graph_host import Received, Sent, flaws, pinned, reach, root_of
from slangvi.methods._launched import Launched, Numbers, Outcome, Setup
from slangvi.methods._lowrank_step import Observed, Proposed, Rates, Widened, moved, shift, widen
from slangvi.types import GradientOperator

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


class Captured(ABC):
    """The graphs of one step for one layout: everything but where the gradients come from."""

    # Whether time counts more than memory: sums over the gradients then run beside the eigenproblem, in memory that
    # nothing else can use, and the new state is copied at once instead of when it is looked at.
    hurries = True

    def __init__(self, setup: Setup) -> None:
        state, self.prior, self.num_data, self.momentum, generator, pool = setup
        self._pool = pool
        self._host: dict[str, Tensor] = {}
        self._doubts = self._failures = 0  # steps to be taken in halves before the whole is tried again
        # Rounds of the eigenproblem, steps in a row that could have done with one less, and how many of them it takes.
        self._rounds, self._good, self._patience, self._lowered = 2, 0, 1, False
        self.default = torch.cuda.default_generators[state.device.index or 0]
        self.gram_is_there = torch.cuda.Event(external=True)
        self.told_is_there = torch.cuda.Event(external=True)
        self.running: Launched | None = None  # the latest step, as long as nobody knows how it went
        # The step whose outcome is in `state`; if nobody else holds it, nobody can ask for that.
        self._held: Callable[[], Launched | None] = lambda: None
        # Captured in place of the caller's, whose state is handed over and back: a capture that fails would leave it
        # unusable, and another one can be passed at the next step.
        self.generator = None if generator is None else torch.Generator(state.device)
        self.state = state.clone()
        self.squares = column_squares(state[3:])  # of the factor's columns, which the step before has worked out
        self.rank = rank = len(state) - 3
        # Small numbers travel both ways through page-locked memory, inside the graphs.
        self.sent = Sent(rank)
        self.edge = pinned(1).fill_(1.0)  # see `filtered`

    @abstractmethod
    def gradients(self) -> tuple[GradientOperator, Tensor]:
        """The operator, and the mean log-likelihood; captured."""

    @abstractmethod
    def explain(self) -> None:
        """Raise if it can be told why the gradients are not finite."""

    def extra_pieces(self) -> list[Callable[[], None]]:
        """More to be captured."""
        return []

    # ---- what is captured

    def capture(self) -> None:
        """Run everything once beside the graph, as CUDA asks for, then capture it; the random state is left alone."""
        with randomness_kept(self.state.device), torch.no_grad():
            self._rehearse()
            self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
            # In one go first: what that leaves behind is not needed, and its memory goes to the others.
            iterated = [self.once, self.twice, self.thrice, self.watch, self.again, self.sift, self.move_along]
            pieces = iterated if self.iterates else [self.watch]
            for piece in (*pieces, self.move_to_given, *self.extra_pieces()):
                if not self.hurries and (piece in iterated[: len(_WAYS)] or piece == self.watch):
                    self._let_go()
                self.graphs[piece.__name__] = capture_graph(piece, self._pool, self.state.device, self.generator)

    def _let_go(self) -> None:
        """Of what the piece before has left: the next one may have its memory from its first operation on."""
        del self.observed, self.seen, self.here, self.rates

    def _rehearse(self) -> None:
        """All pieces beside the graphs: libraries set themselves up on first use."""
        with aside(self.state.device):
            self.watch()
            rank, problem = self.rank, self.observed.problem
            self.vectors = self.state.new_zeros(problem.size, min(rank, problem.size), dtype=torch.float64)
            self.values = self.vectors.new_zeros(self.vectors.shape[1])
            self.inner = pinned((1 + self.block.shape[1]) * rank) if self.iterates else pinned(0)
            kept, squares = self.state.clone(), self.squares.clone()
            if self.iterates:
                self.once()
                self.watch()
                self.again()
                self.sift()
                self.move_along()
            self.move_to_given()
            self.state.copy_(kept)
            self.squares.copy_(squares)
            for piece in self.extra_pieces():
                piece()

    def observe(self) -> list[Tensor]:
        """Gradients and the eigenproblem; returns numbers that show whether all is finite, after `_join_sums`."""
        self.receive()
        sent = self.here
        plain = sent.numbers.to(self.state.dtype)
        self.rates = Rates(plain[0], plain[1], None, self.momentum, plain[2])
        self.seen, mean = self.gradients()
        self.num_rows = self.seen.num_rows
        self.weight = self.num_data / self.num_rows
        factor, seen, dtype = self.state[3:], self.seen, self.state.dtype
        mean = mean.to(dtype)  # not in the branch, by which the original would have to be held on to
        with beside(self.state.device) if self.hurries else nullcontext():
            # What is not finite in the gradients is not finite in their squares.
            squares, total = seen.square_sum(), seen.sum()
            checks = [squares.sum(), mean]
        problem = Problem(factor, seen, sent.keep, sent.gain, None, choose_route(factor, seen), sent.roots)
        self.observed = Observed(total, squares, problem)
        self.iterates = problem.route == "gram" and dtype in TOLERANCE and iteration_pays(problem.size, self.rank)
        return checks

    def _join_sums(self) -> None:
        """Wait for sums and squares of the gradients."""
        if self.hurries:
            joined(self.state.device)

    def draw(self, count: tuple[int, ...]) -> Tensor:
        """Draws of the weights from the current state by what was received, (*count, P)."""
        turns = self.here.spectrum[1]
        precision = LowRankPrecision(self.state[3:], self.state[1], turns, turns)
        precision.__dict__.update(spectrum=self.here.spectrum, damping=self.here.damping)
        return precision.sample(count, self.generator, self.state[0])

    def once(self) -> None:
        """The step in one go, trusting that the previous factor is a very good start."""
        self._in_one(1)

    def twice(self) -> None:
        """The same with more work, for a good start."""
        self._in_one(2)

    def thrice(self) -> None:
        """The same with still more, for one that is not bad."""
        self._in_one(3)

    def _in_one(self, rounds: int) -> None:
        checks = self.observe()
        problem, rank = self.observed.problem, self.rank
        start = starting_block(problem.size, rank, rank, torch.float64, self.state.device, 0)
        found = pursued(problem.apply, start, rounds)
        self._join_sums()
        widened = self.widen(found.small.diagonal(), found.vectors)
        precision = widened.precision
        loc, _, momentum = self.state[:3]
        pull = self.prior.precision * (loc - self.prior.mean)
        with beside(self.state.device):
            matrices = (found.small.flatten(), found.gram.flatten(), precision.gram.flatten())
            self.matrices = self._returned("matrices", torch.cat([found.left, *matrices]))
            self.gram_is_there.record()  # the CPU works on it while the rest runs
            lengths = [torch.linalg.vector_norm(vector) for vector in (pull, momentum)]
            told = torch.stack([*checks, *lengths, *precision.diag.aminmax()]).to(torch.float64)
            diagonal = torch.stack([widened.whole_diag.sum(), widened.correction.clamp_max_(0).sum()])
            self.told = self._returned("told", torch.cat([told, diagonal]))
            self.told_is_there.record()
        average = averaged(momentum, self.observed.total, self.weight, self.momentum)
        assert isinstance(self.rates.correction, Tensor)
        gradient = torch.addcdiv(pull, average, self.rates.correction)
        new_loc = moved(loc, self.rates.lr, precision.solve(gradient))
        joined(self.state.device)  # before anything that is read there is written
        self._keep(new_loc, average, widened)

    def watch(self) -> None:
        """The first half: up to what the CPU needs to solve the eigenproblem."""
        checks = self.observe()
        problem, rank = self.observed.problem, self.rank
        problem.prepare()
        self._join_sums()
        head = torch.stack(checks).to(torch.float64)
        if self.iterates:
            start = starting_block(problem.size, rank, problem.known, torch.float64, self.state.device)
            self.block = sharpened(problem.apply, start, krylov.STEPS)
            head = torch.cat([head, projected(problem.apply, self.block).flatten()])
        self.head = self._returned("head", head)

    def again(self) -> None:
        """A few more products with the small matrix."""
        self._improve(sharpened(self.observed.problem.apply, self.block, krylov.STEPS))

    def sift(self) -> None:
        """The same, as a filter that tells close eigenvalues apart."""
        edge = self.edge.to(self.state.device, non_blocking=True)
        self._improve(filtered(self.observed.problem.apply, self.block, edge[0]))

    def _improve(self, block: Tensor) -> None:
        self.block.copy_(block)
        self.more = self._returned("more", projected(self.observed.problem.apply, self.block).flatten())

    def move_along(self) -> None:
        """The new state, from Ritz pairs whose coordinates in the block come from the CPU."""
        inner = self.inner.to(self.state.device, non_blocking=True).view(-1, self.rank)
        self.move(inner[0], self.block @ inner[1:])

    def move_to_given(self) -> None:
        """The new state, from eigenpairs that were found elsewhere."""
        self.move(self.values, self.vectors)

    def move(self, values: Tensor, vectors: Tensor) -> None:
        """The new state, from the eigenpairs."""
        loc, _, momentum = self.state[:3]
        widened = self.widen(values, vectors)
        self.gram = self._returned("gram", widened.precision.gram.flatten())
        self.gram_is_there.record()  # the CPU works on it while the rest runs
        new: Proposed = shift(loc, momentum, self.observed, widened, self.weight, self.prior, self.rates)
        self.tail = self._returned("tail", new.told.to(torch.float64))
        self._keep(new.loc, new.momentum, widened)

    def widen(self, values: Tensor, vectors: Tensor) -> Widened:
        """The new precision, from the eigenpairs."""
        diag, squares = self.state[1], self.squares
        return widen(diag, self.observed, values, vectors, self.prior, self.rates, squares)

    def _keep(self, loc: Tensor, momentum: Tensor, widened: Widened) -> None:
        precision, squares = widened.precision, widened.squares
        assert squares is not None
        places = [*self.state[:3], self.state[3:], self.squares]
        torch._foreach_copy_(places, [loc, precision.diag, momentum, precision.factor, squares])  # in few kernels

    def receive(self) -> None:
        """Take over rates and what a draw needs."""
        self.here: Received = self.sent.received(self.state.device)

    def _returned(self, name: str, values: Tensor) -> Tensor:
        """A copy in page-locked memory, one for each name."""
        if name not in self._host or self._host[name].numel() < values.numel():
            self._host[name] = pinned(values.numel())
        place = self._host[name]
        place[: values.numel()].copy_(values, non_blocking=True)
        return place

    # ---- what runs

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
        near = far <= _FAR * torch.finfo(self.state.dtype).max
        if not (near and residual <= TOLERANCE[self.state.dtype] and tilt <= _TILT):
            return None
        self.sent.root(*root)
        # Every round takes the residual down by about the same factor.
        rounds, enough = self._rounds, TOLERANCE[self.state.dtype] * _MARGIN
        self._good = self._good + 1 if rounds > 1 and residual <= enough ** (rounds / (rounds - 1)) else 0
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
