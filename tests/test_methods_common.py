"""What every method promises, one row per method: purity, determinism, schedules, dtypes, learning, posteriors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slangvi
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

METHODS = {
    "slang": (slangvi.slang.build, {"rank": 2}),
    "slang-rank-0": (slangvi.slang.build, {"rank": 0}),
    "slang-wide": (slangvi.slang.build, {"rank": 9}),
    "online_eig": (slangvi.online_eig.build, {"rank": 2}),
    "online_eig-wide": (slangvi.online_eig.build, {"rank": 9}),
    "mean_field": (slangvi.mean_field.build, {}),
    "mean_field-hessian": (slangvi.mean_field.build, {"curvature": "hessian"}),
    "full": (slangvi.full.build, {}),
    "full-hessian": (slangvi.full.build, {"curvature": "hessian"}),
    "bbb": (slangvi.bbb.build, {}),
    "bbb-log": (slangvi.bbb.build, {"scale": "log"}),
    "mc_dropout": (slangvi.mc_dropout.build, {"rates": 0.3}),
    "mc_dropout-draw": (slangvi.mc_dropout.build, {"rates": 0.3, "masks": "draw"}),
}


def log_likelihood(params, batch):
    x, y = batch
    return slangvi.Bernoulli().log_prob(x @ params["w"][0] + params["b"], y)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=dtype)
    y = (x @ torch.tensor([1.0, -1.0, 0.5], dtype=dtype) > 0.2).to(dtype)
    return x, y


def start(dtype=torch.float64):
    """A matrix of one row: of vectors no method could drop inputs."""
    return {"w": torch.zeros(1, 3, dtype=dtype), "b": torch.zeros((), dtype=dtype)}


@pytest.fixture(params=METHODS)
def method(request):
    build, options = METHODS[request.param]
    return lambda **more: build(log_likelihood, num_data=40, **({"lr": 0.1} | options | more))


def run(vi, steps, batch=None, dtype=torch.float64, seed=0):
    state = vi.init(start(dtype))
    generator = torch.Generator().manual_seed(seed)
    infos = []
    for _ in range(steps):
        state, info = vi.update(state, batch or data(dtype), generator=generator)
        infos.append(info)
    return state, infos


def tensors(state):
    return {k: v for k, v in vars(state).items() if isinstance(v, torch.Tensor)}


def test_the_same_seed_gives_the_same_state_and_another_does_not(method):
    a, b, c = run(method(), 3)[0], run(method(), 3)[0], run(method(), 3, seed=1)[0]
    assert all(torch.equal(x, y) for x, y in zip(tensors(a).values(), tensors(b).values(), strict=True))
    assert not torch.equal(a.loc, c.loc)


def test_a_generator_leaves_the_global_random_state_alone(method):
    before = torch.get_rng_state()
    vi = method()
    state, _ = run(vi, 2)
    vi.sample(state, (3,), generator=torch.Generator())
    assert torch.equal(before, torch.get_rng_state())


def test_updates_do_not_touch_the_state_they_start_from(method):
    vi = method()
    state, _ = run(vi, 2)
    kept = copy.deepcopy(tensors(state))
    vi.update(state, data())
    assert all(torch.equal(kept[name], value) for name, value in tensors(state).items())


def test_params_given_to_init_are_not_modified(method):
    params = start()
    vi = method()
    vi.update(vi.init(params), data())
    assert not params["w"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_half_is_raised_to_float32(method, dtype):
    state, _ = run(method(), 2, dtype=dtype)
    assert {value.dtype for value in tensors(state).values()} == {dtype}
    half = method().init(start(torch.bfloat16))
    assert half.loc.dtype is torch.float32


def test_the_likelihood_improves(method):
    _state, infos = run(method(lr=slangvi.inverse_time(0.5, 0.51), mc_samples=4), 60)
    early = sum(info.expected_log_likelihood for info in infos[:5]) / 5
    late = sum(info.expected_log_likelihood for info in infos[-5:]) / 5
    assert late > early + 5.0


def test_a_schedule_equals_its_values_given_one_by_one(method):
    scheduled = run(method(lr=lambda step: 0.1 / step), 3)[0]
    state, generator = method().init(start()), torch.Generator().manual_seed(0)
    for step in (1, 2, 3):
        state, _ = method(lr=0.1 / step).update(state, data(), generator=generator)
    torch.testing.assert_close(scheduled.loc, state.loc, rtol=0, atol=0)


def test_samples_have_the_posterior_moments(method, within_sigmas):
    vi = method()
    state, _ = run(vi, 5)
    draws = vi.sample(state, (20000,), generator=torch.Generator().manual_seed(0))
    assert draws["w"].shape == (20000, 1, 3)
    assert draws["b"].shape == (20000,)
    flat = state.spec.flatten(draws)
    q = vi.posterior(state)
    assert within_sigmas(flat, q.mean)
    centred = flat - q.mean
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), q.covariance_matrix)
    torch.testing.assert_close(q.covariance_matrix.diagonal(), q.variance)


def test_steps_and_infos_count_up(method):
    state, infos = run(method(mc_samples=3), 4)
    assert state.step == 4
    assert [info.step for info in infos] == [1, 2, 3, 4]
    assert {info.num_rows for info in infos} == {120}


def test_permuting_parameters_changes_nothing_but_the_order():
    """The same posterior, whichever order the parameters come in (noise permuted along)."""
    x, y = data()
    a = slangvi.slang.init({"w": torch.zeros(3).double()}, 2)
    order = [2, 0, 1]
    b = slangvi.slang.init({"w": torch.zeros(3).double()}, 2)
    prior = Prior(torch.ones(3).double(), torch.zeros(3).double())
    rate = Rate(0.2)
    for k in range(5):
        rows = (torch.sigmoid(x @ a.loc) - y)[:, None] * x * (1 + 0.1 * k)
        dense = DenseGradients
        a, _ = slangvi.slang.update(a, dense.from_rows(rows), num_data=40, prior=prior, lr=rate)
        b, _ = slangvi.slang.update(b, dense.from_rows(rows[:, order]), num_data=40, prior=prior, lr=rate)
    torch.testing.assert_close(a.loc[order], b.loc, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a.prec_diag[order], b.prec_diag, rtol=1e-9, atol=1e-9)


def test_duplicated_data_with_doubled_count_is_another_temperature():
    """N doubled equals temperature halved: only N/T enters."""
    doubled = slangvi.slang.build(log_likelihood, num_data=80, rank=2, lr=0.1)
    cooled = slangvi.slang.build(log_likelihood, num_data=40, rank=2, lr=0.1, temperature=0.5)
    torch.testing.assert_close(run(doubled, 4)[0].loc, run(cooled, 4)[0].loc)


def test_engines_agree_on_a_module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()
    likelihood = slangvi.Bernoulli().of(model).__call__
    states = []
    for engine in ("dense", "factored"):
        vi = slangvi.slang.build(likelihood, num_data=40, rank=3, lr=0.1, mc_samples=2, model=model, engine=engine)
        state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
        for _ in range(5):
            state, _ = vi.update(state, data(), generator=generator)
        states.append(state)
    torch.testing.assert_close(states[0].loc, states[1].loc, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states[0].prec_diag, states[1].prec_diag, rtol=1e-9, atol=1e-9)
