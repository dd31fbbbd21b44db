"""Memory of tensors without values is counted once, as long as they live, by phase and part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cases import CASES, build
from slangvi.memory.fake import fake_memory
from slangvi.memory.step import FakePlans
from slangvi.params import ParamSpec
from slangvi.rows import Plan, make_plan
from slangvi.settings import CompiledOptimizerSettings


@given(st.lists(st.integers(-5, 50), max_size=30))
def test_what_is_alive_adds_up(script):
    """Positive numbers allocate as many floats, others free the oldest."""
    with fake_memory() as memory:
        tensors, peak = [], 0
        for number in script:
            if number > 0:
                tensors.append(torch.empty(number)[1:])
            elif tensors:
                tensors.pop(0)
            assert memory.live == sum(x.untyped_storage().nbytes() for x in tensors)
            peak = max(peak, memory.live)
        assert memory.peaks.get("setting up", (0, []))[0] == peak


def test_phases_have_peaks_of_their_own_whose_parts_may_be_named_later():
    with fake_memory() as memory:
        x = torch.empty(10)
        with memory.phase("outer", "temporaries"):
            y = torch.empty(20)
            with memory.phase("inner", "rows"):
                torch.empty(1000)
            torch.empty(5)
        memory.label([x, y, None], "data", of="temporaries")
    peaks = {name: (nbytes, sorted(records)) for name, (nbytes, records) in memory.peaks.items()}
    assert peaks == {
        "setting up": (40, [[40, "state"]]),
        "outer": (140, [[20, "temporaries"], [40, "state"], [80, "data"]]),
        "inner": (4120, [[40, "state"], [80, "data"], [4000, "rows"]]),
    }


def test_what_a_kernel_takes_for_itself_counts_while_it_runs():
    with fake_memory() as memory:
        x, y = torch.empty(100), torch.empty(100, dtype=torch.float64)
        z = x + y
    assert memory.live == 400 + 800 + z.nbytes == 2000
    assert memory.peaks["setting up"][0] == 2800  # x was converted


def test_addresses_tell_fake_tensors_apart_and_real_ones_keep_theirs():
    real = torch.zeros(3)
    before = real.data_ptr(), real.untyped_storage().data_ptr()
    with fake_memory():
        a, b = torch.empty(3), torch.empty(3)
        assert len({a.data_ptr(), a[1:].data_ptr(), b.data_ptr(), b.untyped_storage().data_ptr()}) == 3
        assert (real.data_ptr(), real.untyped_storage().data_ptr()) == before
    assert (real.data_ptr(), real.untyped_storage().data_ptr()) == before


def test_conditions_are_what_a_phase_says():
    with fake_memory() as memory:
        x = torch.empty(3)
        assert bool((x > 0).all())
        assert not bool((x > 0).any())
        with memory.phase("hope", "rows", condition=True):
            assert bool((x > 0).any())
            assert float(x.sum()) == 0.0
        with memory.phase("doubt", "rows", condition=False):
            assert not bool((x > 0).all())
    assert memory.guesses == 0


def test_copies_leave_the_original_alone_and_keep_ties():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with fake_memory() as memory:
        twin = memory.copy(model, model.parameters(), "parameters", torch.device("cpu"))
        assert twin[1].weight is twin[0].weight
        assert isinstance(twin[0].weight, nn.Parameter)
        assert memory.live == 36
    assert type(model[0].weight.data) is Tensor
    assert not model._forward_hooks


def places(plan: Plan) -> set[tuple[object, ...]]:
    """Return where a plan reads rows; examples that alternate take as much as those that lie side by side."""
    return {(f.position, f.index, f.output, f.layout.dim, f.names, f.by_rule) for f in plan.frontiers}


@pytest.mark.parametrize("name", CASES)
def test_the_batch_is_found_by_its_size_where_values_would_show_it(name):
    case = build(name)
    outputs = [x for x in tree_leaves(case.model(*case.args)) if isinstance(x, Tensor) and x.requires_grad]
    params = {name: case.model.get_parameter(name) for name in ParamSpec.of_module(case.model).names}
    settings = CompiledOptimizerSettings(num_data=1, lr=0.1)
    (found,) = FakePlans(case.model, (case.args, None), None, None, settings).found.values()
    assert places(found) == places(make_plan(outputs, params, case.num_examples))
