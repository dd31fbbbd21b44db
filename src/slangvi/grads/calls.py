"""What hooks write down: forward calls of modules, and what one backward pass brought to each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from slangvi.errors import UnsupportedModuleError

__all__ = [
    "Backward",
    "Call",
    "Signature",
    "Surroundings",
    "called_twice",
    "count_examples",
    "modified",
    "signature_of",
]

Signature = tuple[object, ...]

_ONE_TENSOR = tree_flatten(((0,), {}))[1]


@dataclass(frozen=True)
class Surroundings:
    """Autocast and random state at the moment of a call, so that it can be made again with the same outcome."""

    device: torch.device
    autocast: bool
    autocast_dtype: torch.dtype
    cpu_rng: Tensor
    cuda_rng: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        """Take note."""
        return cls(
            device,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Back to that moment inside the block, and nothing changed after it."""
        with ExitStack() as stack:
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            self.rewind()
            stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast))
            yield

    def rewind(self) -> None:
        """Put the random numbers back to that moment."""
        torch.set_rng_state(self.cpu_rng)
        if self.cuda_rng is not None:
            torch.cuda.set_rng_state(self.cuda_rng, self.device)


@dataclass(eq=False)
class Call:
    """One forward call of a hooked module.

    Args:
        name: path of the module in the model; "" is the model itself.
        module: the module.
        leaves: flattened (args, kwargs), tensors detached.
        structure: how to put the leaves back together.
        surroundings: autocast and random state before the call; None for modules that have a rule.
        recomputed: whether the call was made inside a backward pass, by activation checkpointing.
        watched: whether its inputs are to stay as they are; those of a captured graph are filled again and again.
    """

    name: str
    module: nn.Module
    leaves: list[Any]
    structure: TreeSpec
    surroundings: Surroundings | None
    recomputed: bool = False
    watched: bool = True
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = [x._version for x in self.leaves if isinstance(x, Tensor)]

    @classmethod
    def of(cls, name: str, module: nn.Module, args: Any, kwargs: Any, surroundings: Surroundings | None) -> Call:
        """Note a call, detaching its tensors."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return cls(name, module, [args[0].detach()], _ONE_TENSOR, surroundings)
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        return cls(name, module, leaves, structure, surroundings)

    @property
    def first_tensor(self) -> Tensor | None:
        """The first tensor among the arguments that has a batch dimension."""
        return next((x for x in self.leaves if isinstance(x, Tensor) and x.ndim), None)

    @property
    def is_spoilt(self) -> bool:
        """Whether the input that rules read was modified in place: the gradient was that of what it had been."""
        first, versions = self.first_tensor, iter(self.versions)
        for x in self.leaves:
            if isinstance(x, Tensor) and x._version != next(versions) and x is first:
                return self.watched
        return False

    @property
    def untouched(self) -> bool:
        """Whether no input was modified in place since the call."""
        return self.versions == [x._version for x in self.leaves if isinstance(x, Tensor)]


@dataclass
class Backward:
    """One backward pass.

    Args:
        cotangents: for each call it reached, output leaf → gradient of the loss.
        inner: for calls with several outputs, the same with what arrived from inside the module included.
        totals: canonical parameter name → gradient of the loss, as autograd added it up.
        accumulated: whether it was a `backward()`, which adds to p.grad, and not a `torch.autograd.grad`.
        completed: whether it came to its end; one that failed half way has gradients of some layers only.
        replayed: rows of calls that were replayed from a graph, which has recorded them by itself.
    """

    cotangents: dict[Call, dict[int, Tensor]] = field(default_factory=dict)
    inner: dict[Call, dict[int, Tensor]] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    accumulated: bool = False
    completed: bool = False
    replayed: list[Any] = field(default_factory=list)

    @property
    def is_signal(self) -> bool:
        """Whether it is to be learnt from."""
        # torch.autograd.grad passes through the same hooks, but is no training signal: it leaves p.grad alone.
        return self.completed and bool(self.replayed or (self.accumulated and self.totals))

    def complete(self) -> None:
        """It came to its end."""
        self.completed = True

    def note(self, call: Call, leaf: int, grad: Tensor, inner: bool = False) -> None:
        """What reached an output of a call."""
        # One that was written to in place may be a buffer of the caller's, who will write to it again.
        kept = grad.clone() if grad._version else grad
        (self.inner if inner else self.cotangents).setdefault(call, {})[leaf] = kept

    def absorb(self, other: Backward) -> None:
        """Add a second pass through the same graph: the same examples, one more loss term."""
        for ours, theirs in ((self.cotangents, other.cotangents), (self.inner, other.inner)):
            for call, grads in theirs.items():
                mine = ours.setdefault(call, {})
                for leaf, grad in grads.items():
                    mine[leaf] = mine[leaf] + grad if leaf in mine else grad
        for name, total in other.totals.items():
            self.totals[name] = self.totals[name] + total if name in self.totals else total


def count_examples(backward: Backward) -> int:
    """M > 0: the batch of the whole model's call, or of every recorded call when the model was called in parts."""
    whole = [call for call in backward.cotangents if call.name == ""]
    if len(whole) > 1:
        raise called_twice(len(whole))
    counts = {x.shape[0] for call in whole if (x := call.first_tensor) is not None}
    if not counts:
        counts = {g.shape[0] for grads in backward.cotangents.values() for g in grads.values() if g.ndim}
    if len(counts) != 1:
        raise UnsupportedModuleError(
            f"one backward pass must bring the gradients of one batch, got first dimensions {sorted(counts)}. Call "
            "the model on the batch as a whole with the batch as first dimension, and call backward once per batch."
        )
    count = counts.pop()
    if count == 0:
        raise ValueError("the batch is empty: a step needs at least one example. Skip empty batches.")
    return count


def called_twice(count: int) -> UnsupportedModuleError:
    """What is said when one backward pass goes through several calls of the model."""
    return UnsupportedModuleError(
        f"the model was called {count} times for one backward pass, and it cannot be told whether these are new "
        "examples or the same ones. New examples: call backward once per batch. The same ones (pairs, views): make the "
        "calls inside a module of your own and give that one to the optimizer."
    )


def modified(call: Call) -> UnsupportedModuleError:
    """What is said when an input is no longer what it was in the call."""
    return UnsupportedModuleError(
        f"an input of module {call.name!r} ({type(call.module).__name__}) was modified in place after the call, so its "
        "per-example gradients cannot be computed. Use the out-of-place operation, or modify a copy."
    )


def signature_of(backward: Backward, count: int) -> Signature:
    """What makes two passes alike: the same calls, with the batch in the same places."""

    def batched(values: Iterable[object]) -> tuple[bool, ...]:
        return tuple(isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == count for x in values)

    calls = tuple((c.name, batched(grads.values()), batched(c.leaves)) for c, grads in backward.cotangents.items())
    return calls, tuple(backward.totals)
