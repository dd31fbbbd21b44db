"""Allocations are counted once, as long as they live."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.memory.ledger import Ledger


@given(st.lists(st.integers(-5, 50), max_size=30))
def test_what_is_alive_adds_up_after_every_event(script):
    """Positive numbers allocate so many floats, others free the oldest."""
    ledger, tensors = Ledger(), []
    for number in script:
        if number > 0:
            tensors.append(torch.zeros(number))
            ledger.label([tensors[-1]], "data")
            ledger.label([tensors[-1][1:]], "rows")
        elif tensors:
            tensors.pop(0)
    assert ledger.live[-1] == sum(4 * len(x) for x in tensors)
    for event, live in enumerate(ledger.live):
        assert sum(record.nbytes for record in ledger.at(event)) == live
    assert {record.part for record in ledger.records} <= {"rows"}


def test_what_a_kernel_takes_for_itself_lives_for_one_event():
    ledger = Ledger()
    ledger.inside(0, lambda: "temporaries")
    ledger.inside(100, lambda: "temporaries")
    assert ledger.live == [0, 100, 0]


def test_the_rest_is_relabelled():
    ledger, x, y = Ledger(), torch.zeros(1), torch.zeros(2)
    ledger.label([x], "data")
    ledger.label([y], "draws")
    ledger.relabel_all("state", but=("data",))
    assert [record.part for record in ledger.records] == ["data", "state"]
