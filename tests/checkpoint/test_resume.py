"""A run that is saved, and taken up by what a new process would build, is the run that was never interrupted."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import slangvi
from helpers import replica_problems
from helpers.optimizer_runs import CLASSES, N, assert_identical, make, model_and_data, train
from slangvi.checkpoint._plain import RECORDS, record_of
from test_methods_common import METHODS, data, log_likelihood, start

SCHEDULES = {
    "inverse_time": slangvi.inverse_time,
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=10),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3]),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
}


def equal(a, b):
    """Whether two values are the same to the last bit, whatever they are made of."""
    name = record_of(a)
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.device, a.stride()) == (b.dtype, b.device, b.stride())
        return alike and torch.equal(a, b)
    if name is not None:
        return type(a) is type(b) and all(equal(getattr(a, f), getattr(b, f)) for f in RECORDS[name].fields)
    return a == b


# ---- optimizers


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_resumes_at_every_step(name, path):
    kind, options = CLASSES[name]

    def begin(seed):
        model, x, y = model_and_data(seed, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        return kind(model, **({"num_data": N, "lr": 0.1, "generator": generator} | options)), x, y

    opt, x, y = begin(0)
    for k in range(4):
        slangvi.save(path.with_name(f"{k}"), opt)
        train(opt, x, y, steps=1)
    for k in range(4):
        resumed = begin(9)[0]
        assert slangvi.load(path.with_name(f"{k}"), resumed) is resumed
        assert resumed._state.step == k
        assert_identical(train(resumed, x, y, steps=4 - k), opt)
        assert torch.equal(resumed.generator.get_state(), opt.generator.get_state())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_on(schedule, path):
    def begin(seed):
        model, x, y = model_and_data(seed)
        opt = make(model, seed, momentum=0.9)
        return opt, SCHEDULES[schedule](opt), x, y

    def step(opt, sched, x, y):
        train(opt, x, y, steps=1)
        plateau = isinstance(sched, lr_scheduler.ReduceLROnPlateau)
        sched.step(1.0) if plateau else sched.step()

    opt, sched, x, y = begin(0)
    for _ in range(2):
        step(opt, sched, x, y)
    slangvi.save(path, opt, scheduler=sched)
    other, other_sched, _, _ = begin(9)
    slangvi.load(path, other, scheduler=other_sched)
    for _ in range(3):
        step(opt, sched, x, y)
        step(other, other_sched, x, y)
        assert other.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    assert_identical(other, opt)
    assert_plain_equal(other_sched.state_dict(), sched.state_dict())


def assert_plain_equal(a, b):
    assert type(a) is type(b)
    assert repr(a) == repr(b)


def test_groups_priors_and_tensors_in_groups_come_back(path):
    def begin(seed, lr):
        model, x, y = model_and_data(seed)
        groups = [
            {"params": model[0].parameters(), "lr": lr, "prior_precision": torch.linspace(0.5, 2.0, 25).double()},
            {"params": model[2].parameters(), "prior_precision": {"*.bias": 1e-3, "*": 2.0}, "precision_lr": 0.2},
        ]
        return make(model, seed, params=groups, momentum=0.5), x, y

    opt, x, y = begin(0, 0.3)
    train(opt, x, y)
    slangvi.save(path, opt)
    other = slangvi.load(path, begin(9, 0.01)[0])
    assert other.param_groups[0]["lr"] == 0.3
    assert_identical(train(other, x, y), train(opt, x, y))


def test_accumulated_micro_batches_resume_between_steps_only(path):
    def begin(seed):
        model, x, y = model_and_data(seed)
        return make(model, seed, accumulation_steps=2), x, y

    def half(opt, x, y):
        with opt.sampled_params(train=True):
            (F.cross_entropy(opt.model(x), y) / 2).backward()

    opt, x, y = begin(0)
    half(opt, x, y)
    with pytest.raises(slangvi.CheckpointError, match=r"gradients collected since the last step.*discard_gradients"):
        slangvi.save(path, opt)
    assert not path.exists()
    half(opt, x, y)
    opt.step()
    slangvi.save(path, opt)
    other = slangvi.load(path, begin(9)[0])
    for run in (opt, other):
        half(run, x, y)
        half(run, x, y)
        run.step()
    assert_identical(other, opt)


def test_gradients_collected_before_loading_are_forgotten(path):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    slangvi.save(path, opt)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x), y).backward()
    assert opt.has_gradients
    slangvi.load(path, opt)
    assert not opt.has_gradients


def test_without_a_generator_torchs_own_is_saved_by_name(path):
    def begin(seed):
        model, x, y = model_and_data(seed)
        return make(model, generator=None), x, y

    opt, x, y = begin(0)
    torch.manual_seed(3)
    train(opt, x, y)
    slangvi.save(path, opt, generator=torch.default_generator)
    train(opt, x, y)
    other = begin(9)[0]
    slangvi.load(path, other, generator=torch.default_generator)
    assert_identical(train(other, x, y), opt)


def test_a_module_brings_its_buffers_and_frozen_parameters(path):
    def begin(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Linear(5, 3)).double()
        model[1].running_mean.uniform_()
        model[0].requires_grad_(False)
        return model.eval()

    _, x, y = model_and_data()
    opt = train(make(begin(0)), x, y)
    slangvi.save(path, opt, model=opt.model)
    other = make(begin(9), seed=9)
    slangvi.load(path, other, model=other.model)
    assert torch.equal(other.model[1].running_mean, opt.model[1].running_mean)
    assert_identical(train(other, x, y), train(opt, x, y))


def test_a_half_precision_model_keeps_the_digits_of_its_mean(path):
    def begin(seed):
        model, x, y = model_and_data(seed, torch.float32)
        return make(model.bfloat16(), seed), x.bfloat16(), y

    def step(opt, x, y):
        with opt.sampled_params(train=True):
            F.cross_entropy(opt.model(x).float(), y).backward()
        opt.step()
        return opt

    opt, x, y = begin(0)
    slangvi.save(path, step(opt, x, y))
    other = slangvi.load(path, begin(9)[0])
    assert_identical(step(other, x, y), step(opt, x, y))


# ---- the functional interface


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resumes_at_every_step(name, path):
    dtype = torch.float32
    build, options = METHODS[name]

    def begin():
        return build(log_likelihood, num_data=40, lr=0.1, mc_samples=2, **options)

    generator, vi, batch = torch.Generator().manual_seed(0), begin(), data(dtype)
    state = vi.init(start(dtype))
    for k in range(4):
        slangvi.save(path.with_name(f"{k}"), state, generator=generator)
        state, _ = vi.update(state, batch, generator=generator)
    for k in range(4):
        fresh, source = begin(), torch.Generator()
        other = slangvi.load(path.with_name(f"{k}"), fresh.init(start(dtype)), generator=source)
        assert equal(other, slangvi.load(path.with_name(f"{k}"), generator=None))
        for _ in range(4 - k):
            other, _ = fresh.update(other, batch, generator=source)
        assert equal(other, state)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("name", ["slang", "online_eig", "mean_field", "full"])
def test_runs_through_the_layers_of_a_model_resume_at_every_step(name, draws, path):
    """All draws may go through the model at once, but not before that was seen to be right: it must not show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 17), nn.ReLU(), nn.Linear(17, 2))
    x, y = torch.randn(23, 3), torch.arange(23) % 2

    def log_likelihood(params, batch):
        return -F.cross_entropy(
            torch.func.functional_call(model, dict(params), (batch[0],)), batch[1], reduction="none"
        )

    def begin():
        rank = {"rank": 3} if name in ("slang", "online_eig") else {}
        options = {"num_data": 100, "lr": 0.05, "mc_samples": draws, "model": model}
        return getattr(slangvi, name).build(log_likelihood, **options, **rank)

    params = {key: value.detach() for key, value in model.named_parameters()}
    generator, vi = torch.Generator().manual_seed(0), begin()
    state = vi.init(params)
    for k in range(4):
        slangvi.save(path.with_name(f"{k}"), state, generator=generator)
        state, _ = vi.update(state, (x, y), generator=generator)
    for k in range(4):
        fresh, source = begin(), torch.Generator()
        other = slangvi.load(path.with_name(f"{k}"), fresh.init(params), generator=source)
        for _ in range(4 - k):
            other, _ = fresh.update(other, (x, y), generator=source)
        assert equal(other, state), k


