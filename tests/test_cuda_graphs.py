"""Steps captured and replayed on a real GPU; skipped where there is none. `tests/methods` has the logic on a CPU."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

import slangvi
from helpers.captured_steps import N, Net, assert_same_state, functional, problem, relative, steps
from helpers.optimizer_runs import flat
from slangvi.linalg import lowrank, products
from slangvi.priors import Prior

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # autograd's thread makes its context late
]


def source(seed=1):
    return torch.Generator(DEVICE).manual_seed(seed)


def random_state(generator):
    return torch.cuda.get_rng_state() if generator is None else generator.get_state()


def both(model, batches, own=True, **options):
    """State, info and random state after the same steps, taken eagerly and replayed."""
    found = []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled, **options)
        generator = source() if own else None
        torch.manual_seed(5)
        state, info = steps(vi, state, batches, generator)
        found.append((state, info, random_state(generator)))
    return found


@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_functional_steps_equal_eager_ones(rank, dtype, own):
    model, batch = problem(dtype, device=DEVICE)
    (eager, a, random), (replayed, b, handed) = both(model, [batch] * 20, own, rank=rank)
    assert_same_state(eager, replayed, 1e-5)
    assert torch.equal(random, handed)
    assert relative(a.spectrum, b.spectrum.to(DEVICE)) <= 1e-4
    assert (b.loss, b.kl, b.captured) == pytest.approx((a.loss, a.kl, a.captured), rel=1e-4, abs=1e-5)


def test_functional_batches_may_change_their_shape():
    model, (x, y) = problem(device=DEVICE)
    batches = [(x[:size], y[:size]) for size in (40, 33, 36, 34, 38, 35)]
    (eager, *_), (replayed, *_) = both(model, batches * 4)
    assert_same_state(eager, replayed, 1e-5)


def warm(steps_before=5, **options):
    """A replaying method, an eager twin, a state that came from the first, and the batch."""
    model, batch = problem(device=DEVICE)
    vi, state = functional(model, compile=True, **options)
    eager, _ = functional(model, **options)
    state, _ = steps(vi, state, [batch] * steps_before, source())
    return vi, eager, state, batch


def assert_usable(vi, eager, state, batch):
    a, _ = steps(eager, state, [batch] * 2, source(3))
    b, _ = steps(vi, state, [batch] * 2, source(3))
    assert_same_state(a, b, 1e-5)
    assert bool(torch.randn(3, device=DEVICE).isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_refused_and_leave_the_state_usable(bad):
    vi, eager, state, (x, y) = warm()
    broken = x.clone()
    broken[3, 1] = bad
    with pytest.raises(slangvi.NumericalError, match="not finite"):
        steps(vi, state, [(broken, y)], source())[0].loc.sum()
    assert bool(state.loc.isfinite().all())
    assert_usable(vi, eager, state, (x, y))


def test_labels_out_of_range_are_refused_and_leave_the_device_alive():
    vi, eager, state, (x, y) = warm()
    wrong = y.clone()
    wrong[7] = 3
    with pytest.raises(slangvi.NumericalError, match="not finite for 1 of 40 examples"):
        steps(vi, state, [(x, wrong)], source())[0].loc.sum()
    torch.cuda.synchronize()
    assert_usable(vi, eager, state, (x, y))


class Looks(Net):
    """Reads a number from the device, which a capture does not allow."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.abs().sum().item() > 0 else 2.0)


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_a_model_that_cannot_be_captured_warns_and_goes_on_eagerly(own):
    batch = problem(device=DEVICE)[1]
    model, found = Looks().to(DEVICE), []
    for compiled in (False, True):
        vi, state = functional(model, compile=compiled)
        generator = source() if own else None
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = steps(vi, state, [batch] * 6, generator)
        ours = [str(w.message) for w in caught if "compile=True" in str(w.message)]
        assert len(ours) == compiled
        found.append((state, random_state(generator)))
    assert "the step could not be captured" in ours[0]
    assert_same_state(found[0][0], found[1][0], 1e-5)
    assert torch.equal(found[0][1], found[1][1])
    assert bool(torch.randn(3, device=DEVICE).isfinite().all())  # the default generator works


def test_dropout_in_the_functional_interface_runs_eagerly_and_says_so():
    model, batch = problem(dropout=0.3, device=DEVICE)
    vi, state = functional(model, compile=True)
    with pytest.warns(UserWarning, match="the draws cannot pass through the model together"):
        state, _ = steps(vi, state, [batch] * 5, source())
    assert bool(state.loc.isfinite().all())


def optimizer(model, compiled, own=True, **options):
    defaults = {"num_data": N, "rank": 3, "lr": 0.02, "init_precision": 50.0, "generator": source() if own else None}
    return slangvi.SLANG(model, compile=compiled, **(defaults | options))


def train(opt, batches, draws=2, autocast=False):
    """All draws of a step inside one autocast block, if asked for."""
    for x, y in batches:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            for _ in range(draws):
                with opt.sampled_params(train=True):
                    opt.zero_grad()
                    F.cross_entropy(opt.model(x), y).backward()
        opt.step()


