"""From rows of a value that is made of parameters alone to rows of these parameters.

Views and casts are undone one by one; rows that are kept as factors stay so. Anything else is gone through by a batched
backward pass over that part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from slangvi.rows.blocks import Block, Formed, Outer
from slangvi.rows.nodes import (
    UnknownNodeError,
    dtypes_of,
    is_leaf,
    operand_shape,
    pull_back,
    saved,
    shapes_of,
    signed,
    type_name,
)

__all__ = ["View", "find_views", "pull_back_block", "undo_views"]

# From rows (K, *shape of a view) to rows (K, *shape of what it is a view of).
Undo = Callable[[Tensor], Tensor]


class View(NamedTuple):
    """A view that reorders the entries of a parameter.

    Args:
        shape: of the view, without dimensions of size one.
        undo: takes rows of the view to rows of what it is a view of.
        is_transpose: whether it swaps the last two dimensions of matrices, or of a stack of them.
    """

    shape: torch.Size
    undo: Undo
    is_transpose: bool


def find_views(node: Node) -> tuple[View, ...] | None:
    """Return the views that reorder entries between a node and a leaf; None if there is more than views and casts."""
    views: list[View] = []
    try:
        while not is_leaf(node):
            if type_name(node) not in _ORDERS or node.next_functions[0][0] is None:
                return None
            order = _ORDERS[type_name(node)](node)
            view = None if order is None else _reordering(shapes_of(node)[0], order)
            if view is not None:
                views.append(view)
            node = node.next_functions[0][0]
    except UnknownNodeError:
        return None
    return tuple(views)


def undo_views(views: Sequence[View], block: Block) -> Block:
    """Return the rows of the parameter behind some views."""
    for shape, undo, is_transpose in views:
        groups = shape[:-2].numel()
        is_same = is_transpose and isinstance(block, Outer) and block.left.shape[1] == groups
        swapped = block.transposed() if is_same else None  # type: ignore[attr-defined]
        block = swapped or Formed(undo(block.form().unflatten(1, shape)).flatten(1))
    return block


def pull_back_block(edge: tuple[Node | None, int], leaves: Sequence[Tensor], block: Block) -> list[Block | None]:
    """Return the rows of each leaf behind an edge of the graph, by a batched backward pass from there."""
    node, output = edge
    assert node is not None
    with torch.enable_grad():
        rows = block.form().to(dtypes_of(node)[output])
        rows = rows.reshape(len(rows), *shapes_of(node)[output])
        try:
            found = pull_back((node, output), rows, leaves)
        except RuntimeError:  # a node that vmap cannot follow
            found = pull_back((node, output), rows, leaves, batched=False)
    return [None if part is None else Formed(part.detach().reshape(len(part), -1)) for part in found]


def _reordering(shape: torch.Size, order: Sequence[int]) -> View | None:
    """Return the view whose dimension k was dimension order[k]; None if that leaves the order of entries as it is."""
    wide = [k for k, size in enumerate(shape) if size != 1]
    kept = [order[k] for k in wide]
    if kept == sorted(kept):
        return None
    places = sorted(kept)
    back = [0, *(kept.index(place) + 1 for place in places)]
    is_transpose = len(kept) in (2, 3) and kept[:-2] == places[:-2]
    return View(torch.Size(shape[k] for k in wide), lambda rows: rows.permute(back), is_transpose)


def _transpose(node: Node) -> list[int]:
    order = list(range(len(shapes_of(node)[0])))
    first, second = (signed(saved(node, key)) % len(order) for key in ("dim0", "dim1"))
    order[first], order[second] = order[second], order[first]
    return order


def _permute(node: Node) -> list[int]:
    ndim = len(shapes_of(node)[0])
    return [signed(dim) % ndim for dim in saved(node, "dims")]


def _unexpanded(node: Node) -> None:
    if shapes_of(node)[0].numel() != operand_shape(node, 0).numel():
        raise UnknownNodeError("a parameter is repeated")


def _unscaled(node: Node) -> None:
    if saved(node, "other") != 1:
        raise UnknownNodeError("a parameter is multiplied by a number")


# From a node to the order of dimensions that its view has; None if entries stay in their order.
_ORDERS: dict[str, Callable[[Node], list[int] | None]] = {
    "TBackward0": lambda node: [1, 0] if len(shapes_of(node)[0]) == 2 else None,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "ExpandBackward0": _unexpanded,
    "MulBackward1": _unscaled,
    **dict.fromkeys(
        (
            *("ToCopyBackward0", "CloneBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
            *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
        ),
        lambda node: None,
    ),
}
