"""One rule for each type of node at which parameters meet data: gradients of the parameter for chosen examples.

A rule returns a function that forms the rows of one operand of its node, (K, *shape of the operand). It keeps the
chosen examples of the node's inputs and of the gradient of its output, and nothing else. `None` leaves the node to
`rows.graph`, which runs it once for each chosen example.

Index legend for einsum: k chosen examples, n positions, i inputs, o outputs, b blocks, g groups, l patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from slangvi.rows.layout import Layout
from slangvi.rows.nodes import operand_shape, saved, signed, type_name

__all__ = ["FormRows", "Meeting", "Rule", "find_rule", "keep_formed", "register_node_rule"]

FormRows = Callable[[], Tensor]


class Meeting(NamedTuple):
    """A node at which a parameter meets data, and what its backward pass brought.

    Args:
        node: of autograd's graph.
        operand: which of its inputs is the parameter, or made of parameters alone.
        delta: gradient of the node's output.
        layout: where the batch lies in it.
        chosen: examples whose rows are wanted, (K,).
        num_examples: M.
    """

    node: Node
    operand: int
    delta: Tensor
    layout: Layout
    chosen: Tensor
    num_examples: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the operand."""
        return operand_shape(self.node, self.operand)

    def take(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Return the chosen examples of a tensor whose batch lies as in delta, or likewise in another dimension."""
        layout = self.layout if dim is None else self.layout._replace(dim=dim)
        return layout.take(tensor, self.chosen, self.num_examples)

    def taken_delta(self) -> Tensor:
        """Return the chosen examples of delta, (K, ...)."""
        return self.take(self.delta)


Rule = Callable[[Meeting], FormRows | None]
_RULES: dict[str, Rule] = {}


def register_node_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for node types by their names in autograd's graph, such as "AddmmBackward0"."""

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def find_rule(node: Node) -> Rule | None:
    """Return the rule of a node's type, if there is one."""
    return _RULES.get(type_name(node))


def keep_formed(rows: Tensor) -> FormRows:
    """Return a function that returns rows that are formed already."""
    return lambda: rows


def sum_to_operand(rows: Tensor, shape: torch.Size) -> Tensor:
    """Sum (K, ...) over the dimensions along which an operand of this shape was broadcast, (K, *shape)."""
    extra = rows.ndim - 1 - len(shape)
    if extra:
        rows = rows.sum(tuple(range(1, 1 + extra)))
    spread = [dim for dim, size in enumerate(shape, 1) if size == 1 and rows.shape[dim] != 1]
    return rows.sum(spread, keepdim=True) if spread else rows


# ---- matrix products


@register_node_rule("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0")
def matrix_product(meeting: Meeting) -> FormRows | None:
    """C = A B: rows of B are A_kᵀ δ_k, rows of A are δ_k B_kᵀ; of an added bias, δ_k summed."""
    node, name = meeting.node, type_name(meeting.node)
    added = name in ("AddmmBackward0", "BaddbmmBackward0")
    scale = saved(node, "alpha") if added else 1
    place = meeting.operand - added
    if place < 0:
        weight, delta, shape = saved(node, "beta"), meeting.taken_delta(), meeting.shape
        return lambda: sum_to_operand(delta, shape) * weight
    left = {"AddmmBackward0": "mat1", "BaddbmmBackward0": "batch1"}.get(name, "self")
    right = "batch2" if name == "BaddbmmBackward0" else "mat2"
    rows_dim = meeting.delta.ndim - 2
    if place == 1 and meeting.layout.dim == rows_dim:  # B is the parameter, the batch lies among the rows of A
        x, delta = meeting.take(saved(node, left)), meeting.taken_delta()
        return lambda: torch.einsum("k...ni,k...no->k...io", x, delta) * scale
    if place == 0 and meeting.layout.dim == rows_dim + 1:  # A is the parameter, the batch lies among the columns of B
        x, delta = meeting.take(saved(node, right)), meeting.taken_delta()
        return lambda: torch.einsum("k...on,k...in->k...oi", delta, x) * scale
    return None


# ---- convolutions


@register_node_rule("ConvolutionBackward0", "MkldnnConvolutionBackward0", "CudnnConvolutionBackward0")
def convolution(meeting: Meeting) -> FormRows | None:
    """Rows of the weight are convolutions of one example's input with its δ; of the bias, δ summed over positions."""
    if meeting.layout.dim != 0 or meeting.delta.shape[0] != meeting.num_examples:
        return None
    node, delta = meeting.node, meeting.taken_delta().squeeze(1)
    if meeting.operand == 2:
        return lambda: delta.flatten(2).sum(2)
    if meeting.operand != 1:
        return None
    x, weight = meeting.take(saved(node, "input")).squeeze(1), saved(node, "weight")
    stride, padding, dilation = (tuple(saved(node, key)) for key in ("stride", "padding", "dilation"))
    transposed, groups, output_padding = (saved(node, key) for key in ("transposed", "groups", "output_padding"))

    def form() -> Tensor:
        if not transposed and weight.ndim <= 4:
            return _unfolded(x, delta, weight.shape, stride, padding, dilation, groups)
        sizes = stride, padding, dilation, transposed, output_padding, groups
        back = torch.ops.aten.convolution_backward
        each = [
            back(delta[k : k + 1], x[k : k + 1], weight, None, *sizes, (False, True, False))[1] for k in range(len(x))
        ]
        return torch.stack(each)

    return form


def _unfolded(
    x: Tensor,
    delta: Tensor,
    shape: torch.Size,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Rows of a convolution in one or two dimensions: δ times patches of the input."""
    kernel = tuple(shape[2:])
    if len(kernel) == 1:  # a height of one
        x, delta, kernel = x.unsqueeze(2), delta.unsqueeze(2), (1, *kernel)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    patches = F.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)
    d, p = delta.flatten(2).unflatten(1, (groups, -1)), patches.unflatten(1, (groups, -1))
    return torch.einsum("kgol,kgil->kgoi", d, p).reshape(len(x), *shape)


# ---- tables


@register_node_rule("EmbeddingBackward0")
def embedding(meeting: Meeting) -> FormRows | None:
    """Rows of the table: δ of every position, added to the row that was looked up there."""
    node, shape = meeting.node, meeting.shape
    if saved(node, "scale_grad_by_freq") or meeting.layout.dim >= meeting.delta.ndim - 1:
        return None
    indices = meeting.take(saved(node, "indices")).flatten(1)
    delta = meeting.taken_delta().flatten(1, -2)
    padding = signed(saved(node, "padding_idx"))

    def form() -> Tensor:
        used = delta if padding < 0 else delta * (indices != padding).unsqueeze(-1)
        empty = delta.new_zeros(len(delta), *shape)
        return empty.scatter_add_(1, indices.unsqueeze(-1).expand_as(used), used)

    return form


# ---- normalisation


def _scale_and_shift(meeting: Meeting, normalised: Callable[[], Tensor], dims: tuple[int, ...]) -> FormRows | None:
    """Rows of a gain, Σ δ ∘ x̂, and of an offset, Σ δ.

    Args:
        meeting: whose operand 1 is the gain and operand 2 the offset.
        normalised: x̂ of the chosen examples, shaped like the chosen δ.
        dims: to sum over.
    """
    delta, shape = meeting.taken_delta(), meeting.shape
    if meeting.operand == 2:
        return lambda: delta.sum(dims).reshape(len(delta), *shape)
    if meeting.operand == 1:
        x = normalised()
        return lambda: (delta * x).sum(dims).reshape(len(delta), *shape)
    return None


@register_node_rule("NativeLayerNormBackward0")
def layer_norm(meeting: Meeting) -> FormRows | None:
    """LayerNorm: mean and scale of every position were saved."""
    node, inner = meeting.node, len(meeting.shape)
    if meeting.layout.dim >= meeting.delta.ndim - inner:
        return None

    def normalised() -> Tensor:
        x, mean, scale = (meeting.take(saved(node, key)) for key in ("input", "result1", "result2"))
        return (x - mean) * scale

    return _scale_and_shift(meeting, normalised, tuple(range(1, meeting.delta.ndim + 1 - inner)))


@register_node_rule("NativeGroupNormBackward0")
def group_norm(meeting: Meeting) -> FormRows | None:
    """GroupNorm: mean and scale of every example and group were saved."""
    if meeting.layout.dim != 0 or meeting.delta.shape[0] != meeting.num_examples:
        return None
    node = meeting.node

    def normalised() -> Tensor:
        x = meeting.take(saved(node, "input"))
        mean, scale = (meeting.take(saved(node, key)) for key in ("result1", "result2"))
        groups = x.flatten(2).unflatten(2, (mean.shape[-1], -1))
        x_hat: Tensor = (groups - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
        return x_hat.reshape(x.shape)

    return _scale_and_shift(meeting, normalised, (1, *range(3, meeting.delta.ndim + 1)))


@register_node_rule("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
def batch_norm(meeting: Meeting) -> FormRows | None:
    """BatchNorm in eval mode: mean and variance are those of the module."""
    node = meeting.node
    if saved(node, "training") or meeting.layout.dim != 0 or meeting.delta.shape[0] != meeting.num_examples:
        return None

    def normalised() -> Tensor:
        mean, variance = saved(node, "running_mean"), saved(node, "running_var")
        shape = (1, 1, -1, *(1 for _ in range(meeting.delta.ndim - 2)))
        scale: Tensor = (variance + saved(node, "eps")).rsqrt().view(shape)
        centred: Tensor = meeting.take(saved(node, "input")) - mean.view(shape)
        return centred * scale

    return _scale_and_shift(meeting, normalised, (1, *range(3, meeting.delta.ndim + 1)))


# ---- elementwise


def _elementwise(meeting: Meeting, factor: Any) -> FormRows:
    """Rows of an operand whose gradient is δ times something of δ's shape, or a number."""
    delta, shape = meeting.taken_delta(), meeting.shape
    if isinstance(factor, Tensor):
        spread = factor.expand(meeting.delta.shape) if factor.shape != meeting.delta.shape else factor
        factor = meeting.take(spread)
    return lambda: sum_to_operand(delta * factor, shape)


@register_node_rule("AddBackward0", "SubBackward0")
def addition(meeting: Meeting) -> FormRows:
    """A ± αB: rows are δ, or ±αδ."""
    sign = -1 if type_name(meeting.node) == "SubBackward0" else 1
    return _elementwise(meeting, sign * saved(meeting.node, "alpha") if meeting.operand == 1 else 1)


@register_node_rule("MulBackward0")
def multiplication(meeting: Meeting) -> FormRows:
    """A ∘ B: rows are δ times the other operand."""
    return _elementwise(meeting, saved(meeting.node, "self" if meeting.operand == 1 else "other"))


@register_node_rule("ExpandBackward0")
def expansion(meeting: Meeting) -> FormRows:
    """A value repeated along the batch: rows are δ, summed over all else that it was repeated along."""
    return _elementwise(meeting, 1)


@register_node_rule("PreluKernelBackward0")
def prelu(meeting: Meeting) -> FormRows | None:
    """max(x, 0) + w min(x, 0): rows of w are δ min(x, 0)."""
    return _elementwise(meeting, saved(meeting.node, "self").clamp_max(0)) if meeting.operand == 1 else None
