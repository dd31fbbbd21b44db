"""Per-example gradients of chosen examples, read off autograd's own graph while the user's backward pass runs.

Whatever code a model runs, a parameter meets the data at a node of autograd's graph. A hook on that node sees the
gradient δ of its output, and the node holds its inputs: rules turn both into rows for the chosen examples. Behind the
node may lie a value that is made of parameters alone (a view, a cast, a normalised weight), through which rows are
pulled back.

`Plan` finds these nodes when a graph is seen for the first time. Gradients of single examples' outputs are sent through
the graph: where what arrives at a node belongs to that example, the node has a batch, and its place in the tensor is
known. The same passes give the gradients of these examples by definition, with which the rules are compared; a
parameter whose rows differ is served by definition from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError

from slangvi.errors import UnsupportedModuleError
from slangvi.rows.blocks import Block, Formed, add
from slangvi.rows.layout import Layout, fitting_layouts, possible_layouts
from slangvi.rows.nodes import (
    UnknownNodeError,
    dtypes_of,
    is_leaf,
    leaf_of,
    operand_shape,
    run_node,
    shapes_of,
    trace,
    walk,
)
from slangvi.rows.pullback import View, find_views, pull_back_block, undo_views
from slangvi.rows.rules import Meeting, find_rule

__all__ = ["Plan", "Plans", "Recording", "make_plan", "record", "watch_outputs"]

# Largest difference from the definition, relative to the largest entry of the rows, that counts as rounding where
# something is computed in this dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Graphs that are remembered, the oldest of which goes first: texts of any length would be new ones for ever.
MOST_PLANS = 256


@dataclass(frozen=True)
class Frontier:
    """One place where a parameter, or a value made of parameters, meets the batch.

    Args:
        position: of the node in the order of `walk`.
        index: which input of the node it is.
        output: which output's gradient has the batch.
        layout: where the batch lies in it.
        shape: of that gradient, when the plan was made.
        operand_shape: of the input.
        names: of the parameters behind it.
        views: what undoes views between the node and its parameter; None where there is more than views.
        by_rule: whether the rule of the node's type is taken; else the node is run once for each chosen example.
    """

    position: int
    index: int
    output: int
    layout: Layout
    shape: torch.Size
    operand_shape: torch.Size
    names: tuple[str, ...]
    views: tuple[View, ...] | None
    by_rule: bool = True


@dataclass(frozen=True)
class Plan:
    """Places of a graph at which its rows are read; they hold for every graph of the same structure.

    Args:
        num_examples: M.
        output_layouts: where the batch lies in each output; None for those without one.
        frontiers: places at which rules are applied.
        tolerance: relative difference from the definition that counts as rounding.
        by_definition: names of parameters whose rows are found by going back once for each example.
    """

    num_examples: int
    output_layouts: tuple[Layout | None, ...]
    frontiers: tuple[Frontier, ...]
    tolerance: float
    by_definition: frozenset[str] = frozenset()

    @cached_property
    def places(self) -> list[tuple[int, tuple[Frontier, ...]]]:
        """Positions of the nodes at which rows are read, and what is read there."""
        used = (f for f in self.frontiers if not self.by_definition.issuperset(f.names))
        return [(position, tuple(some)) for position, some in groupby(used, key=lambda f: f.position)]

    def fits(self, nodes: Sequence[Node], outputs: Sequence[Tensor]) -> bool:
        """Tell whether a graph of the same structure has its batch in the same places."""
        count = self.num_examples
        for position, (first, *_) in self.places:
            shape = nodes[position]._input_metadata[first.output].shape
            if shape != first.shape:
                dim = first.layout.dim
                if len(shape) != len(first.shape) or shape[dim] % count:
                    return False
                if (shape[dim] == count) != (first.shape[dim] == count):  # then it was not seen what alternates
                    return False
        return [_output_layout(output, count) for output in outputs] == list(self.output_layouts)


@dataclass(eq=False)
class Recording:
    """Rows of the backward passes through one call of a model, in the making.

    Args:
        params: name → parameter.
        chosen: examples, (K,); None for all.
        num_examples: M.
        plan: by which the graph is read; None for outputs that are not finite, of which there are no rows.
        copy_data: returns a copy of data, which its owner may overwrite before the rows are used.
    """

    params: Mapping[str, Tensor]
    chosen: Tensor | None
    num_examples: int
    plan: Plan | None
    copy_data: Callable[[Tensor], Tensor] = torch.clone
    # Number of a backward pass in autograd's engine → parameter name → what its nodes add.
    passes: dict[int, dict[str, list[Block]]] = field(default_factory=dict)
    # Activations that blocks are views of, and their versions.
    kept: list[tuple[Tensor, int]] = field(default_factory=list)
    is_paused: bool = False  # while a hook goes back through the graph itself
    _handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_rows = self.num_examples if self.chosen is None else len(self.chosen)  # K

    def blocks(self, dtype: torch.dtype | None = None, of_passes: Sequence[int] | None = None) -> dict[str, Block]:
        """Return the rows by parameter name; a parameter that was not reached is missing.

        Args:
            dtype: of the rows; None for that of each parameter.
            of_passes: numbers of backward passes; None for all of them.
        """
        found, joined = dict[str, list[Block]](), dict[str, Block]()
        for task, parts in self.passes.items():
            if of_passes is None or task in of_passes:
                for name, blocks in parts.items():
                    found.setdefault(name, []).extend(blocks)
        for name, blocks in found.items():
            joined[name] = add([block.to_dtype(dtype or self.params[name].dtype) for block in blocks])
        return joined

    def add_block(self, name: str, block: Block) -> None:
        """Note rows of a parameter that the backward pass now running brought."""
        task = torch._C._current_graph_task_id()
        self.passes.setdefault(task, {}).setdefault(name, []).append(block)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor that blocks may be views of: a copy of data, and activations as they are."""
        own = tensor.detach()
        # Views of parameters are copied as well: the mean, or the next draw, will be there before the step.
        if tensor.is_leaf or own.untyped_storage().data_ptr() in self._own_memory:
            return self.copy_data(own)
        self.kept.append((own, own._version))
        return own

    @cached_property
    def _own_memory(self) -> set[int]:
        """Addresses of the parameters' memory."""
        return {param.untyped_storage().data_ptr() for param in self.params.values()}

    def check_unmodified(self) -> None:
        """Raise if an activation that rows are made of was modified in place."""
        for tensor, version in self.kept:
            if tensor._version != version:
                raise UnsupportedModuleError(
                    f"an activation of shape {tuple(tensor.shape)} was modified in place after backward, and "
                    "per-example gradients are made of it. Use the out-of-place operation, or modify a copy."
                )

    def detach(self) -> None:
        """Take the hooks off the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


# ---- finding out


def make_plan(outputs: Sequence[Tensor], params: Mapping[str, Tensor], num_examples: int) -> Plan:
    """Find where parameters meet the batch, and check the rules there against the definition.

    The graph is gone through three times and kept. No gradient is accumulated.

    Args:
        outputs: of the model; those without a batch are left alone.
        params: name → parameter to be inferred.
        num_examples: M.
    """
    nodes = walk(outputs)
    layouts = tuple(_output_layout(output, num_examples) for output in outputs)
    if not any(layouts):
        shapes = [tuple(output.shape) for output in outputs]
        raise UnsupportedModuleError(
            f"no output of the model has {num_examples} examples in its first or second dimension: {shapes}. Return "
            "the predictions of each example."
        )
    seeds = _seeds(outputs)
    probes = sorted({0, num_examples - 1})
    seen = [_probe(outputs, layouts, seeds, nodes, params, example, num_examples) for example in probes]
    with_data = _nodes_with_data(nodes)
    found = {
        node: _common([fits.get(node) for fits, _ in seen], node, num_examples, node in with_data) for node in nodes
    }
    tolerance = max(TOLERANCE.get(dtype, 0.0) for node in nodes for dtype in dtypes_of(node))
    plan = Plan(num_examples, layouts, tuple(_frontiers(nodes, found, params)), tolerance)
    definition = {name: torch.stack([gradients[name] for _, gradients in seen]) for name in params}
    largest = max((float(x.abs().max()) for x in definition.values() if x.numel()), default=0.0)
    chosen = torch.tensor(probes, device=outputs[0].device)

    def find_wrong() -> frozenset[str]:
        recording = Recording(params, chosen, num_examples, plan)
        _listen(recording, nodes)
        try:
            _gradients(outputs, layouts, seeds, params)
        finally:
            recording.detach()
        blocks = recording.blocks()
        return frozenset(name for name in params if not _agrees(blocks.get(name), definition[name], tolerance, largest))

    try:
        wrong = find_wrong()
    except CheckpointError:  # of a version of torch whose checkpoints cannot be read twice
        return replace(plan, frontiers=(), by_definition=frozenset(params))
    if wrong:  # nodes are right where rules are not
        frontiers = tuple(replace(f, by_rule=wrong.isdisjoint(f.names)) for f in plan.frontiers)
        plan = replace(plan, frontiers=frontiers)
        wrong = find_wrong()
    return replace(plan, by_definition=wrong)


def _seeds(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return random gradients of the outputs, the same each time; torch's own generator is left alone."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(output.shape, generator=generator, device="cpu").to(output) for output in outputs]


def _output_layout(output: Tensor, num_examples: int) -> Layout | None:
    """Return the place of the batch in an output: the first dimension, or the second where time comes first."""
    for dim in range(min(2, output.ndim)):
        if output.shape[dim] == num_examples and output.requires_grad:
            return Layout(dim)
    return None


Fits = dict[Node, dict[int, list[Layout]]]


def _probe(
    outputs: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    seeds: Sequence[Tensor],
    nodes: Sequence[Node],
    params: Mapping[str, Tensor],
    example: int,
    num_examples: int,
) -> tuple[Fits, dict[str, Tensor]]:
    """Send one example's gradient back; return the layouts that fit it at each node, and the parameters' gradients."""
    fits: Fits = {}

    def look(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        fits[node] = {
            k: fitting_layouts(gradient, example, num_examples)
            for k, gradient in enumerate(gradients)
            if gradient is not None and bool((gradient != 0).any())
        }

    with ExitStack() as stack:
        for node in nodes:
            if not is_leaf(node):
                stack.callback(node.register_prehook(partial(look, node)).remove)
        masked = [
            seed if layout is None else layout.keep_only(seed, example, num_examples)
            for seed, layout in zip(seeds, layouts, strict=True)
        ]
        definition = _gradients(outputs, layouts, masked, params)
    return fits, definition


def _gradients(
    outputs: Sequence[Tensor], layouts: Sequence[Layout | None], seeds: Sequence[Tensor], params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return gradients of the parameters for given gradients of the outputs; the graph is kept."""
    used = [(output, seed) for output, seed, layout in zip(outputs, seeds, layouts, strict=True) if layout is not None]
    found = torch.autograd.grad(
        [output for output, _ in used],
        list(params.values()),
        [seed for _, seed in used],
        retain_graph=True,
        allow_unused=True,
    )
    pairs = zip(params.items(), found, strict=True)
    return {name: torch.zeros_like(param) if grad is None else grad for (name, param), grad in pairs}


