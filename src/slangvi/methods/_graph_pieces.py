"""What the CUDA graphs of SLANG's step are captured from.

What is captured is what runs otherwise: `observe`, `propose`, and the pass over all draws. The step exists as one
graph, with a fixed number of products for the eigenproblem, and in two halves with the eigenproblem solved on the CPU
between them. `_graph` says when which of them is replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from slangvi.grads import FactoredGradients, Formed
from slangvi.linalg import LowRankPrecision, Problem, choose_route, krylov
from slangvi.linalg.krylov import iteration_pays
from slangvi.linalg.products import column_squares
from slangvi.linalg.subspace import filtered, projected, pursued, sharpened, starting_block
from slangvi.linalg.topk import TOLERANCE
from slangvi.methods._averages import averaged
from slangvi.methods._graph_host import Received, Sent, pinned
from slangvi.methods._launched import Setup
from slangvi.methods.graph_capture import aside, beside, capture_graph, joined, randomness_kept, rehearsing, reserved
from slangvi.methods.lowrank_step import Observed, Proposed, Rates, Widened, moved, shift, widen

__all__ = ["Pieces"]


class Pieces(ABC):
    """The pieces of one step for one layout: everything but where the gradients come from.

    Args:
        setup: see `Setup`.
    """

    # Whether time counts more than memory: sums over the gradients then run beside the eigenproblem, in memory that
    # nothing else can use, and the new state is copied at once instead of when it is looked at. Where it does not, the
    # graphs of a step share one piece of memory, and none holds what another has seen while it is captured.
    hurries = True
    # Bytes of formed gradients up to which their sums leave room for something beside them.
    apart = 32 << 20

    def __init__(self, setup: Setup) -> None:
        state, self.prior, self.num_data, self.momentum, generator, pool = setup
        self._pool = pool
        self._host: dict[str, Tensor] = {}
        self.gram_is_there = torch.cuda.Event(external=True)
        self.told_is_there = torch.cuda.Event(external=True)
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
    def gradients(self) -> tuple[FactoredGradients, Tensor]:
        """The operator, and the mean log-likelihood; captured."""

    @abstractmethod
    def explain(self) -> None:
        """Raise if it can be told why the gradients are not finite."""

    def extra_pieces(self) -> list[Callable[[], None]]:
        """More to be captured."""
        return []

    def capture(self) -> None:
        """Run everything once beside the graph, as CUDA asks for, then capture it; the random state is left alone."""
        with randomness_kept(self.state.device), torch.no_grad():
            kept = [(x, x.clone()) for x in (self.state, self.squares)]  # not counted, since graphs do not need it
            with aside(self.state.device) if self.hurries else rehearsing(self.state.device) as taken:
                self._rehearse(kept)
            del kept
            room = None
            if taken is not None:
                self.forget()
                room = reserved(taken.needed, self._pool, self.state.device)  # held until everything is captured
            self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
            # In one go first: what that leaves behind is not needed, and its memory goes to the others.
            iterated = [self.once, self.twice, self.thrice, self.watch, self.again, self.sift, self.move_along]
            pieces = iterated if self.iterates else [self.watch]
            for piece in (*pieces, self.move_to_given, *self.extra_pieces()):
                self.graphs[piece.__name__] = capture_graph(piece, self._pool, self.state.device, self.generator)
            del room

    def _rehearse(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        """All pieces beside the graphs: libraries set themselves up on first use. What was kept is put back."""
        self.watch()
        rank, size = self.rank, self.observed.problem.size
        self.vectors = self.state.new_zeros(size, min(rank, size), dtype=torch.float64)
        self.values = self.vectors.new_zeros(self.vectors.shape[1])
        self.inner = pinned((1 + self.block.shape[1]) * rank) if self.iterates else pinned(0)
        if self.iterates:
            self.once()
            self.watch()
            self.again()
            self.sift()
            self.move_along()
        self.move_to_given()
        for x, before in kept:
            x.copy_(before)
        for piece in self.extra_pieces():
            piece()

    def observe(self) -> list[Tensor]:
        """Gradients and the eigenproblem; returns numbers that show whether all is finite, after `_join_sums`."""
        if not self.hurries:
            self.forget()
        self.receive()
        sent = self.here
        plain = sent.numbers.to(self.state.dtype)
        self.rates = Rates(plain[0], plain[1], None, self.momentum, plain[2])
        self.seen, mean = self.gradients()
        self.num_rows = self.seen.num_rows
        self.weight = self.num_data / self.num_rows
        factor, seen, dtype = self.state[3:], self.seen, self.state.dtype
        mean = mean.to(dtype)  # not in the branch, by which the original would have to be held on to
        formed = sum(block.rows.nbytes for block in seen.blocks.values() if isinstance(block, Formed))
        self.parted = self.hurries and formed <= self.apart
        with beside(self.state.device) if self.parted else nullcontext():
            # What is not finite in the gradients is not finite in their squares.
            squares, total = seen.square_sum(), seen.sum()
            checks = [squares.sum(), mean]
        problem = Problem(factor, seen, sent.keep, sent.gain, None, choose_route(factor, seen), sent.roots)
        self.observed = Observed(total, squares, problem)
        self.iterates = problem.route == "gram" and dtype in TOLERANCE and iteration_pays(problem.size, self.rank)
        return checks

    def forget(self) -> None:
        """Give up what another piece has seen: while a graph is captured, that memory is there for it."""
        for name in ("seen", "observed", "block"):
            self.__dict__.pop(name, None)

    def _join_sums(self) -> None:
        """Wait for sums and squares of the gradients."""
        if self.parted:
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
