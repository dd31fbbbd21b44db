"""Rules: those of torch's own nodes against a loop over the examples, and those that users register."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import slangvi
from cases import Case, M, squares
from helpers.captured_gradients import recorder_of, rows_of
from reference import loop_gradients
from rows.models import Lambda
from slangvi.errors import UnsupportedModuleError
from slangvi.params import ParamSpec
from slangvi.rows import (
    FactoredGradients,
    Formed,
    GradientRecorder,
    Meeting,
    Outer,
    RowGroup,
    TableRows,
    blocks,
    graph,
    rules,
)
from slangvi.rows.blocks import Block, Patches
from slangvi.rows.rules import find_rule

T, D = 4, 6


class NodeRunError(AssertionError):
    """A node was run once for each example, where a rule was to be taken."""


def refuse_runs(*told: object) -> Block:
    raise NodeRunError(told)


@pytest.fixture
def rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are not run by example: whatever has no rule that fits fails."""
    monkeypatch.setattr(graph, "_run_by_example", refuse_runs)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    before = dict(rules._RULES)
    yield
    assert before.keys() <= rules._RULES.keys()


def recorded(
    model: nn.Module, *args: Tensor, losses: Callable[[Tensor], Tensor] = squares, num_examples: int = M
) -> tuple[RowGroup, GradientRecorder]:
    """The rows of one backward pass, which are those of a loop over the examples; in float64."""
    case = Case(model, args, losses, num_examples).double()
    recorder = recorder_of(case.model)
    truth = loop_gradients(case)
    with recorder.recording():
        case.losses(case.model(*case.args)).sum().backward()
    (group,) = recorder.collect()
    assert not recorder.plans.latest().by_definition
    operator = FactoredGradients(ParamSpec.of_module(case.model), [group], truth)
    torch.testing.assert_close(rows_of(operator), truth, rtol=1e-9, atol=1e-9)
    return group, recorder


def kinds(group: RowGroup) -> dict[str, str]:
    return {name: type(block).__name__ for name, block in group.blocks.items()}


# ---- matrix products

PRODUCTS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]], str]] = {
    "vectors @ w": (lambda x, w: x[:, 0] @ w, {"w": (D, 3)}, "Outer"),
    "sequences @ w": (lambda x, w: x @ w, {"w": (D, 3)}, "Outer"),
    "w @ columns": (lambda x, w: (w @ x[:, 0].T).T, {"w": (3, D)}, "Outer"),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x[:, 0], w, beta=0.5, alpha=-2.0),
        {"w": (D, 3), "b": (3,)},
        "Outer",
    ),
    "addmm with a column": (
        lambda x, w, b: torch.addmm(b, w, x[:, 0].T, beta=3.0).T,
        {"w": (3, D), "b": (3, 1)},
        "Outer",
    ),
    "one matrix for each position": (
        lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1),
        {"w": (T, D, 3)},
        "Outer",
    ),
    "one matrix on the left for each position": (
        lambda x, w: torch.bmm(w, x.permute(1, 2, 0)).permute(2, 0, 1),
        {"w": (T, 3, D)},
        "Outer",
    ),
    "baddbmm": (
        lambda x, w, b: torch.baddbmm(b, x.transpose(0, 1), w, beta=0.5, alpha=2.0).transpose(0, 1),
        {"w": (T, D, 3), "b": (T, 1, 3)},
        "Outer",
    ),
    "experts": (lambda x, w: torch.einsum("btd,edf->btef", x, w), {"w": (3, D, 2)}, "Formed"),
    "heads": (lambda x, w: torch.einsum("btd,dhe->bhte", x, w), {"w": (D, 2, 3)}, "Formed"),
    "an einsum": (lambda x, w: torch.einsum("btd,de->bte", x, w), {"w": (D, 3)}, ""),
    "an einsum over positions": (lambda x, w: torch.einsum("btd,tde->be", x, w), {"w": (T, D, 3)}, ""),
    "an expanded matrix": (lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1)), {"w": (D, 3)}, "Formed"),
}


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products_have_the_rows_of_a_loop(name):
    function, shapes, kind = PRODUCTS[name]
    group, _ = recorded(Lambda(function, **shapes), torch.randn(M, T, D))
    assert kind in kinds(group)["w"]


