"""Steps by graphs are the steps that run eagerly; what cannot be captured is said once."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.fake_graphs import taped as taped

N = 60


def network(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
    return model, torch.randn(24, 4, dtype=dtype), torch.arange(24) % 3


def assert_close(a: slangvi.slang.State, b: slangvi.slang.State, tolerance: float = 1e-9) -> None:
    low = [s.prec_factor.T @ s.prec_factor for s in (a, b)]
    for x, y in ((a.loc, b.loc), (a.prec_diag, b.prec_diag), (a.momentum, b.momentum), low):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def run_pure(compile: bool, rank: int, draws: int, steps: int = 8, spoil: int | None = None, **options):
    model, x, y = network()
    vi = slangvi.slang.build(
        slangvi.Categorical().of(model),
        num_data=N,
        rank=rank,
        lr=slangvi.inverse_time(0.1, 0.4),
        mc_samples=draws,
        model=model,
        compile=compile,
        curvature="ef",
        projection="eig",
        **options,
    )
    state, source, infos = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(1), []
    for k in range(steps):
        pick = torch.arange(8) + k
        batch = (x[pick].clone(), y[pick])
        if k == spoil:
            batch[0][0] = math.nan
            with pytest.raises(slangvi.NumericalError, match="not finite"):
                vi.update(state, batch, generator=source)
            continue
        state, info = vi.update(state, batch, generator=source)
        infos.append(info)
    return state, infos, source


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("draws", [1, 3])
def test_functional_steps_are_those_of_the_eager_one(taped, rank, draws):
    eager, told, source = run_pure(False, rank, draws)
    assert not taped
    compiled, infos, own = run_pure(True, rank, draws)
    assert [graph.replays for graph in taped] == [4, 4, 4]  # all but the 1st, 2nd, 4th and 8th
    assert_close(compiled, eager)
    assert torch.equal(source.get_state(), own.get_state())
    for a, b in zip(infos, told, strict=True):
        assert (a.step, a.num_rows) == (b.step, b.num_rows)
        assert math.isclose(a.expected_log_likelihood, b.expected_log_likelihood, rel_tol=1e-9)
        assert math.isclose(a.kl, b.kl, rel_tol=1e-9)
        assert math.isclose(a.captured, b.captured, rel_tol=1e-9, abs_tol=1e-12)


def test_a_posterior_may_be_the_prior(taped):
    prior = run_loop(False).posterior
    for rank in (0, 3):
        assert_close(run_pure(True, rank, 2, prior=prior)[0], run_pure(False, rank, 2, prior=prior)[0])
    assert_close(run_loop(True, prior=prior)._state, run_loop(False, prior=prior)._state)
    assert len(taped) > 3
    assert all(graph.replays for graph in taped)


@pytest.mark.parametrize("spoil", [4, 6])
def test_a_batch_that_is_not_finite_is_refused_and_the_run_goes_on(taped, spoil):
    eager, _, _ = run_pure(False, 2, 2, spoil=spoil)
    compiled, _, _ = run_pure(True, 2, 2, spoil=spoil)
    assert any(graph.replays for graph in taped)
    assert_close(compiled, eager)


def test_earlier_states_do_not_change(taped):
    model, x, y = network()
    vi = slangvi.slang.build(slangvi.Categorical().of(model), num_data=N, rank=2, lr=0.1, model=model, compile=True)
    states = [vi.init(dict(model.named_parameters()))]
    copies = []
    for _ in range(7):
        copies.append([t.clone() for t in states[-1].tensors])
        states.append(vi.update(states[-1], (x, y))[0])
    assert any(graph.replays for graph in taped)
    for state, kept in zip(states, copies, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(state.tensors, kept, strict=True))
    again, _ = vi.update(states[5], (x, y), torch.Generator().manual_seed(0))  # from an earlier one
    assert again.step == 6


def run_loop(compile: bool, steps: int = 8, groups: bool = False, **options) -> slangvi.SLANG:
    model, x, y = network()
    params = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.01}] if groups else None
    opt = slangvi.SLANG(
        model,
        params,
        num_data=N,
        rank=2,
        lr=0.1,
        compile=compile,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    for k in range(steps):
        for part in (slice(0, 5), slice(5, 8)):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(model(x[k : k + 8][part]), y[k : k + 8][part]).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("rows", [None, 2])
def test_steps_of_a_loop_are_those_of_the_eager_one(taped, rows):
    eager, compiled = run_loop(False, curvature_rows=rows), run_loop(True, curvature_rows=rows)
    assert [graph.replays for graph in taped] == [7, 7, 7]
    assert_close(compiled._state, eager._state)
    assert math.isclose(compiled.kl(), eager.kl(), rel_tol=1e-9)


def test_a_weight_and_its_bias_share_their_memory_in_the_graph(taped):
    opt = run_loop(True)
    ((_, places),) = opt._steps._graphs.values()
    assert len({place.data_ptr() for place in places}) == len(places)


def test_groups_that_differ_run_eagerly_and_say_so_once(taped):
    with pytest.warns(UserWarning, match="no steps: parameter groups differ in lr, precision_lr or momentum") as told:
        compiled = run_loop(True, groups=True)
    assert len(told) == 1
    assert_close(compiled._state, run_loop(False, groups=True)._state)


@pytest.mark.parametrize("run", [run_loop, lambda compile: run_pure(compile, 1, 1)])
def test_without_a_gpu_steps_run_eagerly_and_say_so_once(run):
    with pytest.warns(UserWarning, match="no steps: it needs a CUDA device, and the parameters are on cpu") as told:
        run(True)
    assert len(told) == 1


def test_formed_gradients_are_not_captured():
    with pytest.warns(UserWarning, match='replays no steps: it needs engine="factored"'):
        slangvi.slang.build(lambda p, b: -(b - p["w"]).square().sum(1), num_data=2, rank=1, lr=0.1, compile=True)


def test_what_cannot_be_captured_runs_eagerly_and_says_why(taped):
    model, x, y = network()

    def looks(params, batch):
        values = slangvi.Categorical().of(model)(params, batch)
        return values * float(values.sum().abs() > 0)

    vi = slangvi.slang.build(looks, num_data=N, rank=1, lr=0.1, model=model, compile=True)
    state = vi.init(dict(model.named_parameters()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            state, _ = vi.update(state, (x, y), torch.Generator().manual_seed(0))
    assert state.step == 6
    assert [str(one.message) for one in told if "cannot be captured" in str(one.message)] != []


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 16, 3)).double()


def run_images(compile: bool, images: list[torch.Tensor], **options) -> tuple[slangvi.SLANG, list[str]]:
    """One step for each batch, and what was raised."""
    model, raised = convolutions(), []
    source = torch.Generator().manual_seed(0)
    opt = slangvi.SLANG(model, num_data=100, rank=2, lr=0.02, compile=compile, generator=source, **options)
    for x in images:
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
        try:
            opt.step()
        except slangvi.NumericalError as error:
            raised.append(str(error))
            opt.discard_gradients()
    return opt, raised


def test_a_graph_opens_the_patches_of_its_own_batch(taped):
    images = list(torch.randn(6, 8, 1, 6, 6, dtype=torch.float64))
    eager, compiled = (run_images(compile, images)[0] for compile in (False, True))
    assert [graph.replays for graph in taped] == [5, 5, 5]
    assert_close(compiled._state, eager._state)


@pytest.mark.parametrize("place", [1, 4], ids=["captured", "replayed"])
@pytest.mark.parametrize("size", [1e200, 1e30])
def test_a_batch_too_large_for_the_dtype_is_refused_as_by_the_eager_step(taped, place, size):
    images = list(torch.randn(6, 8, 1, 6, 6, dtype=torch.float64))
    images[place] = images[place] * size
    (eager, said), (compiled, said_compiled) = (run_images(compile, images) for compile in (False, True))
    assert said_compiled == said
    assert_close(compiled._state, eager._state)
