"""CSV files from strangers: a table or a DataError, whatever the bytes are."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slangvi.errors import DataError
from slangvi.tabular import reading
from slangvi.tabular.reading import MAX_COLUMNS, Table, parse, read_csv


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_delimiters_line_ends_and_marks_are_found(delimiter, end, mark):
    text = end.join(delimiter.join(row) for row in [["a", "b"], ["1", " x "], ["2", ""]])
    assert parse(mark + text.encode()).columns == {"a": ["1", "2"], "b": ["x", ""]}


def test_quotes_hold_delimiters_quotes_and_line_ends_and_lines_are_counted():
    table = parse(b'a,b\n"x, ""y""","1\n2"\n\n3,4\n')
    assert table.columns == {"a": ['x, "y"', "3"], "b": ["1\n2", "4"]}
    assert table.lines == [3, 5]


def test_a_semicolon_file_with_decimal_commas_is_not_split_at_the_commas():
    assert list(parse("größe;preis, EUR\n1,5;2,5\n3;4,5\n".encode()).columns) == ["größe", "preis, EUR"]


def test_columns_without_a_name_are_called_by_their_place():
    assert list(parse(b",x\n0,1\n").columns) == ["column 1", "x"]


def test_formulas_stay_text():
    assert parse(b"a,b\n=1+1,@SUM(A1)\n").columns == {"a": ["=1+1"], "b": ["@SUM(A1)"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n \n", "is empty"),
        (b"a,b\n", "no rows below its header"),
        (b"a,b\n1,2\n3\n", "line 3: 1 cells, but the header has 2"),
        (b"a,a\n1,2\n", "two columns named 'a'"),
        (b"a,b\n1,\xff\n", "line 2: byte 6 is not UTF-8"),
        (b"a,b\n1,\x00\n", "zero bytes"),
        (b'a,b\n"1,2\n', "Look at the quotes there"),
        (b"a,b\n1," + b"x" * 200_000 + b"\n", "field larger than field limit"),
        (b"PK\x03\x04rest", "Excel workbook; export it as CSV"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-16"),
        (b"x," * MAX_COLUMNS + b"y\n", "at most 10000 are read"),
    ],
)
def test_what_is_no_table_is_refused_with_a_reason(content, message):
    with pytest.raises(DataError, match=message):
        parse(content)


def test_more_cells_than_allowed_are_refused_while_reading(tmp_path, monkeypatch):
    """Short cells take more memory than the file does."""
    with pytest.raises(DataError, match=r"the file has more than 6 cells\. Raise --max-mb, or give fewer rows"):
        parse(b"a,b\n" + b",1\n" * 4, max_cells=6)
    assert len(parse(b"a,b\n" + b",1\n" * 3, max_cells=6)) == 3
    path = tmp_path / "cells.csv"
    path.write_bytes(b"a,b\n" + b",1\n" * 4)
    assert len(read_csv(path, max_mb=1.0)) == 4
    monkeypatch.setattr(reading, "MAX_CELLS", 6)
    assert len(read_csv(path, max_mb=1.0)) == 4  # 100,000 for every MB
    with pytest.raises(DataError, match="more than 6 cells"):
        read_csv(path, max_mb=0.00002)


@given(st.binary(max_size=200) | st.text(alphabet='a1",;\t\n\r =\x00é', max_size=60).map(str.encode))
def test_any_bytes_give_a_table_or_a_documented_error(content):
    try:
        table = parse(content)
    except DataError:
        return
    assert len(table) >= 1
    assert {len(cells) for cells in table.columns.values()} == {len(table)}


cells = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)


@given(st.integers(2, 4).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=1)))
def test_what_csv_writes_is_read_back(rows):
    names = [f"name{k}" for k in range(len(rows[0]))]
    text = io.StringIO()
    csv.writer(text).writerows([names, *rows])
    table = parse(text.getvalue().encode())
    assert list(zip(*table.columns.values(), strict=True)) == [tuple(cell.strip() for cell in row) for row in rows]


def test_size_is_limited_and_files_must_exist(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b"a,b\n" + b"1,2\n" * 10)
    assert len(read_csv(path, max_mb=44e-6)) == 10
    with pytest.raises(DataError, match=r"larger than 4e-05 MB. Raise --max-mb"):
        read_csv(path, max_mb=40e-6)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")


def test_rows_and_columns_can_be_picked():
    table = Table({"a": ["1", "2", "3"], "b": ["x", "y", "z"]}, [2, 3, 4])
    assert table.take([2, 0]) == Table({"a": ["3", "1"], "b": ["z", "x"]}, [4, 2])
    assert list(table.without(["a"]).columns) == ["b"]


@pytest.mark.parametrize(("sign", "end"), [(";", "\r\n"), (",", "\n"), ("\t", "\n")])
def test_a_declared_separator_is_taken_and_lines_are_still_counted(sign, end):
    rows = [f"sep={sign}", sign.join("ab"), sign.join(["1|5", "x"]), "", sign.join(["2", "y"])]
    assert parse(end.join([*rows, ""]).encode("utf-8-sig")) == Table({"a": ["1|5", "2"], "b": ["x", "y"]}, [3, 5])