@pytest.mark.usefixtures("rules_alone")
@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    inputs=st.integers(1, 4),
    outputs=st.integers(1, 4),
    bias=st.booleans(),
    count=st.integers(2, 4),
)
def test_linear_layers_of_any_size_keep_their_rows_as_factors(lead, inputs, outputs, bias, count):
    torch.manual_seed(0)
    x = torch.randn(count, *lead, inputs)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias), nn.Tanh(), nn.Linear(outputs, 2))
    group, _ = recorded(model, x, num_examples=count)
    assert kinds(group)["0.weight"] == kinds(group)["2.weight"] == "Outer"
    assert group.blocks["0.weight"].left.shape[2] == torch.Size(lead).numel()


# ---- convolutions

DIMS = st.integers(1, 2)


@pytest.mark.usefixtures("rules_alone")
@given(
    dims=st.integers(1, 3),
    groups=DIMS,
    stride=DIMS,
    padding=st.integers(0, 2),
    dilation=DIMS,
    kernel=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    transposed=st.booleans(),
    bias=st.booleans(),
)
def test_convolutions_of_any_kind_have_the_rows_of_a_loop(
    dims, groups, stride, padding, dilation, kernel, transposed, bias
):
    torch.manual_seed(0)
    plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    turned = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    sizes, channels = (5, 4, 3)[:dims], 2 * groups
    reach = [dilation * (k - 1) + 1 for k in kernel[:dims]]
    if transposed:
        assume(all((n - 1) * stride - 2 * padding + r > 0 for n, r in zip(sizes, reach, strict=True)))
    else:
        assume(all(n + 2 * padding >= r for n, r in zip(sizes, reach, strict=True)))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    layer = (turned if transposed else plain)(channels, 2 * groups, tuple(kernel[:dims]), **options)
    group, _ = recorded(layer, torch.randn(3, channels, *sizes), num_examples=3)
    assert kinds(group)["weight"] == ("Formed" if transposed else "Patches")
    assert kinds(group).get("bias", "Formed") == "Formed"


def test_patches_are_not_made_before_they_are_needed(monkeypatch):
    monkeypatch.setattr(blocks, "KEPT_BYTES", 0)
    opened = []
    real = rules.take_patches
    monkeypatch.setattr(rules, "take_patches", lambda x, **sizes: opened.append(len(x)) or real(x, **sizes))
    group, _ = recorded(nn.Conv2d(2, 3, 3, padding=1), torch.randn(M, 2, 5, 5))
    block = group.blocks["weight"]
    assert isinstance(block, Patches)
    assert block.source.numel() == M * 2 * 5 * 5
    before = len(opened)
    block.form()
    assert len(opened) == before + 1


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_convolutions_pad_as_they_say(mode):
    layer = nn.Conv2d(2, 3, (1, 3), padding="same", padding_mode=mode)
    group, _ = recorded(layer, torch.randn(M, 2, 5, 4))
    assert kinds(group) == {"weight": "Patches", "bias": "Formed"}


def test_a_kernel_that_is_used_at_two_sizes_adds_up():
    model = Lambda(
        lambda x, w: F.conv1d(x, w, padding=1).sum(2) + F.conv1d(x, w, stride=2, dilation=2).sum(2), w=(3, T, 2)
    )
    group, _ = recorded(model, torch.randn(M, T, D))
    assert kinds(group) == {"w": "Sum"}


# ---- tables


@pytest.mark.usefixtures("rules_alone")
@given(
    lead=st.lists(st.integers(1, 4), max_size=2),
    padding=st.sampled_from([None, 0, 2, -1]),
    rows=st.integers(3, 5),
    count=st.integers(1, 4),
)
def test_tables_have_the_rows_of_a_loop(lead, padding, rows, count):
    torch.manual_seed(1)
    model, ids = nn.Embedding(rows, 3, padding_idx=padding), torch.randint(rows, (count, *lead))
    nn.init.normal_(model.weight)
    group, _ = recorded(model, ids, num_examples=count)
    block = group.blocks["weight"]
    assert isinstance(block, TableRows)
    if padding is not None:
        assert not block.form().view(count, rows, 3)[:, padding].any()


@pytest.mark.usefixtures("rules_alone")
def test_words_that_are_looked_up_time_first_have_the_rows_of_their_example():
    ids = torch.randint(5, (M, T))
    group, _ = recorded(Lambda(lambda x, w: F.embedding(x.T, w).transpose(0, 1).tanh(), w=(5, 3)), ids)
    assert kinds(group) == {"w": "TableRows"}


# ---- normalisation and what works entry by entry

