"""The experiments on logistic regression, on a tiny problem: files, what is not computed twice, the page."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from helpers import fake_experiments
from slangvi_reproduction.experiments import (
    EXPERIMENTS,
    logreg,
    logreg_convergence,
    logreg_covariance,
    logreg_online_eig,
    module_name,
)
from slangvi_reproduction.experiments._logistic import METRICS
from slangvi_reproduction.experiments._logistic_cells import Recipe
from slangvi_reproduction.experiments._logistic_tables import main_recipe, require_data
from slangvi_reproduction.experiments.report import write
from slangvi_reproduction.experiments.results import read_posteriors, read_rows
from slangvi_reproduction.experiments.settings import Settings

LOGISTIC = [name for name in EXPERIMENTS if name.startswith("logreg")]
SOME = {"datasets": ("breast_cancer", "usps_3vs5"), "methods": ("mf_exact", "slang_1", "full_exact")}


@pytest.fixture
def computed(monkeypatch):
    return fake_experiments.inject(monkeypatch)


@pytest.fixture
def settings(tmp_path):
    return Settings(out=tmp_path / "results", epochs=3, splits=2, command="slangvi reproduce logreg")


def test_logreg_writes_tables_posteriors_and_how_they_came_about(computed, settings):
    outcome = logreg.run(replace(settings, **SOME))
    assert [path.name for path in outcome.files] == [
        "logreg.csv",
        "logreg-splits.csv",
        "logreg-posteriors.npz",
        "logreg.json",
    ]
    rows = read_rows(settings.out / "logreg.csv")
    assert [row[:3] for row in rows] == [
        (dataset, metric, method)
        for metric in METRICS
        for dataset in ("breast_cancer", "usps_3vs5")
        for method in ("mf_exact", "slang_1", "full_exact")
    ]
    assert all(row.n == 2 and row.worst >= row.median for row in rows)
    assert all(row.mean == 0 for row in rows if row[1:3] == ("symmetric_kl", "full_exact"))
    assert len((settings.out / "logreg-splits.csv").read_text().splitlines()) == 1 + 2 * 2 * 3
    q = read_posteriors(settings.out / "logreg-posteriors.npz")
    assert q["usps_3vs5/slang_1"].covariance.shape == (4, 4)
    about = json.loads((settings.out / "logreg.json").read_text())
    assert about["command"] == "slangvi reproduce logreg"
    assert about["settings"] == {"quick": False, "epochs": 3, "splits": 2, "mc_samples": 12, "decay": 0.51}
    cell = about["cells"]["breast_cancer slang_1"]
    assert (cell["settings"]["batch_size"], cell["settings"]["lr"], cell["settings"]["momentum"]) == (32, 0.05, 0.9)
    assert about["cells"]["breast_cancer full_exact"]["gradient_norm"] < 1e-8
    assert {"torch", "device", "seconds", "seed"} <= about.keys()


def test_finished_cells_are_used_again_and_tables_grow(computed, settings):
    logreg.run(replace(settings, datasets=("breast_cancer",), methods=("slang_1",)))
    assert computed == ["breast_cancer full_exact", "breast_cancer slang_1"]
    outcome = logreg.run(replace(settings, datasets=("breast_cancer",), methods=("mf_ef",)))
    assert computed[2:] == ["breast_cancer mf_ef"]
    assert {row.method for row in outcome.rows} == {"full_exact", "slang_1", "mf_ef"}
    about = (settings.out / "logreg.json").read_text()
    again = logreg.run(replace(settings, datasets=("breast_cancer",), methods=("mf_ef",), command="other"))
    assert len(computed) == 3
    assert again.rows == outcome.rows
    assert (settings.out / "logreg.json").read_text() == about, (
        "command and time are those of the run that did the work"
    )


def test_other_settings_are_other_cells_and_force_computes_again(computed, settings):
    one = replace(settings, datasets=("breast_cancer",), methods=("mf_ef",))
    logreg.run(one)
    for other in (replace(one, seed=1), replace(one, epochs=4), replace(one, force=True, epochs=4)):
        before = len(computed)
        logreg.run(other)
        assert "breast_cancer mf_ef" in computed[before:]
    with pytest.raises(ValueError, match="is from a run of 4 epochs and 2 splits"):
        logreg.run(one)


def test_the_papers_settings_are_the_default():
    recipe = main_recipe(Settings())
    assert (recipe.epochs, recipe.mc_samples, recipe.decay, recipe.lr("a1a", "slang_1")) == (10_000, 12, 0.51, 0.05)
    assert [len(recipe.splits(name)) for name in logreg.DATASETS] == [20, 20, 1, 20]
    quick = main_recipe(Settings(quick=True))
    assert (quick.epochs, [len(quick.splits(name)) for name in logreg.DATASETS]) == (500, [5, 5, 1, 5])


def test_only_the_large_matrices_are_trained_in_float32():
    recipe = main_recipe(Settings())
    cells = [recipe.cell(dataset, method) for dataset in logreg.DATASETS for method in logreg.METHODS]
    single = [cell.label for cell in cells if cell.settings.get("dtype", "float64") != "float64"]
    assert single == ["usps_3vs5 full_ef", "usps_3vs5 full_hess"]


def test_exact_cells_do_not_depend_on_the_training():
    long, short = (
        Recipe("logreg", epochs, lambda dataset: [1], 0, lambda dataset, method: 0.1, None) for epochs in (1, 2)
    )
    for method in ("mf_exact", "full_exact"):
        assert long.cell("a1a", method).fingerprint == short.cell("a1a", method).fingerprint
    assert long.cell("a1a", "mf_ef").fingerprint != short.cell("a1a", "mf_ef").fingerprint


def test_the_longest_cells_are_known_beforehand():
    recipe = main_recipe(Settings())
    costs = {method: recipe.cell("usps_3vs5", method).cost for method in logreg.METHODS}
    assert costs["full_ef"] > costs["slang_10"] > costs["mf_ef"] > costs["mf_exact"]
    assert recipe.cell("australian", "slang_1").cost < costs["slang_1"]


def test_online_eig_keeps_the_way_on_usps(computed, settings):
    outcome = logreg_online_eig.run(
        replace(settings, datasets=("usps_3vs5",), methods=("online_eig_1", "online_eig_2"))
    )
    assert {row.method for row in outcome.rows} == {"online_eig_1", "online_eig_2"}
    lines = (settings.out / "logreg-online-eig-trace.csv").read_text().splitlines()
    assert {line.split(",")[2] for line in lines[1:]} == {"online_eig_1", "online_eig_2", "mf_ef"}
    assert {line.split(",")[1] for line in lines[1:]} == {"symmetric_kl"}
    assert "usps_3vs5 mf_ef" in computed


def test_convergence_repeats_one_split_with_the_papers_rates(computed, settings):
    chosen = replace(settings, datasets=("usps_3vs5",), methods=("slang_5",), splits=3)
    outcome = logreg_convergence.run(chosen)
    assert {row.n for row in outcome.rows} == {3}
    about = json.loads((settings.out / "logreg-convergence.json").read_text())
    cell = about["cells"]["usps_3vs5 slang_5"]["settings"]
    assert (cell["splits"], cell["lr"], cell["decay"]) == ([1, 1, 1], 0.0215, None)
    assert "logreg-convergence-trace.csv" in [path.name for path in outcome.files]


def test_covariance_uses_what_logreg_kept(computed, settings):
    logreg.run(replace(settings, datasets=("breast_cancer",)))
    before = len(computed)
    kept = (settings.out / "logreg-posteriors.npz").read_bytes()
    for path in sorted(settings.cells.rglob("*.npz")):  # as in a clone of the repository, which has no cells
        path.unlink()
    outcome = logreg_covariance.run(replace(settings, datasets=("breast_cancer",)))
    assert len(computed) == before
    assert (settings.out / "logreg-posteriors.npz").read_bytes() == kept
    assert [row.metric for row in outcome.rows[:2]] == ["bias_mean", "bias_variance"]
    assert [row.method for row in outcome.rows[::2]] == list(logreg_covariance.METHODS)
    q = read_posteriors(settings.out / "logreg-posteriors.npz")["breast_cancer/slang_5"]
    assert [row.mean for row in outcome.rows if row.method == "slang_5"] == [q.loc[0], q.covariance[0, 0]]


def test_covariance_trains_what_is_missing(computed, settings):
    logreg.run(replace(settings, datasets=("breast_cancer",), methods=("slang_1",)))
    logreg_covariance.run(replace(settings, datasets=("breast_cancer",), methods=("slang_1", "slang_5")))
    assert computed == ["breast_cancer full_exact", "breast_cancer slang_1", "breast_cancer slang_5"]
    assert "breast_cancer/slang_5" in read_posteriors(settings.out / "logreg-posteriors.npz")
    logreg_covariance.run(replace(settings, datasets=("breast_cancer",), methods=("slang_1", "slang_5")))
    assert len(computed) == 3


def test_covariance_does_not_mix_runs(computed, settings):
    one = replace(settings, datasets=("breast_cancer",), methods=("slang_1", "full_exact"))
    logreg.run(one)
    before = (settings.out / "logreg-posteriors.npz").read_bytes()
    for other in (replace(one, seed=1), replace(one, epochs=4)):
        with pytest.raises(ValueError, match="is from a run of logreg with epochs 3, splits 2, seed 0, and this one"):
            logreg_covariance.run(other)
    assert (settings.out / "logreg-posteriors.npz").read_bytes() == before
    alone = replace(one, out=settings.out / "alone")
    first = logreg_covariance.run(alone).rows
    assert logreg_covariance.run(replace(alone, seed=1)).rows != first
    assert logreg_covariance.run(alone).rows == first


def test_a_clone_without_cells_loses_nothing(computed, settings):
    one = replace(settings, datasets=("breast_cancer",), methods=("mf_exact", "slang_1"))
    logreg.run(one)
    logreg_covariance.run(one)
    kept = {path: path.read_bytes() for path in settings.out.iterdir() if path.is_file()}
    for path in sorted(settings.cells.rglob("*.npz")):
        path.unlink()
    logreg_covariance.run(one)
    assert {path: path.read_bytes() for path in settings.out.iterdir() if path.is_file()} == kept
    with pytest.raises(ValueError, match=r"has 3 cells of other settings .* \(breast_cancer full_exact, "):
        logreg.run(replace(one, datasets=("a1a",), methods=("full_exact", "mf_exact"), epochs=9, splits=3))
    assert {path: path.read_bytes() for path in settings.out.iterdir() if path.is_file()} == kept


@pytest.mark.parametrize("experiment", [logreg, logreg_online_eig, logreg_convergence])
def test_a_clone_goes_on_where_the_table_is(experiment, computed, settings):
    methods = experiment.METHODS[:1]
    first, second = ({"datasets": (name,), "methods": methods} for name in ("usps_3vs5", "breast_cancer"))
    whole, parts = fake_experiments.assert_alike_in_two_places(experiment, settings, first, second)
    if experiment is logreg:
        kept, made = (read_posteriors(folder / "logreg-posteriors.npz") for folder in (parts, whole))
        assert kept.keys() == made.keys()
        assert all(np.array_equal(kept[name].covariance, made[name].covariance) for name in made)


def test_cells_of_an_old_table_are_said_to_be_of_its_machine(computed, settings):
    one = replace(settings, methods=("mf_exact",))
    about = logreg.run(replace(one, datasets=("breast_cancer",))).files[-1]
    told = json.loads(about.read_text()) | {"device": "another machine"}
    for facts in told["cells"].values():
        del facts["device"]
    about.write_text(json.dumps(told))
    shutil.rmtree(settings.cells)
    logreg.run(replace(one, datasets=("a1a",)))
    found = {label: facts["device"] for label, facts in json.loads(about.read_text())["cells"].items()}
    assert found["breast_cancer mf_exact"] == "another machine"
    assert found["a1a mf_exact"] != "another machine"


def test_a_table_that_is_gone_is_missed_by_name(computed, settings):
    one = replace(settings, methods=("mf_exact",))
    logreg.run(replace(one, datasets=("breast_cancer",)))
    shutil.rmtree(settings.cells)
    (settings.out / "logreg-splits.csv").unlink()
    with pytest.raises(ValueError, match=r"logreg-splits.csv is missing, though logreg.json beside it"):
        logreg.run(replace(one, datasets=("a1a",)))


def test_missing_data_are_told_before_anything_is_computed(settings, monkeypatch, tmp_path):
    from slangvi.errors import DataError

    monkeypatch.setenv("SLANGVI_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    with pytest.raises(DataError, match="a1a"):
        require_data(["a1a"])
    with pytest.raises(DataError, match="australian"):
        logreg.run(settings)
    assert not settings.out.exists()


@pytest.mark.parametrize("name", LOGISTIC)
def test_unknown_names_are_refused_with_the_nearest(name, settings, computed):
    module = import_module(module_name(name))
    with pytest.raises(ValueError, match=r"unknown dataset 'usps'\. Did you mean 'usps_3vs5'\?"):
        module.run(replace(settings, datasets=("usps",)))
    assert computed == []


def test_the_page_shows_paper_and_ours_side_by_side(computed, settings, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "_results_notes.md").write_text("Something to say.\n")
    for name in LOGISTIC:
        import_module(module_name(name)).run(replace(settings, datasets=("australian", "usps_3vs5")))
    paths = write(settings.out, docs)
    assert paths[0] == docs / "results.md"
    assert sorted(path.name for path in (docs / "images").iterdir()) == sorted(path.name for path in paths[1:])
    assert all(0 < path.stat().st_size < 300_000 for path in paths[1:])
    page = paths[0].read_text()
    lines = page.splitlines()
    ours = next(
        row for row in read_rows(settings.out / "logreg.csv") if row[:3] == ("australian", METRICS[0], "slang_1")
    )
    line = next(line for line in lines if line.startswith("| slang_1 | 0.5744 ± 0.0055 |"))
    assert f"| {ours.mean:.4f} ± {ours.standard_error:.4f} |" in line
    assert line.endswith(("| ✓ |", "| ✗ |"))
    assert sum(line.startswith("| full_hess |") for line in lines) == 2 * 3
    assert "not converged in the paper" in page
    assert "paper, distance" in page
    assert "| Australian | mf_exact | 19.94 |" in page
    assert "ended with gradient norms of at most" in page
    assert page.count("numbers agree") == 4
    assert page.count("```{image}") == len(paths) - 1
    assert "_results_notes.md" in page


def test_the_same_results_give_the_same_page(computed, settings, tmp_path):
    logreg_online_eig.run(replace(settings, datasets=("usps_3vs5",)))
    text, (picture,) = logreg_online_eig.section(settings.out, tmp_path)
    before = picture.read_bytes()
    assert logreg_online_eig.section(settings.out, tmp_path) == (text, [picture])
    assert picture.read_bytes() == before


def test_the_page_says_what_was_not_run_and_refuses_quick_runs(computed, settings, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    settings.out.mkdir()
    (path,) = write(settings.out, docs)
    assert path.read_text().count("Not run yet: `slangvi reproduce ") == len(EXPERIMENTS)
    logreg.run(replace(settings, quick=True, datasets=("breast_cancer",), methods=("mf_exact",)))
    with pytest.raises(ValueError, match="comes from a --quick run"):
        write(settings.out, docs)
