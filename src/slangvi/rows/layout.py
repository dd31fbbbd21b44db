"""Place of the batch in a tensor: a dimension of its own, or one that it was folded into."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "fitting_layouts", "possible_layouts"]


class Layout(NamedTuple):
    """The place of the batch in tensors of one shape.

    Args:
        dim: dimension of size M·t, of which every example has t entries.
        outer: True if an example's entries lie side by side, (M, t); False if examples alternate, (t, M).
    """

    dim: int
    outer: bool = True

    def take(self, tensor: Tensor, chosen: Tensor | None, num_examples: int) -> Tensor:
        """Return the chosen examples in front: (K, ...) with size t in place of M·t; all of them, as a view, for None.

        Example:
            >>> tensor = torch.arange(6.0).view(6, 1)  # two examples of three entries
            >>> Layout(0).take(tensor, torch.tensor([1]), 2).flatten()
            tensor([3., 4., 5.])
            >>> Layout(0, outer=False).take(tensor, torch.tensor([1]), 2).flatten()
            tensor([1., 3., 5.])
        """
        each = tensor.shape[self.dim] // num_examples
        if self.dim == 0 and (self.outer or each == 1):
            rows = tensor.view(num_examples, each, *tensor.shape[1:])
            return rows if chosen is None else rows.index_select(0, chosen)
        sizes = (num_examples, each) if self.outer else (each, num_examples)
        batch = self.dim if self.outer else self.dim + 1
        taken: Tensor = tensor.unflatten(self.dim, sizes).movedim(batch, 0)
        return taken if chosen is None else taken.index_select(0, chosen)

    def keep_only(self, tensor: Tensor, example: int, num_examples: int) -> Tensor:
        """Return a copy with zeros in place of all other examples."""
        each = tensor.shape[self.dim] // num_examples
        places = torch.arange(tensor.shape[self.dim], device=tensor.device)
        own = places // each == example if self.outer else places % num_examples == example
        shape = [-1 if dim == self.dim else 1 for dim in range(tensor.ndim)]
        return torch.where(own.view(shape), tensor, 0.0)


def possible_layouts(shape: tuple[int, ...], num_examples: int) -> list[Layout]:
    """Return every place that a batch of this size may have in a shape, the usual ones first.

    Example:
        >>> possible_layouts((12, 4), 4)
        [Layout(dim=0, outer=True), Layout(dim=0, outer=False), Layout(dim=1, outer=True)]
    """
    found = []
    for dim, size in enumerate(shape):
        if size and size % num_examples == 0:
            found.append(Layout(dim))
            if size > num_examples > 1:
                found.append(Layout(dim, outer=False))
    return found


def fitting_layouts(tensor: Tensor, example: int, num_examples: int) -> list[Layout]:
    """Return the layouts by which all that is not zero belongs to one example.

    Args:
        tensor: a gradient that came from the output of that example alone.
        example: its index.
        num_examples: M.

    Example:
        >>> fitting_layouts(torch.tensor([[0.0, 0.0], [3.0, 5.0]]), 1, 2)
        [Layout(dim=0, outer=True)]
    """
    fitting = []
    for layout in possible_layouts(tuple(tensor.shape), num_examples):
        others = [dim for dim in range(tensor.ndim) if dim != layout.dim]
        used = (tensor != 0).any(dim=others) if others else tensor != 0
        places, each = used.nonzero().squeeze(1), tensor.shape[layout.dim] // num_examples
        owners = places // each if layout.outer else places % num_examples
        if bool((owners == example).all()):
            fitting.append(layout)
    return fitting
