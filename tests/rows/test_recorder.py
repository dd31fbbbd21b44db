"""Captured per-example gradients against a Python loop, for every model of the table and both engines."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import CASES, RANDOM_CASES, Case, build, squares
from helpers.captured_gradients import captured, products_of, recorder_of, rows_of
from reference import loop_gradients
from slangvi.errors import UnsupportedModuleError
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, GradientRecorder, Outer
from slangvi.types import Routes


@pytest.mark.parametrize("engine", ["factored", "dense"])
@pytest.mark.parametrize("name", [*CASES, *RANDOM_CASES])
def test_every_product_equals_the_loop(name, engine):
    case = build(name)
    torch.manual_seed(7)
    truth = loop_gradients(case)
    torch.manual_seed(7)
    operator = captured(case, engine)
    torch.manual_seed(3)
    C, W = torch.randn(3, truth.shape[1]).double(), torch.randn(len(truth), 2).double()
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(rows_of(operator), truth, **close)
    torch.testing.assert_close(operator.sum(), truth.sum(0), **close)
    torch.testing.assert_close(operator.square_sum(), truth.square().sum(0), **close)
    gram, product, combined = products_of(operator, W, C)
    torch.testing.assert_close(gram, truth @ truth.T, **close)
    torch.testing.assert_close(product, truth @ C.T, **close)
    torch.testing.assert_close(combined, W.T @ truth, **close)


@pytest.mark.parametrize("name", CASES)
def test_float32_stays_within_1e_4(name):
    case = build(name)
    truth = loop_gradients(case)
    case.model.float()
    case.args = torch.utils._pytree.tree_map(
        lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, case.args
    )
    rows = rows_of(captured(case, dtype=torch.float32)).double()
    assert float((rows - truth).norm() / truth.norm()) < 1e-4


def test_factors_are_not_formed_for_products(monkeypatch):
    operator = captured(build("mlp"), routes=Routes(layers="factor"))

    def refuse(self):
        raise AssertionError("formed")

    monkeypatch.setattr(Outer, "form", refuse)
    assert operator.height == 5
    assert operator.square_sum().isfinite().all()


def test_matrices_and_tables_are_kept_as_factors_and_small_tensors_are_formed():
    case = build("gpt_tied")
    kinds = {name: type(block).__name__ for name, block in captured(case).blocks.items()}
    assert set(kinds.values()) == {"Outer", "Sum", "Formed"}
    assert all(kind == "Formed" for name, kind in kinds.items() if name.endswith("bias"))


def test_frozen_parameters_are_absent_and_untouched():
    case = build("mlp")
    case.model[0].requires_grad_(False)
    truth = loop_gradients(case)
    operator = captured(case)
    assert not any(name.startswith("0.") for name in operator.spec.names)
    torch.testing.assert_close(rows_of(operator), truth, rtol=1e-10, atol=1e-10)
    assert case.model[0].weight.grad is None


def test_unused_parameters_have_zero_rows():
    case = build("mlp")
    case.model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    operator = captured(case)
    assert "unused" not in operator.blocks
    assert not rows_of(operator)[:, operator.spec.slices["unused"]].any()
    assert case.model.unused.grad is None


def test_passes_of_different_batches_stack_and_their_sequences_may_differ_in_length():
    first, second = build("gpt_tied"), build("gpt_tied")
    second.model = first.model
    second.args = (torch.randint(7, (3, 6)),)
    targets = torch.randint(7, (3, 6))
    second.losses = lambda out: nn.functional.cross_entropy(out.transpose(1, 2), targets, reduction="none").sum(1)
    second.num_examples = 3
    truth = torch.cat([loop_gradients(first), loop_gradients(second)])
    spec = ParamSpec.of_module(first.model)
    capture = GradientRecorder(first.model, spec, torch.float64)
    with capture.recording():
        for case in (first, second):
            case.losses(case.model(*case.args)).sum().backward()
    groups = capture.collect()
    assert [group.num_rows for group in groups] == [5, 3]
    operator = FactoredGradients(spec, groups, truth)
    torch.testing.assert_close(rows_of(operator), truth, rtol=1e-10, atol=1e-10)


def test_a_parameter_used_in_some_passes_only_has_zero_rows_in_the_others():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, second):
            return self.b(self.a(x)) if second else self.a(x)

    torch.manual_seed(0)
    model, x = Gate().double(), torch.randn(2, 3, dtype=torch.float64)
    spec = ParamSpec.of_module(model)
    capture = GradientRecorder(model, spec, torch.float64)
    with capture.recording():
        for second in (False, True, False):
            squares(model(x, second)).sum().backward()
    operator = FactoredGradients(spec, capture.collect(), x)
    truth = torch.cat([loop_gradients(Case(model, (x, second), squares, 2)) for second in (False, True, False)])
    torch.testing.assert_close(rows_of(operator), truth, rtol=1e-10, atol=1e-10)


def test_two_losses_on_one_graph_belong_to_the_same_examples():
    case = build("mlp")
    spec = ParamSpec.of_module(case.model)
    truth = loop_gradients(case) + loop_gradients(Case(case.model, case.args, squares))
    capture = GradientRecorder(case.model, spec, torch.float64)
    with capture.recording():
        out = case.model(*case.args)
        case.losses(out).sum().backward(retain_graph=True)
        squares(out).sum().backward()
    operator = FactoredGradients(spec, capture.collect(), truth)
    torch.testing.assert_close(rows_of(operator), truth, rtol=1e-10, atol=1e-10)


def test_autograd_grad_is_no_training_signal():
    case = build("mlp")
    spec = ParamSpec.of_module(case.model)
    capture = GradientRecorder(case.model, spec, torch.float64)
    with capture.recording():
        loop_gradients(case)
    assert capture.collect() == []


class Twin(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, a, b):
        return self.inner(a) - self.inner(b)


def test_several_calls_of_the_model_in_one_loss_are_refused_and_a_wrapper_makes_them_pairs():
    case = build("mlp")
    other = torch.randn(5, 4, dtype=torch.float64)
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    with capture.recording():
        squares(case.model(*case.args) - case.model(other)).sum().backward()
    with pytest.raises(UnsupportedModuleError, match="called 2 times for one backward pass"):
        capture.collect()
    pairs = Case(Twin(case.model), (*case.args, other), squares)
    truth = loop_gradients(pairs)
    torch.testing.assert_close(rows_of(captured(pairs)), truth, rtol=1e-10, atol=1e-10)


def test_a_model_that_mixes_examples_is_served_by_the_definition():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            h = self.layer(x)
            return h - h.mean(0)

    torch.manual_seed(0)
    case = Case(Mixing(), (torch.randn(5, 3),), squares).double()
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case)), truth, rtol=1e-10, atol=1e-10)


def test_non_reentrant_checkpointing_works_and_reentrant_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
            self.reentrant = reentrant

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    torch.manual_seed(0)
    case = Case(Checkpointed(False), (torch.randn(5, 4),), squares).double()
    truth = loop_gradients(case)
    torch.testing.assert_close(rows_of(captured(case)), truth, rtol=1e-10, atol=1e-10)
    case.model.reentrant = True
    case.args = (case.args[0].requires_grad_(),)
    with pytest.raises(UnsupportedModuleError, match="use_reentrant=False"):
        captured(case)


@pytest.mark.parametrize("kind", ["train", "no running statistics"])
def test_batch_statistics_are_refused_by_name(kind):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=kind == "train"))
    model.train(kind == "train")
    capture = GradientRecorder(model, ParamSpec.of_module(model), torch.float32)
    with (
        pytest.raises(UnsupportedModuleError, match=r"module '1' \(BatchNorm1d\).*eval mode.*GroupNorm"),
        capture.recording(),
    ):
        pass
    assert not capture.active


def test_an_empty_batch_is_refused():
    case = build("mlp")
    case.args = (torch.zeros(0, 4, dtype=torch.float64),)
    case.losses = squares
    with pytest.raises(ValueError, match="batch is empty"):
        captured(case)


def test_batches_of_different_size_in_one_pass_are_refused():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    with capture.recording():
        loss = squares(case.model(*case.args)).sum() + squares(case.model(torch.ones(2, 4).double())).sum()
        loss.backward()
    with pytest.raises(UnsupportedModuleError, match="called 2 times"):
        capture.collect()


def test_a_model_called_in_parts_is_refused():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    with capture.recording():
        h = case.args[0]
        for layer in case.model:
            h = layer(h)
        case.losses(h).sum().backward()
    with pytest.raises(UnsupportedModuleError, match=r"not through a recorded call.*Call the model as model\(x\)"):
        capture.collect()


@pytest.mark.parametrize("engine", ["factored", "dense"])
@pytest.mark.parametrize("kind", ["weights", "gradients"])
def test_penalties_are_refused_by_name(kind, engine):
    case = build("mlp")
    capture = recorder_of(case.model, engine)
    with capture.recording():
        x = case.args[0].clone().requires_grad_()
        loss = case.losses(case.model(x)).sum()
        if kind == "weights":
            loss = loss + sum(p.square().sum() for p in case.model.parameters())
        else:
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        loss.backward()
    with pytest.raises(UnsupportedModuleError, match=r"gradient of parameter\(s\) '.*prior_precision"):
        capture.collect()


def test_verification_can_be_switched_off():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64, verify=False)
    with capture.recording():
        penalty = sum(p.square().sum() for p in case.model.parameters())
        (case.losses(case.model(*case.args)).sum() + penalty).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(capture.collect()) == 1


def test_data_changed_in_place_after_the_pass_do_no_harm():
    case = build("raw_parameter")
    truth = loop_gradients(case)
    spec = ParamSpec.of_module(case.model)
    capture = GradientRecorder(case.model, spec, torch.float64)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
        case.args[0].zero_()
    groups = capture.collect()
    torch.testing.assert_close(rows_of(FactoredGradients(spec, groups, truth)), truth, rtol=1e-10, atol=1e-10)


def test_nothing_is_recorded_outside_the_block_or_without_gradients():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    case.losses(case.model(*case.args)).sum().backward()
    with capture.recording(), torch.no_grad():
        case.model(*case.args)
    assert capture.collect() == []


def test_a_capture_may_go_while_the_model_is_being_called():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    x, alive = torch.randn(4, 2), {}
    expected = model(x)

    def forget(*told):
        alive.clear()
        gc.collect()

    for module in model:
        module.register_forward_hook(forget)  # called before ours
    alive["capture"] = GradientRecorder(model, ParamSpec.of_module(model), torch.float32)
    assert len(model._forward_hooks) == 1
    assert torch.equal(model(x), expected)
    assert not model._forward_hooks


def test_hooks_leave_with_the_capture():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    assert any(m._forward_hooks for m in case.model.modules())
    gone = weakref.ref(capture)
    del capture
    gc.collect()
    assert gone() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in case.model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in case.model.parameters())


def test_close_removes_hooks_at_once():
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    capture.close()
    assert not any(m._forward_hooks for m in case.model.modules())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_of_a_model_are_not_recorded(duplicate):
    case = build("mlp")
    capture = GradientRecorder(case.model, ParamSpec.of_module(case.model), torch.float64)
    twin = duplicate(case.model)
    with capture.recording():
        case.losses(twin(*case.args)).sum().backward()
    assert capture.collect() == []


def test_the_global_random_state_is_left_alone():
    case = build("encoder_dropout")
    spec = ParamSpec.of_module(case.model)
    capture = GradientRecorder(case.model, spec, torch.float64)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
    before = torch.get_rng_state()
    capture.collect()
    assert torch.equal(before, torch.get_rng_state())


# ---- gradients of a pass as a whole


def two_outputs() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)


def test_gradients_that_were_there_before_are_not_the_pass_own():
    model, x = two_outputs()
    recorder = GradientRecorder(model, ParamSpec.of_module(model), torch.float64)
    totals = []
    with recorder.recording():
        for scale in (1.0, 2.0, 3.0):  # as micro-batches add up
            (scale * model(x)).sum().backward()
        for param in model.parameters():
            param.grad = None
        (4.0 * model(x)).sum().backward()
        later, last = model(x).sum(), (5.0 * model(x)).sum()  # both graphs before both passes
        later.backward()
        last.backward()
    totals = [group.total for group in recorder.collect()]
    unit = torch.cat([x.sum(0).repeat(2), torch.full((2,), 4.0, dtype=torch.float64)])
    for total, scale in zip(totals, (1.0, 2.0, 3.0, 4.0, 1.0, 5.0), strict=True):
        torch.testing.assert_close(total, scale * unit)


def test_hooks_of_others_do_not_change_what_is_recorded():
    model, x = two_outputs()
    handle = model.weight.register_hook(torch.zeros_like)
    recorder = GradientRecorder(model, ParamSpec.of_module(model), torch.float64, wants_rows=False)
    with recorder.recording():
        model(x).sum().backward()
    (group,) = recorder.collect()
    torch.testing.assert_close(group.total[:6], x.sum(0).repeat(2))
    assert not model.weight.grad.any()
    handle.remove()
    model.zero_grad()
    with recorder.recording():
        loss = model(x).sum()
        model.weight.register_hook(torch.zeros_like)
        with pytest.raises(UnsupportedModuleError, match="between forward and backward"):
            loss.backward()


def test_a_term_beside_the_outputs_in_a_second_pass_is_refused():
    model, x = two_outputs()
    model.beside = nn.Parameter(torch.ones(2, dtype=torch.float64))
    recorder = GradientRecorder(model, ParamSpec.of_module(model), torch.float64, verify=False)
    with recorder.recording():
        first, second = model(x).sum(), model(x)[:, 0].sum()
        first.backward()
        (second + model.beside.square().sum()).backward()
    with pytest.raises(UnsupportedModuleError, match="second of two backward passes"):
        recorder.collect()


def recorded_totals(recorder: GradientRecorder) -> list[torch.Tensor]:
    return [group.total for group in recorder.collect()]


def test_a_pass_that_failed_half_way_leaves_nothing_in_the_next():
    model, x = two_outputs()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    recorder = GradientRecorder(model, ParamSpec.of_module(model), torch.float64)
    alone = torch.autograd.grad(model(x).sum(), list(model.parameters()))

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("half way")

    with recorder.recording():
        hidden = []
        handle = model[1].register_forward_hook(lambda module, args, out: hidden.append(out))
        first, second = model(x).sum(), model(x).sum()
        handle.remove()
        hidden[0].register_hook(fail)
        with pytest.raises(RuntimeError, match="half way"):
            first.backward()
        assert model[2].weight.grad is not None
        second.backward()
    (total,) = recorded_totals(recorder)
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in alone]))


def test_gradients_put_back_between_forward_and_backward_are_not_counted():
    model, x = two_outputs()
    recorder = GradientRecorder(model, ParamSpec.of_module(model), torch.float64)
    alone = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with recorder.recording():
        loss = model(x).sum()
        for param in model.parameters():
            param.grad = torch.full_like(param, 8.0)
        loss.backward()
    (total,) = recorded_totals(recorder)
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in alone]))


def test_blocks_that_overlap_leave_the_thread_of_backward_as_it_was():
    recorders = []
    for _ in range(2):
        model, _ = two_outputs()
        recorders.append(GradientRecorder(model, ParamSpec.of_module(model), torch.float64).recording())
    assert torch._C._is_multithreading_enabled()
    for block in recorders:
        block.__enter__()
        assert not torch._C._is_multithreading_enabled()
    recorders[0].__exit__(None, None, None)
    assert not torch._C._is_multithreading_enabled()
    recorders[1].__exit__(None, None, None)
    assert torch._C._is_multithreading_enabled()
