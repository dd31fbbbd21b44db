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

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from slangvi.errors import UnsupportedModuleError
from slangvi.rows.layout import Layout, fitting_layouts, possible_layouts
from slangvi.rows.nodes import (
    UnknownNodeError,
    dtypes_of,
    is_leaf,
    leaf_of,
    run_node,
    shapes_of,
    type_name,
    walk,
)
from slangvi.rows.pullback import PullBack, find_pull_back
from slangvi.rows.rules import FormRows, Meeting, find_rule, keep_formed

__all__ = ["Plan", "Recording", "make_plan", "record"]

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
        by_rule: whether the rule of the node's type is taken; else the node is run once for each chosen example.
    """

    position: int
    index: int
    output: int
    layout: Layout
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


@dataclass
class Recording:
    """Rows of one backward pass, in the making.

    Args:
        params: name → parameter.
        chosen: examples, (K,).
        plan: by which the graph is read; None for outputs that are not finite, of which there are no rows.
    """

    params: Mapping[str, Tensor]
    chosen: Tensor
    plan: Plan | None
    parts: dict[str, list[FormRows]] = field(default_factory=dict)
    is_paused: bool = False  # while a hook goes back through the graph itself
    _handles: list[Any] = field(default_factory=list)

    def rows(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows of one parameter, (K, *shape); zeros where the backward pass did not reach it."""
        param = self.params[name]
        total: Tensor | None = None
        for form in self.parts.get(name, ()):
            part = form().to(dtype or param.dtype)
            total = part if total is None else total + part
        return param.new_zeros(len(self.chosen), *param.shape, dtype=dtype) if total is None else total

    def detach(self) -> None:
        """Take the hooks off the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def signature_of(nodes: Sequence[Node], outputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the structure of a graph: types, shapes and edges of all nodes."""
    places = {node: k for k, node in enumerate(nodes)}
    edges = (
        (type_name(node), shapes_of(node), tuple((places.get(f, -1), n) for f, n in node.next_functions))  # type: ignore[arg-type]
        for node in nodes
    )
    return (*(output.shape for output in outputs), *edges)


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
    plan = Plan(num_examples, layouts, tuple(_frontiers(nodes, found)), tolerance)
    definition = {name: torch.stack([gradients[name] for _, gradients in seen]) for name in params}
    largest = max(float(gradients.abs().max()) for gradients in definition.values())
    chosen = torch.tensor(probes, device=outputs[0].device)

    def find_wrong() -> frozenset[str]:
        recording = _listen(plan, nodes, params, chosen)
        try:
            _gradients(outputs, layouts, seeds, params)
        finally:
            recording.detach()
        return frozenset(name for name in params if not _agrees(recording, name, definition[name], tolerance, largest))

    wrong = find_wrong()
    if wrong:  # nodes are right where rules are not
        plan = replace(plan, frontiers=_without_rules(plan.frontiers, nodes, [params[name] for name in wrong]))
        wrong = find_wrong()
    return replace(plan, by_definition=wrong)


def _without_rules(
    frontiers: Sequence[Frontier], nodes: Sequence[Node], leaves: Sequence[Tensor]
) -> tuple[Frontier, ...]:
    """Return the frontiers with rules switched off for those that lead to some leaves."""
    wrong = {id(leaf) for leaf in leaves}

    def leads_there(frontier: Frontier) -> bool:
        function = nodes[frontier.position].next_functions[frontier.index][0]
        assert function is not None
        return any(id(leaf_of(leaf)) in wrong for leaf in _leaves_behind(function))

    return tuple(replace(frontier, by_rule=not leads_there(frontier)) for frontier in frontiers)


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


def _frontiers(nodes: Sequence[Node], found: Mapping[Node, dict[int, Layout]]) -> list[Frontier]:
    """Return the inputs without a batch of nodes with one: parameters, or values made of them."""
    frontiers = []
    for position, node in enumerate(nodes):
        if not found[node]:
            continue
        output, layout = next(iter(found[node].items()))
        for index, (function, place) in enumerate(node.next_functions):
            if function is not None and (is_leaf(function) or place not in found[function]):
                frontiers.append(Frontier(position, index, output, layout))
    return frontiers


def _agrees(recording: Recording, name: str, definition: Tensor, tolerance: float, largest: float) -> bool:
    """Tell whether the rows of a parameter are those of the definition but for rounding.

    Args:
        recording: of a pass.
        name: of the parameter.
        definition: its rows.
        tolerance: relative to their largest entry.
        largest: entry of any parameter; what cancels in one has the rounding of others.
    """
    try:
        rows = recording.rows(name)
    except UnknownNodeError:
        return False
    rounding = 100 * torch.finfo(definition.dtype).eps * largest
    return float((rows - definition).abs().max()) <= tolerance * float(definition.abs().max()) + rounding


# ---- reading


