"""The captured step: in one go when the start is good, in halves when not, refused when not finite, usable after."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import slangvi
from helpers.captured_steps import assert_same_state, draw_and_step, functional, optimizer, problem, relative, steps
from slangvi.linalg import topk
from slangvi.linalg.subspace import OVERSAMPLING, starting_block
from slangvi.methods import _graph


def source(seed=1):
    return torch.Generator().manual_seed(seed)


def compiled(cuda, warm=5, dtype=torch.float32, **options):
    """A method whose next steps are replayed, an eager twin, a state and a batch; what was replayed is forgotten."""
    model, batch = problem(dtype)
    vi, state = functional(model, compile=True, **options)
    eager, _ = functional(model, **options)
    state, _ = steps(vi, state, [batch] * warm, source())
    cuda.replayed.clear()
    return vi, eager, state, batch


def compare(vi, eager, state, batch, seed=2):
    """One step either way from the same state with the same noise."""
    (a, info), (b, other) = (method.update(state, batch, generator=source(seed)) for method in (eager, vi))
    assert_same_state(a, b)
    assert relative(info.spectrum, other.spectrum) <= 1e-5
    return b, other


def slowly(cuda):
    """The same after steps so small that the previous factor is a good start; 7 replayed steps are to come."""
    model, batch = problem()
    options = {"rank": 2, "lr": lambda step: 0.3 if step <= 8 else 1e-4, "precision_warmup": False}
    (vi, state), (eager, _) = functional(model, compile=True, **options), functional(model, **options)
    state, _ = steps(eager, state, [batch] * 8, source())
    state, _ = steps(vi, state, [batch] * 8, source())
    assert cuda.replayed == ["whole"] * 4
    cuda.replayed.clear()
    return vi, eager, state, batch


def test_a_good_start_makes_one_graph_of_the_step(cuda):
    vi, eager, state, batch = slowly(cuda)
    for seed in range(3):
        state, info = compare(vi, eager, state, batch, seed)
        assert info.leading.shape == (2, 2)
        assert info.spectrum.tolist() == sorted(info.spectrum.tolist(), reverse=True)
        assert 0.0 < float(info.residual) <= 1e-6
        assert 0.0 < info.captured <= 1.0 + 1e-5
    assert cuda.replayed == ["whole"] * 3


def test_a_very_good_start_takes_fewer_products_and_a_worse_one_more(cuda):
    vi, eager, state, batch = slowly(cuda)
    cuda.ways.clear()
    for seed in range(3):
        state, info = compare(vi, eager, state, batch, seed)
        assert 0.0 < float(info.residual) <= 1e-6
    assert cuda.ways == ["once"] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(topk.TOLERANCE, torch.float32, float(info.residual) * 1e-2)
        state, again = compare(vi, eager, state, batch, 3)  # not good enough, so it is repeated with more of them
    assert cuda.ways == ["once"] * 4 + ["twice"]
    assert cuda.replayed == ["whole"] * 5
    assert 0.0 < float(again.residual) < 1e-2 * float(info.residual)
    for seed in (4, 5):
        state, _ = compare(vi, eager, state, batch, seed)
    assert cuda.ways[5:] == ["twice"] * 2  # it takes more such steps now before fewer are tried again


def test_a_bad_start_is_repeated_in_halves_on_the_same_draws(cuda, monkeypatch):
    monkeypatch.setattr(_graph, "_WAYS", ("once", "twice"))
    monkeypatch.setattr(_graph, "_MARGIN", 0.0)
    vi, eager, state, batch = slowly(cuda)
    state = replace(state, prec_factor=torch.zeros_like(state.prec_factor))
    state, info = compare(vi, eager, state, batch)
    assert cuda.replayed[:2] == ["whole", "watch"]
    assert cuda.replayed[-1] in ("move_along", "move_to_given")
    assert info.leading.shape == (2,)
    assert float(info.residual) <= 1e-6


def test_after_a_failure_the_whole_is_left_alone_for_some_steps_and_tried_again(cuda, monkeypatch):
    monkeypatch.setattr(_graph, "_MOST_DOUBTS", 8)
    monkeypatch.setattr(_graph, "_WAYS", ("once", "twice"))
    monkeypatch.setattr(_graph, "_MARGIN", 0.0)
    vi, eager, state, batch = slowly(cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_graph, "_TILT", -1.0)  # nothing is good enough
        for seed in range(7):
            state, _ = compare(vi, eager, state, batch, seed)
    tries = [name for name in cuda.replayed if name in ("whole", "watch")]
    # The whole is tried at once, then after 2 and after 4 steps more.
    assert tries == ["whole", "watch", "watch", "whole", "watch", "watch", "watch", "watch", "whole", "watch"]
    cuda.replayed.clear()
    for seed in range(12):  # the first of these is a check, and eager
        state, _ = compare(vi, eager, state, batch, seed)
    tries = [name for name in cuda.replayed if name in ("whole", "watch")]
    assert tries == ["watch"] * 7 + ["whole"] * 4


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_products_are_added_until_the_residual_is_small_enough(cuda, monkeypatch, allowed):
    vi, eager, state, batch = compiled(cuda)
    monkeypatch.setattr(_graph, "_TILT", -1.0)
    seen, real = [], _graph.ritz

    def strict(small, count):
        """Not satisfied before the given look."""
        found = real(small, count)
        seen.append(float(found.residual / found.values[0]))
        return found if len(seen) > allowed else found._replace(residual=found.values[0])

    monkeypatch.setattr(_graph, "ritz", strict)
    compare(vi, eager, state, batch)
    halves = cuda.replayed[cuda.replayed.index("watch") :]
    assert halves[0] == "watch"
    assert halves.count("again") + halves.count("sift") >= allowed
    assert halves[-1] == "move_along"
    assert seen == sorted(seen, reverse=True) or max(seen[1:]) < 1e-6


def test_an_eigenproblem_that_does_not_converge_is_left_to_the_eager_routes(cuda, monkeypatch):
    vi, eager, state, batch = compiled(cuda)
    monkeypatch.setitem(topk.TOLERANCE, torch.float32, 1e-30)
    _, info = compare(vi, eager, state, batch)
    halves = cuda.replayed[cuda.replayed.index("watch") :]
    assert [halves[0], halves[-1]] == ["watch", "move_to_given"]
    assert len(halves) == _graph._LOOKS + 1
    assert set(halves[1:-1]) <= {"again", "sift"}
    assert float(info.residual) == 0.0


@pytest.mark.parametrize("flat", [False, True])
def test_products_are_a_filter_where_the_spectrum_is_flat(cuda, monkeypatch, flat):
    vi, eager, state, batch = compiled(cuda)
    monkeypatch.setattr(_graph, "_TILT", -1.0)
    real, looks = _graph.ritz, []

    def judged(small, count):
        found = real(small, count)
        looks.append(1)
        edge = found.values.new_tensor(float(found.values[-1])) if flat else found.edge * 0
        return found._replace(edge=edge, residual=found.residual if len(looks) > 1 else found.values[0])

    monkeypatch.setattr(_graph, "ritz", judged)
    compare(vi, eager, state, batch)
    halves = cuda.replayed[cuda.replayed.index("watch") :]
    assert halves[1] == ("sift" if flat else "again")


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("size", [30, 300])
def test_nothing_is_rounded_alike_at_every_step(cuda, size, replayed):
    """Rank 5 holds all of a curvature of rank 3, and d stays at the prior: what is rounded alike would add up in it."""
    model = torch.nn.Linear(size, 1, bias=False)
    generator = source(0)
    span = torch.randn(3, size, generator=generator)

    def log_likelihood(params, batch):
        outputs = torch.func.functional_call(model, dict(params), (batch[0],))
        return -0.5 * (batch[1] - outputs.squeeze(-1)).square()

    options = {"rank": 5, "lr": 2e-3, "precision_warmup": False, "init_precision": 1.0, "mc_samples": 1}
    vi, state = functional(model, log_likelihood=log_likelihood, compile=replayed, **options)
    for _ in range(400):
        x = 10 * torch.randn(40, 3, generator=generator) @ span
        state, _ = vi.update(state, (x, torch.randn(40, generator=generator)), generator=generator)
    assert bool(cuda.replayed) == replayed
    rounding = torch.finfo(torch.float32).eps * state.prec_factor.square().sum(0)
    assert float(((state.prec_diag - 1.0) / rounding).abs().mean()) < 15.0  # more than 100 if something is


def spoilt(batch, value=math.nan):
    x = batch[0].clone()
    x[3, 1] = value
    return x, batch[1]


def assert_usable(vi, eager, state, batch):
    """The failure left no trace: the next steps are what they would have been."""
    for seed in (3, 4):
        state, _ = compare(vi, eager, state, batch, seed)
    assert bool(state.loc.isfinite().all())


REFUSED = {math.nan: "log_likelihood is not finite for 1 of 40", math.inf: "step 6: the gradient of parameter 'first.w"}


@pytest.mark.parametrize("bad", REFUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_that_are_not_finite_are_refused_and_leave_the_state(cuda, bad, dtype):
    vi, eager, state, batch = compiled(cuda, dtype=dtype)
    generators = source(), source()
    for method, generator in zip((eager, vi), generators, strict=True):
        with pytest.raises(slangvi.NumericalError, match=REFUSED[bad]):
            steps(method, state, [spoilt(batch, bad)], generator)[0].loc.sum()
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
    assert_usable(vi, eager, state, batch)


OVERFLOWS = {
    # The log-likelihood is finite, and so is its gradient; the squares of the gradient are not.
    "the gradient": (1e22, {}),
    "the new precision": (1e17, {"num_data": 10**9, "rank": 0}),
    "the new mean": (1.0, {"init_precision": 0.1, "precision_lr": 0.02, "lr": lambda t: 3e38 if t == 6 else 0.02}),
}


@pytest.mark.parametrize("what", OVERFLOWS)
def test_steps_that_overflow_are_refused_by_name_and_leave_the_state(cuda, what):
    scale, options = OVERFLOWS[what]
    model, (x, y) = problem()

    def weighed(params, batch):
        return slangvi.Categorical().of(model)(params, batch[:2]) * batch[2]

    usual, wrong = (x, y, torch.ones(40)), (x, y, torch.full((40,), scale))
    vi, state = functional(model, compile=True, log_likelihood=weighed, **options)
    eager, _ = functional(model, log_likelihood=weighed, **options)
    state, _ = steps(vi, state, [usual] * 5, source())
    for method in (eager, vi):
        with pytest.raises(slangvi.NumericalError, match=f"step 6: {what} of parameter 'first.weight' is not finite"):
            steps(method, state, [wrong], source())[0].loc.sum()
    assert bool(state.loc.isfinite().all())
    if what == "the gradient":
        assert_usable(vi, eager, state, usual)
    elif what == "the new precision":
        state, _ = steps(vi, state, [usual] * 2, source())
        assert state.step == 7


@pytest.mark.choreography
def test_graphs_hold_the_constants_they_read(cuda):
    model, batch = problem()
    opt = optimizer(model, True)
    for _ in range(12):
        draw_and_step(opt, batch)
    (graph,) = opt._graphs.graphs.values()
    size = graph.observed.problem.size
    start = starting_block(size, graph.rank, graph.rank, torch.float64, graph.state.device, 0)
    assert any(constant is start for constant in graph.graphs["twice"].constants)
    assert any(constant.shape == (size, graph.rank + OVERSAMPLING) for constant in graph.graphs["watch"].constants)
