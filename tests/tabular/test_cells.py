"""Single cells: numbers, and what says that there is none."""

from __future__ import annotations

import math

import pytest

from slangvi.tabular.cells import is_missing, is_no_number, number_of, numbers, short


@pytest.mark.parametrize("cell", ["", "NA", "n/a", "#N/A", "<NA>", "NaN", "null", "None", "?"])
def test_missing_words(cell):
    assert is_missing(cell)
    assert is_no_number(cell)
    assert number_of("0") == 0.0
    assert not is_missing("0")


@pytest.mark.parametrize("cell", ["-", "--", ".", "n.a.", "Unknown", "missing", "#DIV/0!"])
def test_words_that_say_something_among_words_only(cell):
    assert is_no_number(cell)
    assert not is_missing(cell)
    assert math.isnan(numbers([cell])[0])


def test_long_cells_are_cut_in_messages():
    assert short("a" * 20) == repr("a" * 20)
    assert short("a" * 21) == repr("a" * 19 + "…")
