"""What a plan says, what it leaves alone, and what it answers to what it cannot plan."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slangvi
from cases import build
from slangvi.errors import UnsupportedModuleError
from slangvi.linalg import products
from slangvi.memory.plan import MemoryPlan
from slangvi.rows import factored

X, Y = torch.randn(6, 5), torch.zeros(6)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


@cache
def plan_of(rank: int = 1, mc_samples: int = 1) -> MemoryPlan:
    return slangvi.estimate_memory(network(), (X, Y), rank, mc_samples)


def test_parts_add_up_to_the_peak_and_sizes_are_those_given():
    plan = plan_of(rank=2, mc_samples=3)
    assert sum(plan.parts.values()) == plan.peak
    assert len(plan.parts) == 11
    assert (plan.num_params, plan.num_examples, plan.rank, plan.mc_samples) == (75, 6, 2, 3)
    assert plan.parameters == plan.gradients == 4 * 75
    assert plan.data == 4 * 6 * 5 + 4 * 6
    assert plan.parameters + plan.state + plan.factor < plan.between_steps <= plan.later_peak <= plan.peak
    assert plan.guesses == 0


def test_the_factor_grows_with_the_rank_and_the_vectors_do_not():
    small, large = plan_of(rank=1), plan_of(rank=5)
    assert large.state == small.state >= 3 * 4 * 75  # mean, diagonal and momentum; a prior that is a number takes none
    assert large.factor - small.factor >= 4 * 75 * 4
    assert large.peak > small.peak


def test_more_draws_take_more():
    assert plan_of(rank=2, mc_samples=3).peak > plan_of(rank=2).peak


@pytest.mark.parametrize("interface", ["optimizer", "functional"])
def test_fewer_rows_for_the_curvature_take_less(interface):
    model, x = nn.Sequential(nn.Linear(50, 80), nn.Tanh(), nn.Linear(80, 3)), torch.randn(200, 50)
    peaks = [slangvi.estimate_memory(model, x, interface=interface, curvature_rows=k).later_peak for k in (4, 50, None)]
    assert peaks == sorted(set(peaks))


def test_a_smaller_limit_makes_segments_shorter():
    model, x = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Conv2d(64, 8, 3)), torch.randn(20, 8, 6, 6)
    free, limited = (slangvi.estimate_memory(model, x, memory_limit=limit, verify=False) for limit in (None, 50_000))
    assert free.rows > 20 * 4 * 9000 > limited.rows
    assert free.later_peak > limited.later_peak


def test_models_that_insist_on_their_number_of_examples_are_planned():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.view(6, 5))

    assert slangvi.estimate_memory(Fixed(), X).num_params == 18


def test_slices_of_long_vectors_are_as_they_were_after_a_plan():
    before = products._CACHED, factored.CPU_ENTRIES
    with torch.device("meta"):
        wide = nn.Linear(5_000, 2_000)
    plan = slangvi.estimate_memory(wide, torch.empty(8, 5_000), rank=2, curvature_rows=4)
    assert before == (products._CACHED, factored.CPU_ENTRIES)
    assert plan.factor == 2 * 4 * plan.num_params


def test_the_table_names_every_part_and_its_knob():
    text = str(plan_of(rank=5))
    assert "P = 75 parameters, M = 6 examples, S = 1 draws, rank L = 5" in text
    assert "at its peak, in " in text
    assert any(line.startswith("factor") and line.endswith("rank") for line in text.splitlines())
    assert "KiB" in text


# ---- what is left alone


class Busy(nn.Module):
    """Draws random numbers, counts its calls in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cached = F.dropout(self.inner(x))
        return self.cached


def test_model_batch_and_random_state_stay_as_they_were():
    model, before_batch, random_state = Busy(), X.clone(), torch.get_rng_state()
    opt = slangvi.SLANG(model, num_data=10)
    before = copy.deepcopy(model.state_dict())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    slangvi.estimate_memory(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.cached is None
    assert model.training
    assert all(p.grad is None and p._post_accumulate_grad_hooks for p in model.parameters())  # those of `opt`
    assert torch.equal(X, before_batch)
    assert opt.posterior.mean.shape == (18,)


def test_nothing_of_size_is_allocated():
    model = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10))
    plan_of()  # torch fills its own tables the first time
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        plan = slangvi.estimate_memory(model, torch.empty(4, 500), rank=4)
    taken = sum(max(0, e.nbytes()) for e in profiled.kineto_results.events() if e.name() == "[memory]")
    assert taken < plan.parameters / 2 < plan.peak / 20


