"""The one module that touches autograd's nodes: what they saved, what they lead to, and how one is run.

Saved tensors of nodes are half-private to torch. Whatever is missing or has another layout raises `UnknownNodeError`,
and the caller takes a way that does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils import checkpoint

__all__ = [
    "UnknownNodeError",
    "dtypes_of",
    "is_leaf",
    "leaf_of",
    "operand_shape",
    "pull_back",
    "run_node",
    "saved",
    "shapes_of",
    "signed",
    "trace",
    "type_name",
    "walk",
]


class UnknownNodeError(Exception):
    """A node without a field that a rule needs, as of another version of torch."""


def type_name(node: Node) -> str:
    """Return the name of a node's type, such as "AddmmBackward0"."""
    return type(node).__name__


def is_leaf(node: Node) -> bool:
    """Tell whether a node stands for a tensor that gradients are accumulated in."""
    return type_name(node) == "AccumulateGrad"


def leaf_of(node: Node) -> Tensor:
    """Return the tensor of a leaf."""
    leaf: Tensor = node.variable  # type: ignore[attr-defined]
    return leaf


def shapes_of(node: Node) -> tuple[torch.Size, ...]:
    """Return the shapes of the gradients that a node receives, which are those of its outputs."""
    return tuple(torch.Size(item.shape) for item in node._input_metadata)


def dtypes_of(node: Node) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the gradients that a node receives."""
    return tuple(item.dtype for item in node._input_metadata)


def operand_shape(node: Node, index: int) -> torch.Size:
    """Return the shape of an input of a node that needs gradients."""
    function, output = node.next_functions[index]
    assert function is not None
    return shapes_of(function)[output]


def saved(node: Node, name: str) -> Any:
    """Return what a node saved under a name; tensors are those of the graph."""
    try:
        value = getattr(node, f"_saved_{name}")
    except AttributeError:
        raise UnknownNodeError(f"{type_name(node)} has no {name}") from None
    if isinstance(value, Tensor):
        raw: Any = getattr(node, f"_raw_saved_{name}", None)
        if type(getattr(raw, "data", None)).__name__ == "_Holder":
            _put_back(raw, value)
    return value


def _put_back(raw: Any, value: Tensor) -> None:
    """Let the node itself unpack what activation checkpointing hands out only once in a backward pass.

    Args:
        raw: torch's wrapper of a saved tensor.
        value: what it has just handed out.
    """
    task, frame = torch._C._current_graph_task_id(), getclosurevars(raw.unpack_hook).nonlocals["frame"]
    raw.data.handles[task] = handle = checkpoint._Handle()
    frame.recomputed[task][handle] = value


def signed(number: int) -> int:
    """Return a number that a node saved; torch hands out negative ones as unsigned."""
    return number if number < 1 << 62 else number - (1 << 64)


def walk(outputs: Iterable[Tensor]) -> list[Node]:
    """Return every node behind some tensors, each once, in an order that depends on the graph's structure alone."""
    return trace(outputs, {})[0]


def trace(outputs: Iterable[Tensor], names: Mapping[int, str]) -> tuple[list[Node], tuple[Any, ...]]:
    """Return the nodes of `walk`, and the structure of the graph: all types and edges, and which leaf is which.

    Args:
        outputs: tensors with a graph behind them.
        names: id of a parameter → its name.
    """
    places: dict[Node, int] = {}
    structure: list[Any] = []
    stack = [(output.grad_fn, 0) for output in outputs if output.grad_fn is not None][::-1]
    while stack:
        node, output = stack.pop()
        place = places.get(node)
        if place is not None:
            structure.append((place, output))
            continue
        places[node] = len(places)
        kind = type(node)
        structure += kind, output
        if kind.__name__ == "AccumulateGrad":
            structure.append(names.get(id(node.variable)))  # type: ignore[attr-defined]
            continue
        edges = node.next_functions
        for k in range(len(edges) - 1, -1, -1):
            if edges[k][0] is None:
                structure.append(~k)
            else:
                stack.append(edges[k])  # type: ignore[arg-type]
    return list(places), tuple(structure)


def run_node(node: Node, gradients: Sequence[Tensor | None], index: int) -> Tensor | None:
    """Return the gradient of one input of a node for gradients of its outputs; the graph stays as it is."""
    run = node if callable(node) else node.apply  # type: ignore[attr-defined]  # Python's own functions
    found = run(*gradients)
    one: Tensor | None = found[index] if isinstance(found, tuple) else found
    return one


def pull_back(
    edge: tuple[Node, int], rows: Tensor, leaves: Sequence[Tensor], batched: bool = True
) -> tuple[Tensor | None, ...]:
    """Return gradients of leaves for each of K gradients of an edge of the graph, (K, *shape) each.

    Args:
        edge: a node, and which of its outputs.
        rows: (K, *shape of that output).
        leaves: tensors that the node was made from.
        batched: go back once for all rows, by vmap; else once for each.
    """
    output = GradientEdge(*edge)
    if batched:
        return torch.autograd.grad(output, leaves, rows, retain_graph=True, allow_unused=True, is_grads_batched=True)
    each = [torch.autograd.grad(output, leaves, row, retain_graph=True, allow_unused=True) for row in rows]
    return tuple(
        None if parts[0] is None else torch.stack([part for part in parts if part is not None])
        for parts in zip(*each, strict=True)
    )