def record(
    outputs: Sequence[Tensor], params: Mapping[str, Tensor], chosen: Tensor, plans: dict[Any, Plan], num_examples: int
) -> Recording:
    """Listen to the backward pass that will go through some outputs, and return what its rows are made from.

    Args:
        outputs: of the model, just computed.
        params: name → parameter.
        chosen: examples whose rows are wanted, (K,).
        plans: graphs that were seen before; a new one is added.
        num_examples: M.
    """
    nodes = walk(outputs)
    key = (num_examples, signature_of(nodes, outputs))
    if key not in plans:
        if not all(bool(torch.isfinite(output).all()) for output in outputs):
            return Recording(params, chosen, None)  # nothing could be found out
        while len(plans) >= MOST_PLANS:
            plans.pop(next(iter(plans)))
        plans[key] = make_plan(outputs, params, num_examples)
    plan = plans[key]
    recording = _listen(plan, nodes, params, chosen)
    if plan.by_definition:
        slow = {name: params[name] for name in sorted(plan.by_definition)}
        for output, layout in zip(outputs, plan.output_layouts, strict=True):
            if layout is not None:
                hook = partial(_go_back_by_example, recording, output, layout, slow, num_examples)
                recording._handles.append(output.register_hook(hook))
    return recording


def _listen(plan: Plan, nodes: Sequence[Node], params: Mapping[str, Tensor], chosen: Tensor) -> Recording:
    recording = Recording(params, chosen, plan)
    names = {id(param): name for name, param in params.items() if name not in plan.by_definition}
    for frontier in plan.frontiers:
        node = nodes[frontier.position]
        function, place = node.next_functions[frontier.index]
        assert function is not None
        behind = map(leaf_of, _leaves_behind(function))
        leaves = {names[id(leaf)]: leaf for leaf in behind if id(leaf) in names}
        if leaves:
            hook = partial(_note, recording, plan, frontier, node, find_pull_back((function, place), leaves))
            recording._handles.append(node.register_prehook(hook))
    return recording


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
    recording: Recording,
    plan: Plan,
    frontier: Frontier,
    node: Node,
    pull_back: PullBack,
    gradients: tuple[Tensor | None, ...],
) -> None:
    """Keep what the rows of one frontier are made from, when its node is about to run."""
    delta = gradients[frontier.output]
    if delta is None or recording.is_paused:
        return
    with torch.no_grad():
        meeting = Meeting(node, frontier.index, delta.detach(), frontier.layout, recording.chosen, plan.num_examples)
        try:
            parts = pull_back(_form_by_rule(meeting) if frontier.by_rule else _form_by_node(meeting, gradients))
        except UnknownNodeError:
            parts = pull_back(_form_by_node(meeting, gradients))
        for name, part in parts.items():
            recording.parts.setdefault(name, []).append(part)


def _form_by_rule(meeting: Meeting) -> FormRows:
    rule = find_rule(meeting.node)
    form = None if rule is None else rule(meeting)
    if form is None:
        raise UnknownNodeError(f"no rule for {type_name(meeting.node)}")
    return partial(_of_shape, meeting.shape, form)


def _of_shape(shape: torch.Size, form: FormRows) -> Tensor:
    """Form the rows of a rule, and raise if they do not have the shape of its operand."""
    rows = form()
    if rows.shape[1:] != shape:
        raise UnknownNodeError(f"rows have shape {tuple(rows.shape[1:])}, and {tuple(shape)} is wanted")
    return rows


def _form_by_node(meeting: Meeting, gradients: Sequence[Tensor | None]) -> FormRows:
    """Run the node once for each chosen example, with the gradients of all others set to zero."""
    rows, shape = [], meeting.shape
    for example in meeting.chosen.tolist():
        masked = [_masked(g, meeting, example) for g in gradients]
        row = run_node(meeting.node, masked, meeting.operand)
        # The engine would sum what was broadcast; a node that is run by hand leaves that to its caller.
        rows.append(meeting.delta.new_zeros(shape) if row is None else row.sum_to_size(shape))
    return keep_formed(torch.stack(rows))


def _masked(gradient: Tensor | None, meeting: Meeting, example: int) -> Tensor | None:
    """Return one of a node's gradients with those of other examples set to zero."""
    if gradient is None:
        return None
    layout = meeting.layout
    if gradient.shape != meeting.delta.shape:  # another output of the node, such as the last state of a recurrent layer
        layout = possible_layouts(tuple(gradient.shape), meeting.num_examples)[0]
    return layout.keep_only(gradient, example, meeting.num_examples)


def _go_back_by_example(
    recording: Recording, output: Tensor, layout: Layout, params: Mapping[str, Tensor], num_examples: int, delta: Tensor
) -> None:
    """Go back from one output once for each chosen example, for parameters that no rule serves."""
    if recording.is_paused:
        return
    rows: dict[str, list[Tensor]] = {name: [] for name in params}
    recording.is_paused = True
    try:
        for example in recording.chosen.tolist():
            masked = layout.keep_only(delta.detach(), example, num_examples)
            for name, gradient in _gradients([output], [layout], [masked], params).items():
                rows[name].append(gradient)
    finally:
        recording.is_paused = False
    for name, parts in rows.items():
        recording.parts.setdefault(name, []).append(keep_formed(torch.stack(parts)))
