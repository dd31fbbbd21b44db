"""Constants are made once, and noted by those who have to hold on to them."""

from __future__ import annotations

import torch

from slangvi.linalg.constants import constant, handed_out
from slangvi.linalg.subspace import starting_block

CPU = torch.device("cpu")


@constant
def filled(size: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((size,), value)


def test_the_same_arguments_give_the_same_tensor():
    assert filled(2) is filled(2)
    assert filled(2) is not filled(3)
    assert filled(2, value=1.0).tolist() == [1.0, 1.0]


def test_all_that_are_handed_out_are_noted_also_those_that_were_there():
    first = filled(4)
    with handed_out() as outer:
        second = filled(5)
        with handed_out() as inner:
            assert filled(4) is first
        filled(5)
    filled(6)
    assert [x is y for x, y in zip(outer, [second, first, second], strict=True)] == [True] * 3
    assert [x is first for x in inner] == [True]


def test_what_is_noted_outlives_the_cache():
    with handed_out() as notes:
        block = starting_block(40, 2, 2, torch.float64, CPU)
    for size in range(41, 41 + 20):
        starting_block(size, 2, 2, torch.float64, CPU)
    assert starting_block(40, 2, 2, torch.float64, CPU) is not block
    assert notes[0] is block
