"""Saving, resuming, copying, and changes from outside."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi.optimizer
from helpers.optimizer_runs import N, assert_identical, flat, make, model_and_data, train
from slangvi.types import Routes


def test_state_dict_resumes_bitwise_at_every_step():
    model, x, y = model_and_data()
    whole = train(make(model), x, y, steps=5)
    for k in range(5):
        first, _, _ = model_and_data()
        opt = train(make(first), x, y, steps=k)
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        second, _, _ = model_and_data(seed=9)
        resumed = make(second, seed=123, lr=0.7, prior_precision=9.0)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
        assert_identical(train(resumed, x, y, steps=5 - k), whole)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_go_on_like_the_original(duplicate):
    model, x, y = model_and_data()
    opt = make(model, params=[{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}])
    train(opt, x, y)
    twin = duplicate(opt)
    start = copy.deepcopy(twin._state.loc)
    assert torch.equal(start, opt._state.loc)
    assert twin.param_groups[0]["lr"] == 0.3
    seed = opt.generator.get_state()
    after = train(twin, x, y)._state.loc.clone()
    if twin.model is model:
        opt.load_state_dict(opt.state_dict() | {"slangvi": opt.state_dict()["slangvi"]})
        return
    opt.generator.set_state(seed)
    assert torch.equal(train(opt, x, y)._state.loc, after)


def test_pickles_name_a_place_that_stays():
    """Those of earlier versions have it too: whatever file the function is in, it is found here."""
    opt = make(model_and_data()[0])
    restore, (kind, *_) = opt.__reduce__()
    assert (restore.__module__, restore.__qualname__) == ("slangvi.optimizer", "_restore")
    assert restore is slangvi.optimizer._restore
    assert kind is slangvi.SLANG
    assert b"slangvi.optimizer._" not in pickle.dumps(opt)


def test_a_state_dict_holds_what_later_steps_do_not_change():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    saved = opt.state_dict()["slangvi"]["tensors"]
    kept = copy.deepcopy(saved)
    train(opt, x, y)
    assert all(torch.equal(saved[k], kept[k]) for k in saved)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop("slangvi"), "was not written by a slangvi optimizer"),
        (lambda s: s["slangvi"].update(method="Other"), "method 'Other'"),
        (lambda s: s["slangvi"].update(names=["x", *s["slangvi"]["names"][1:]]), "expected parameter '0.weight'"),
        (lambda s: s["slangvi"]["names"].pop() and s["slangvi"]["shapes"].pop(), "3 parameters, and 4 are expected"),
        (lambda s: s["slangvi"]["tensors"].pop("prec_diag"), "prec_diag.*found nothing"),
        (lambda s: s["slangvi"].pop("step"), "has no 'step'"),
        (lambda s: s["slangvi"]["tensors"]["loc"].fill_(math.nan), "'loc'.*damaged"),
        (lambda s: s["slangvi"]["tensors"]["prec_diag"].neg_(), "'prec_diag'.*damaged"),
        (lambda s: s["slangvi"]["tensors"].update(prec_factor=torch.zeros(3, 43).double()), "same rank"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(change, match):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    saved = copy.deepcopy(opt.state_dict())
    change(saved)
    before = flat(model)
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(saved)
    assert torch.equal(flat(model), before)


def test_weights_loaded_from_outside_become_the_mean():
    (model, x, y), (other, _, _) = model_and_data(), model_and_data(seed=5)
    opt = train(make(model), x, y)
    kept = opt.posterior.prec_diag
    model.load_state_dict(other.state_dict())
    assert torch.equal(opt.posterior.mean, flat(other))
    assert torch.equal(opt.posterior.prec_diag, kept)
    model[0].weight.data = torch.zeros_like(model[0].weight)
    assert not opt.posterior.mean[:20].any()


def test_edits_through_data_are_kept():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    model[2].bias.data.fill_(0.25)
    with opt.sampled_params():
        pass
    assert model[2].bias.unique().tolist() == [0.25]
    assert opt.posterior.mean[-3:].tolist() == [0.25] * 3


class Tanh(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x).bfloat16()


@pytest.mark.parametrize("draws", [0, 1], ids=["after a step", "between draws"])
@pytest.mark.parametrize("half", [False, True])
def test_every_write_through_data_is_noticed_before_the_next_draw(draws, half):
    """Such writes leave no mark, so the numbers are compared; on a CPU always, also between the draws of one step."""
    model, x, y = model_and_data(dtype=torch.float32)
    if half:
        model[1] = Tanh()
        model[2].bfloat16()

    def backward():
        F.cross_entropy(model(x).float(), y).backward()

    opt = make(model)
    for _ in range(2):
        with opt.sampled_params(train=True):
            backward()
        opt.step()
    for _ in range(draws):
        with opt.sampled_params(train=True):
            backward()
    model[2].bias.data[1] = 0.375
    model[0].weight.data.mul_(2.0)
    expected = model[0].weight.detach().flatten().clone()
    with opt.sampled_params(train=True):
        backward()
    assert model[2].bias[1].item() == 0.375
    assert torch.equal(opt._state.loc[:20], expected)
    assert opt._state.loc[-2].item() == 0.375
    opt.step()
    assert opt._state.step == 3


def test_parameters_that_are_no_longer_the_models_are_refused():
    model, x, y = model_and_data()
    opt = make(model)
    model[2] = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"'2.weight' was replaced in the model"):
        train(opt, x, y)
    model[2] = None
    with pytest.raises(ValueError, match=r"'2.weight' was replaced in the model"):
        train(opt, x, y)


ROUTES = Routes(layers={"0.*": "form"}, spectrum="gram", chunk_bytes=100)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("options", [{"routes": ROUTES}, {"routes": ROUTES, "memory_limit": 10_000}, {"compile": True}])
@pytest.mark.filterwarnings("ignore:compile=True replays no steps")
def test_copies_keep_their_settings(duplicate, options):
    model, x, y = model_and_data()
    opt = train(make(model, **options), x, y)
    twin = duplicate(opt)
    assert vars(twin.settings) == vars(opt.settings)
    assert_identical(train(twin, x, y), train(opt, x, y))


def test_resuming_with_another_number_of_examples_is_noticed():
    model, x, y = model_and_data()
    saved = train(make(model), x, y).state_dict()
    other = make(model_and_data()[0], num_data=N + 1)
    with pytest.warns(UserWarning, match="num_data=40, this optimizer has num_data=41"):
        other.load_state_dict(saved)


def test_a_saved_half_precision_model_does_not_cost_digits():
    model, x, y = model_and_data(dtype=torch.float32)
    model.bfloat16()
    opt = make(model)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    opt.step()
    mean = opt.posterior.mean
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(opt.posterior.mean, mean)


def test_two_optimizers_on_one_model_do_not_disturb_each_other():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    head = make(first, params=first[2].parameters())
    other = make(first, params=first[0].parameters())
    alone = make(second, params=second[2].parameters())
    assert_identical(train(head, x, y), train(alone, x, y))
    assert other._state.step == 0


def test_two_optimizers_that_take_turns_see_nothing_of_each_other_but_the_weights():
    """The same with the other one's weights put in by hand, and no other optimizer."""
    model, x, y = model_and_data()
    head, body = make(model, params=model[2].parameters()), make(model, seed=2, params=model[0].parameters())
    moves = []
    for _ in range(3):
        train(head, x, y, steps=1)
        train(body, x, y, steps=1)
        moves.append({name: value.clone() for name, value in model[0].state_dict().items()})
    assert head.info.step == body.info.step == 3
    other, _, _ = model_and_data()
    alone = make(other, params=other[2].parameters())
    for move in moves:
        train(alone, x, y, steps=1)
        other[0].load_state_dict(move)
    assert_identical(head, alone)