NORMS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "layer norm of vectors": lambda: (nn.LayerNorm(D), (M, D)),
    "layer norm of sequences": lambda: (nn.LayerNorm(D), (M, T, D)),
    "layer norm over positions": lambda: (nn.LayerNorm((T, D)), (M, 3, T, D)),
    "layer norm without bias": lambda: (nn.LayerNorm(D, bias=False), (M, T, D)),
    "group norm of vectors": lambda: (nn.GroupNorm(2, 4), (M, 4)),
    "group norm of images": lambda: (nn.GroupNorm(2, 4), (M, 4, 3, 2)),
    "group norm by channel": lambda: (nn.GroupNorm(4, 4), (M, 4, 3)),
    "batch norm of vectors": lambda: (nn.BatchNorm1d(4).eval(), (M, 4)),
    "batch norm of images": lambda: (nn.BatchNorm2d(4).eval(), (M, 4, 3, 2)),
    "rms norm": lambda: (nn.RMSNorm(D), (M, T, D)),
    "prelu": lambda: (nn.PReLU(), (M, T, D)),
    "prelu by channel": lambda: (nn.PReLU(4), (M, 4, 3, 2)),
    "prelu of vectors": lambda: (nn.PReLU(4), (M, 4)),
}


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("name", NORMS)
def test_norms_and_units_with_parameters_have_the_rows_of_a_loop(name):
    layer, shape = NORMS[name]()
    for param in layer.parameters():
        nn.init.normal_(param)
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 2.0)
    group, _ = recorded(layer, torch.randn(shape), losses=lambda out: out.pow(3).flatten(1).sum(1))
    assert set(kinds(group).values()) == {"Formed"}


SHAPES = st.sampled_from([(), (1,), (D,), (T, 1), (T, D), (1, D), (1, 1, D), (1, T, D), (1, T, 1), (1, 1, 1)])
ENTRYWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + w": lambda x, w: x + w,
    "w + x": lambda x, w: w + x,
    "x - w": lambda x, w: x - w,
    "w - x": lambda x, w: w - x,
    "x + 3w": lambda x, w: torch.add(x, w, alpha=3.0),
    "x - 3w": lambda x, w: torch.sub(x, w, alpha=3.0),
    "x w": lambda x, w: x * w,
    "w x": lambda x, w: w * x,
    "w repeated": lambda x, w: w.expand_as(x),
}


@pytest.mark.usefixtures("rules_alone")
@given(name=st.sampled_from(sorted(ENTRYWISE)), shape=SHAPES)
def test_parameters_of_any_shape_meet_the_batch_entry_by_entry(name, shape):
    torch.manual_seed(0)
    group, _ = recorded(Lambda(lambda x, w: (ENTRYWISE[name](x, w) * x).tanh(), w=shape), torch.randn(M, T, D))
    assert kinds(group) == {"w": "Formed"}
    assert group.blocks["w"].num_params == torch.Size(shape).numel()


# ---- rules of one's own


class Scale(torch.autograd.Function):
    """x ∘ w + b for a gain and an offset by feature."""

    @staticmethod
    def forward(ctx, x, gain, offset):
        ctx.save_for_backward(x, gain)
        return x * gain + offset

    @staticmethod
    def backward(ctx, delta):
        x, gain = ctx.saved_tensors
        return delta * gain, (delta * x).flatten(0, -2).sum(0), delta.flatten(0, -2).sum(0)


def scale_rule(meeting: Meeting) -> Block:
    x, _ = meeting.node.saved_tensors
    rows = meeting.taken_delta() * (meeting.take(x) if meeting.operand == 1 else 1)
    return Formed(rows.flatten(1, -2).sum(1))


def scaled_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(D, 3), nn.Tanh(), Lambda(lambda x, **params: Scale.apply(x, *params.values()), gain=(3,), offset=(3,))
    )


