"""Models that are awkward but possible."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slangvi
from helpers.optimizer_runs import CLASSES, assert_identical, backward, flat, make, model_and_data, train


class Shapes(nn.Module):
    """Parameters of every number of dimensions, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.deep = nn.Parameter(torch.randn(1, 2, 1, 2, 1))
        self.matrix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return x @ self.matrix * self.scalar + self.deep.sum() + self.empty.sum()


@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_of_any_shape_are_trained(kind):
    torch.manual_seed(0)
    model = Shapes()
    before = flat(model)
    build, options = CLASSES[kind]
    opt = build(model, num_data=12, generator=torch.Generator().manual_seed(0), **options)
    opt.step(lambda: backward(nn.functional.cross_entropy(model(torch.randn(12, 4)), torch.arange(12) % 3)))
    assert opt.posterior.event_shape == (1 + 4 + 12,)
    assert model.empty.shape == (0, 3)
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize("kind", CLASSES)
def test_mixed_dtypes_keep_their_own(kind):
    class Mixed(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).bfloat16()).float()

    model = Mixed(nn.Linear(4, 3), nn.Linear(3, 3).bfloat16())
    build, options = CLASSES[kind]
    opt = build(model, num_data=12, generator=torch.Generator().manual_seed(0), **options)
    train(opt, torch.randn(12, 4), torch.arange(12) % 3)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert opt._state.loc.dtype is torch.float32


def test_several_devices_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises((ValueError, TypeError), match="meta"):
        make(model)


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel without devices": nn.DataParallel,
    "a module around it": nn.Sequential,
}


@pytest.mark.filterwarnings("ignore:per-example gradients could not be checked")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in WRAPPERS])
def test_wrapped_models_are_trained_as_what_they_wrap(name):
    (model, x, y), (other, _, _) = model_and_data(), model_and_data()
    wrapped = WRAPPERS[name](other)
    assert_identical_means(train(make(model), x, y), train(make(wrapped), x, y))


def assert_identical_means(a, b):
    torch.testing.assert_close(a._state.loc, b._state.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.posterior.variance, b.posterior.variance, rtol=1e-10, atol=1e-12)


class Quantised(nn.Module):
    """Integers in buffers, as quantised layers keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(2, 2, dtype=torch.int8))


def test_quantised_models_have_nothing_to_infer():
    with pytest.raises(ValueError, match="no trainable parameters"):
        make(Quantised())


def test_a_closure_that_changes_the_model_is_told():
    model, x, y = model_and_data()
    opt = make(model)

    def closure():
        loss = backward(nn.functional.cross_entropy(model(x), y))
        model[2] = nn.Linear(5, 3).double()
        return loss

    opt.step(closure)
    with pytest.raises(ValueError, match=r"'2.weight' was replaced"):
        opt.step(closure)


def test_predictions_for_no_rows_are_refused():
    model, x, _ = model_and_data()
    with pytest.raises(ValueError, match="M ≥ 1"):
        slangvi.predictive_samples(model, make(model).posterior, x[:0], 7)


@pytest.mark.parametrize("rows", [1, 5])
def test_predictions_for_any_number_of_rows(rows):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    q, generator = opt.posterior, torch.Generator()
    out = slangvi.predictive_samples(model, q, x[:rows], 7, generator=generator.manual_seed(0))
    assert out.shape == (7, rows, 3)
    whole = slangvi.predictive_samples(model, q, x, 7, generator=generator.manual_seed(0))
    torch.testing.assert_close(out, whole[:, :rows])
    with pytest.raises(RuntimeError, match="shapes"):
        slangvi.predictive_samples(model, q, x[:, :3], 7)


def test_both_optimizers_of_a_copy_agree():
    """A model copied together with its optimizer is a run of its own."""
    import copy

    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    twin = copy.deepcopy(opt)
    assert twin.model is not model
    assert_identical(train(twin, x, y), train(opt, x, y))
