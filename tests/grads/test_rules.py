"""Layer rules: options of every layer against a Python loop, and which rule applies to which class."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import Case, squares
from helpers.allocated_bytes import allocated
from reference import loop_gradients
from slangvi.errors import UnsupportedModuleError
from slangvi.grads import FactoredGradients, Formed, GradientCapture, register_rule
from slangvi.grads.rules import find_rule, registry
from slangvi.grads.rules.conv import patches
from slangvi.params import ParamSpec
from slangvi.types import Routes

M = 3
CONVS = {
    "stride": {"stride": 2},
    "padding": {"padding": 2},
    "dilation": {"dilation": 2, "padding": 1},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "stride": 2, "padding": 1},
    "same": {"padding": "same"},
    "same_even_kernel": {"padding": "same", "kernel_size": 2},
    "valid": {"padding": "valid", "bias": False},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular", "groups": 2, "stride": 2},
    "everything": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
}


def gradients(case: Case) -> tuple[torch.Tensor, FactoredGradients]:
    """Rows by loop and by the factored engine with the check switched off, so that rules stand on their own."""
    case.double()
    spec = ParamSpec.of_module(case.model)
    truth = loop_gradients(case)
    capture = GradientCapture(case.model, spec, torch.float64, verify=False)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
    groups = capture.collect(dict(case.model.named_parameters()))
    return truth, FactoredGradients(spec, groups, rank=1, like=truth, routes=Routes(form_bytes=0))


def assert_same(truth: torch.Tensor, found: FactoredGradients) -> None:
    rows = found.t_mm(torch.eye(len(truth), dtype=torch.float64))
    torch.testing.assert_close(rows, truth, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.gram(), truth @ truth.T, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(found.square_sum(), truth.square().sum(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.sum(), truth.sum(0), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("options", CONVS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_options(dims, options):
    torch.manual_seed(dims)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    settings = {"kernel_size": 3} | CONVS[options]
    layer = kind(4, 4, **settings)
    case = Case(layer, (torch.randn(M, 4, *(6, 5, 7)[:dims]),), lambda out: out.flatten(1).pow(3).sum(1), M)
    assert_same(*gradients(case))


def test_rectangular_kernels_strides_and_paddings():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 6, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(1, 2), groups=2)
    case = Case(layer, (torch.randn(M, 2, 5, 6),), squares, M)
    assert_same(*gradients(case))


@pytest.mark.parametrize("between", [(), (4,), (2, 3), (1, 2, 2)])
def test_linear_with_any_dimensions_between_batch_and_features(between):
    torch.manual_seed(0)
    case = Case(nn.Linear(3, 4), (torch.randn(M, *between, 3),), squares, M)
    assert_same(*gradients(case))


@pytest.mark.parametrize("between", [(), (4,), (2, 3)])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_embedding_with_any_index_shape(between, padding_idx):
    torch.manual_seed(0)
    layer = nn.Embedding(5, 3, padding_idx=padding_idx)
    index = torch.randint(5, (M, *between))
    case = Case(layer, (index,), lambda out: (out - 1).reshape(M, -1).pow(2).sum(1), M)
    assert_same(*gradients(case))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(4), (4,)),
        (nn.LayerNorm(4), (3, 4)),
        (nn.LayerNorm((3, 4)), (2, 3, 4)),
        (nn.LayerNorm(4, bias=False), (2, 3, 4)),
        (nn.RMSNorm(4), (3, 4)),
        (nn.RMSNorm((3, 4), eps=1e-3), (3, 4)),
        (nn.GroupNorm(2, 4), (4,)),
        (nn.GroupNorm(2, 4), (4, 3)),
        (nn.GroupNorm(4, 4, eps=1e-2), (4, 3, 2)),
    ],
    ids=str,
)
def test_norms(layer, shape):
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    case = Case(layer, (torch.randn(M, *shape),), lambda out: out.flatten(1).pow(3).sum(1), M)
    assert_same(*gradients(case))


def test_elementwise_affine_off_leaves_nothing_to_capture():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False))
    assert_same(*gradients(Case(model, (torch.randn(M, 3),), lambda out: out.pow(3).sum(1), M)))


@pytest.mark.parametrize(("option", "value"), [("sparse", True), ("max_norm", 1.0), ("scale_grad_by_freq", True)])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_options_without_per_example_gradients_are_refused(kind, option, value):
    model = nn.Sequential()
    model.add_module("table", kind(4, 2, **{option: value}))
    capture = GradientCapture(model, ParamSpec.of_module(model), torch.float32)
    with pytest.raises(UnsupportedModuleError, match=f"'table' .*{option}"), capture.recording():
        pass


def test_rules_apply_to_subclasses_only_when_they_keep_forward():
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    assert find_rule(Same(2, 2)) is find_rule(nn.Linear(2, 2))
    assert find_rule(Other(2, 2)) is None
    assert_same(*gradients(Case(Other(3, 2), (torch.randn(M, 3),), squares, M)))


def test_a_registered_rule_is_used(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    used = []

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.gain

    @register_rule(Scale)
    def scale(module, x, delta):
        used.append(module)
        return {"gain": Formed(x * delta)}

    assert_same(*gradients(Case(Scale(), (torch.randn(M, 3),), squares, M)))
    assert used


def test_an_unbatched_input_is_not_taken_for_a_batch():
    """A layer called without batch dimension inside a batched model is served by replaying the model."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(M, 2, 1)
            self.norm = nn.LayerNorm(M)
            self.linear = nn.Linear(M, 4)
            self.constant = torch.randn(M, 4, dtype=torch.float64)

        def forward(self, x):
            code = self.linear(self.norm(self.constant.T[0])) + self.conv(self.constant).mean(0)
            return x * code

    torch.manual_seed(0)
    assert_same(*gradients(Case(Shared(), (torch.randn(M, 4),), squares, M)))


def test_rules_are_for_classes_of_modules():
    with pytest.raises(TypeError, match=r"takes classes of modules, got Linear\("):
        register_rule(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="takes classes of modules, got None"):
        register_rule()
    with pytest.raises(TypeError, match="shares_inputs must be True or False, got 1"):
        register_rule(nn.Bilinear, shares_inputs=1)
    with pytest.raises(TypeError, match=r"a rule must be a function .* got 'rule'"):
        register_rule(nn.Bilinear)("rule")


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2, "padding": 1}], ids=str)
def test_patches_are_copied_once(options):
    layer, x = nn.Conv2d(4, 4, 3, **options), torch.randn(3, 4, 12, 11)
    size = patches(layer, x).nbytes
    padded = F.pad(x, layer._reversed_padding_repeated_twice).nbytes
    assert size > 4 * padded / layer.stride[0] ** 2
    assert allocated(lambda: patches(layer, x)) <= size + padded + 1024