def _common(
    seen: Sequence[dict[int, list[Layout]] | None], node: Node, num_examples: int, touches_data: bool
) -> dict[int, Layout]:
    """Return the layout of each output of a node that fits the gradients of every probe, if it has a batch.

    Where only zeros came, as behind a unit that was off in these examples, a value that depends on data is taken to
    have the batch in front.
    """
    found = {}
    for output, shape in enumerate(shapes_of(node)):
        candidates = possible_layouts(tuple(shape), num_examples)
        looked = [fits[output] for fits in seen if fits is not None and output in fits]
        if looked or touches_data:
            fitting = [layout for layout in candidates if all(layout in fits for fits in looked)]
            if fitting:
                found[output] = fitting[0]
    return found


def _nodes_with_data(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that have an input without gradients, such as data, or lead to a node that has."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for function, _ in node.next_functions:
            if function is not None:
                users.setdefault(function, []).append(node)
    stack = [node for node in nodes if any(function is None for function, _ in node.next_functions)]
    found = set(stack)
    while stack:
        new = [user for user in users.get(stack.pop(), ()) if user not in found]
        found.update(new)
        stack += new
    return found


def _frontiers(
    nodes: Sequence[Node], found: Mapping[Node, dict[int, Layout]], params: Mapping[str, Tensor]
) -> list[Frontier]:
    """Return the inputs without a batch of nodes with one: parameters, or values made of them."""
    name_of = {id(param): name for name, param in params.items()}
    frontiers = []
    for position, node in enumerate(nodes):
        if not found[node]:
            continue
        output, layout = next(iter(found[node].items()))
        shape = shapes_of(node)[output]
        for index, (function, place) in enumerate(node.next_functions):
            if function is not None and (is_leaf(function) or place not in found[function]):
                leaves = {id(leaf_of(leaf)) for leaf in _leaves_behind(function)}
                names = tuple(name for key, name in name_of.items() if key in leaves)
                if names:
                    views = find_views(function) if len(leaves) == 1 else None
                    own = operand_shape(node, index)
                    frontiers.append(Frontier(position, index, output, layout, shape, own, names, views))
    return frontiers


def _agrees(block: Block | None, definition: Tensor, tolerance: float, largest: float) -> bool:
    """Tell whether the rows of a parameter are those of the definition but for rounding.

    Args:
        block: the rows; None for zeros.
        definition: what they should be, (K, *shape).
        tolerance: relative to their largest entry.
        largest: entry of any parameter; what cancels in one has the rounding of others.
    """
    if not definition.numel():
        return True
    difference = definition if block is None else block.form().view_as(definition) - definition
    rounding = 100 * torch.finfo(definition.dtype).eps * largest
    return float(difference.abs().max()) <= tolerance * float(definition.abs().max()) + rounding


# ---- reading


def record(
    outputs: Sequence[Tensor],
    params: Mapping[str, Tensor],
    chosen: Tensor | None,
    plans: Plans,
    num_examples: int,
    copy_data: Callable[[Tensor], Tensor] = torch.clone,
) -> Recording:
    """Listen to the backward passes that will go through some outputs, and return what their rows are made from.

    Args:
        outputs: of the model, just computed.
        params: name → parameter.
        chosen: examples whose rows are wanted, (K,); None for all.
        plans: graphs that were seen before; a new one is added.
        num_examples: M.
        copy_data: see `Recording`.
    """
    nodes, structure = trace(outputs, {id(param): name for name, param in params.items()})
    plan = plans.find(nodes, structure, outputs, params, num_examples)
    recording = Recording(params, chosen, num_examples, plan, copy_data)
    if plan is not None:
        _listen(recording, nodes)
    return recording


def watch_outputs(recording: Recording, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Listen to the gradients that reach outputs, for parameters whose rows are found by definition.

    An output that another one was made from also gets the gradient of that one. Such outputs are handed on as copies,
    which get their own alone.

    Args:
        recording: as `record` returned it.
        outputs: as given to it.

    Returns:
        The outputs that the caller is to use.
    """
    plan, handed = recording.plan, list(outputs)
    if plan is None or not plan.by_definition:
        return handed
    slow = {name: recording.params[name] for name in sorted(plan.by_definition)}
    for k, (output, layout) in enumerate(zip(outputs, plan.output_layouts, strict=True)):
        if layout is None:
            continue
        others = [x for j, x in enumerate(outputs) if j != k and plan.output_layouts[j] is not None]
        if output.grad_fn in walk(others):
            handed[k] = Alias.apply(output)  # type: ignore[no-untyped-call]
        hook = partial(_go_back_by_example, recording, output, layout, slow)
        recording._handles.append(handed[k].register_hook(hook))
    return handed


class Alias(torch.autograd.Function):
    """An identity that makes another node of the graph, and no view: the caller may change it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Plans:
    """Plans of the graphs that were seen, by their structure.

    Args:
        verify: make a plan again, and so compare rules with the definition, the 2nd, 4th, 8th, … time it is used.
        by_definition: leave rules and nodes alone, and go back once for each example.
    """

    def __init__(self, verify: bool = True, by_definition: bool = False) -> None:
        self.verify, self.by_definition = verify, by_definition
        self.is_frozen = False  # while nothing may look at a number
        self.num_made = 0
        self._known: dict[Any, list[tuple[Plan, int]]] = {}  # with how often each was used

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def latest(self) -> Plan:
        """Return the plan that was made or used last."""
        return next(reversed(self._known.values()))[-1][0]

    def find(
        self,
        nodes: Sequence[Node],
        structure: tuple[Any, ...],
        outputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        num_examples: int,
    ) -> Plan | None:
        """Return the plan of a graph, made now if it is new or a check is due; None if outputs are not finite.

        Graphs of one structure may differ in sizes, such as the length of a text: they share a plan that fits both.
        """
        key = num_examples, structure
        known = self._known.pop(key, [])
        found = next((k for k, (plan, _) in enumerate(known) if plan.fits(nodes, outputs)), None)
        plan, uses = (None, 0) if found is None else known.pop(found)
        due = plan is None or (self.verify and uses.bit_count() == 1 and not self.is_frozen)
        if due and all(bool(torch.isfinite(output).all()) for output in outputs):
            plan = make_plan(outputs, params, num_examples)
            self.num_made += 1
            if self.by_definition:
                plan = replace(plan, frontiers=(), by_definition=frozenset(params))
        if plan is not None:
            known.append((plan, uses + 1))
        if known:
            while len(self._known) >= MOST_PLANS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = known[-MOST_PLANS:]
        return plan


def _listen(recording: Recording, nodes: Sequence[Node]) -> None:
    """Put hooks on the nodes at which the plan of a recording reads rows."""
    assert recording.plan is not None
    for position, frontiers in recording.plan.places:
        node = nodes[position]
        recording._handles.append(node.register_prehook(partial(_note, recording, frontiers, node)))


def _leaves_behind(function: Node) -> list[Node]:
    """Return the leaves that a value was made from."""
    seen, stack, found = {function}, [function], []
    while stack:
        node = stack.pop()
        if is_leaf(node):
            found.append(node)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                stack.append(other)
    return found


def _note(
    recording: Recording, frontiers: Sequence[Frontier], node: Node, gradients: tuple[Tensor | None, ...]
) -> None:
    """Keep what the rows of a node's frontiers are made from, when it is about to run."""
    first = frontiers[0]
    delta = gradients[first.output]
    if recording.is_paused or delta is None:
        return
    if torch.is_grad_enabled():  # a graph of the backward pass is being made
        with torch.no_grad():
            _note(recording, frontiers, node, gradients)
        return
    # A gradient that was written to in place may be a buffer of the caller's, who will write to it again.
    if delta._version and recording.chosen is None:
        delta = delta.clone()
    meeting = Meeting(node, first.layout, delta, recording.chosen, recording.num_examples, recording.keep)
    rule, count = find_rule(node), recording.num_rows
    for frontier in frontiers:
        meeting.operand, block = frontier.index, None
        # Values made of parameters, such as position embeddings, differ in size between graphs of one plan.
        meeting.shape = operand_shape(node, frontier.index) if frontier.views is None else frontier.operand_shape
        if rule is not None and frontier.by_rule:
            with suppress(UnknownNodeError):
                block = rule(meeting)
            if block is not None and (block.num_rows, block.num_params) != (count, meeting.shape.numel()):
                block = None
        _add_rows(recording, frontier, node, _run_by_example(meeting, gradients) if block is None else block)


def _add_rows(recording: Recording, frontier: Frontier, node: Node, block: Block) -> None:
    """Note the rows of the parameters behind an operand, given those of the operand."""
    if frontier.views is not None:
        own = undo_views(frontier.views, block) if frontier.views else block
        recording.add_block(frontier.names[0], own)
        return
    assert recording.plan is not None
    names = [name for name in frontier.names if name not in recording.plan.by_definition]
    edge, leaves = node.next_functions[frontier.index], [recording.params[name] for name in names]
    for name, part in zip(names, pull_back_block(edge, leaves, block), strict=True):
        if part is not None:
            recording.add_block(name, part)


def _run_by_example(meeting: Meeting, gradients: Sequence[Tensor | None]) -> Block:
    """Run the node once for each chosen example, with the gradients of all others set to zero."""
    rows, shape = [], meeting.shape
    for example in range(meeting.num_examples) if meeting.chosen is None else meeting.chosen.tolist():
        masked = [_masked(g, meeting, example) for g in gradients]
        row = run_node(meeting.node, masked, meeting.operand)
        # The engine would sum what was broadcast; a node that is run by hand leaves that to its caller.
        rows.append(meeting.delta.new_zeros(shape) if row is None else row.sum_to_size(shape))
    return Formed(torch.stack(rows).reshape(len(rows), -1))


def _masked(gradient: Tensor | None, meeting: Meeting, example: int) -> Tensor | None:
    """Return one of a node's gradients with those of other examples set to zero."""
    if gradient is None:
        return None
    layout = meeting.layout
    if gradient.shape != meeting.delta.shape:  # another output of the node, such as the last state of a recurrent layer
        layout = possible_layouts(tuple(gradient.shape), meeting.num_examples)[0]
    return layout.keep_only(gradient, example, meeting.num_examples)


def _go_back_by_example(
    recording: Recording, output: Tensor, layout: Layout, params: Mapping[str, Tensor], delta: Tensor
) -> None:
    """Go back from one output once for each chosen example, for parameters that no rule serves."""
    if recording.is_paused:
        return
    rows: dict[str, list[Tensor]] = {name: [] for name in params}
    count, chosen = recording.num_examples, recording.chosen
    recording.is_paused = True
    try:
        for example in range(count) if chosen is None else chosen.tolist():
            masked = layout.keep_only(delta.detach(), example, count)
            for name, gradient in _gradients([output], [layout], [masked], params).items():
                rows[name].append(gradient)
    finally:
        recording.is_paused = False
    for name, parts in rows.items():
        recording.add_block(name, Formed(torch.stack(parts).reshape(len(parts), -1)))
