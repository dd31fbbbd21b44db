"""Svmlight text: what scikit-learn reads is read the same, and what is malformed is refused by line and reason."""

from __future__ import annotations

import bz2
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from slangvi.errors import DataError
from slangvi_reproduction.data import _svmlight
from slangvi_reproduction.data._svmlight import Table, digest, parse, read

TEXT = b"""\
# a heading

+1 1:0.5 3:-2e-1 \r
-1   2:+.5\t4:1.  # the rest is silence
3
   2 1:1 2:2 3:3 4:4
1.5 4:1E+2"""


def sklearn_reads(text: bytes, num_features: int) -> Table:
    x, y = load_svmlight_file(io.BytesIO(text), n_features=num_features)
    return Table(x.toarray(), y)


def assert_same(ours: Table, other: Table) -> None:
    np.testing.assert_array_equal(ours.x, other.x)
    np.testing.assert_array_equal(ours.y, other.y)


def test_text_is_read_as_scikit_learn_does():
    table = parse(TEXT, 4)
    assert_same(table, sklearn_reads(TEXT, 4))
    assert_same(
        table,
        Table(
            np.array([[0.5, 0, -0.2, 0], [0, 0.5, 0, 1], [0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 100.0]]),
            np.array([1, -1, 3, 2, 1.5]),
        ),
    )
    assert table.x.dtype == table.y.dtype == np.float64


@given(data=st.data())
def test_any_table_survives_being_written_and_read(data):
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    numbers = st.one_of(st.just(0.0), st.floats(-1e6, 1e6, allow_subnormal=False))
    x = np.array(data.draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))).reshape(rows, columns)
    y = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=rows, max_size=rows)), dtype=float)
    buffer = io.BytesIO()
    dump_svmlight_file(x, y, buffer, zero_based=False)
    padded = columns + data.draw(st.integers(0, 3))
    assert_same(parse(buffer.getvalue(), padded), sklearn_reads(buffer.getvalue(), padded))


@pytest.mark.parametrize("text", [b"", b"\n \n# nothing\n"])
def test_text_without_rows_is_an_empty_table(text):
    table = parse(text, 3)
    assert table.x.shape == (0, 3)
    assert table.y.shape == (0,)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"<!DOCTYPE html>", "the label '<!DOCTYPE' is not a finite number."),
        (b"nan 1:1", "the label 'nan' is not a finite number."),
        (b"1e999 1:1", "the label '1e999' is not a finite number."),
        (b"1:1 2:1", "the label '1:1' is not a finite number."),
        (b"1,1:1", "the label '1,1:1' is not a finite number."),
        (b"1 2", "expected index:value, got '2'."),
        (b"1 qid:3 1:1", "expected index:value, got 'qid:3'."),
        (b"1 -1:3", "expected index:value, got '-1:3'."),
        (b"1 :3", "expected index:value, got ':3'."),
        (b"1 1:", "the value of '1:' is not a finite number."),
        (b"1 1: 3", "the value of '1:' is not a finite number."),
        (b"1 1:2:3", "the value of '1:2:3' is not a finite number."),
        (b"1 1:inf", "the value of '1:inf' is not a finite number."),
        (b"1 1:1e999", "the value of '1:1e999' is not a finite number."),
        (b"1 1:1_0", "the value of '1:1_0' is not a finite number."),
        (b"1 1:\xff", r"the value of '1:\\xff' is not a finite number."),
        (b"1 1:0\x00", r"the value of '1:0\x00' is not a finite number."),
        (b"1 0:3", "'0:3': indices go from 1 to 4."),
        (b"1 5:3", "'5:3': indices go from 1 to 4."),
        (b"1 99999999999999999999999:3", "'99999999999999999999999:3': indices go from 1 to 4."),
        (b"1 2:1 2:1", "'2:1' comes after index 2: indices must grow."),
        (b"1 2:1 1:1", "'1:1' comes after index 2: indices must grow."),
        (b"1 1:1\r2 1:1", "expected index:value, got '2'."),
    ],
)
def test_malformed_lines_are_named_with_the_reason(line, reason):
    with pytest.raises(DataError, match=f"^here:3: {re.escape(reason)}$"):
        parse(b"1 4:1\n\n" + line + b"\n1 1:1", 4, "here")


@pytest.mark.parametrize("pack", [bytes, bz2.compress], ids=["plain", "bzip2"])
@pytest.mark.parametrize("name", ["set", "set.bz2", ".set.bz2.12-ab.part"])
def test_files_are_read_packed_or_not_whatever_their_name(tmp_path, pack, name):
    path = tmp_path / name
    path.write_bytes(pack(TEXT))
    assert_same(read(path, 4), parse(TEXT, 4))


def test_a_file_is_parsed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    path = tmp_path / "set"
    path.write_bytes(b"1 1:1")
    first = read(path, 1)
    assert read(path, 1) is first
    with pytest.raises(ValueError, match="read-only"):
        first.x[0, 0] = 5
    path.write_bytes(b"1 1:10")
    assert read(path, 1).x.tolist() == [[10.0]]


@pytest.mark.parametrize("body", [bz2.compress(TEXT * 50)[:-20], b"BZh9" + b"x" * 50], ids=["cut", "garbage"])
def test_broken_bzip2_is_refused_by_name(tmp_path, body):
    path = tmp_path / "set.bz2"
    path.write_bytes(body)
    with pytest.raises(DataError, match=r"^this is not a whole bzip2 file: "):
        read(path, 4, "this")


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_svmlight, "MAX_UNPACKED", 10_000)
    path = tmp_path / "bomb"
    path.write_bytes(bz2.compress(b"1 1:1\n" * 10_000))
    with pytest.raises(DataError, match="unpacks to more than 10,000 bytes"):
        read(path, 1)


def test_a_file_that_cannot_be_opened_raises_as_python_does(tmp_path):
    with pytest.raises(IsADirectoryError):
        read(tmp_path, 4)


# ---- the digest ----


def changed(text: bytes, old: bytes, new: bytes) -> str:
    assert old in text
    return digest(parse(text.replace(old, new), 4))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"0.5 ", b"5e-1 "), (b"-2e-1", b"-0.2000004"), (b"+1 ", b"1.0 "), (b"  2:+.5", b"  1:0 2:.4999996")],
)
def test_the_digest_does_not_see_how_a_number_is_written(old, new):
    assert changed(TEXT, old, new) == digest(parse(TEXT, 4))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"0.5 ", b"0.501 "), (b"+1 ", b"2 "), (b"1.5 ", b"1.6 "), (b"3:3", b"3:-3"), (b"4:1E+2", b"4:1e300")],
)
def test_the_digest_sees_changed_values_and_labels(old, new):
    assert changed(TEXT, old, new) != digest(parse(TEXT, 4))


def test_the_digest_sees_the_order_of_rows_and_columns():
    assert len({digest(parse(text, 2)) for text in (b"1 1:1\n1 2:1", b"1 2:1\n1 1:1", b"1 1:1 2:1\n1")}) == 3
