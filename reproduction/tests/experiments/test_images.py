"""The experiment with convolutions, on tiny images: cells, tables, the page."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from helpers import fake_experiments, fake_mnist
from slangvi_reproduction.experiments import _image_cells, _images_pages, images
from slangvi_reproduction.experiments._image_learners import IMAGE_LEARNERS
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._images_pages import COLUMNS, STRANGER_COLUMNS, TURNED_COLUMNS
from slangvi_reproduction.experiments.results import read_table
from slangvi_reproduction.experiments.settings import Settings

TINY = {
    "num_images": {"tuning": 60, "train": 60, "validation": 20, "test": 20},
    "batch": 30,
    "draws": 2,
    "trace_draws": 1,
    "degrees": [0, 90],
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    real = images.chosen
    with pytest.MonkeyPatch.context() as patch:
        fake_mnist.inject(patch)
        patch.setattr(images, "chosen", lambda settings: real(settings) | TINY)
        out = tmp_path_factory.mktemp("images") / "results"
        yield Settings(out=out, epochs=1, quick=True, command="slangvi reproduce images --quick")
    _image_cells.load.cache_clear()


@pytest.fixture(scope="module")
def ran(settings):
    return settings, images.run(settings)


def test_run_writes_the_tables(ran):
    settings, outcome = ran
    lines = read_table(settings.out / "images.csv", COLUMNS)
    assert [(line["data"], line["network"], line["method"]) for line in lines] == [
        ("mnist", "lenet", "slang_8"),
        ("mnist", "lenet", "map"),
        ("mnist", "lenet", "laplace"),
    ]
    turned = read_table(settings.out / "images-turned.csv", TURNED_COLUMNS)
    assert [line["degrees"] for line in turned] == ["0", "90"] * 3
    for straight, line in zip(turned[::2], lines, strict=True):  # not turned, with the same draws
        assert float(straight["test_nll"]) == pytest.approx(float(line["test_nll"]), rel=1e-4)
    strangers = read_table(settings.out / "images-strangers.csv", STRANGER_COLUMNS)
    assert [line["strangers"] for line in strangers] == ["fashion_mnist", "letters"] * 3
    # Here the other set is the same images, of which uncertainty can tell nothing.
    assert {line["entropy_auroc"] for line in strangers[::2]} == {"0.5"}
    assert read_table(settings.out / "images-tuning.csv", _images_pages.TUNING.columns) == []  # --quick tries none
    assert len(outcome.rows) == 3 * len(METRICS)
    assert json.loads((settings.out / "images.json").read_text())["settings"]["splits"] == 1


def test_what_a_run_does_not_compute_stays_in_the_tables(ran, tmp_path):
    settings = ran[0]
    out = tmp_path / "clone"
    shutil.copytree(settings.out, out, ignore=shutil.ignore_patterns(".cells"))
    images.run(replace(settings, out=out, methods=("map",)))
    for name in ("images.csv", "images-turned.csv", "images-strangers.csv"):
        assert (out / name).read_text() == (settings.out / name).read_text(), name


def test_tables_are_extended_without_computing_what_they_hold(ran, tmp_path, monkeypatch):
    settings, asked = ran[0], []
    clone = replace(settings, out=tmp_path / "clone", extend=True)
    shutil.copytree(settings.out, clone.out, ignore=shutil.ignore_patterns(".cells"))
    compute = _image_cells.compute_final
    monkeypatch.setattr(_image_cells, "compute_final", lambda cell, at: asked.append(cell.method) or compute(cell, at))
    images.run(clone)
    for name in ("images.csv", "images-turned.csv", "images-strangers.csv"):
        assert (clone.out / name).read_text() == (settings.out / name).read_text(), name
    images.run(replace(clone, splits=2, methods=("laplace",)))
    assert asked == ["laplace-seed1"]


def test_a_run_that_was_lost_has_no_lines_on_shift():
    cell = images.plan(images.tables(images.chosen(Settings())), ["mnist_lenet"], ["map"])[0]
    stored = images.Finished(cell, type("Stored", (), {"arrays": {"ece": np.array([np.nan])}})())
    assert images._lines(stored, "degrees", "turned") == []


def test_the_page_is_written_from_the_files(ran, tmp_path):
    text, pictures = fake_experiments.page_of("images", ran[0].out, tmp_path)
    assert "### MNIST, LeNet-5" in text
    assert "| letters, slang_8 |" in text
    assert [path.name for path in pictures] == ["results-images-mnist-lenet.png"]
    assert pictures[0].stat().st_size > 5000


def test_all_data_sets_networks_and_rivals_are_planned():
    rows = images.tables(images.chosen(Settings(device="cuda")))
    cells = images.plan(rows, images.DATASETS, images.METHODS)
    assert len(cells) == 4 * 7 * 3
    assert {len(cell.needs) for cell in cells} == {6}
    assert {cell.settings["chosen_by"] for cell in cells} == {"test_nll"}
    assert {cell.settings["learner"] for cell in cells} <= set(IMAGE_LEARNERS)
    fashion = next(cell for cell in cells if cell.dataset == "fashion_mnist_resnet")
    assert fashion.settings["strangers"] == ["mnist", "letters"]
    assert {cell.dataset: cell.settings["stages"] for cell in cells} == {
        f"{data}_{network}": [["train", epochs]]
        for data in ("mnist", "fashion_mnist")
        for network, epochs in (("lenet", 20), ("resnet", 10 if data == "mnist" else 20))
    }
    assert set(_images_pages.COLORS) == set(images.METHODS)


def line(method, nll, network="lenet"):
    return {"data": "mnist", "network": network, "method": method, "test_nll": str(nll)}


def test_verdicts_compare_likelihoods():
    told = _images_pages.verdicts([line("slang_8", 0.02), line("map", 0.03), line("ivon", 0.02)])
    assert told == [
        "MNIST, LeNet-5: the NLL of slang_8, 0.0200, is below that of map, 0.0300.",
        "MNIST, LeNet-5: the NLL of slang_8, 0.0200, is not below that of ivon, 0.0200.",
    ]