def test_elbo_and_kl_in_two_parts():
    model, x, y = model_and_data()
    opt = train(make(model, prior_precision=2.0), x, y)
    elbo = opt.elbo(lambda: F.cross_entropy(model(x), y), mc_samples=5)
    prior = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(43), torch.full((43,), 0.5**0.5)), 1)
    assert math.isclose(elbo.kl, float(torch.distributions.kl_divergence(opt.posterior, prior)), rel_tol=1e-6)
    assert elbo.value == elbo.expected_log_likelihood - elbo.kl
    total = make(model, loss_reduction="sum")
    total.load_state_dict(opt.state_dict())
    total.generator.manual_seed(0)
    opt.generator.manual_seed(0)
    a = opt.elbo(lambda: F.cross_entropy(model(x), y)).expected_log_likelihood
    b = total.elbo(lambda: F.cross_entropy(model(x), y, reduction="sum")).expected_log_likelihood
    assert math.isclose(a / N, b / 12, rel_tol=1e-9)


def test_elbo_of_the_closure_of_step_says_what_to_pass_and_other_errors_stay():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"elbo\(closure\): the closure must return the loss without .*backward"):
        opt.elbo(lambda: F.cross_entropy(model(x), y).backward())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        opt.elbo(lambda: F.cross_entropy(model(x[:, :1]), y))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_pickles_of_the_first_version_are_read():
    """State, settings, groups and generator; written by version 0.1 for SLANG and BBB."""
    path = Path(__file__).parents[1] / "golden" / "optimizers-0.1.pickle"
    for name, (opt, mean, variance) in pickle.loads(path.read_bytes()).items():
        assert torch.equal(opt.posterior.mean, mean)
        torch.testing.assert_close(opt.posterior.variance, variance)
        assert (opt.settings.num_data, opt.defaults["lr"], opt._state.step) == (10, 0.05, 2)
        assert {"SLANG": ("rank", 2), "BBB": ("scale", "log")}[name] in vars(opt.settings).items()
        opt.step(lambda opt=opt: backward(F.cross_entropy(opt.model(torch.ones(2, 3)), torch.tensor([0, 1]))))
        assert opt._state.step == 3


def backward(loss):
    loss.backward()
    return loss


def test_copies_have_the_defaults_of_the_original():
    opt = slangvi.SLANG(nn.Linear(3, 2), num_data=10)
    opt.defaults["lr"] = 0.5
    assert copy.deepcopy(opt).defaults["lr"] == 0.5