def test_steps_after_a_plan_have_values():
    """Sixty-four rows are enough for iterations whose starting vectors are remembered between calls."""
    model, x = network(), torch.randn(64, 5)
    slangvi.estimate_memory(model, x)
    opt = slangvi.SLANG(model, num_data=100)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x), torch.arange(64) % 3).backward()
    opt.step()
    assert opt.info is not None
    assert opt.info.captured > 0


def test_a_model_on_the_meta_device_is_planned_as_on_a_cpu():
    with torch.device("meta"):
        empty = network()
    assert slangvi.estimate_memory(empty, (X, Y)) == plan_of()


# ---- what a batch may be


def test_batches_of_every_form_are_planned_alike():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    forms = [X, [X, Y], {"x": X}, ((X,), Y, "more")]
    plans = [slangvi.estimate_memory(Named(), form) for form in forms]
    assert len({plan.peak - plan.data for plan in plans}) == 1


@pytest.mark.parametrize("interface", ["optimizer", "functional"])
def test_outputs_that_have_the_batch_elsewhere_are_left_out_of_the_loss_that_stands_in(interface):
    lstm, x = nn.LSTM(5, 3, batch_first=True), torch.randn(6, 4, 5)  # its last state is (1, 6, 3)
    plan = slangvi.estimate_memory(lstm, x, interface=interface)
    own = slangvi.estimate_memory(lstm, (x, None), interface=interface, loss=lambda out, _: -out[0].log_softmax(-1))
    assert (plan.activations, plan.later_peak) == (own.activations, own.later_peak)


def test_a_loss_of_ones_own_is_planned_with():
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append((output.shape, target.shape))
        return F.cross_entropy(output.repeat(1, 1000), target)

    batch = (X, torch.zeros(6, dtype=torch.long))
    assert slangvi.estimate_memory(network(), batch, loss=loss).peak > 2 * plan_of().peak
    assert set(seen) == {((6, 3), (6,))}


def test_values_that_had_to_be_made_up_are_counted():
    plan = slangvi.estimate_memory(build("data_dependent").model.float(), torch.randn(5, 4))
    assert plan.guesses > 0
    assert "asked for values" in str(plan)


# ---- what cannot be planned


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.from_numpy(x.numpy()))


@pytest.mark.parametrize(
    ("model", "batch", "error", "match"),
    [
        (Outside(), X, RuntimeError, r"could not call Outside .*numpy.*max_memory_allocated"),
        (network(), (), ValueError, "batch must hold the model's input"),
        (network(), {"x": X}, RuntimeError, r"unexpected keyword argument 'x'.*as model\(\*\*x\)"),
        (network(), torch.randn(6, 4), RuntimeError, "could not call Sequential"),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), X, UnsupportedModuleError, "eval mode"),
        (lambda x: x, X, TypeError, "model must be a torch.nn.Module, got function"),
        (nn.Tanh(), X, ValueError, "nothing to infer"),
        (nn.Sequential(nn.Linear(5, 3), nn.Flatten(0)), X, UnsupportedModuleError, "no output .* has 6 examples"),
    ],
)
def test_errors_say_what_to_do(model, batch, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        slangvi.estimate_memory(model, batch)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"interface": "loop"}, "interface must be one of 'optimizer', 'functional', got 'loop'"),
        ({"rank": -1}, "rank must be ≥ 0"),
        ({"mc_samples": 0}, "mc_samples must be ≥ 1"),
        ({"engine": "sparse"}, "engine must be one of"),
        ({"curvature_rows": 0}, "curvature_rows must be ≥ 1"),
    ],
)
def test_arguments_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        slangvi.estimate_memory(network(), X, **options)


def test_a_curvature_of_functions_that_needs_a_target_asks_for_it():
    own = {"likelihood": "categorical", "interface": "functional"}
    with pytest.raises(ValueError, match=r"batch must be \(input, target\)"):
        slangvi.estimate_memory(nn.Linear(4, 3), torch.empty(8, 4), **own)
    plan = slangvi.estimate_memory(nn.Linear(4, 3), (torch.empty(8, 4), torch.zeros(8, dtype=torch.long)), **own)
    assert plan.peak > 0
