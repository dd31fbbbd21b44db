"""Files of results: aggregates, tables, posteriors, and runs that must not be overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._earlier import known_cells
from slangvi_reproduction.experiments.results import (
    Posterior,
    Row,
    aggregate,
    read_about,
    read_posteriors,
    read_rows,
    read_table,
    refuse_shorter,
    write_about,
    write_posteriors,
    write_rows,
    write_table,
)


def test_aggregates_over_splits():
    row = aggregate("a1a", "symmetric_kl", "slang_1", np.array([4.0, 1.0, 2.0, 9.0]))
    assert row == Row("a1a", "symmetric_kl", "slang_1", 4.0, np.std([4, 1, 2, 9], ddof=1) / 2, 3.0, 9.0, 4)


def test_one_split_has_no_standard_error():
    assert aggregate("a1a", "symmetric_kl", "slang_1", [2.0]) == (
        "a1a",
        "symmetric_kl",
        "slang_1",
        2.0,
        0.0,
        2.0,
        2.0,
        1,
    )


def test_rows_survive_the_file(tmp_path):
    rows = [Row("a", "m", "x", 1 / 3, 1e-9, 22398.4321, 1e5, 20), Row("b", "m", "y", 0.0, 0.0, 0.0, 0.0, 1)]
    write_rows(tmp_path / "t.csv", rows)
    text = (tmp_path / "t.csv").read_text()
    assert text.splitlines()[0] == "dataset,metric,method,mean,standard_error,median,worst,n"
    assert text.splitlines()[1] == "a,m,x,0.33333333,1e-09,22398.432,100000,20"
    for row, found in zip(rows, read_rows(tmp_path / "t.csv"), strict=True):
        assert found[:3] + found[7:] == row[:3] + row[7:]
        assert found[3:7] == pytest.approx(row[3:7], rel=1e-7)


def test_tables_with_other_columns_are_refused(tmp_path):
    write_table(tmp_path / "t.csv", ("a", "b"), [(1, "x")])
    assert read_table(tmp_path / "t.csv", ("a", "b")) == [{"a": "1", "b": "x"}]
    with pytest.raises(ValueError, match=r"t\.csv does not have the columns a,c\. Run `slangvi reproduce` again"):
        read_table(tmp_path / "t.csv", ("a", "c"))


@pytest.mark.parametrize(("size", "tolerance"), [(3, 0.0), (120, 1e-6)])
def test_posteriors_survive_the_file(tmp_path, size, tolerance):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(size, size))
    q = Posterior(rng.normal(size=size), root @ root.T)
    write_posteriors(tmp_path / "q.npz", {"a1a/slang_1": q, "a1a/mf_ef": Posterior(q.loc, np.eye(size))})
    found = read_posteriors(tmp_path / "q.npz")
    assert found.keys() == {"a1a/slang_1", "a1a/mf_ef"}
    np.testing.assert_array_equal(found["a1a/slang_1"].loc, q.loc)
    np.testing.assert_allclose(found["a1a/slang_1"].covariance, q.covariance, rtol=tolerance)
    np.testing.assert_array_equal(found["a1a/mf_ef"].covariance, np.eye(size))


def test_posteriors_of_the_whole_table_take_less_than_two_megabytes(tmp_path):
    rng = np.random.default_rng(0)
    many = {
        f"{size}/{k}": Posterior(rng.normal(size=size), rng.normal(size=(size, size)))
        for size in (257, 124, 15, 11)
        for k in range(7)
    }
    write_posteriors(tmp_path / "q.npz", many)
    assert (tmp_path / "q.npz").stat().st_size < 2e6


def test_shorter_runs_do_not_replace_longer_ones(tmp_path):
    path = tmp_path / "logreg.json"
    refuse_shorter(path, 1, 1)
    write_about(path, {"settings": {"epochs": 100, "splits": 20}})
    refuse_shorter(path, 100, 20)
    for epochs, splits in ((99, 20), (100, 5)):
        with pytest.raises(ValueError, match="is from a run of 100 epochs and 20 splits, and would be replaced"):
            refuse_shorter(path, epochs, splits)


@pytest.mark.parametrize("content", ["", "[]", "{}", '"text"'])
def test_strange_json_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match="was not written by `slangvi reproduce`"):
        read_about(tmp_path / "a.json")


@pytest.mark.parametrize("same", [True, False])
def test_cells_are_known_if_they_were_made_with_the_settings_they_are_planned_with(same, tmp_path):
    cells = [Cell("g", "data", method, {"lr": 0.1}, "module:work") for method in "abcd"]
    told = {"a": {"fingerprint": cells[0].fingerprint}, "b": {"fingerprint": "another"}, "c": {}, "z": {}}
    about = {"settings": {"epochs": 1}, "device": "H", "cells": {f"data {name}": each for name, each in told.items()}}
    write_about(tmp_path / "t.json", about)
    found = known_cells(tmp_path / "t.json", {"epochs": 1 if same else 2}, cells)
    # Where no fingerprint is told, what all cells share decides.
    assert list(found) == (["data a", "data c"] if same else ["data a"])
    assert found["data a"] == {"device": "H", "fingerprint": cells[0].fingerprint}
    assert known_cells(tmp_path / "none.json", {"epochs": 1}, cells) == {}
