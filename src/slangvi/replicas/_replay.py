"""The step of all replicas as one captured CUDA graph.

A step of many small networks is some three hundred kernels, each over in a few microseconds: launched one by one they
keep a GPU waiting nearly all of the time. What is captured is what runs otherwise, but for the eigenproblems, which are
solved by squaring. Replicas that sit out, have failed, or would fail stand still inside the graph. When one of them is
not finite or its eigenvectors are not good enough, the whole step is taken again eagerly, on the same noise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from slangvi.linalg import LowRankPrecision
from slangvi.methods.graph_capture import aside, capture_graph, randomness_kept
from slangvi.methods.graph_runner import Shelf
from slangvi.priors import Prior
from slangvi.replicas._gather import Gathered
from slangvi.replicas._inputs import Minibatch
from slangvi.replicas._rules import Lanes, Rule
from slangvi.replicas._step import Taken, Told, take_step, told_of
from slangvi.replicas.state import State

__all__ = ["Given", "GraphKeeper", "Replayed"]

Gather = Callable[[Tensor, Minibatch], Gathered]


class Given(NamedTuple):
    """What one step of all replicas is given besides the state.

    Args:
        batch: any nesting of tensors (K, M, ...).
        constants: any nesting of tensors (K, ...).
        weights: of the examples, (K, M), or None.
        num_examples: M.
        noise: standard normal, (K, S, P); anything where a replica does not move.
        numbers: those `take_step` takes, then N/R, then 1 for replicas that take the step and 0 for others; float64,
            (K, 7).
    """

    batch: Any
    constants: Any
    weights: Tensor | None
    num_examples: int
    noise: Tensor
    numbers: Tensor

    @property
    def data(self) -> Minibatch:
        """What the likelihoods see."""
        return Minibatch(self.batch, self.constants, self.weights, self.num_examples)


class Replayed(NamedTuple):
    """What a replayed step leaves, in tensors of its own.

    Args:
        lanes: the states.
        told: of those that moved; NaN for the others.
        graph: what made it.
    """

    lanes: Lanes
    told: Told
    graph: LockstepGraph


class LockstepGraph:
    """One step, captured for batches of one kind.

    Args:
        rule: of the method.
        gather: (draws (K, S, P), batch) → gradients; called while capturing.
        state: an example of the states to come.
        given: an example of what comes with them; copied.
        prior: λ and μ₀, (K, P).
        pool: memory shared with graphs that never run at the same time.
    """

    def __init__(self, rule: Rule, gather: Gather, state: State, given: Given, prior: Prior, pool: Any) -> None:
        self.rule, self.gather, self.prior = rule, gather, prior
        self.vectors = torch.stack([state.loc, state.prec_diag, state.momentum])
        self.factor = state.prec_factor.clone(memory_format=torch.contiguous_format)
        leaves, self.structure = tree_flatten(given)
        device = state.loc.device
        self.leaves = [leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.gram = state.precision.gram.clone()
        self.roots, self.turns = (x.clone() for x in state.precision.spectrum)
        self._made: weakref.ref[State] | None = None  # the state whose numbers are still here
        with randomness_kept(device), torch.no_grad():
            with aside(device):
                self.step()  # libraries set themselves up on first use
            self.graph = capture_graph(self.step, pool, device)

    @property
    def rank(self) -> int:
        """L."""
        return self.factor.shape[1]

    def step(self) -> None:
        """What is captured: from noise to new states, in place."""
        given: Given = tree_unflatten(self.leaves, self.structure)
        loc, diag, momentum = self.vectors.unbind()
        precision = LowRankPrecision(self.factor, diag, self.turns, self.turns)
        precision.__dict__["spectrum"] = (self.roots, self.turns)  # fills the cached property
        thetas = (loc + precision.transform_noise(given.noise.transpose(0, 1))).transpose(0, 1)
        gathered = self.gather(thetas, given.data)
        *numbers, share, moving = given.numbers.unbind(1)
        lanes, moves = Lanes(loc, self.factor, diag, momentum), moving > 0
        taken = take_step(self.rule, lanes, gathered, self.prior, torch.stack(numbers, 1), captured=True)
        good = taken.fine & (taken.residual <= self.rule.tolerance[loc.dtype])
        self.fine, moved = (good | ~moves).all(), good & moves
        self.told = _packed(told_of(taken, gathered, given.weights, share)).masked_fill(~moved[:, None], torch.nan)
        self._keep(taken, moved)

    def _keep(self, taken: Taken, moved: Tensor) -> None:
        """Write down the new states of those that have moved."""
        new, where = taken.lanes, moved[:, None]
        vectors = torch.stack([new.loc, new.prec_diag, new.momentum])
        self.vectors.copy_(torch.where(where, vectors, self.vectors))
        self.factor.copy_(torch.where(where[:, None], new.prec_factor, self.factor))
        if self.rank == 1:
            self.roots.copy_(torch.where(where, taken.precision.spectrum[0], self.roots))
        else:
            self.gram.copy_(torch.where(where[:, None], taken.precision.gram, self.gram))

    def advance(self, state: State, given: Given) -> Replayed | None:
        """The step, or None when a replica could not take it this way."""
        if self._made is None or self._made() is not state:
            self._load(state)
        self._made = None
        for mine, value in zip(self.leaves, tree_flatten(given)[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(value, non_blocking=True)
        self.graph.replay()
        if not bool(self.fine):
            return None
        if self.rank > 1:
            self._set_spectrum(LowRankPrecision(self.factor, self.vectors[1], self.gram, self.gram))
        loc, diag, momentum = self.vectors.clone().unbind()
        return Replayed(Lanes(loc, self.factor.clone(), diag, momentum), _unpacked(self.told.clone(), loc.dtype), self)

    def made(self, state: State) -> None:
        """Note that this state holds what is still here."""
        self._made = weakref.ref(state)

    def _load(self, state: State) -> None:
        """Start from a state that was not made here."""
        torch.stack([state.loc, state.prec_diag, state.momentum], out=self.vectors)
        self.factor.copy_(state.prec_factor)
        self.gram.copy_(state.precision.gram)
        self._set_spectrum(state.precision)

    def _set_spectrum(self, precision: LowRankPrecision) -> None:
        """What the next draws need, whose eigenproblems cannot be captured unless they are trivial."""
        for mine, value in zip((self.roots, self.turns), precision.spectrum, strict=True):
            mine.copy_(value)


class GraphKeeper(Shelf[LockstepGraph]):
    """Takes steps of all replicas by replaying graphs where that is possible.

    Args:
        rule: of the method.
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def usable(self, like: Tensor, rank: int, whole: bool) -> bool:
        """Whether a step on tensors like this may be captured at all.

        Args:
            like: (K, P).
            rank: L.
            whole: whether all replicas are advanced at once.
        """
        if self._given_up or self._declined(like.device):
            return False
        if like.dtype not in self.rule.tolerance:
            self._give_up(f"{like.dtype} asks for eigenvectors to the last digit; pass float32 parameters")
        elif not 0 < rank <= like.shape[1]:
            self._give_up(f"rank must lie between 1 and the {like.shape[1]} parameters for it, got {rank}")
        elif reason := self.rule.why_eager(rank):
            self._give_up(reason)
        elif not whole:
            self._give_up("memory_limit lets only some replicas advance at a time")
        return not self._given_up

    def step(self, kind: object, gather: Gather, state: State, given: Given, prior: Prior) -> Replayed | None:
        """One step by the graph of a kind, captured when it is new; None when it has to be taken eagerly."""
        graph = self._kept(kind, lambda: LockstepGraph(self.rule, gather, state, given, prior, self.pool))
        return None if graph is None else graph.advance(state, given)


def _packed(told: Told) -> Tensor:
    """Side by side, the spectrum first: float64, (K, L + 4)."""
    spectrum, *others = (x.double() for x in told)
    return torch.cat([spectrum, torch.stack(others, 1)], 1)


def _unpacked(table: Tensor, dtype: torch.dtype) -> Told:
    rank = table.shape[1] - len(Told._fields) + 1
    total, residual, clipped, fit = table[:, rank:].unbind(1)
    return Told(table[:, :rank].to(dtype), total.to(dtype), residual, clipped.to(dtype), fit)
