"""One rule for each type of node at which parameters meet data: gradients of the parameter for chosen examples.

A rule returns the rows of one operand of its node for the chosen examples, as a block with as many columns as the
operand has entries: rows of small operands are formed at once, those of matrices and tables are kept as factors. `None`
leaves the node to `rows.graph`, which runs it once for each chosen example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from slangvi.rows.blocks import Block, Formed, Outer, Patches, TableRows
from slangvi.rows.layout import Layout
from slangvi.rows.nodes import UnknownNodeError, saved, signed, type_name

T = TypeVar("T")

__all__ = ["Meeting", "Rule", "find_rule", "form_block", "register_rule"]


class Meeting:
    """A node at which a parameter meets data, and what its backward pass brought.

    Args:
        node: of autograd's graph.
        layout: where the batch lies in δ.
        delta: δ, gradient of the node's output.
        chosen: examples whose rows are wanted, (K,); None for all of them, whose tensors are then not copied.
        num_examples: M.
        keep: returns a tensor that rows may be views of; see `Recording.keep`.

    `operand` is which of the node's inputs is the parameter, or made of parameters alone, and `shape` is its shape.
    """

    __slots__ = ("_parts", "chosen", "delta", "keep", "layout", "node", "num_examples", "operand", "shape")

    def __init__(
        self,
        node: Node,
        layout: Layout,
        delta: Tensor,
        chosen: Tensor | None,
        num_examples: int,
        keep: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        self.node, self.layout, self.delta = node, layout, delta
        self.chosen, self.num_examples, self.keep = chosen, num_examples, keep
        self.operand, self.shape = 0, torch.Size()
        self._parts: dict[str, Any] = {}

    def take(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Return the chosen examples of a tensor whose batch lies as in delta, or likewise in another dimension."""
        layout = self.layout if dim is None else self.layout._replace(dim=dim)
        if tensor.layout is not torch.strided:
            raise UnknownNodeError(f"an operand has layout {tensor.layout}")
        return layout.take(self.keep(tensor) if self.chosen is None else tensor, self.chosen, self.num_examples)

    def taken_delta(self) -> Tensor:
        """Return the chosen examples of delta, (K, ...)."""
        found: Tensor | None = self._parts.get("delta")
        if found is None:
            found = self._parts["delta"] = self.layout.take(self.delta, self.chosen, self.num_examples)
        return found

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under a name for another operand of the node, or make it."""
        if name not in self._parts:
            self._parts[name] = make()
        found: T = self._parts[name]
        return found


Rule = Callable[[Meeting], Block | None]
_RULES: dict[str, Rule] = {}


def register_rule(*kinds: str | type[torch.autograd.Function]) -> Callable[[Rule], Rule]:
    """Register a rule for nodes of autograd's graph, by their names or by the custom functions that make them.

    The rule gets a `Meeting` and returns the rows of its operand for the chosen examples, as a `Formed` block, (K, p)
    for an operand of p entries, or an `Outer` one. It returns None for what it cannot handle; the node is then run once
    for each chosen example. Rows of a rule are compared with the definition when a graph is first seen.

    Args:
        kinds: names of node types, such as "AddmmBackward0", or subclasses of `torch.autograd.Function`.

    Example:
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, gain):
        ...         ctx.save_for_backward(x, gain)
        ...         return x * gain
        ...     @staticmethod
        ...     def backward(ctx, delta):
        ...         x, gain = ctx.saved_tensors
        ...         return delta * gain, (delta * x).sum()
        >>> @register_rule(Scale)
        ... def scale(meeting):
        ...     x, _ = meeting.node.saved_tensors
        ...     return Formed((meeting.taken_delta() * meeting.take(x)).flatten(1).sum(1, keepdim=True))
    """
    names = [_name_of(kind) for kind in kinds or (None,)]

    def register(rule: Rule) -> Rule:
        if not callable(rule):
            raise TypeError(f"a rule must be a function of a meeting that returns its rows, got {rule!r}.")
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _name_of(kind: Any) -> str:
    """Return the name that nodes of a kind have in the graph."""
    if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
        return f"{kind.__name__}Backward"
    if isinstance(kind, str):
        return kind
    raise TypeError(
        f"register_rule takes names of autograd's nodes or subclasses of torch.autograd.Function, got {kind!r}. Write "
        '@register_rule("AddmmBackward0") or @register_rule(MyFunction) above the rule.'
    )


def find_rule(node: Node) -> Rule | None:
    """Return the rule of a node's type, if there is one."""
    return _RULES.get(type_name(node))


def form_block(rows: Tensor) -> Formed:
    """Return rows (K, ...) as a block."""
    return Formed(rows.flatten(1) if rows.ndim > 1 else rows.unsqueeze(1))


