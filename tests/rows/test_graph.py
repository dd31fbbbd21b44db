"""TableRows read off autograd's graph are the gradients of the examples, whatever the model is made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cases import CASES, RANDOM_CASES, Case
from rows.models import MODELS
from slangvi.errors import UnsupportedModuleError
from slangvi.rows import Formed, Plan, Plans, Recording, make_plan, record, watch_outputs
from slangvi.rows.nodes import type_name, walk
from slangvi.rows.rules import find_rule

ALL = {**CASES, **RANDOM_CASES, **MODELS}
# No rule: these run their own node once for each chosen example.
BY_NODE = {
    "bilinear": {"TrilinearBackward0"},
    "function_of_ones_own": {"ScaleBackward"},
    "instance_norm": {"RepeatBackward0"},
    "embedding_bag": {"EmbeddingBagBackward0"},
    "differences": {"DivBackward0"},
    "gates": {"WhereBackward0"},
}


def outputs_of(case: Case) -> tuple[object, list[Tensor]]:
    out = case.model(*case.args)
    return out, [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]


def formed(recording: Recording, name: str) -> Tensor:
    """Rows of a parameter, (K, *shape); zeros where it was not reached."""
    param, block = recording.params[name], recording.blocks().get(name)
    shape = (recording.num_rows, *param.shape)
    return param.new_zeros(shape) if block is None else block.form().reshape(shape)


def inferred(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def definition(case: Case, out: object, chosen: list[int]) -> dict[str, Tensor]:
    """The gradient of each chosen example's own loss, (K, *shape) by name."""
    losses, params = case.losses(out), inferred(case.model)
    each = [torch.autograd.grad(losses[k], list(params.values()), retain_graph=True, allow_unused=True) for k in chosen]
    return {
        name: torch.stack([torch.zeros_like(param) if grads[j] is None else grads[j] for grads in each])
        for j, (name, param) in enumerate(params.items())
    }


def read(case: Case, chosen: list[int], plans: Plans | None = None) -> tuple[Recording, dict[str, Tensor], Plan]:
    """TableRows of a backward pass of the summed losses, and what they should be."""
    out, outputs = outputs_of(case)
    expected = definition(case, out, chosen)
    plans = Plans() if plans is None else plans
    recording = record(outputs, inferred(case.model), torch.tensor(chosen), plans, case.num_examples)
    watch_outputs(recording, outputs)
    case.losses(out).sum().backward()
    return recording, expected, plans.latest()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ALL)
def test_rows_are_the_gradients_of_the_chosen_examples(name):
    case = ALL[name]().double()
    recording, expected, plan = read(case, [3, 1])
    assert not plan.by_definition
    for param, value in expected.items():
        torch.testing.assert_close(
            formed(recording, param), value, rtol=1e-10, atol=1e-12 * float(value.abs().max() + 1)
        )


@pytest.mark.parametrize("name", ALL)
def test_where_there_is_a_rule_it_is_taken(name):
    case = ALL[name]().double()
    _, outputs = outputs_of(case)
    plan = make_plan(outputs, inferred(case.model), case.num_examples)
    nodes = walk(outputs)
    without = {type_name(nodes[f.position]) for f in plan.frontiers if find_rule(nodes[f.position]) is None}
    assert without == BY_NODE.get(name, set())


