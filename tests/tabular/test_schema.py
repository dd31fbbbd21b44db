"""Kinds of columns, and numbers made from them."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slangvi.errors import DataError
from slangvi.tabular.reading import Table
from slangvi.tabular.schema import MAX_LEVELS, Categorical, Numeric, Schema, Unusual, infer


def table(**columns: list[object]) -> Table:
    made = {name: [str(cell) for cell in cells] for name, cells in columns.items()}
    return Table(made, list(range(2, 2 + len(next(iter(made.values()))))))


def test_numbers_are_standardised_with_missing_ones_at_the_mean_and_marked():
    schema = infer(table(x=[1, "", 3, "NA", 8]))
    (column,) = schema.columns
    assert column == Numeric("x", 4.0, float(np.std([1, 3, 8])), True)
    assert schema.notes == {"x": "2 missing values are set to the mean"}
    scaled = (np.array([1, 4, 3, 4, 8]) - 4) / column.scale
    np.testing.assert_allclose(schema.encode(table(x=[1, "", 3, "?", 8])), np.stack([scaled, [0, 1, 0, 1, 0]], 1))


def test_words_become_one_column_for_each_level_and_one_for_all_others():
    schema = infer(table(x=["b", "a", "b", "", "a", "b"]))
    assert schema.columns == (Categorical("x", ("b", "a")),)
    assert schema.encode(table(x=["a", "b", "new", ""])).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1]]
    what = "are missing or of no level that the model knows"
    assert schema.unusual(table(x=["a", "b", "", "new"])) == {"x": Unusual(2, f"{what}, such as 'new'")}
    assert schema.unusual(table(x=["a", ""])) == {"x": Unusual(1, what)}
    assert schema.unusual(table(x=["a", "b"])) == {}


def test_rare_levels_are_taken_together():
    cells = [f"level{k}" for k in range(MAX_LEVELS + 5) for _ in range(1 + (k < MAX_LEVELS))] * 2
    schema = infer(table(x=cells))
    assert schema.columns[0].levels == tuple(sorted(f"level{k}" for k in range(MAX_LEVELS)))
    assert schema.notes == {"x": "5 rarer levels are taken together"}


DATES = "; if these are dates, put year, month or age into columns of their own"
NUMBERS = "; if these are numbers, write them as 1234.5, without other signs"


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (["", "NA", "nan"] * 10, "all of it is missing"),
        (["x"] * 30, "it is 'x' in every row"),
        (["5"] * 30, "it is '5' in every row"),
        (list(range(7, 37)), "it only counts the rows"),
        ([f"name {k}" for k in range(30)], "it has 30 different words in 30 rows"),
        ([f"2024-05-{k:02}" for k in range(1, 31)], f"it has 30 different words in 30 rows{DATES}"),
        ([f"{k}.5.24 10:00" for k in range(1, 31)], f"it has 30 different words in 30 rows{DATES}"),
        ([f"{k},5" for k in range(30)], f"it has 30 different words in 30 rows{NUMBERS}"),
        ([f"$1,{k:03}.50" for k in range(30)], f"it has 30 different words in 30 rows{NUMBERS}"),
        ([f"{k} %" for k in range(30)], f"it has 30 different words in 30 rows{NUMBERS}"),
    ],
)
def test_columns_that_say_nothing_are_dropped_with_a_reason(cells, why):
    schema = infer(table(x=[0.5, 2, 2.5] * 10, y=cells))
    assert schema.dropped == {"y": why}
    assert [column.name for column in schema.columns] == ["x"]


def test_a_few_words_among_numbers_count_as_missing():
    schema = infer(table(x=[*(k * k for k in range(39)), "a lot"]))
    assert schema.columns[0].indicator
    told = "1 missing values are set to the mean, among them 1 that are no numbers, such as 'a lot'"
    assert schema.notes["x"] == told


@pytest.mark.parametrize("word", ["#N/A", "<NA>", "-", ".", "unknown"])
def test_however_many_numbers_are_missing_the_others_are_numbers(word):
    schema = infer(table(x=[word, *(k * k for k in range(6)), word, word]))
    assert schema.columns[0].kind == "numeric"
    assert schema.notes == {"x": "3 missing values are set to the mean"}


def test_beside_words_what_is_no_number_may_be_a_word():
    assert infer(table(x=["+", "-", "unknown", "-"])).columns == (Categorical("x", ("-", "+", "unknown")),)


@pytest.mark.parametrize(("spread", "start"), [(30, "it has 29 different words in 30 rows; "), (3, "")])
def test_what_keeps_a_column_from_being_numbers_is_named(spread, start):
    cells = [*(k % spread * 1.5 for k in range(27)), "low", "low", "high"]
    schema = infer(table(x=[0.5, 2, 2.5] * 10, y=cells))
    told = (schema.dropped or schema.notes)["y"]
    assert told.startswith(f"{start}90 % are numbers, and the others such as 'low' and 'high': write those as numbers")


def test_columns_that_differ_by_rounding_alone_are_dropped():
    cells = ["0.3", "0.30000000000000004"] * 10
    assert infer(table(x=[0.5, 2] * 10, y=cells)).dropped == {"y": "it is '0.3' in every row, but for rounding"}
    assert infer(table(y=[*cells, ""])).columns[0].scale == 1.0  # whether one is missing may say something


def test_large_numbers_that_differ_are_scaled():
    times = 1.7e18 + np.random.RandomState(0).uniform(0, 1e6, 200)  # nanoseconds
    encoded = infer(table(x=[f"{time:.0f}" for time in times])).encode(table(x=[f"{time:.0f}" for time in times]))
    assert encoded.std() == pytest.approx(1.0)


@pytest.mark.parametrize("indicator", [False, True])
def test_cells_that_are_no_numbers_are_always_told(indicator):
    column = Numeric("x", 0.0, 1.0, indicator)
    assert column.unusual(["1", "2"]).cells == 0
    assert column.unusual(["1,5", "2", "$3"]) == (2, "are no numbers, such as '1,5', and count as the mean")
    assert column.unusual(["", "-", "2"]).cells == (0 if indicator else 2)
    words = "no numbers, such as 'x'," if indicator else "missing or no numbers, such as 'x',"
    assert column.unusual(["", "x", "2"]) == (2 - indicator, f"are {words} and count as the mean")


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(DataError, match=r"no column to learn from\. 'x': it is '1' in every row"):
        infer(table(x=[1, 1]))


def test_too_many_numbers_are_refused():
    cells = [f"v{k}" for k in range(MAX_LEVELS)] * 3
    with pytest.raises(DataError, match="become 10013 numbers for each row"):
        infer(table(**{f"c{k}": cells for k in range(323)}))


def test_missing_columns_are_named_and_order_is_free():
    schema = infer(table(x=[1, 2, 4], y=["a", "b", "a"]))
    with pytest.raises(DataError, match=r"no column 'y', which the model was fitted with\. Its columns are 'x', 'z'"):
        schema.encode(table(x=[1], z=[1]))
    turned = schema.encode(table(z=[5], y=["a"], x=[4]))
    np.testing.assert_array_equal(turned, schema.encode(table(x=[4], y=["a"])))


texts = st.sampled_from(["", "NA", "1", "2.5", "-3e2", "1e300", "inf", "1_0", "a", "=b"]) | st.text(max_size=3)


@given(st.lists(st.tuples(texts, texts), min_size=2, max_size=20), st.lists(st.tuples(texts, texts), min_size=1))
def test_any_cells_become_finite_numbers_and_schemas_survive_json(rows, others):
    first, second = zip(*rows, strict=True)
    try:
        schema = infer(Table({"x": list(first), "y": list(second)}, list(range(len(rows)))))
    except DataError:
        return
    again = Schema.from_json(json.loads(json.dumps(asdict(schema), allow_nan=False)))
    assert again == schema
    first, second = zip(*others, strict=True)
    encoded = again.encode(Table({"x": list(first), "y": list(second)}, list(range(len(others)))))
    assert encoded.shape == (len(others), schema.features)
    assert np.isfinite(encoded).all()


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="unknown kind 'date'"):
        Schema.from_json({"columns": [{"kind": "date", "name": "x"}], "dropped": {}, "notes": {}})
