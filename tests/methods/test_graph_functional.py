"""The functional step replayed from graphs: what is replayed, on which random stream, and what makes it give up."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import slangvi
from helpers.captured_steps import Net, assert_same_state, functional, problem, relative, steps
from slangvi.methods import slang
from slangvi.methods._graph_functional import FunctionalStep, GraphRunner
from slangvi.methods.graph_runner import MOST_GRAPHS, why_not_captured
from slangvi.types import Routes


def source(seed=1):
    return torch.Generator().manual_seed(seed)


def both(batches, model, own=True, **options):
    """State, info and random states after the same steps, taken eagerly and replayed."""
    found = []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled, **options)
        generator = source() if own else None
        torch.manual_seed(5)
        state, info = steps(vi, state, batches, generator)
        found.append((state, info, torch.get_rng_state(), generator and generator.get_state()))
    return found


@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_replayed_steps_equal_eager_ones(cuda, rank, dtype, own):
    model, batch = problem(dtype)
    (eager, a, *random), (replayed, b, *handed) = both([batch] * 12, model, own, rank=rank)
    assert_same_state(eager, replayed, 1e-6 if dtype is torch.float32 else 1e-12)
    assert all(x is y or torch.equal(x, y) for x, y in zip(random, handed, strict=True))
    assert (a.step, a.num_rows, a.rank_used) == (b.step, b.num_rows, b.rank_used)
    assert relative(a.spectrum, b.spectrum) <= 1e-5
    assert (b.loss, b.kl, b.captured) == pytest.approx((a.loss, a.kl, a.captured), rel=1e-5, abs=1e-6)
    assert float(b.total) == pytest.approx(float(a.total), rel=1e-5)
    assert max(float(a.residual), float(b.residual)) <= 1e-6
    # Steps 1, 2, 4 and 8 are checks, and eager.
    assert sum(name in ("whole", "watch") for name in cuda.replayed) >= 8
    assert set(cuda.captured) >= {"watch", "move_to_given"}


@pytest.mark.parametrize("routes", [Routes(spectrum="randomized"), Routes(spectrum="gram"), Routes(layers="form")])
def test_every_route_can_be_replayed(cuda, routes):
    model, batch = problem()
    (eager, *_), (replayed, *_) = both([batch] * 7, model, routes=routes)
    assert_same_state(eager, replayed)
    assert cuda.replayed


@pytest.mark.parametrize(("apart", "parted"), [(-1, False), (1 << 30, True)])
def test_sums_of_large_gradients_have_no_branch(cuda, monkeypatch, apart, parted):
    monkeypatch.setattr(FunctionalStep, "apart", apart)
    seen, observe = [], FunctionalStep.observe

    def watched(self):
        found = observe(self)
        seen.append(self.parted)
        return found

    monkeypatch.setattr(FunctionalStep, "observe", watched)
    model, batch = problem()
    (eager, *_), (replayed, *_) = both([batch] * 7, model)
    assert_same_state(eager, replayed)
    assert set(seen) == {parted}


def test_more_rows_than_parameters_can_be_replayed(cuda):
    model, (x, y) = nn.Linear(2, 3), (torch.randn(30, 2), torch.arange(30) % 3)
    (eager, a, *_), (replayed, b, *_) = both([(x, y)] * 7, model, rank=12)
    assert_same_state(eager, replayed)
    torch.testing.assert_close(b.spectrum, a.spectrum, rtol=1e-5, atol=1e-4)
    assert cuda.replayed == ["watch", "move_to_given"] * 4


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.bfloat16()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).bfloat16()).float()


UNFIT = {
    "dropout": (lambda: problem(dropout=0.3)[0], {}),
    "verify": (lambda: problem()[0], {"verify": False}),
    "a layer without a rule": (lambda: nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval(), {}),
    "half precision": (Half, {}),
}


@pytest.mark.parametrize("why", UNFIT)
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_models_that_draws_cannot_pass_together_say_so_once_and_run_eagerly(cuda, why, own):
    (make, options), batch = UNFIT[why], problem()[1]
    torch.manual_seed(0)
    model, found = make(), []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled, **options)
        generator = source() if own else None
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = steps(vi, state, [batch] * 5, generator)
        assert len(caught) == compiled
        found.append((state, torch.get_rng_state()))
    assert "compile=True has no effect: the draws cannot pass through the model together" in str(caught[0].message)
    assert not cuda.captured
    assert torch.equal(found[0][0].loc, found[1][0].loc)
    assert torch.equal(found[0][1], found[1][1])


def test_generators_may_change_from_step_to_step(cuda):
    model, batch = problem()
    states, seeds = [], (1, 1, None, 2, 3, None, 2)
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled)
        torch.manual_seed(3)
        for seed in seeds:
            state, _ = vi.update(state, batch, generator=None if seed is None else source(seed))
        states.append(state)
    assert_same_state(*states)
    assert cuda.captured.count("watch") == 2  # for the global source, and for all others


def runners(monkeypatch) -> list[GraphRunner]:
    """Those that `build` makes from now on."""
    made: list[GraphRunner] = []

    class Noted(GraphRunner):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(slang, "GraphRunner", Noted)
    return made


@pytest.mark.choreography
def test_every_shape_of_batch_has_its_graph_and_the_latest_few_are_kept(cuda, monkeypatch):
    made = runners(monkeypatch)
    model, (x, y) = problem()
    batches = [(x[:size], y[:size]) for size in (40, 39, 38, 37, 36, 35)]
    # Each is replayed the third time it is seen. The first is the first to go, and is captured again the fifth time.
    (eager, *_), (replayed, *_) = both(batches * 3 + batches[:1] * 2, model)
    assert_same_state(eager, replayed)
    assert len(made[0].graphs) == MOST_GRAPHS
    assert cuda.captured.count("watch") == 7


def test_alternating_shapes_hand_the_state_over(cuda):
    model, (x, y) = problem()
    (eager, *_), (replayed, *_) = both([(x, y), (x[:33], y[:33])] * 7, model)
    assert_same_state(eager, replayed)
    assert cuda.captured.count("watch") == 2


def test_an_older_state_can_be_gone_on_from(cuda):
    """States are immutable: the graph holds the latest one, and any other is loaded."""
    model, batch = problem()
    ends = []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled)
        old, _ = steps(vi, state, [batch] * 4, source())
        first, _ = steps(vi, old, [batch] * 2, source(2))
        again, _ = steps(vi, old, [batch] * 2, source(2))
        assert relative(first.loc, again.loc) <= 1e-7
        ends.append(again)
    assert_same_state(*ends)


def test_a_state_is_not_touched_by_later_steps(cuda):
    model, batch = problem()
    vi, state = functional(model, compile=True)
    state, _ = steps(vi, state, [batch] * 3, source())
    kept = [x.clone() for x in (state.loc, state.prec_factor, state.prec_diag, state.momentum)]
    steps(vi, state, [batch] * 3, source())
    now = (state.loc, state.prec_factor, state.prec_diag, state.momentum)
    assert all(torch.equal(x, y) for x, y in zip(kept, now, strict=True))


def test_what_a_graph_reads_by_address_is_captured_anew(cuda):
    model, batch = problem(buffer=True)
    states = []
    for compiled in (False, True):
        model.shift = torch.zeros(16)
        vi, state = functional(model, compile=compiled)
        generator = source()
        state, _ = steps(vi, state, [batch] * 3, generator)
        model.shift.add_(0.5)  # in place: the graph sees it
        state, _ = steps(vi, state, [batch] * 3, generator)
        model.shift = torch.full((16,), -0.5)  # another tensor: it does not
        state, _ = steps(vi, state, [batch], generator)
        states.append(state)
    assert_same_state(*states)
    assert cuda.captured.count("watch") == 2


class Unwilling(Net):
    """Cannot be captured: looks at a value."""

    def __init__(self, cuda) -> None:
        super().__init__()
        self.cuda = cuda

    def forward(self, x):
        if self.cuda.busy:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().forward(x)


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_a_model_that_cannot_be_captured_is_named_once_and_runs_eagerly(cuda, own):
    _, batch = problem()
    model, found = Unwilling(cuda), []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled)
        generator = source() if own else None
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = steps(vi, state, [batch] * 6, generator)
        assert len(caught) == compiled
        found.append((state, torch.get_rng_state()))
    assert "could not be captured (RuntimeError: operation not permitted" in str(caught[0].message)
    assert caught[0].filename == steps.__code__.co_filename
    assert not cuda.replayed
    assert torch.equal(found[0][0].loc, found[1][0].loc)
    assert torch.equal(found[0][1], found[1][1])  # the capture that failed left no trace in the random state
    assert torch.rand(()).isfinite()


def test_the_first_error_is_the_reason(cuda):
    """A capture that fails fails again when it is closed."""

    def fail():
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError("closing failed as well")

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert why_not_captured(caught.value) == "the step could not be captured (ValueError: the cause)"


REFUSALS = {
    "parameters are on cpu": {},
    r'it needs engine="factored" with model=': {"engine": "dense"},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_without_cuda_or_layers_compiling_warns_once_and_changes_nothing(reason):
    model, batch = problem(torch.float64)
    states = []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled, **REFUSALS[reason])
        if compiled:
            with pytest.warns(UserWarning, match=f"compile=True has no effect: {reason}.* Steps run eagerly") as caught:
                state, _ = vi.update(state, batch, generator=source())
            assert caught[0].filename == __file__
        else:
            state, _ = vi.update(state, batch, generator=source())
        state, _ = steps(vi, state, [batch] * 3, source(2))  # warnings are errors
        states.append(state)
    assert torch.equal(states[0].loc, states[1].loc)
    assert torch.equal(states[0].prec_factor, states[1].prec_factor)


def test_labels_out_of_range_are_refused_by_a_replayed_step(cuda):
    model, (x, y) = problem()
    vi, state = functional(model, compile=True)
    state, _ = steps(vi, state, [(x, y)] * 5, source())
    wrong = y.clone()
    wrong[7], wrong[9] = 3, -1
    with pytest.raises(slangvi.NumericalError, match="not finite for 2 of 40 examples"):
        steps(vi, state, [(x, wrong)], source())[0].loc.sum()
    state, _ = steps(vi, state, [(x, y)], source())
    assert state.step == 6


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_states_may_be_looked_at_long_after_others_were_made_from_them(cuda, ahead):
    model, batch = problem()
    told = []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled)
        generator, states = source(), []
        for _ in range(12):
            state, _ = vi.update(state, batch, generator=generator)
            states.append(state)
        for _ in range(2):  # twice from where it was
            for state in states[-1 - ahead :: -3]:
                states.append(vi.update(state, batch, generator=generator)[0])
        told.append(states)
    for eager, replayed in zip(*told, strict=True):
        assert_same_state(eager, replayed)


@pytest.mark.choreography
def test_graphs_go_with_what_was_built(taped, monkeypatch):
    found = runners(monkeypatch)
    model, batch = problem()
    vi, state = functional(model, compile=True)
    state, info = steps(vi, state, [batch] * 12, source())
    (graph,) = map(weakref.ref, found.pop().graphs.values())
    assert bool(info.total > 0)
    assert state.loc.isfinite().all()
    gc.collect()  # infos of earlier steps, which nobody has looked at
    gc.disable()
    try:
        del vi, state, info
        assert graph() is None  # nothing waits for the garbage collector
    finally:
        gc.enable()