def sum_to_operand(rows: Tensor, shape: torch.Size) -> Tensor:
    """Sum (K, ...) over the dimensions along which an operand of this shape was broadcast, (K, *shape)."""
    extra = rows.ndim - 1 - len(shape)
    if extra:
        given = rows.shape[1 : 1 + extra].numel()
        rows = rows.flatten(0, extra) if given == 1 else rows.sum(tuple(range(1, 1 + extra)))
    spread = [dim for dim, size in enumerate(shape, 1) if size == 1 and rows.shape[dim] != 1]
    return rows.sum(spread, keepdim=True) if spread else rows


# ---- matrix products


# Names of the factors that a node saved, and how many inputs come before them.
_FACTORS = {
    "MmBackward0": ("self", "mat2", 0),
    "BmmBackward0": ("self", "mat2", 0),
    "AddmmBackward0": ("mat1", "mat2", 1),
    "BaddbmmBackward0": ("batch1", "batch2", 1),
}


@register_rule(*_FACTORS)
def matrix_product(meeting: Meeting) -> Block | None:
    """C = A B: rows of B are A_kᵀ δ_k, rows of A are δ_k B_kᵀ; of an added bias, δ_k summed."""
    node, delta = meeting.node, meeting.taken_delta()
    left, right, added = _FACTORS[type(node).__name__]
    place = meeting.operand - added
    if place < 0:
        weight, rows = saved(node, "beta"), sum_to_operand(delta, meeting.shape)
        return form_block(rows if weight == 1 else rows * weight)
    scale = saved(node, "alpha") if added else 1
    rows_dim = meeting.delta.ndim - 2
    if place == 1 and meeting.layout.dim == rows_dim:  # B is the parameter, the batch lies among the rows of A
        x = meeting.take(saved(node, left))
    elif place == 0 and meeting.layout.dim == rows_dim + 1:  # A is the parameter, the batch is in the columns of B
        x, delta = delta.mT, meeting.take(saved(node, right)).mT
    else:
        return None
    if delta.ndim == 3:  # (K, n, o); products of several matrices have them in front of n
        x, delta = x.unsqueeze(1), delta.unsqueeze(1)
    return Outer(x if scale == 1 else x * scale, delta)


@register_rule("MvBackward0")
def matrix_vector_product(meeting: Meeting) -> Block | None:
    """C = A b: rows of b are A_kᵀ δ_k."""
    if meeting.operand != 1 or meeting.layout.dim != 0:
        return None
    x, delta = meeting.take(saved(meeting.node, "self")), meeting.taken_delta()
    return Outer(x.unsqueeze(1), delta.unsqueeze(1).unsqueeze(-1))


# ---- convolutions


