"""OnlineEig with small networks, on a tiny set: its cells, the trace on Energy, tables, the page."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import fake_experiments, fake_uci
from slangvi_reproduction.experiments import _uci_cells, uci, uci_online_eig
from slangvi_reproduction.experiments._cells import Attempt, Stopped
from slangvi_reproduction.experiments._learners import LEARNERS
from slangvi_reproduction.experiments._logistic_tables import TRACE_COLUMNS
from slangvi_reproduction.experiments._regression import Scores
from slangvi_reproduction.experiments._watch import Watch
from slangvi_reproduction.experiments.paper import Printed, printed
from slangvi_reproduction.experiments.results import Row, read_rows, read_table, write_rows
from slangvi_reproduction.experiments.settings import Settings

FAST = {"evaluations": 2, "at_once": 1, "folds": 2, "hidden": 5, "search_draws": 10, "test_draws": 20, "mc_samples": 2}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    fake_uci.inject(monkeypatch)
    chosen = uci.chosen
    monkeypatch.setattr(uci, "chosen", lambda settings: chosen(settings) | FAST)
    middle = lambda box, histories, count, seeds, jobs: [[(-0.1, -2.0)] * count for _ in seeds]  # noqa: E731
    monkeypatch.setattr(_uci_cells, "propose_all", middle)
    return Settings(tmp_path / "results", epochs=3, splits=2, quick=True, command="slangvi reproduce uci-online-eig")


@pytest.fixture
def done(settings):
    chosen = replace(settings, datasets=("energy",))
    return chosen, uci_online_eig.run(chosen)


def trace_cell(settings, method):
    return next(cell for cell in uci_online_eig.along(settings) if cell.settings["learner"] == method)


def computed(cell, folder, report=lambda done, steps: False):
    return _uci_cells.compute_trace(cell, Attempt(cell, folder, report))


# ---- cells ----


def test_cells_differ_from_the_first_table_in_method_and_rates():
    (first,) = uci.plan(uci.chosen(Settings()), ["boston"], ["slang_1"])
    (ours,) = uci.plan(uci_online_eig.chosen(Settings()), ["boston"], ["online_eig_1"], uci.chosen(Settings()))
    assert first.group == ours.group
    borrowed = {"evaluations": 0, "points_of": "slang_1"}
    assert dict(first.settings) | uci_online_eig.OWN | borrowed == ours.settings
    (lender,) = ours.needs
    assert (lender.label, lender.fingerprint) == (first.label, first.fingerprint)
    assert set(uci_online_eig.METHODS) | set(uci_online_eig.DRAWN_METHODS) <= set(LEARNERS)


def test_cells_of_the_figure_have_names_and_rates_of_their_own():
    cells = uci_online_eig.along(Settings())
    labels = {cell.label for cell in (*cells, *uci.plan(uci.chosen(Settings()), ["energy"], LEARNERS))}
    assert len(labels) == len(cells) + len(LEARNERS)
    rates = {cell.settings["learner"]: (cell.settings["lr"], cell.settings["precision_lr"]) for cell in cells}
    assert rates["slang_1"] == (uci.LR, "slow")
    assert {rates[f"online_eig_{rank}"] for rank in (1, 2, 5)} == {(0.02, 0.001)}


def test_the_trace_is_that_of_training_without_a_look(settings, tmp_path):
    """Watched at few steps or at many, a network is the same."""
    cell = trace_cell(settings, "online_eig_2")
    few = replace(cell, settings=cell.settings | {"trace_points": 2})
    many = replace(cell, settings=cell.settings | {"trace_points": 40})
    a, b = computed(few, tmp_path / "a"), computed(many, tmp_path / "b")
    assert a["trace_steps"].tolist() == [1, 9]
    assert b["trace_steps"].tolist() == list(range(1, 10))
    for name in ("trace_rmse", "trace_log_likelihood"):
        assert a[name].shape == (2, 2)
        assert np.array_equal(a[name], b[name][[0, 8]])
    assert len(np.unique(b["trace_rmse"])) == 18


def test_a_trace_stopped_anywhere_ends_where_it_would_have(settings, tmp_path):
    cell, stops = trace_cell(settings, "online_eig_1"), [1, 2]

    def report(done, steps):
        assert steps == 3
        return bool(stops) and done == stops[0] and bool(stops.pop(0))

    for _ in range(2):
        with pytest.raises(Stopped):
            computed(cell, tmp_path / "b", report)
    resumed, straight = computed(cell, tmp_path / "b", report), computed(cell, tmp_path / "a")
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


def test_a_watch_leaves_the_generator_where_it_was():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    watch = Watch([2], seed=lambda step: step)
    look = lambda: Scores(*torch.rand(2, 4, generator=generator))  # noqa: E731
    for _ in range(3):
        watch.step(generator, look)
    assert torch.equal(generator.get_state(), before)
    expected = torch.rand(2, 4, generator=torch.Generator().manual_seed(2)).double().numpy()
    assert np.array_equal(watch.values("rmse"), expected[:1])
    assert Watch().arrays() == {}


# ---- files and the page ----


def test_tables_of_splits_and_along_the_way(done):
    _, outcome = done
    names = [path.name for path in outcome.files]
    assert names == [f"uci-online-eig{end}" for end in (".csv", "-splits.csv", "-trace.csv", ".json")]
    rows = read_rows(outcome.files[0])
    assert [row[:3] for row in rows] == [("energy", metric, "online_eig_1") for metric in _uci_cells.METRICS]
    assert len(outcome.files[1].read_text().splitlines()) == 1 + 2
    lines = read_table(outcome.files[2], TRACE_COLUMNS)
    assert {line["method"] for line in lines} == {f"{method}-trace" for method in uci_online_eig.DRAWN_METHODS}
    assert {int(line["n"]) for line in lines} == {2}
    for line in lines:
        higher = line["metric"] == "test_log_likelihood"
        worst, mean = float(line["worst"]), float(line["mean"])
        assert worst <= mean if higher else worst >= mean
    about = json.loads(outcome.files[3].read_text())
    assert len(about["cells"]) == 1 + len(uci_online_eig.DRAWN_METHODS)


def test_another_set_has_no_trace_and_loses_none(done):
    settings, before = done
    trace = before.files[2].read_text()
    outcome = uci_online_eig.run(replace(settings, datasets=("yacht",)))
    assert {row.dataset for row in outcome.rows} == {"energy", "yacht"}
    assert outcome.files[2].read_text() == trace


def test_a_clone_goes_on_where_the_table_is(settings):
    fake_experiments.assert_alike_in_two_places(
        uci_online_eig, settings, {"datasets": ("energy",)}, {"datasets": ("boston",)}
    )


def test_without_its_set_the_figure_is_left_out(settings, tmp_path):
    uci_online_eig.run(replace(settings, datasets=("yacht",)))
    text, pictures = uci_online_eig.section(settings.out, tmp_path)
    assert pictures == []
    assert "image" not in text


def test_the_page_has_a_figure_the_papers_numbers_and_slang_beside_them(done, tmp_path):
    settings, _ = done
    mine = {"test_rmse": -1.0, "test_log_likelihood": 1e9}  # better than anything
    rows = [Row("energy", metric, "slang_1", mean, 0.1, mean, mean, 20) for metric, mean in mine.items()]
    write_rows(settings.out / "uci.csv", rows)
    text, pictures = uci_online_eig.section(settings.out, tmp_path)
    assert [path.name for path in pictures] == ["results-uci-online-eig.png"]
    assert pictures[0].stat().st_size > 1000
    assert "| Energy, online_eig_1 | 0.59 ± 0.01 |" in text
    assert "| Energy, online_eig_1 | -1.05 ± 0.01 |" in text
    assert "online_eig_1, RMSE: as good as the paper's on" in text
    assert "RMSE: slang_1 of ours is better on 1 of 1 sets." in text
    (settings.out / "uci.csv").unlink()
    assert "slang_1 of ours" not in uci_online_eig.section(settings.out, tmp_path)[0]


def test_the_papers_table_is_there():
    paper = printed("uci_online_eig")
    assert paper["yacht", "test_log_likelihood", "online_eig_1"] == Printed(-1.41, 0.01, 0.01)
    assert {key[0] for key in paper} == set(uci_online_eig.DATASETS)