@pytest.mark.parametrize("family", ["full", "mean_field"])
def test_the_exact_method_resumes(family, path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = (x.sum(-1) > 0).double()
    vi = slangvi.exact.build(x, y, prior_precision=1.0, family=family)
    state = vi.init()
    for _ in range(2):
        state, _ = vi.update(state)
    slangvi.save(path, state)
    other = slangvi.load(path, vi.init())
    assert equal(other, state)
    assert equal(vi.update(other)[0], vi.update(state)[0])


@pytest.mark.parametrize("problem", [replica_problems.regression, replica_problems.logistic])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicas_resume_with_their_streams(problem, dtype, path):
    task = problem(dtype)
    index = torch.stack([torch.randperm(30)[:8] for _ in range(task.count)])
    batch = task.batch(index)

    def begin():
        runs = task.runs()
        return runs, runs.init(task.starts)

    runs, state = begin()
    streams = slangvi.replicas.streams(range(task.count))
    for _ in range(2):
        state, _ = runs.update(state, batch, generators=streams)
    slangvi.save(path, state, streams=streams)
    for _ in range(2):
        state, _ = runs.update(state, batch, generators=streams)
    fresh, other = begin()
    own = slangvi.replicas.streams([99] * task.count)
    other = slangvi.load(path, other, streams=own)
    for _ in range(2):
        other, _ = fresh.update(other, batch, generators=own)
    assert equal(other, state)


# ---- posteriors


@pytest.mark.parametrize("name", METHODS)
def test_posteriors_come_back_whole(name, path):
    build, options = METHODS[name]
    vi = build(log_likelihood, num_data=40, lr=0.1, **options)
    state, _ = vi.update(vi.init(start()), data(), generator=torch.Generator().manual_seed(0))
    q = vi.posterior(state)
    slangvi.save(path, q)
    for p in (slangvi.load(path), slangvi.load(path, q)):
        assert equal(p, q)
        draws = [one.sample((3,), generator=torch.Generator().manual_seed(1)) for one in (p, q)]
        assert torch.equal(*draws)


def test_a_posterior_without_names_and_with_a_batch(path):
    q = slangvi.LowRankPrecisionNormal(torch.randn(2, 5), torch.randn(2, 5, 3), torch.rand(5) + 0.5)
    slangvi.save(path, q)
    p = slangvi.load(path)
    assert p.param_spec is None
    assert p.batch_shape == (2,)
    assert torch.equal(p.variance, q.variance)


def test_loading_leaves_the_saved_run_alone(path):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    kept = copy.deepcopy(opt.state_dict())
    slangvi.save(path, opt)
    other = slangvi.load(path, make(model_and_data(9)[0]))
    train(other, x, y)
    assert torch.equal(opt.state_dict()["slangvi"]["tensors"]["loc"], kept["slangvi"]["tensors"]["loc"])