@register_rule("ConvolutionBackward0", "MkldnnConvolutionBackward0", "CudnnConvolutionBackward0")
def convolution(meeting: Meeting) -> Block | None:
    """Rows of the weight are δ times patches of the input; of the bias, δ summed over positions."""
    if meeting.layout.dim != 0 or meeting.delta.shape[0] != meeting.num_examples:
        return None
    node, delta = meeting.node, meeting.taken_delta().squeeze(1)
    if meeting.operand == 2:
        return Formed(delta.flatten(2).sum(2))
    if meeting.operand != 1:
        return None
    x, weight = meeting.take(saved(node, "input")).squeeze(1), saved(node, "weight")
    stride, padding, dilation = (tuple(saved(node, key)) for key in ("stride", "padding", "dilation"))
    transposed, groups, output_padding = (saved(node, key) for key in ("transposed", "groups", "output_padding"))
    if not transposed:
        kernel = tuple(weight.shape[2:])
        patches = partial(take_patches, kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
        return Patches(delta.unflatten(1, (groups, -1)).flatten(3).mT, x, weight[0].numel(), patches)
    sizes = stride, padding, dilation, transposed, output_padding, groups
    back = torch.ops.aten.convolution_backward
    each = [back(delta[k : k + 1], x[k : k + 1], weight, None, *sizes, (False, True, False))[1] for k in range(len(x))]
    return form_block(torch.stack(each))


def take_patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return what each output position of a convolution sees, (K, groups, positions, C/groups · kernel entries)."""
    x = F.pad(x, [size for side in reversed(padding) for size in (side, side)])
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, (size - 1) * gap + 1, step)[..., ::gap]
    x = x.unflatten(1, (groups, -1))
    positions = range(3, 3 + len(kernel))
    # The last line makes the only copy: patches are as many times larger than x as a kernel has entries.
    ordered = x.permute(0, 1, *positions, 2, *(axis + len(positions) for axis in positions))
    return ordered.flatten(2 + len(positions)).flatten(2, -2)


# ---- tables


@register_rule("EmbeddingBackward0")
def embedding(meeting: Meeting) -> Block | None:
    """Rows of the table: δ of every position, added to the row that was looked up there."""
    node, shape = meeting.node, meeting.shape
    if saved(node, "scale_grad_by_freq") or meeting.layout.dim >= meeting.delta.ndim - 1:
        return None
    indices = meeting.take(saved(node, "indices")).flatten(1)
    delta = meeting.taken_delta().flatten(1, -2)
    padding = signed(saved(node, "padding_idx"))
    return TableRows(indices, delta if padding < 0 else delta * (indices != padding).unsqueeze(-1), shape[0])


# ---- normalisation


def _scale_and_shift(meeting: Meeting, normalised: Callable[[], Tensor], dims: tuple[int, ...]) -> Formed | None:
    """Return rows of a gain, Σ δ ∘ x̂, or of an offset, Σ δ.

    Args:
        meeting: whose operand 1 is the gain and operand 2 the offset.
        normalised: x̂ of the chosen examples, shaped like the chosen δ.
        dims: to sum over.
    """
    delta = meeting.taken_delta()
    if meeting.operand == 2:
        return form_block(delta.sum(dims))
    if meeting.operand == 1:
        return form_block((delta * normalised()).sum(dims))
    return None


@register_rule("NativeLayerNormBackward0")
def layer_norm(meeting: Meeting) -> Block | None:
    """LayerNorm: mean and scale of every position were saved."""
    node, inner = meeting.node, len(meeting.shape)
    if meeting.layout.dim >= meeting.delta.ndim - inner:
        return None

    def normalised() -> Tensor:
        x, mean, scale = (meeting.take(saved(node, key)) for key in ("input", "result1", "result2"))
        return (x - mean).mul_(scale)

    return _scale_and_shift(meeting, normalised, tuple(range(1, meeting.delta.ndim + 1 - inner)))


@register_rule("NativeGroupNormBackward0")
def group_norm(meeting: Meeting) -> Block | None:
    """GroupNorm: mean and scale of every example and group were saved.

    Torch's own backward sums over examples; here they are channels of a single one.
    """
    if meeting.layout.dim != 0 or meeting.delta.shape[0] != meeting.num_examples or not meeting.operand:
        return None

    def both() -> Sequence[Tensor]:
        node, delta = meeting.node, meeting.taken_delta()
        x, mean, scale = (meeting.take(saved(node, key)) for key in ("input", "result1", "result2"))
        count, channels, groups = len(x), x.shape[2], mean.shape[-1]
        delta, x = (each.reshape(1, count * channels, -1) for each in (delta, x))
        mean, scale = (each.reshape(1, -1) for each in (mean, scale))
        sizes = 1, count * channels, x.shape[-1], count * groups
        back = torch.ops.aten.native_group_norm_backward
        gain = x.new_empty(count * channels)  # asked for its shape alone
        found = back(delta, x, mean, scale, gain, *sizes, (False, True, True))
        return [each.view(count, channels) for each in found[1:]]

    return Formed(meeting.once("gain and offset", both)[meeting.operand - 1])


@register_rule("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
def batch_norm(meeting: Meeting) -> Block | None:
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


def _elementwise(meeting: Meeting, factor: Any) -> Formed:
    """Return rows of an operand whose gradient is δ times something of δ's shape, or a number."""
    delta = meeting.taken_delta()
    if isinstance(factor, Tensor):
        spread = factor.expand(meeting.delta.shape) if factor.shape != meeting.delta.shape else factor
        delta = delta * meeting.layout.take(spread, meeting.chosen, meeting.num_examples)
    elif factor != 1:
        delta = delta * factor
    return form_block(sum_to_operand(delta, meeting.shape))


@register_rule("AddBackward0", "SubBackward0")
def addition(meeting: Meeting) -> Block:
    """A ± αB: rows are δ, or ±αδ."""
    sign = -1 if type_name(meeting.node) == "SubBackward0" else 1
    return _elementwise(meeting, sign * saved(meeting.node, "alpha") if meeting.operand == 1 else 1)


@register_rule("MulBackward0")
def multiplication(meeting: Meeting) -> Block:
    """A ∘ B: rows are δ times the other operand."""
    return _elementwise(meeting, saved(meeting.node, "self" if meeting.operand == 1 else "other"))


@register_rule("ExpandBackward0")
def expansion(meeting: Meeting) -> Block:
    """A value repeated along the batch: rows are δ, summed over all else that it was repeated along."""
    return _elementwise(meeting, 1)


@register_rule("PreluKernelBackward0")
def prelu(meeting: Meeting) -> Block | None:
    """max(x, 0) + w min(x, 0): rows of w are δ min(x, 0)."""
    return _elementwise(meeting, saved(meeting.node, "self").clamp_max(0)) if meeting.operand == 1 else None
