"""The UCI sets without a search, on a tiny set: cells in parts, results, the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from helpers import fake_uci
from slangvi_reproduction.data import standardise
from slangvi_reproduction.experiments import _uci_defaults_cells, _uci_tables, uci, uci_defaults
from slangvi_reproduction.experiments._cells import Attempt, Stopped, compute, read_cell
from slangvi_reproduction.experiments._uci_defaults_cells import COLUMNS
from slangvi_reproduction.experiments.results import Row, read_rows, read_table, write_rows
from slangvi_reproduction.experiments.settings import Settings


@pytest.fixture
def settings(tmp_path, monkeypatch):
    for module in (_uci_defaults_cells, _uci_tables):
        monkeypatch.setattr(module, "load_uci", fake_uci.tiny)
    return Settings(tmp_path / "results", splits=3, quick=True, command="slangvi reproduce uci-defaults")


def test_one_recipe_for_all_sets_and_no_search():
    cells = uci_defaults.plan(uci_defaults.chosen(Settings()), uci_defaults.DATASETS, [uci_defaults.MAIN])
    assert len(cells) == 8
    assert all(cell.settings == cells[0].settings for cell in cells)
    assert cells[0].settings["temperature"] == 1.0
    assert [split for part in cells[0].needs for split in part.settings["splits"]] == list(range(20))


def test_variants_are_on_some_splits_of_the_small_sets():
    cells = uci_defaults.plan(uci_defaults.chosen(Settings()), uci_defaults.DATASETS, uci_defaults.METHODS)
    few = [cell for cell in cells if cell.method != uci_defaults.MAIN]
    assert {cell.dataset for cell in few} == set(uci_defaults.SMALL)
    assert {len(cell.settings["splits"]) for cell in few} == {uci_defaults.FEW}


def test_tables_and_the_page(settings, tmp_path):
    outcome = uci_defaults.run(replace(settings, datasets=("yacht", "wine")))
    assert [(row.dataset, row.method, row.n) for row in outcome.rows if row.metric == "test_rmse"] == [
        ("wine", "slang_8", 3),
        ("yacht", "slang_8", 3),
        ("yacht", "slang_8_prior", 3),
        ("yacht", "slang_8_cold", 3),
    ]
    assert all(math.isfinite(row.mean) for row in outcome.rows)
    lines = read_table(settings.out / "uci-defaults-splits.csv", ("dataset", "method", "split", *COLUMNS))
    given = [float(line["log_lambda"]) for line in lines if line["method"] == "slang_8"]
    assert given == pytest.approx([math.log(0.2)] * 6, rel=1e-6)
    about = json.loads((settings.out / "uci-defaults.json").read_text())
    assert about["cells"]["yacht slang_8"]["seconds"] > 0
    text, _ = uci_defaults.section(settings.out, tmp_path)
    assert "| Yacht, slang_8 | -1.88 ± 0.01 |" in text
    assert "slang_8_prior |" not in text
    assert "of 2 sets, better on" in text
    write_rows(settings.out / "uci.csv", [Row("yacht", "test_log_likelihood", "ensemble_5", 99.0, 0.0, 99.0, 99.0, 3)])
    rows = [row for row in read_rows(settings.out / "uci-defaults.csv") if row.dataset == "yacht"]
    main = [row for row in rows if row.method == uci_defaults.MAIN]
    assert "on 0 of 1 sets (Yacht -" in uci_defaults._near(main, read_rows(settings.out / "uci.csv"))[0]


def test_gains_are_over_the_splits_that_both_have():
    found = {("yacht", method, str(split)): value for method, split, value in
             [("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 0.5), ("b", 1, 1.0), ("b", 2, 9.0)]}  # fmt: skip
    assert uci_defaults._gain(found, "yacht", "a", "b") == "+0.750 ± 0.250 (2)"
    assert uci_defaults._gain(found, "wine", "a", "b") == ""


def test_a_part_goes_on_where_it_was_stopped(settings):
    common = uci_defaults.chosen(settings)
    (cell,) = uci_defaults.plan(common, ["boston"], ["slang_8_prior"])
    part = cell.needs[0]
    assert len(part.settings["splits"]) == uci_defaults.AT_ONCE
    with pytest.raises(Stopped):
        compute(part, settings.cells, lambda done, steps: True)
    kept = Attempt(part, settings.cells, lambda done, steps: False).restored()
    compute(part, settings.cells, lambda done, steps: False)
    whole = read_cell(part, settings.cells).arrays
    assert [len(whole[name]) for name in COLUMNS] == [uci_defaults.AT_ONCE] * 4
    assert all(np.array_equal(whole[name][:1], kept[name]) for name in COLUMNS)


def test_cooling_takes_prior_and_start_along(monkeypatch):
    seen = []
    real = _uci_defaults_cells.slangvi.SLANG
    monkeypatch.setattr(
        _uci_defaults_cells.slangvi, "SLANG", lambda model, **given: seen.append(given) or real(model, **given)
    )
    data, common = fake_uci.tiny(), uci_defaults.chosen(Settings(quick=True))
    parts = standardise(data, data.splits[0])
    for method in ("slang_8", "slang_8_cold"):
        _uci_defaults_cells.fit(parts, common | uci_defaults.VARIANTS[method], 0)
    warm, cold = seen
    assert cold["temperature"] == uci.COLD
    assert cold["prior_precision"]["*"] == warm["prior_precision"]["*"] / uci.COLD
    assert cold["init_precision"] == pytest.approx(warm["init_precision"] / uci.COLD)
