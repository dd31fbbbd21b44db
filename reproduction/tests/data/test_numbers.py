"""Tables of numbers: what NumPy reads is read the same, and what is malformed is refused by line and reason."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slangvi.errors import DataError
from slangvi_reproduction.data._numbers import is_number, parse_table

TEXT = b"# a heading\n 1\t+2.5 -3e1 \r\n\n.5  4. 1E-3 # the rest is silence\n0 -0 007"


def test_text_is_read_as_numpy_does():
    table = parse_table(TEXT)
    assert table.dtype == np.float64
    assert table.tolist() == [[1, 2.5, -30], [0.5, 4, 1e-3], [0, 0, 7]]
    np.testing.assert_array_equal(table, np.loadtxt(io.BytesIO(TEXT)))


@given(data=st.data())
def test_any_table_survives_being_written_and_read(data):
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    numbers = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
    words = st.lists(st.builds(repr, numbers), min_size=columns, max_size=columns)
    gap, end = data.draw(st.sampled_from([" ", "\t", "  \t "])), data.draw(st.sampled_from(["\n", "\r\n", " \n\n"]))
    lines = [gap.join(data.draw(words)) for _ in range(rows)]
    text = (end.join(lines) + data.draw(st.sampled_from(["", end]))).encode()
    assert parse_table(text).tolist() == [[float(word) for word in line.split()] for line in lines]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"<!DOCTYPE html>", "'<!DOCTYPE' is not a finite number."),
        (b"1 nan", "'nan' is not a finite number."),
        (b"1 1e999", "'1e999' is not a finite number."),
        (b"1_0 1", "'1_0' is not a finite number."),
        (b"1,2", "'1,2' is not a finite number."),
        (b"1 \xff", r"'\\xff' is not a finite number."),
        (b"1 2 3", "3 numbers, and the lines before it have 2."),
        (b"1", "1 numbers, and the lines before it have 2."),
    ],
)
def test_malformed_lines_are_named_with_the_reason(line, reason):
    with pytest.raises(DataError, match=f"^here:3: {re.escape(reason)}$"):
        parse_table(b"1 2\n\n" + line + b"\n3 4", "here")


@pytest.mark.parametrize("text", [b"", b" \n# nothing\n"])
def test_text_without_numbers_is_refused(text):
    with pytest.raises(DataError, match=r"^here holds no numbers\.$"):
        parse_table(text, "here")


def test_only_finite_numbers_in_plain_notation_are_numbers():
    assert all(map(is_number, ("1", "-.5", "+3.e-2")))
    assert not any(map(is_number, ("", "nan", "inf", "0x1", "1e", "1e999", "1_0", " 1", "1 ", "١")))
