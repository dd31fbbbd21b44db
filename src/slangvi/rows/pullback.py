"""From rows of a value that is made of parameters alone to rows of these parameters.

Views and casts are undone one by one, which costs nothing and can wait until rows are formed. Anything else is gone
through at once by a batched backward pass over that part of the graph, which is freed soon after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

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
from slangvi.rows.rules import FormRows, keep_formed

__all__ = ["PullBack", "find_pull_back"]

# From what forms rows of a value to what forms rows of each parameter behind it.
PullBack = Callable[[FormRows], dict[str, FormRows]]
Undo = Callable[[Tensor], Tensor]


def find_pull_back(edge: tuple[Node, int], leaves: Mapping[str, Tensor]) -> PullBack:
    """Return how rows of an edge become rows of the parameters behind it.

    Args:
        edge: a node, and which of its outputs.
        leaves: name → parameter.
    """
    if len(leaves) == 1:
        try:
            steps = _undo_views(edge[0])
        except UnknownNodeError:
            steps = None
        if steps is not None:
            return partial(_later, next(iter(leaves)), steps)
    return partial(_at_once, edge, leaves)


def _later(name: str, steps: Sequence[Undo], form: FormRows) -> dict[str, FormRows]:
    def formed() -> Tensor:
        rows = form()
        for step in steps:
            rows = step(rows)
        return rows

    return {name: formed}


def _at_once(edge: tuple[Node, int], leaves: Mapping[str, Tensor], form: FormRows) -> dict[str, FormRows]:
    with torch.enable_grad():
        rows = form().to(dtypes_of(edge[0])[edge[1]])
        try:
            found = pull_back(edge, rows, list(leaves.values()))
        except RuntimeError:  # a node that vmap cannot follow
            found = pull_back(edge, rows, list(leaves.values()), batched=False)
    pairs = zip(leaves, found, strict=True)
    return {name: keep_formed(part.detach()) for name, part in pairs if part is not None}


def _undo_views(node: Node) -> list[Undo] | None:
    """Return the functions that take rows of a chain of views and casts to rows of the leaf; None for other chains."""
    steps: list[Undo] = []
    while not is_leaf(node):
        if type_name(node) not in _UNDO or node.next_functions[0][0] is None:
            return None
        steps.append(_UNDO[type_name(node)](node))
        node = node.next_functions[0][0]
    return steps


def _transpose(node: Node) -> Undo:
    ndim = len(shapes_of(node)[0])
    first, second = (signed(saved(node, key)) % ndim + 1 for key in ("dim0", "dim1"))
    return lambda rows: rows.transpose(first, second)


def _permute(node: Node) -> Undo:
    ndim = len(shapes_of(node)[0])
    dims = [signed(dim) % ndim for dim in saved(node, "dims")]
    back = [0, *(dims.index(k) + 1 for k in range(ndim))]
    return lambda rows: rows.permute(back)


def _reshape(node: Node) -> Undo:
    shape = operand_shape(node, 0)
    return lambda rows: rows.reshape(len(rows), *shape)


_UNDO: dict[str, Callable[[Node], Undo]] = {
    "TBackward0": lambda node: lambda rows: rows.mT,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "ToCopyBackward0": lambda node: lambda rows: rows,
    "CloneBackward0": lambda node: lambda rows: rows,
    **dict.fromkeys(
        (
            *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
            *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
        ),
        _reshape,
    ),
}