class Product(torch.autograd.Function):
    """x W for a matrix."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, delta):
        x, weight = ctx.saved_tensors
        return delta @ weight.T, x.flatten(0, -2).T @ delta.flatten(0, -2)


def product_rule(meeting: Meeting) -> Block:
    x, _ = meeting.node.saved_tensors
    inputs, delta = meeting.take(x), meeting.taken_delta()
    return Outer(inputs.flatten(1, -2).unsqueeze(1), delta.flatten(1, -2).unsqueeze(1))


def product_model() -> nn.Module:
    return Lambda(lambda x, **params: Product.apply(x, *params.values()), w=(D, 3))


def ways(recorder: GradientRecorder) -> set[bool]:
    """Whether the nodes of the latest graph are served by rules."""
    return {frontier.by_rule for frontier in recorder.plans.latest().frontiers}


@pytest.mark.usefixtures("own_rules")
def test_a_function_without_a_rule_is_run_for_each_example(monkeypatch):
    recorded(scaled_model(), torch.randn(M, T, D))
    monkeypatch.setattr(graph, "_run_by_example", refuse_runs)
    with pytest.raises(NodeRunError):
        recorded(scaled_model(), torch.randn(M, T, D))


@pytest.mark.usefixtures("own_rules", "rules_alone")
@pytest.mark.parametrize("shape", [(M, D), (M, T, D), (M, 2, T, D)])
def test_a_rule_for_a_function_of_ones_own_is_taken(shape):
    seen = []

    @slangvi.register_rule(Scale)
    def scale(meeting):
        seen.append((meeting.operand, meeting.shape, meeting.num_examples))
        return scale_rule(meeting)

    group, recorder = recorded(scaled_model(), torch.randn(shape))
    assert ways(recorder) == {True}
    assert kinds(group)["2.gain"] == kinds(group)["2.offset"] == "Formed"
    assert set(seen) == {(operand, torch.Size((3,)), M) for operand in (1, 2)}


@pytest.mark.usefixtures("own_rules", "rules_alone")
def test_a_rule_may_keep_its_rows_as_factors():
    slangvi.register_rule(Product)(product_rule)
    group, recorder = recorded(product_model(), torch.randn(M, T, D))
    assert ways(recorder) == {True}
    assert kinds(group) == {"w": "Outer"}


@pytest.mark.usefixtures("own_rules", "rules_alone")
def test_rows_of_a_rule_go_through_views():
    slangvi.register_rule(Product)(product_rule)
    model = Lambda(lambda x, w: Product.apply(x, w.T), w=(3, D))
    group, _ = recorded(model, torch.randn(M, T, D))
    assert kinds(group) == {"w": "Outer"}


@pytest.mark.usefixtures("own_rules", "rules_alone")
def test_a_rule_serves_chosen_examples():
    slangvi.register_rule(Scale)(scale_rule)
    torch.manual_seed(0)
    case = Case(scaled_model(), (torch.randn(M, T, D),), squares).double()
    truth, spec = loop_gradients(case), ParamSpec.of_module(case.model)
    recorder = GradientRecorder(
        case.model, spec, torch.float64, curvature_rows=2, generator=torch.Generator().manual_seed(0)
    )
    chosen = torch.randperm(M, generator=torch.Generator().manual_seed(0))[:2]
    with recorder.recording():
        squares(case.model(*case.args)).sum().backward()
    rows = FactoredGradients(spec, recorder.collect(), truth).form()
    torch.testing.assert_close(rows, (M / 2) ** 0.5 * truth[chosen])


@pytest.mark.usefixtures("own_rules", "rules_alone")
def test_data_of_a_rule_may_be_overwritten_before_the_step():
    slangvi.register_rule(Product)(product_rule)
    case = Case(product_model(), (torch.randn(M, T, D),), squares).double()
    truth, recorder = loop_gradients(case), recorder_of(case.model)
    with recorder.recording():
        squares(case.model(*case.args)).sum().backward()
    case.args[0].zero_()
    torch.testing.assert_close(recorder.collect()[0].blocks["w"].form(), truth)


@pytest.mark.usefixtures("own_rules")
def test_a_rule_by_the_name_of_a_node_is_taken(monkeypatch):
    model, x = Lambda(lambda x, w: x / w, w=(D,)), torch.randn(M, T, D)
    recorded(model, x)
    monkeypatch.setattr(graph, "_run_by_example", refuse_runs)

    @slangvi.register_rule("DivBackward0")
    def division(meeting):
        """x / w: rows of w are −δ x / w²."""
        above, below = (rules.saved(meeting.node, name) for name in ("self", "other"))
        rows = meeting.taken_delta() * meeting.take(above)
        return Formed(-rows.flatten(1, -2).sum(1) / below.square())

    _, recorder = recorded(model, x)
    assert ways(recorder) == {True}


@pytest.mark.usefixtures("own_rules", "rules_alone")
def test_one_rule_may_serve_several_kinds_and_is_returned():
    registered = slangvi.register_rule(Scale, "NoSuchBackward0", Product)
    assert registered(scale_rule) is scale_rule
    assert [rules._RULES[name] for name in ("ScaleBackward", "NoSuchBackward0", "ProductBackward")] == [scale_rule] * 3
    assert find_rule(Scale.apply(torch.ones(2, 3), torch.ones(3).requires_grad_(), torch.ones(3)).grad_fn) is scale_rule
    slangvi.register_rule(Product)(product_rule)
    recorded(product_model(), torch.randn(M, D))
    assert rules._RULES["ScaleBackward"] is scale_rule


# ---- rules that are wrong

WRONG: dict[str, Callable[[Meeting], object]] = {
    "twice the rows": lambda meeting: scale_rule(meeting).scaled(2.0),
    "zeros": lambda meeting: scale_rule(meeting).scaled(0.0),
    "other examples' rows": lambda meeting: Formed(scale_rule(meeting).rows.flip(0)),
    "not a number": lambda meeting: scale_rule(meeting).scaled(float("nan")),
    "too few columns": lambda meeting: scale_rule(meeting).narrow(0, 2),
    "too many columns": lambda meeting: Formed(torch.cat([scale_rule(meeting).rows] * 2, 1)),
    "nothing": lambda meeting: None,
}


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found_out_and_its_nodes_are_run_instead(name):
    slangvi.register_rule(Scale)(WRONG[name])
    group, recorder = recorded(scaled_model(), torch.randn(M, T, D))
    plan = recorder.plans.latest()
    served = {param: frontier.by_rule for frontier in plan.frontiers for param in frontier.names}
    assert served["0.weight"], "rules of other layers are left alone"
    has_right_size = "columns" not in name and name != "nothing"
    assert served["2.gain"] is served["2.offset"] is not has_right_size
    assert kinds(group)["2.gain"] == "Formed"


@pytest.mark.usefixtures("own_rules")
def test_a_rule_that_gives_rows_of_all_examples_is_found_out():
    """Of a rule that forgets that some are chosen."""

    @slangvi.register_rule(Scale)
    def scale(meeting):
        x, _ = meeting.node.saved_tensors
        rows = meeting.delta * (x.detach() if meeting.operand == 1 else 1)
        return Formed(rows.flatten(1, -2).sum(1))

    group, _ = recorded(scaled_model(), torch.randn(M, T, D))
    assert kinds(group)["2.gain"] == "Formed"


@pytest.mark.usefixtures("own_rules")
def test_a_rule_that_is_wrong_for_examples_that_were_not_compared_is_refused():
    """The first and the last example are compared; the sum over all says the rest."""

    @slangvi.register_rule(Scale)
    def scale(meeting):
        block = scale_rule(meeting)
        return block if meeting.chosen is not None else block.scaled(1.1)

    with pytest.raises(UnsupportedModuleError, match=r"parameter\(s\) '2\.gain', '2\.offset' does not come from"):
        recorded(scaled_model(), torch.randn(M, T, D))


@pytest.mark.usefixtures("own_rules")
def test_errors_of_a_rule_are_seen():
    @slangvi.register_rule(Scale)
    def scale(meeting):
        raise KeyError("a slip in the rule")

    with pytest.raises(KeyError, match="a slip in the rule"):
        recorded(scaled_model(), torch.randn(M, T, D))


# ---- arguments


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (nn.Linear, "torch.nn.modules.linear.Linear"),
        (Scale.apply, "apply"),
        (scale_rule, "scale_rule"),
        (None, "None"),
        (3, "3"),
        (["AddmmBackward0"], "AddmmBackward0"),
    ],
)
def test_what_is_no_kind_of_node_is_refused(kind, shown):
    before = dict(rules._RULES)
    with pytest.raises(
        TypeError, match=rf"names of autograd's nodes or subclasses of torch\.autograd\.Function.*{shown}"
    ):
        slangvi.register_rule("MmBackward0", kind)
    assert before == rules._RULES


@pytest.mark.usefixtures("own_rules")
def test_a_rule_for_nothing_is_refused():
    with pytest.raises(TypeError, match=r"got None\. Write @register_rule\(\"AddmmBackward0\"\)"):
        slangvi.register_rule()


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("rule", [None, Formed(torch.zeros(1, 1)), "AddmmBackward0"])
def test_what_is_no_function_is_no_rule(rule):
    before = dict(rules._RULES)
    with pytest.raises(TypeError, match="a rule must be a function of a meeting that returns its rows, got"):
        slangvi.register_rule(Scale)(rule)
    assert before == rules._RULES


def test_rules_of_tests_are_gone():
    assert not {"ScaleBackward", "ProductBackward", "DivBackward0", "NoSuchBackward0"} & rules._RULES.keys()