@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer_encoder", "lstm", "gru", "class_token"])
def test_float32_rows_are_as_exact_as_the_backward_pass(name):
    recording, expected, plan = read(ALL[name](), [0, 2, 4])
    assert not plan.by_definition
    for param, value in expected.items():
        torch.testing.assert_close(formed(recording, param), value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_autocast_has_rows_in_the_dtype_of_the_parameters():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)), torch.randn(5, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        losses = out.float().square().flatten(1).sum(1)
    params = inferred(model)
    expected = [torch.autograd.grad(losses[k], list(params.values()), retain_graph=True) for k in (1, 2)]
    recording = record([out], params, torch.tensor([1, 2]), plans := Plans(), 5)
    losses.sum().backward()
    assert not plans.latest().by_definition
    for j, (name, param) in enumerate(params.items()):
        rows = formed(recording, name)
        assert rows.dtype is param.dtype
        value = torch.stack([grads[j] for grads in expected])
        assert float((rows - value).abs().max()) <= 0.02 * float(value.abs().max())


def test_a_plan_is_made_once_for_graphs_of_the_same_structure():
    case, plans = CASES["mlp"]().double(), Plans()
    for _ in range(3):
        recording, expected, _ = read(case, [2], plans)
        for name, value in expected.items():
            torch.testing.assert_close(formed(recording, name), value)
    assert len(plans) == 1
    shorter = Case(case.model, tuple(x[:4] for x in case.args), lambda out: out.square().sum(1), 4)
    read(shorter, [2], plans)
    assert len(plans) == 2


def test_finding_out_leaves_no_gradients_and_the_graph_as_it_was():
    case = CASES["transformer_encoder"]().double()
    out, outputs = outputs_of(case)
    make_plan(outputs, inferred(case.model), case.num_examples)
    assert all(param.grad is None for param in case.model.parameters())
    case.losses(out).sum().backward()
    assert all(param.grad is not None for param in case.model.parameters())


class Coupled(nn.Module):
    """Every example's output depends on all examples' inputs through the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(0)).tanh()


def test_rows_of_coupled_examples_are_those_of_the_definition():
    """The row of an example is the gradient of its own loss, which others' inputs enter here."""
    torch.manual_seed(0)
    case = Case(Coupled(), (torch.randn(5, 6),), lambda out: out.square().sum(1)).double()
    recording, expected, plan = read(case, [0, 3])
    assert not plan.by_definition
    for name, value in expected.items():
        torch.testing.assert_close(formed(recording, name), value)


def test_a_wrong_rule_is_found_out_and_its_nodes_are_run_instead(monkeypatch):
    from slangvi.rows import rules

    monkeypatch.setitem(
        rules._RULES, "AddmmBackward0", lambda meeting: Formed(torch.zeros(2, meeting.shape.numel()).double())
    )
    case = CASES["mlp"]().double()
    recording, expected, plan = read(case, [0, 4])
    assert not any(frontier.by_rule for frontier in plan.frontiers)
    for name, value in expected.items():
        torch.testing.assert_close(formed(recording, name), value)


def test_where_nodes_cannot_be_run_either_rows_come_by_definition(monkeypatch):
    from slangvi.rows import graph

    monkeypatch.setattr(graph, "find_rule", lambda node: None)
    monkeypatch.setattr(graph, "run_node", lambda node, gradients, index: None)
    case = CASES["transformer_encoder"]().double()
    recording, expected, plan = read(case, [0, 4])
    assert plan.by_definition == set(inferred(case.model))
    for name, value in expected.items():
        torch.testing.assert_close(formed(recording, name), value)


def test_a_node_of_another_version_is_run_instead(monkeypatch):
    """As if the fields that a rule reads had other names."""
    from slangvi.rows import nodes, rules

    def missing(node, name):
        raise nodes.UnknownNodeError(f"no {name}")

    monkeypatch.setattr(rules, "saved", missing)
    case = CASES["convnet"]().double()
    recording, expected, plan = read(case, [0, 4])
    assert not plan.by_definition
    for name, value in expected.items():
        torch.testing.assert_close(formed(recording, name), value)


def test_parameters_that_the_outputs_do_not_depend_on_have_zero_rows():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    x, params = torch.randn(4, 3), inferred(model)
    out = model["used"](x)
    recording = record([out], params, torch.tensor([0, 1]), Plans(), 4)
    out.sum().backward()
    assert not formed(recording, "unused.weight").any()
    assert formed(recording, "used.bias").eq(1).all()


def test_several_backward_passes_add_up():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    out, params = model(x), inferred(model)
    recording = record([out], params, torch.tensor([1]), Plans(), 4)
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1].sum().backward()
    torch.testing.assert_close(formed(recording, "weight"), x[1].expand(1, 2, 3))


def test_hooks_go_with_the_recording():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    out, params = model(x), inferred(model)
    recording = record([out], params, torch.tensor([1]), Plans(), 4)
    recording.detach()
    out.sum().backward()
    assert not recording.passes


def test_losses_may_be_anything_of_the_outputs():
    """Weighted, masked or mixed by class: rows are those of the gradient that reached each example's outputs."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4).double(), torch.randn(6, 3).double(), torch.arange(6) % 4
    out, weights = model(x), torch.rand(4).double()
    recording = record([out], inferred(model), torch.arange(6), Plans(), 6)
    F.cross_entropy(out, y, weight=weights, label_smoothing=0.1).backward()
    torch.testing.assert_close(formed(recording, "weight").sum(0), model.weight.grad)


def test_torchs_own_randomness_is_left_alone(global_rng_untouched):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 3, generator=generator), torch.randn(2, 3, generator=generator).requires_grad_()
    out = x @ weight.T
    recording = record([out], {"weight": weight}, torch.tensor([2]), Plans(), 4)
    out.sum().backward()
    torch.testing.assert_close(formed(recording, "weight"), x[2].expand(1, 2, 3))


@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer_encoder", "lstm", "embedding_mlp", "class_token"])
def test_a_batch_of_one(name):
    case = ALL[name]().double()
    single = Case(case.model, tuple(x[:1] for x in case.args), lambda out: out.flatten(1).square().sum(1), 1)
    recording, expected, _ = read(single, [0])
    for param, value in expected.items():
        torch.testing.assert_close(formed(recording, param), value)


def test_outputs_without_examples_are_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(UnsupportedModuleError, match=r"no output of the model has 4 examples .*: \[\(\)\]"):
        record([model(torch.randn(4, 3)).sum()], inferred(model), torch.tensor([0]), Plans(), 4)


def test_only_so_many_graphs_are_remembered(monkeypatch):
    from slangvi.rows import graph

    monkeypatch.setattr(graph, "MOST_PLANS", 3)
    model, plans = nn.Linear(2, 1), Plans()
    for size in range(2, 9):
        out = model(torch.randn(size, 2))
        record([out], inferred(model), torch.tensor([0]), plans, size)
    assert [key[0] for key in plans._known] == [6, 7, 8]
