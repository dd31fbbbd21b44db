"""Any arguments give a result or a documented error, and nothing is fetched."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slangvi
from slangvi_reproduction import data

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=4),
    st.binary(max_size=3),
    st.sampled_from([object(), int, torch.ones(3), torch.full((2, 2), math.nan), torch.arange(0), [1, 2], {"a": 1}]),
)
CALLS = {
    "folds": (data.folds, [torch.arange(10), 0, 2]),
    "load_mnist": (data.load_mnist, ["no such part"]),
    "load_fashion_mnist": (data.load_fashion_mnist, ["no such part"]),
    "libsvm_splits": (data.libsvm_splits, ["no such set"]),
    "load_uci": (data.load_uci, ["no such set"]),
    "load_libsvm": (data.load_libsvm, ["no such set"]),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=15)
@given(values=st.data())
def test_any_arguments_give_a_result_or_a_documented_error(name, values):
    call, possible = CALLS[name]
    arguments = list(possible)
    arguments[values.draw(st.integers(0, len(possible) - 1))] = values.draw(JUNK)
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLANGVI_OFFLINE", "1")
        try:
            call(*arguments)
        except (TypeError, ValueError, slangvi.DataError) as error:
            messages.append(str(error))
    assert all(messages), "an error without a message"
