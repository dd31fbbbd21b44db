"""Models and loops that could fool the capture: seen through, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import Case, build, squares
from helpers.captured_gradients import captured, recorder_of, rows_of
from reference import loop_gradients
from slangvi.errors import UnsupportedModuleError
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, GradientRecorder


class TwoOutputs(nn.Module):
    """One output is computed from the other, inside the module."""

    def __init__(self, loss_inside=False):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.randn(4))
        self.loss_inside = loss_inside

    def forward(self, x):
        h = torch.tanh(self.a(x)) * self.gain
        y = self.b(h)
        return (y.square().sum(), y) if self.loss_inside else (y, h)


@pytest.mark.parametrize("engine", ["factored", "dense"])
@pytest.mark.parametrize("used", ["first", "both"])
def test_outputs_computed_from_one_another_are_not_counted_twice(used, engine):
    torch.manual_seed(0)
    losses = {"first": lambda out: squares(out[0]), "both": lambda out: squares(out[0]) + squares(out[1])}[used]
    case = Case(TwoOutputs(), (torch.randn(5, 4),), losses).double()
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case, engine)), truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["factored", "dense"])
def test_a_loss_computed_inside_the_model_is_told_apart_by_its_batched_output(engine):
    torch.manual_seed(0)
    case = Case(TwoOutputs(loss_inside=True), (torch.randn(5, 4),), lambda out: squares(out[1])).double()
    truth = loop_gradients(case)
    spec = ParamSpec.of_module(case.model)
    capture = recorder_of(case.model, engine)
    with capture.recording():
        case.model(*case.args)[0].backward()
    groups = capture.collect()
    torch.testing.assert_close(rows_of(FactoredGradients(spec, groups, truth)), truth, rtol=1e-10, atol=1e-10)


class Masked(nn.Module):
    """A module without a rule that is given something of shape (T, T) beside the batch."""

    def __init__(self):
        super().__init__()
        self.inner = MaskedInner()

    def forward(self, x):
        T = x.shape[1]
        return self.inner(x, torch.ones(T, T, dtype=x.dtype).tril())


class MaskedInner(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x, mask):
        return mask @ (x * self.gain)


def test_a_mask_that_comes_to_look_like_a_batch_is_seen_through():
    torch.manual_seed(0)
    model = Masked().double()
    spec = ParamSpec.of_module(model)
    capture = GradientRecorder(model, spec, torch.float64)
    for M, T in ((5, 4), (4, 4), (6, 4)):
        case = Case(model, (torch.randn(M, T, 3).double(),), squares, M)
        truth = loop_gradients(case)
        with capture.recording():
            squares(model(*case.args)).sum().backward()
        operator = FactoredGradients(spec, capture.collect(), truth)
        torch.testing.assert_close(rows_of(operator), truth, rtol=1e-10, atol=1e-10)


def test_a_model_that_comes_to_reorder_its_batch_is_found_out_by_a_later_check():
    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, key):
            order = key.argsort(stable=True)
            return self.layer(x[order])[order.argsort()]

    torch.manual_seed(0)
    model = Sorting().double()
    spec = ParamSpec.of_module(model)
    capture = GradientRecorder(model, spec, torch.float64)
    for key in (torch.zeros(6), *(torch.randperm(6) for _ in range(3))):
        case = Case(model, (torch.randn(6, 3).double(), key), squares, 6)
        truth = loop_gradients(case)
        with capture.recording():
            squares(model(*case.args)).sum().backward()
        rows = rows_of(FactoredGradients(spec, capture.collect(), truth))
    torch.testing.assert_close(rows, truth, rtol=1e-10, atol=1e-10)


def test_dropout_that_is_on_in_eval_mode_is_replayed():
    class AlwaysDropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return nn.functional.dropout(x * self.gain, 0.5, training=True)

    torch.manual_seed(0)
    case = Case(AlwaysDropout().eval(), (torch.randn(5, 4),), squares).double()
    torch.manual_seed(1)
    truth = loop_gradients(case)
    torch.manual_seed(1)
    torch.testing.assert_close(rows_of(captured(case)), truth, rtol=1e-10, atol=1e-10)


def test_a_raw_parameter_tied_between_modules_is_summed_without_verification():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.tanh(x * self.gain)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.longer_name = Gain(), Gain()
            self.longer_name.gain = self.a.gain

        def forward(self, x):
            return self.longer_name(self.a(x))

    torch.manual_seed(0)
    case = Case(Pair(), (torch.randn(5, 3),), squares).double()
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case, verify=False)), truth, rtol=1e-10, atol=1e-10)


def test_a_forward_patched_on_the_instance_is_not_taken_for_the_layers_own():
    case = build("mlp")
    layer = case.model[0]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) * 2
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case, verify=False)), truth, rtol=1e-10, atol=1e-10)


def test_replays_leave_no_trace_in_the_modules():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = x * self.gain
            return self.last

    case = Case(Remembering(), (torch.randn(5, 3, dtype=torch.float64),), squares)
    captured(case)
    assert case.model.calls == 1
    torch.testing.assert_close(case.model.last, case.args[0] * case.model.gain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_under_autocast_is_not_mistaken_for_an_error(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))
    capture = GradientRecorder(model, ParamSpec.of_module(model), torch.float32)
    with capture.recording():
        with torch.autocast("cpu", dtype):
            out = model(torch.randn(64, 20))
        nn.functional.cross_entropy(out.float(), torch.arange(64) % 3).backward()
    capture.collect()
    assert not capture.plans.latest().by_definition
    assert all(frontier.by_rule for frontier in capture.plans.latest().frontiers)


def test_patterns_of_calls_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("slangvi.rows.graph.MOST_PLANS", 3)

    class Depth(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))

        def forward(self, x, used):
            for k in used:
                x = self.layers[k](x)
            return x

    model = Depth()
    capture = GradientRecorder(model, ParamSpec.of_module(model), torch.float32)
    for k in range(6):
        with capture.recording():
            squares(model(torch.randn(4, 2), (k,))).sum().backward()
        capture.collect()
        assert len(capture.plans) <= 3


@pytest.mark.parametrize("verify", [True, False])
def test_the_caller_may_change_one_of_several_outputs_in_place(verify):
    torch.manual_seed(0)
    case = Case(TwoOutputs(), (torch.randn(5, 4),), lambda out: squares(out[0]) + squares(out[1])).double()

    def losses(out):
        first, second = out
        return squares(first.relu_()) + squares(second)

    case.losses = losses
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case, verify=verify)), truth, rtol=1e-10, atol=1e-10)


def test_sparse_inputs_are_accepted():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, graph):
            return self.layer(torch.sparse.mm(graph, x))

    torch.manual_seed(0)
    case = Case(Mixed().double(), (torch.randn(5, 4).double(), torch.eye(5).double().to_sparse()), squares)
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case)), truth, rtol=1e-10, atol=1e-10)


def test_a_parameter_used_in_the_loss_only_is_named():
    case = build("mlp")
    case.model.register_parameter("noise", nn.Parameter(torch.zeros((), dtype=torch.float64)))
    case.losses = lambda out: squares(out) * case.model.noise.exp() - case.model.noise
    with pytest.raises(UnsupportedModuleError, match=r"'noise'.*move it into forward"):
        captured(case)


def test_rows_that_cancel_in_the_sum_are_no_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(8, 4)
    signs = torch.cat([torch.ones(8, 1), -torch.ones(8, 1)])
    case = Case(model, (torch.cat([x, x]),), lambda out: (out * signs).sum(1), 16)
    truth = loop_gradients(case)
    rows = rows_of(captured(case, dtype=torch.float32)).double()
    assert float((rows - truth).norm() / truth.norm()) < 1e-5


def test_copies_of_data_do_not_pile_up_without_steps():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)

    def failing():
        with capture.recording():
            case.model(torch.randn(5, 4).double())
            raise RuntimeError("mine")

    for _ in range(5):
        with capture.recording():
            case.model(torch.randn(5, 4).double())
        capture.collect()
        with pytest.raises(RuntimeError, match="mine"):
            failing()
    assert not capture._data


class Energy(nn.Module):
    """A layer that is also called inside torch.func, where no hook can look at its tensors."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        force = torch.func.vmap(torch.func.grad(lambda z: torch.tanh(self.inner(z)).sum()))(x)
        return self.head(torch.tanh(self.inner(x))) + force


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("engine", ["factored", "dense"])
def test_layers_called_inside_torch_func_are_served_by_the_whole_model(engine, verify):
    torch.manual_seed(0)
    case = Case(Energy(), (torch.randn(5, 4),), squares).double()
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case, engine, verify=verify)), truth, rtol=1e-10, atol=1e-10)


def test_a_model_called_inside_torch_func_is_refused():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    with capture.recording():
        case.losses(torch.func.vmap(case.model)(*case.args)).sum().backward()
    with pytest.raises(UnsupportedModuleError, match=r"Call the model as model\(x\).* not inside torch\.func\.vmap"):
        capture.collect()


def test_a_hook_that_changes_the_models_input_is_followed():
    case = build("mlp")
    case.model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case)), truth, rtol=1e-10, atol=1e-10)