def pair(own=True, dropout=0.0, dtype=torch.float32, **options):
    (first, batch), (second, _) = (problem(dtype, dropout, device=DEVICE) for _ in range(2))
    return optimizer(first, False, own, **options), optimizer(second, True, own, **options), batch


def assert_agree(eager, replayed):
    assert_same_state(eager._state, replayed._state, 1e-5)
    for opt in (eager, replayed):
        assert torch.equal(flat(opt.model), opt._state.loc)


@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_optimizer_steps_equal_eager_ones(rank, dtype, own):
    eager, replayed, batch = pair(own, dtype=dtype, rank=rank)
    random = []
    for opt in (eager, replayed):
        torch.manual_seed(5)
        train(opt, [batch] * 20)
        random.append(random_state(opt.generator))
    assert_agree(eager, replayed)
    assert torch.equal(*random)


def test_optimizer_batches_may_change_their_shape_and_dropout_goes_on():
    eager, replayed, (x, y) = pair(dropout=0.3)
    for opt in (eager, replayed):
        torch.manual_seed(5)
        train(opt, [(x[:size], y[:size]) for size in (40, 40, 33, 40, 33, 33, 17, 40)])
    assert_agree(eager, replayed)


def test_every_draw_inside_one_autocast_block_is_its_own():
    apart, together, batch = pair()
    for opt, autocast in ((apart, False), (together, True)):
        train(opt, [batch] * 6, autocast=autocast)
    # bfloat16 costs two digits; a draw that was used twice would cost all of them.
    assert relative(apart._state.momentum, together._state.momentum) < 0.1


def test_an_optimizer_refuses_what_is_not_finite_and_goes_on():
    eager, replayed, (x, y) = pair()
    broken = x.clone()
    broken[3, 1] = math.nan
    for opt in (eager, replayed):
        train(opt, [(x, y)] * 4)
        before = flat(opt.model)
        with pytest.raises(slangvi.NumericalError, match=r"step 5: the gradient of parameter 'first.weight'"):
            train(opt, [(broken, y)])
        assert torch.equal(flat(opt.model), before)
        train(opt, [(x, y)] * 3)
    assert_agree(eager, replayed)


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 4321])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 32])
def test_gram_of_long_rows_is_that_of_float64(rank, weighed, size):
    rows = torch.randn(rank, size, generator=source(), device=DEVICE) + 0.5
    diag = 10 ** (4 * torch.rand(size, generator=source(), device=DEVICE) - 2) if weighed else None
    double = rows.double() if diag is None else rows.double() / diag.double().sqrt()
    expected, found = double @ double.mT, products.gram_float64(rows, diag)
    lengths = expected.diagonal().sqrt()
    assert float(((found - expected).abs() / (lengths[:, None] * lengths)).max()) <= lowrank._LONG_ROUNDING


@pytest.mark.parametrize("scale", ["softplus", "log"])
def test_the_arithmetic_of_bayes_by_backprop_is_captured(scale):
    """Two steps of three runs, from one graph: state, gradients, noise, rates and step are filled anew."""
    state = slangvi.bbb.init({"w": torch.zeros(5, device=DEVICE)}, 4.0, scale)
    buffers = [part.expand(3, 5).clone() for moving in state.moving for part in moving]
    gradients, noise = torch.randn(2, 4, 3, 5, device=DEVICE)
    lr, step = torch.full((3, 1), 0.1, device=DEVICE), torch.ones((), device=DEVICE)
    prior = Prior(torch.ones(3, 5, device=DEVICE), torch.zeros(5, device=DEVICE))

    def take(parts, number):
        moving = slangvi.bbb.Moving(*parts[:3]), slangvi.bbb.Moving(*parts[3:])
        options = {"weight": 2.0, "prior": prior, "lr": lr, "step": number, "scale": scale}
        return [part for x in slangvi.bbb.advanced(*moving, gradients, noise, **options) for part in x]

    expected = take(take([part.clone() for part in buffers], 1), 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for place, value in zip(buffers, take(buffers, step), strict=True):
            place.copy_(value)
        step.add_(1)
    for _ in range(2):
        graph.replay()
    for a, b in zip(buffers, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_arithmetic_and_masks_of_dropout_are_captured():
    state = slangvi.mc_dropout.init({"w": torch.ones(2, 4, device=DEVICE), "b": torch.ones(2, device=DEVICE)}, 0.5)
    buffers = [part.clone() for part in state.moving]
    slope, step, generator = torch.randn(10, device=DEVICE), torch.ones((), device=DEVICE), source()
    decay = slangvi.mc_dropout.decays(state, torch.ones(10, device=DEVICE))

    def take(parts, number):
        weights = slangvi.mc_dropout.Moving(*parts)
        return slangvi.mc_dropout.advanced(weights, slope, weight=2.0, decay=decay, lr=0.1, step=number)

    expected = take(take([part.clone() for part in buffers], 1), 2)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        for place, value in zip(buffers, take(buffers, step), strict=True):
            place.copy_(value)
        step.add_(1)
        masks = slangvi.mc_dropout.draw_masks(state, (64,), generator)["w"]
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(masks.clone())
    for a, b in zip(buffers, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert set(seen[0].unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(*seen)
