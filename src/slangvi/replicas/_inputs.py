"""What one step of K replicas is given: batches, counts and constants, checked, with padding made harmless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["Minibatch", "checked_constants", "read"]


@dataclass(frozen=True)
class Minibatch:
    """What the likelihoods of one step see.

    Args:
        batch: any nesting of tensors (K, M, ...).
        constants: any nesting of tensors (K, ...).
        weights: 1 for examples, 0 for padding, (K, M); None when there is no padding.
        num_examples: M, padding included.
    """

    batch: Any
    constants: Any
    weights: Tensor | None
    num_examples: int

    def take(self, index: Tensor | slice) -> Minibatch:
        """Some of the replicas."""
        batch, constants, weights = _each(lambda x: x[index], (self.batch, self.constants, self.weights))
        return Minibatch(batch, constants, weights, self.num_examples)

    @property
    def first(self) -> tuple[Any, Any]:
        """What the first replica sees, which is like what all others see."""
        batch, constants = _each(lambda x: x[0], (self.batch, self.constants))
        return batch, constants


def read(batch: Any, counts: Any, constants: Any, like: Tensor) -> tuple[Minibatch, Tensor]:
    """The batch for replicas that are like a (K, P) tensor, and how many examples each has, (K,) on the CPU."""
    length = _num_examples(batch, len(like))
    sizes = torch.full((len(like),), length) if counts is None else _checked_counts(counts, len(like), length)
    constants = _each(lambda x: x.to(like.device), constants)
    if bool(((sizes == length) | (sizes == 0)).all()):
        return Minibatch(batch, constants, None, length), sizes
    real = (torch.arange(length) < sizes.unsqueeze(1)).to(like.device)
    # Padding repeats the first example with weight 0, so that whatever stands there cannot spoil a product.
    filled = _each(lambda x: x.where(real.view(*real.shape, *(1,) * (x.ndim - 2)), x[:, :1]), batch)
    return Minibatch(filled, constants, real.to(like.dtype), length), sizes


def checked_constants(constants: Any, count: int) -> Any:
    """Tensors with K in front, or a function that gives them; nothing is an empty nesting."""
    if constants is None or callable(constants):
        return constants or ()
    for leaf in tree_flatten(constants)[0]:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,):
            what = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"constants must be tensors with the {count} replicas in front, got {what}.")
    return constants


def _each(function: Any, tree: Any) -> Any:
    """A function of every tensor in a nesting."""
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def _num_examples(batch: Any, count: int) -> int:
    """M, the second dimension that every tensor of the batch shares behind K."""
    shapes = {tuple(x.shape[:2]) for x in tree_flatten(batch)[0] if isinstance(x, Tensor)}
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 2 or shape[0] != count or not shape[1]:
        raise ValueError(
            f"batch must hold tensors of shape ({count}, M, ...), one entry per replica and example, got first "
            f"dimensions {sorted(shapes) or 'none: it has no tensors'}."
        )
    return shape[1]


def _checked_counts(counts: Any, count: int, length: int) -> Tensor:
    found = torch.as_tensor(counts, device="cpu")
    if found.shape != (count,) or found.is_floating_point() or found.dtype is torch.bool:
        raise ValueError(
            f"counts must be {count} whole numbers, the examples of each replica, got shape {tuple(found.shape)} of "
            f"{found.dtype}."
        )
    if bool((found < 0).any() or (found > length).any()):
        raise ValueError(
            f"counts must lie between 0 (sit out) and the batch's {length} examples, got {int(found.min())} to "
            f"{int(found.max())}."
        )
    return found.long()
