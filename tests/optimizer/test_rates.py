"""Rates, schedulers and parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slangvi
from cases import build
from helpers.optimizer_runs import CLASSES, N, assert_identical, assert_same, backward, make, model_and_data, train


def test_inverse_time_follows_the_papers_schedule_and_beta_follows_lr():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    scheduled, manual = make(first, lr=0.2), make(second, lr=0.2)
    sched = slangvi.inverse_time(scheduled, decay=0.51)
    train(scheduled, x, y, steps=4, sched=sched)
    for t in range(1, 5):
        manual.param_groups[0]["lr"] = 0.2 / (1 + t**0.51)
        train(manual, x, y, steps=1)
    assert_same(scheduled, manual)


SCHEDULERS = {
    "step": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    "cosine to zero": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4),
    "warm-up from zero": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda k: k / 4),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=8),
    "exponential": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_works(name):
    model, x, y = model_and_data()
    opt = make(model)
    train(opt, x, y, steps=6, sched=SCHEDULERS[name](opt))
    assert opt._state.step == 6
    assert bool(torch.isfinite(opt.posterior.variance).all())


def test_reduce_on_plateau_works():
    model, x, y = model_and_data()
    opt = make(model)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for _ in range(4):
        train(opt, x, y, steps=1)
        sched.step(1.0)
    assert opt.param_groups[0]["lr"] < 0.1


def test_a_rate_above_one_needs_its_own_precision_rate():
    model, x, y = model_and_data()
    opt = make(model)
    opt.param_groups[0]["lr"] = 1.5
    with pytest.raises(ValueError, match="give precision_lr if lr must exceed 1"):
        train(opt, x, y, steps=1)
    train(make(model, lr=1.5, precision_lr=0.1), x, y, steps=1)


def test_equal_groups_equal_one_group():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    one = make(first)
    two = make(second, params=[{"params": second[0].parameters()}, {"params": second[2].parameters()}])
    assert_identical(train(one, x, y), train(two, x, y))


def test_groups_have_their_own_rate_and_prior():
    model, x, y = model_and_data()
    opt = make(
        model,
        params=[
            {"params": model[0].parameters(), "lr": 0.05, "prior_precision": 3.0},
            {"params": model[2].parameters(), "precision_lr": 0.2, "prior_precision": {"2.weight": 2.0, "*bias": 1e-6}},
        ],
    )
    train(opt, x, y)
    lam = opt._hyper.prior().precision
    assert lam[:25].unique().tolist() == [3.0]
    assert lam[25:40].unique().tolist() == [2.0]
    assert lam[40:].unique().tolist() == [1e-6]
    assert opt._hyper.rates(1).precision_lr.per_tensor == (0.05, 0.05, 0.2, 0.2)


def test_a_group_with_rate_zero_does_not_move():
    model, x, y = model_and_data()
    opt = make(model, params=[{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    opt.param_groups[0]["lr"] = 0.0
    before = model[0].weight.detach().clone()
    train(opt, x, y)
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[2].weight, before)


def test_priors_changed_between_steps_take_effect():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    opt.param_groups[0]["prior_precision"] = 5.0
    train(opt, x, y, steps=1)
    assert opt._hyper.prior().precision.unique().tolist() == [5.0]


def test_a_group_added_mid_run_starts_at_its_values():
    model, x, y = model_and_data()
    opt = make(model, params=list(model[2].parameters()))
    train(opt, x, y)
    kept, weight = opt.posterior.prec_diag.clone(), model[0].weight.detach().clone()
    opt.add_param_group({"params": model[0].parameters(), "init_precision": 7.0})
    assert torch.equal(opt.posterior.prec_diag[:18], kept)
    assert opt.posterior.prec_diag[18:].unique().tolist() == [7.0]
    assert torch.equal(opt.posterior.mean[18:38], weight.flatten())
    assert opt._state.step == 3
    train(opt, x, y)
    assert not torch.equal(model[0].weight, weight)


def test_a_subset_of_parameters_leaves_the_rest_alone():
    model, x, y = model_and_data()
    before = model[0].weight.detach().clone()
    opt = train(make(model, params=model[2].parameters()), x, y)
    assert torch.equal(model[0].weight, before)
    assert opt.posterior.event_shape == (18,)
    out = slangvi.functional_samples(model, opt.posterior, x, 3, generator=opt.generator)
    assert out.shape == (3, 12, 3)


def test_tied_weights_are_one_parameter():
    case = build("gpt_tied")
    opt = slangvi.SLANG(case.model, num_data=N, rank=1, generator=torch.Generator().manual_seed(0))
    assert opt.posterior.event_shape[0] == sum(p.numel() for p in case.model.parameters())
    opt.step(lambda: backward(case.losses(case.model(*case.args)).mean()))
    assert case.model.head.weight is case.model.tokens.weight


def test_unused_parameters_relax_to_the_prior():
    model, x, y = model_and_data()
    model.register_parameter("unused", nn.Parameter(torch.full((2,), 4.0, dtype=torch.float64)))
    opt = make(model, prior_precision=2.0, momentum=0.0, precision_warmup=False)
    train(opt, x, y, steps=1, draws=1)
    place = opt._spec.slices["unused"]
    expected = 0.9 * 1.0 + 0.1 * 2.0
    torch.testing.assert_close(opt.posterior.prec_diag[place], torch.full((2,), expected).double())
    torch.testing.assert_close(model.unused.detach(), torch.full((2,), 4.0 * (1 - 0.1 * 2.0 / expected)).double())


# ---- groups that join later ----


@pytest.mark.parametrize("name", CLASSES)
def test_a_group_that_joins_later_starts_like_a_new_one(name):
    """Its first step is that of an optimizer that was always on its own."""
    kind, own = CLASSES[name]
    slow = {} if name in ("BBB", "MCDropout") else {"precision_lr": 0.01}
    options = {"num_data": N, "lr": 0.1, **own, **slow}
    (model, x, y), (twin, _, _) = model_and_data(), model_and_data()
    last = list(model[2].parameters())
    early = kind(model, last, generator=torch.Generator().manual_seed(0), **options)
    train(early, x, y, steps=60)
    twin.load_state_dict(model.state_dict())
    size = sum(p.numel() for p in model[0].parameters())
    early.add_param_group({"params": list(model[0].parameters())})
    alone = kind(twin, list(twin[0].parameters()), generator=torch.Generator().manual_seed(0), **options)
    before = alone._state.loc.clone()
    train(early, x, y, steps=1, draws=50)
    train(alone, x, y, steps=1, draws=50)
    late, fresh = early._state.loc[-size:] - before, alone._state.loc - before
    assert 0.5 < float(late.norm() / fresh.norm()) < 2.0
    assert early.param_groups[1]["joined_at_step"] == 60


def test_a_group_that_joined_later_is_resumed_to_the_last_bit():
    model, x, y = model_and_data()
    opt = make(model, params=list(model[2].parameters()), precision_lr=0.02)
    train(opt, x, y, steps=5)
    opt.add_param_group({"params": list(model[0].parameters())})
    train(opt, x, y, steps=2)
    twin, _, _ = model_and_data()
    copy = make(twin, params=list(twin[2].parameters()), precision_lr=0.02)
    copy.add_param_group({"params": list(twin[0].parameters())})
    copy.load_state_dict(opt.state_dict())
    assert_identical(train(opt, x, y, steps=3), train(copy, x, y, steps=3))


def test_averages_are_corrected_by_the_age_of_each_entry():
    model, x, y = model_and_data()
    opt = make(model, params=list(model[2].parameters()))
    train(opt, x, y, steps=4)
    opt.add_param_group({"params": list(model[0].parameters())})
    ages = opt._hyper.ages(5)
    assert ages[:18].unique().tolist() == [5.0]
    assert ages[18:].unique().tolist() == [1.0]
    assert opt._hyper.ages(1000) is None  # by then all are 1 to the last digit
    assert make(model)._hyper.ages(1) is None


@pytest.mark.parametrize("name", CLASSES)
def test_a_group_without_parameters_changes_nothing(name):
    kind, own = CLASSES[name]
    model, x, y = model_and_data()
    groups = [{"params": list(model.parameters())}, {"params": []}]
    opt = kind(model, groups, num_data=N, prior_precision={"*": 2.0}, **own)
    assert bool(torch.isfinite(train(opt, x, y)._state.loc).all())
