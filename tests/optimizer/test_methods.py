"""What every method's optimizer promises, one row per class: saving, copies, groups, growth, learning, refusals."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import CLASSES, N, assert_identical, backward, flat, model_and_data, train
from slangvi.errors import NumericalError
from slangvi.params.state import tensors_of

SUMS = "it takes sums of gradients: there is no curvature to choose and no step to replay, and Python refuses the word"
# Promises that a class cannot keep, and why.
EXEMPT = {
    ("MCDropout", "test_parameters_added_later_start_beside_what_was_learnt"): "its width is p, and no init_precision",
    ("MCDropout", "test_closures_schedules_and_the_elbo"): "q has no density, so that its ELBO is not known",
    ("BBB", "test_second_derivatives_are_not_offered"): SUMS,
    ("MCDropout", "test_second_derivatives_are_not_offered"): SUMS,
    ("SLANG", "test_what_cannot_be_replayed_has_no_such_setting"): "it can",
}


def excuse(name, request):
    reason = EXEMPT.get((name, request.function.__name__))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@pytest.fixture(params=CLASSES)
def make(request):
    excuse(request.param, request)
    kind, options = CLASSES[request.param]

    def build(model, seed=1, **more):
        generator = torch.Generator().manual_seed(seed)
        return kind(model, **({"num_data": N, "lr": 0.1, "generator": generator} | options | more))

    return build


def test_a_saved_run_goes_on_bitwise(make):
    model, x, y = model_and_data()
    whole = train(make(model), x, y, steps=4)
    first, _, _ = model_and_data()
    buffer = io.BytesIO()
    torch.save(train(make(first), x, y, steps=2).state_dict(), buffer)
    buffer.seek(0)
    second, _, _ = model_and_data(seed=9)
    resumed = make(second, seed=123, lr=0.7)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert_identical(train(resumed, x, y, steps=2), whole)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_go_on_like_the_original(make, duplicate):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    assert_identical(train(duplicate(opt), x, y), train(opt, x, y))


def test_another_methods_state_is_refused(make):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    other = slangvi.VOGN if not isinstance(opt, slangvi.VOGN) else slangvi.FullGaussian
    with pytest.raises(ValueError, match=f"state_dict is of method '{other.__name__}'"):
        opt.load_state_dict(other(model, num_data=N).state_dict())


def test_a_damaged_precision_is_refused(make):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    saved = copy.deepcopy(opt.state_dict())
    for name, value in saved["slangvi"]["tensors"].items():
        if name in ("prec_diag", "prec_matrix", "square", "loc_square"):
            value.neg_()
    with pytest.raises(ValueError, match="damaged"):
        opt.load_state_dict(saved)


def test_parameters_added_later_start_beside_what_was_learnt(make):
    model, x, y = model_and_data()
    opt = make(model, params=list(model[0].parameters()))
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x), y).backward()
    opt.step()
    before = opt.posterior.precision_matrix
    opt.add_param_group({"params": model[2].parameters(), "init_precision": 5.0})
    after = opt.posterior.precision_matrix
    size = len(before)
    torch.testing.assert_close(after[:size, :size], before)
    assert not after[:size, size:].any()
    torch.testing.assert_close(after[size:, size:], 5 * torch.eye(len(after) - size).double())
    train(opt, x, y, steps=1)
    assert opt.posterior.loc.isfinite().all()


def test_groups_that_agree_are_one_group(make):
    """Rates given per tensor take another path through the arithmetic than one number."""
    model, x, y = model_and_data()
    twin, _, _ = model_and_data()
    groups = [{"params": twin[0].parameters(), "lr": 0.1 + 1e-13}, {"params": twin[2].parameters()}]
    one, two = train(make(model), x, y), train(make(twin, params=groups), x, y)
    torch.testing.assert_close(one.posterior.loc, two.posterior.loc, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(one.posterior.covariance_matrix, two.posterior.covariance_matrix, rtol=1e-8, atol=1e-8)


def test_closures_schedules_and_the_elbo(make):
    torch.manual_seed(0)
    x = torch.randn(N, 3)
    y = (x @ torch.tensor([2.0, -1.0, 0.5]) > 0).long()
    model = nn.Linear(3, 2)
    opt = make(model, lr=0.5, mc_samples=4)
    sched = slangvi.inverse_time(opt, 0.51)
    first = opt.elbo(lambda: F.cross_entropy(model(x), y), 16).value
    for _ in range(40):
        opt.step(lambda: backward(F.cross_entropy(model(x), y)))
        sched.step()
    assert opt.elbo(lambda: F.cross_entropy(model(x), y), 16).value > first + 5
    assert math.isfinite(opt.info.elbo.value)
    assert opt.kl() == pytest.approx(opt.info.kl)


def test_a_step_that_fails_changes_nothing(make):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    before, kept = flat(model), {name: value.clone() for name, value in tensors_of(opt._state)}
    with opt.sampled_params(train=True):
        (F.cross_entropy(model(x), y) * math.inf).backward()
    with pytest.raises(NumericalError, match="unchanged"):
        opt.step()
    assert torch.equal(flat(model), before)
    assert all(torch.equal(value, kept[name]) for name, value in tensors_of(opt._state))


def test_float32_models_under_autocast_keep_a_float32_state(make):
    model, x, y = model_and_data(dtype=torch.float32)
    opt = make(model)
    with torch.autocast("cpu", torch.bfloat16):
        train(opt, x, y)
    assert {value.dtype for _, value in tensors_of(opt._state)} == {torch.float32}


def test_second_derivatives_are_not_offered(make):
    model, _, _ = model_and_data()
    with pytest.raises(ValueError, match="curvature must be"):
        make(model, curvature="hessian")
    with pytest.raises(ValueError, match="curvature must be"):
        make(model, curvature="gnn")


@pytest.mark.parametrize("name", CLASSES)
def test_what_cannot_be_replayed_has_no_such_setting(name, request):
    excuse(name, request)
    kind, options = CLASSES[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'compile'"):
        kind(nn.Linear(2, 1), num_data=3, compile=True, **options)


def test_two_optimizers_on_one_model_do_not_disturb_each_other(make):
    """While both listen to the same layers, and after one of them has gone."""
    (model, x, y), (other, _, _) = model_and_data(), model_and_data()
    head, body = make(model, params=model[2].parameters()), make(model, params=model[0].parameters())
    alone = make(other, params=other[2].parameters())
    assert_identical(train(head, x, y), train(alone, x, y))
    assert body._state.step == 0
    del body
    assert_identical(train(head, x, y), train(alone, x, y))


@pytest.mark.parametrize("name", CLASSES)
def test_a_default_device_elsewhere_changes_nothing(tmp_path, name):
    """Meta stands for a GPU here: numbers that landed on it would be lost."""
    kind, options = CLASSES[name]
    options = {"num_data": N, "prior_precision": {"*.bias": 0.5, "*": 2.0}} | options
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    plain, moved = (kind(m, generator=torch.Generator().manual_seed(1), **options) for m in (first, second))
    train(plain, x, y)
    with torch.device("meta"):
        train(moved, x, y)
        moved.posterior.sample(generator=torch.Generator())
        slangvi.save(tmp_path / "run.safetensors", moved)
        kind(second, **options).step(lambda: backward(F.cross_entropy(second(x), y)).item())
        slangvi.load(tmp_path / "run.safetensors", moved)
    assert_identical(plain, moved)
