"""SLANG's step as captured CUDA graphs.

A step of a small network is hundreds of kernels of a few microseconds; launched one by one they leave the GPU idle most
of the time. Captured once and replayed, they run back to back. What is captured is what runs otherwise: `observe`,
`propose`, and the pass over all draws.

The step exists twice: as one graph, with a fixed number of products for the eigenproblem, which suffices when the
previous factor is a good start; and in two halves with the eigenproblem solved on the CPU between them, to any
tolerance. The first is tried, and repeated the second way on the same draws when its residual or anything else is not
as it should be. A few numbers a step come back to the CPU; with them come the checks, so a step that is not finite is
refused as ever.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slangvi._steps import Prior
from slangvi.linalg import LowRankPrecision, krylov
from slangvi.linalg.krylov import iteration_pays
from slangvi.linalg.subspace import projected, pursued, ritz, sharpened, starting_block
from slangvi.linalg.topk import TOLERANCE, relative_residual
from slangvi.methods._lowrank_step import Proposed, Rates, observe, shift, widen
from slangvi.types import GradientOperator

__all__ = ["Captured", "Numbers", "Outcome", "Setup"]

# Looks at the residual before the eigenproblem is left to the eager routes.
_LOOKS = 3
# Rounds of the eigenproblem when nothing may wait for the CPU, the lack of orthogonality allowed then, and the most
# steps that are taken in halves after it has failed.
_ROUNDS = 2
_TILT = 1e-6
_MOST_DOUBTS = 4


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
    """A finished step, in tensors of its own.

    Args:
        tensors: loc, prec_diag, momentum and the factor's rows, (3 + L, P).
        ritz: leading eigenvalues (L,), or a matrix that has them (L, L).
        residual: of their pairs, relative to the largest.
        total: trace of (1−β)UUᵀ + βĜ.
        clipped: Σ of negative diagonal corrections set to zero.
        mean_log_likelihood: over all rows.
        num_rows: R.
        graph: what made it.
    """

    tensors: Tensor
    ritz: Tensor
    residual: float
    total: float
    clipped: float
    mean_log_likelihood: float
    num_rows: int
    graph: Captured


class Setup(NamedTuple):
    """What every captured step starts from.

    Args:
        state: μ, d, m and U by rows in one tensor, (3 + L, P); copied.
        prior: λ and μ₀.
        num_data: N over the temperature.
        momentum: γ.
        generator: source of the draws; None is the device's own.
    """

    state: Tensor
    prior: Prior
    num_data: float
    momentum: float
    generator: torch.Generator | None


class Captured(ABC):
    """The graphs of one step for one layout: everything but where the gradients come from."""

    def __init__(self, setup: Setup) -> None:
        state, self.prior, self.num_data, self.momentum, generator = setup
        self._host: dict[str, Tensor] = {}
        self._doubts = self._failures = 0  # steps to be taken in halves before the whole is tried again
        self.default = torch.cuda.default_generators[state.device.index or 0]
        self.gram_is_there = torch.cuda.Event(external=True)
        # Captured in place of the caller's, whose state is handed over and back: a capture that fails would leave it
        # unusable, and another one can be passed at the next step.
        self.generator = None if generator is None else torch.Generator(state.device)
        self.state = state.clone()
        self.rank = rank = len(state) - 3
        # Small numbers travel both ways through page-locked memory, inside the graphs.
        self.sent = _pinned(len(Numbers._fields) + rank + rank * rank)
        self.sent[: len(Numbers._fields)] = 1.0
        if rank:  # without it the slice would be all of them
            self.sent[-rank * rank :] = torch.eye(rank).flatten()

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
        device, default = self.state.device, self.default
        before = default.get_state()
        try:
            with torch.no_grad():
                self._rehearse()
                default.set_state(before)
                self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
                # `whole` first: what it leaves behind is not needed, and its memory goes to the others.
                iterated = [self.whole, self.watch, self.again, self.move_along]
                pieces = iterated if self.iterates else [self.watch]
                for piece in (*pieces, self.move_to_given, *self.extra_pieces()):
                    self._capture_one(piece)
        except BaseException:
            fresh = torch.Generator(device)
            fresh.set_state(before)
            default.graphsafe_set_state(fresh)
            raise

    def _capture_one(self, piece: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        pool = next((known.pool() for known in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            piece()
        self.graphs[piece.__name__] = graph

    def _rehearse(self) -> None:
        """All pieces on a stream of their own: libraries set themselves up on first use."""
        device = self.state.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.watch()
            rank, problem = self.rank, self.observed.problem
            self.vectors = self.state.new_zeros(problem.size, min(rank, problem.size), dtype=torch.float64)
            self.values = self.vectors.new_zeros(self.vectors.shape[1])
            self.inner = _pinned((1 + self.block.shape[1]) * rank) if self.iterates else _pinned(0)
            kept = self.state.clone()
            if self.iterates:
                self.whole()
                self.watch()
                self.again()
                self.move_along()
            self.move_to_given()
            self.state.copy_(kept)
            for piece in self.extra_pieces():
                piece()
        torch.cuda.current_stream(device).wait_stream(side)

    def observe(self) -> Tensor:
        """Gradients and the eigenproblem; returns what shows whether all is finite."""
        numbers, _, _ = self.received()
        self.rates = Rates(numbers[0], numbers[1], None, self.momentum, numbers[2])
        gradients, mean = self.gradients()
        self.num_rows = gradients.num_rows
        self.weight = self.num_data / gradients.num_rows
        self.observed = observe(self.state[3:], gradients, self.weight, self.rates)
        problem, rank = self.observed.problem, self.rank
        self.iterates = problem.route == "gram" and self.state.dtype in TOLERANCE and iteration_pays(problem.size, rank)
        # What is not finite in the gradients is not finite in their squares.
        return torch.stack([self.observed.squares.sum(), mean.to(self.state.dtype)]).to(torch.float64)

    def draw(self, count: tuple[int, ...]) -> Tensor:
        """Draws of the weights from the current state, (*count, P)."""
        _, roots, turns = self.received()
        loc = self.state[0]
        noise = torch.randn(*count, len(loc), generator=self.generator, dtype=loc.dtype, device=loc.device)
        precision = LowRankPrecision(self.state[3:], self.state[1], turns, turns)
        precision.__dict__["spectrum"] = (roots, turns)
        return loc + precision.transform_noise(noise)

    def whole(self) -> None:
        """The step in one go, trusting that the previous factor is a good start."""
        checks = self.observe()
        problem, rank = self.observed.problem, self.rank
        start = starting_block(problem.size, rank, rank, torch.float64, self.state.device, 0)
        vectors, small, flaws = pursued(problem.apply, start, _ROUNDS)
        self.move(small.diagonal(), vectors, torch.cat([checks, flaws, small.flatten()]))

    def watch(self) -> None:
        """The first half: up to what the CPU needs to solve the eigenproblem."""
        checks = self.observe()
        problem, rank = self.observed.problem, self.rank
        problem.prepare()
        if self.iterates:
            start = starting_block(problem.size, rank, problem.known, torch.float64, self.state.device)
            self.block = sharpened(problem.apply, start, krylov.STEPS)
            checks = torch.cat([checks, projected(problem.apply, self.block).flatten()])
        self.head = self._returned("head", checks)

    def again(self) -> None:
        """A few more products with the small matrix."""
        apply = self.observed.problem.apply
        self.block.copy_(sharpened(apply, self.block, krylov.STEPS))
        self.more = self._returned("more", projected(apply, self.block).flatten())

    def move_along(self) -> None:
        """The new state, from Ritz pairs whose coordinates in the block come from the CPU."""
        inner = self.inner.to(self.state.device, non_blocking=True).view(-1, self.rank)
        self.move(inner[0], self.block @ inner[1:])

    def move_to_given(self) -> None:
        """The new state, from eigenpairs that were found elsewhere."""
        self.move(self.values, self.vectors)

    def move(self, values: Tensor, vectors: Tensor, more: Tensor | None = None) -> None:
        """The new state, from the eigenpairs."""
        loc, diag, momentum = self.state[:3]
        widened = widen(diag, self.observed, values, vectors, self.weight, self.prior, self.rates)
        self.gram = self._returned("gram", widened.precision.gram.flatten())
        self.gram_is_there.record()  # the CPU works on it while the rest runs
        new: Proposed = shift(loc, momentum, self.observed, widened, self.weight, self.prior, self.rates)
        told = new.told.to(torch.float64)
        self.tail = self._returned("tail", told if more is None else torch.cat([told, more]))
        for row, value in enumerate((new.loc, new.prec_diag, new.momentum)):
            self.state[row] = value
        self.state[3:] = new.prec_factor

    def received(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rates in the state's dtype, and what a draw needs of VᵀV: √(1+s) and its eigenvectors."""
        rank, count = self.rank, len(Numbers._fields)
        here = self.sent.to(self.state.device, non_blocking=True)
        return here[:count].to(self.state.dtype), here[count : count + rank], here[count + rank :].view(rank, rank)

    def _returned(self, name: str, values: Tensor) -> Tensor:
        """A copy in page-locked memory, one for each name."""
        if name not in self._host or self._host[name].numel() < values.numel():
            self._host[name] = _pinned(values.numel())
        place = self._host[name]
        place[: values.numel()].copy_(values, non_blocking=True)
        return place

    # ---- what runs

    def load(self, state: Tensor, precision: LowRankPrecision) -> None:
        """Start from a state that did not come from here."""
        self.state.copy_(state)
        self._send_root(*(x.cpu() for x in precision.spectrum))

    def advance(
        self,
        generator: torch.Generator | None,
        numbers: Numbers,
        reload: Callable[[], None],
        check: Callable[..., None],
    ) -> Outcome:
        """One step.

        Args:
            generator: source of the draws.
            numbers: rates.
            reload: calls `load` with the state before the step.
            check: `check(what, *vectors)` raises when a vector is not finite.
        """
        self.sent[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        source = self.default if generator is None else generator
        before = source.get_state()
        if self.iterates and self._doubts == 0:
            done = self._at_once(source, before)
            if done is not None:
                self._failures = 0
                return done
            self._failures += 1
            self._doubts = min(2**self._failures, _MOST_DOUBTS)
            reload()
        self._doubts = max(0, self._doubts - 1)
        return self._in_halves(source, before, check)

    def replay(self, name: str, source: torch.Generator, state: Tensor) -> None:
        """Replay a graph that draws, on the caller's random stream."""
        mine = self.default if self.generator is None else self.generator
        mine.set_state(state)
        self.graphs[name].replay()
        if mine is not source:
            source.set_state(mine.get_state())

    def _at_once(self, source: torch.Generator, before: Tensor) -> Outcome | None:
        """The whole step; None when the previous factor was no good start, or something is not finite."""
        self.replay("whole", source, before)
        result = self.state.clone()
        root = self._root()
        self._wait()
        rank = self.rank
        told, rest = self.tail[:4].tolist(), self.tail[4:]
        squares, mean, residual, tilt = rest[:4].tolist()
        fine = all(map(math.isfinite, (*told, squares, mean)))
        if not (fine and residual <= TOLERANCE[self.state.dtype] and tilt <= _TILT):
            return None
        self._send_root(*root)
        small = rest[4 : 4 + rank * rank].view(rank, rank).clone()
        return Outcome(result, small, residual, told[0], told[1], mean, self.num_rows, self)

    def _in_halves(self, source: torch.Generator, before: Tensor, check: Callable[..., None]) -> Outcome:
        """The step with the eigenproblem solved between its halves, to the tolerance whatever the start."""
        self.replay("watch", source, before)
        self._wait()
        if not all(map(math.isfinite, self.head[:2].tolist())):
            self.explain()
            check("the gradient", self.observed.total, self.observed.squares)
        mean = float(self.head[1])
        values, residual = self._solve()
        result = self.state.clone()
        root = self._root()
        self._wait()
        told = self.tail[:4].tolist()
        if not all(map(math.isfinite, told)):
            check("the new precision", result[1], result[3:])
            check("the new mean", result[0])
        self._send_root(*root)
        return Outcome(result, values, residual, told[0], told[1], mean, self.num_rows, self)

    def _solve(self) -> tuple[Tensor, float]:
        """Take the second half of the step, with Ritz pairs if they are good enough and other pairs if not."""
        rank, found = self.rank, self.head[2:]
        for look in range(_LOOKS if self.iterates else 0):
            values, inner, residual = ritz(found.view(3, *self._block_square), rank)
            if float(residual) <= TOLERANCE[self.state.dtype] * float(values[0]):
                self.inner.view(-1, rank)[0] = values
                self.inner.view(-1, rank)[1:] = inner
                self.graphs["move_along"].replay()
                return values, float(residual) / max(float(values[0]), sys.float_info.min)
            if look < _LOOKS - 1:
                self.graphs["again"].replay()
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

    def _root(self) -> tuple[Tensor, Tensor]:
        """What the next draw needs of VᵀV, whose eigenproblem is too small for a GPU: √(1+s) and the eigenvectors."""
        self.gram_is_there.synchronize()
        gram = self.gram.view(self.rank, self.rank).numpy()
        if not np.isfinite(gram).all():  # to be found out by the checks that follow
            return torch.ones(self.rank), torch.eye(self.rank)
        values, vectors = np.linalg.eigh(gram)
        return torch.from_numpy(np.sqrt(np.maximum(values, 0.0) + 1.0)), torch.from_numpy(vectors)

    def _send_root(self, roots: Tensor, turns: Tensor) -> None:
        rank, count = self.rank, len(Numbers._fields)
        self.sent[count : count + rank] = roots
        self.sent[count + rank :] = turns.flatten()

    def _wait(self) -> None:
        torch.cuda.current_stream(self.state.device).synchronize()


def _pinned(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, pin_memory=True)
