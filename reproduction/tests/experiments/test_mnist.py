"""The experiment on MNIST, with tiny images: learners, stages, resuming, the choice, tables and the page."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from helpers import fake_experiments, fake_mnist
from slangvi.errors import NumericalError
from slangvi_reproduction.experiments import _image_cells, _mnist_pages, mnist
from slangvi_reproduction.experiments._cells import Attempt, Cell, Stopped, write
from slangvi_reproduction.experiments._image_cells import chosen_setting, compute_final, compute_tuning
from slangvi_reproduction.experiments._image_learners import IMAGE_LEARNERS, Alone
from slangvi_reproduction.experiments._image_networks import network
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._mnist_recipes import METHODS, QUICK, RANKS, table
from slangvi_reproduction.experiments._task import Task, categorical
from slangvi_reproduction.experiments.paper import printed
from slangvi_reproduction.experiments.results import read_table
from slangvi_reproduction.experiments.settings import Settings

FULL = mnist.chosen
TINY_NETWORK = {"network": "mlp", "hidden": [12, 8]}
TINY = {
    "hidden": [12, 8],
    "num_images": {"tuning": 90, "train": 120, "validation": 30, "test": 60},
    "batch": 30,
    "mc_samples": 2,
    "draws": 12,
    "trace_draws": 5,
    "trace_points": 4,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Tiny images and networks in place of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        fake_mnist.inject(patch)
        patch.setattr(mnist, "chosen", lambda settings: FULL(settings) | TINY)
        out = tmp_path_factory.mktemp("mnist") / "results"
        yield Settings(out=out, epochs=2, quick=True, command="slangvi reproduce mnist --quick")
    _image_cells.load.cache_clear()


def cell(method="slang_1_slow", stages=(("tuning", 3), ("train", 2)), **own) -> Cell:
    recipe = METHODS[method]
    fixed = FULL(Settings()) | TINY | dict(recipe.fixed) | {"learner": recipe.learner, "seed": 0}
    fixed |= recipe.grid[len(recipe.grid) // 2] | {"stages": list(stages), "grid": [{}]} | own
    return Cell("mnist", "mnist", method, fixed, "slangvi_reproduction.experiments._image_cells:compute_tuning")


def attempt_at(tmp_path, cell, stop_at=None) -> Attempt:
    return Attempt(cell, tmp_path, lambda done, steps: done == stop_at, keep_every=1e9)


# ---- one cell ----


@pytest.mark.parametrize("method", ["slang_2_slow", "bbb", "map", "ensemble_5"])
def test_every_kind_of_method_learns(method, settings, tmp_path):
    rate = next(iter(METHODS[method].searched))
    own = {rate: 0.1 if rate == "lr" else 0.02, "hidden": [30], "draws": 40, "neg_log_sigma": 0.0}
    work = cell(method, [["train", 40]], **own)
    found = compute_tuning(work, attempt_at(tmp_path, work))
    assert found["test_error_percent"][0] < 10.0
    assert found["test_nll"][0] < 0.5 * found["trace_nll"][0]
    assert found["trace_epochs"].tolist() == [1, 3, 12, 40]
    assert set(METRICS) < set(found)


@pytest.mark.parametrize(
    ("method", "stop_at"),
    [*(("slang_2_slow", k) for k in (2, 6, 9, 11, 17)), ("slang_1", 10), ("bbb", 2), ("map", 10), ("ensemble_5", 13)],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(method, stop_at, settings, tmp_path):
    """After so many of 3 × 3 and 2 × 4 steps: within the first stage, at its end, in the second, and before the test.

    SLANG's first step after a restart is checked and takes its draws one by one, so that sums are rounded differently.
    """
    work = cell(method)
    whole = compute_tuning(work, attempt_at(tmp_path / "a", work))
    with pytest.raises(Stopped):
        compute_tuning(work, attempt_at(tmp_path / "b", work, stop_at))
    again = compute_tuning(work, attempt_at(tmp_path / "b", work))
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(value, again[name], rtol=1e-5 if method.startswith("slang") else 0, err_msg=name)


def test_a_cold_posterior_counts_examples_and_prior_more_often(settings, tmp_path):
    """p(θ | data)^(1/T) at T = 1/50 is that of 50 copies of the data, under a prior of 50 times the precision."""
    work = cell("slang_2_slow", temperature=0.02)
    run = _image_cells._Run(work.settings, attempt_at(tmp_path, work), "validation")
    cold = run._learner("tuning")
    task = Task(
        model=run.model,
        starts=run._starts,
        num_data=torch.tensor([50 * 90]),
        tau=torch.ones(1),
        prior_precision=50 * math.exp(2 * work.settings["neg_log_sigma"]) * torch.ones(1),
        batch=30,
        steps=3 * 3 + 2 * 4,
        settings=work.settings | {"temperature": 1.0, "init_precision": 50 * 1e4, "bias_precision": 50.0},
        generator=torch.Generator().manual_seed(run._seed("training")),
        log_prob=categorical,
    )
    copies = Alone(task, rank=2)
    x, y = (value[:30].unsqueeze(0) for value in run._part("tuning"))
    for _ in range(3):
        cold.step(x, y)
        copies.step(x, y)
    for name in ("loc", "prec_factor", "prec_diag"):
        torch.testing.assert_close(getattr(cold.state, name), getattr(copies.state, name), rtol=1e-4, atol=1e-4)


def test_looking_along_the_way_changes_nothing(settings, tmp_path):
    few, many = cell(trace_points=1), cell(trace_points=9)
    ends = [compute_tuning(work, attempt_at(tmp_path, work)) for work in (few, many)]
    assert [len(end["trace_epochs"]) for end in ends] == [1, 5]
    for name in METRICS:
        np.testing.assert_array_equal(ends[0][name], ends[1][name])


def test_stages_see_their_images_and_count_their_examples(settings, tmp_path, monkeypatch):
    seen = []

    class Spy:
        generator = torch.Generator()

        def __init__(self, task):
            self.size, self.steps = int(task.num_data[0]), task.steps

        def step(self, x, y):
            seen.append((self.size, self.steps, x.shape, set(y[0].tolist())))

        def draw(self, count):
            return {n: p.expand(1, count, *p.shape) for n, p in network(TINY_NETWORK).named_parameters()}

        def arrays(self):
            return {"carried": np.array(self.size)}

        def restore(self, arrays):
            assert int(arrays["carried"]) == 90

    monkeypatch.setitem(IMAGE_LEARNERS, "slang_1", Spy)
    work = cell()
    compute_tuning(work, attempt_at(tmp_path, work))
    assert [size for size, *_ in seen] == [90] * 9 + [120] * 8  # three epochs of 3 minibatches, two of 4
    assert {(steps, shape) for _, steps, shape, _ in seen} == {(17, torch.Size([1, 30, 1, 28, 28]))}


def test_the_prior_is_that_of_sigma_and_biases_have_their_own(settings, tmp_path, monkeypatch):
    tasks = []
    monkeypatch.setitem(IMAGE_LEARNERS, "slang_1", lambda task: tasks.append(task) or Alone(task, 1))
    work = cell("slang_1", [["tuning", 1]], neg_log_sigma=2.0, decay=0.6)
    compute_tuning(work, attempt_at(tmp_path, work))
    (task,) = tasks
    lam = task.spec.unflatten(task.prior.precision[0])
    assert float(lam["1.weight"].unique()) == pytest.approx(math.exp(4.0))
    assert float(lam["1.bias"].unique()) == pytest.approx(1e-6)
    assert task.rate("lr")(32) == pytest.approx(0.1 / (1 + 32**0.6))
    assert task.rate("precision_lr")(32) == task.rate("lr")(32)


def test_a_run_that_meets_nan_is_lost_and_says_so(settings, tmp_path, monkeypatch):
    number = count()

    def step(self, x, y):
        if next(number) == 4:
            raise NumericalError("step 5: the gradient is not finite.")
        real(self, x, y)

    real = Alone.step
    monkeypatch.setattr(Alone, "step", step)
    work = cell()
    found = compute_final(work, attempt_at(tmp_path, work))
    assert all(math.isnan(found[name][0]) for name in METRICS)
    assert found["probs"].shape == (0, 10)
    assert found["trace_epochs"].tolist() == [1]
    assert next(number) == 5  # nothing is trained any more


@pytest.mark.parametrize("method", ["map", "bbb"])
def test_predictions_that_are_nan_are_a_lost_run_too(method, settings, tmp_path):
    work = cell(method, adam_lr=1e30)
    found = compute_final(work, attempt_at(tmp_path, work))
    assert all(math.isnan(found[name][0]) for name in METRICS)


@pytest.mark.parametrize(
    ("by", "errors", "likelihoods"),
    [
        ({}, [math.nan, 3.0, 4.0], [0.1, 0.3, 0.2]),
        ({}, [3.0, 3.0, 4.0], [0.3, 0.2, 0.1]),
        ({"chosen_by": "test_nll"}, [1.0, 4.0, 3.0], [math.nan, 0.2, 0.3]),
    ],
    ids=["error", "tie", "nll"],
)
def test_the_final_run_takes_the_setting_that_was_best(by, errors, likelihoods, settings, tmp_path):
    needs, grid = [], [{"lr": 0.01, "neg_log_sigma": 0.0}, {"lr": 0.1, "neg_log_sigma": 1.0}, {"lr": 0.2}]
    for number, pair in enumerate(zip(errors, likelihoods, strict=True)):
        needs.append(Cell("mnist", "mnist", f"tuning{number}", {}, "none"))
        write(needs[-1].path(tmp_path), {name: np.array([x]) for name, x in zip(METRICS, pair, strict=False)}, {})
    plain = cell(grid=grid, **by)
    final = Cell(plain.group, plain.dataset, plain.method, plain.settings, plain.work, needs=tuple(needs))
    found = compute_final(final, attempt_at(tmp_path, final))
    assert int(found["choice"]) == 1
    same = cell(**grid[1])
    expected = compute_final(same, attempt_at(tmp_path / "other", same))
    np.testing.assert_array_equal(found["probs"], expected["probs"])
    assert chosen_setting([(math.nan, math.nan)] * 2) == 0
    assert chosen_setting([(math.nan, math.nan)] * 2, images=10) == 0
    assert chosen_setting([(2.0, 0.1), (1.0, math.nan)]) == 1
    close = [(2.0, 0.3), (2.13, 0.2), (2.15, 0.1), (math.nan, math.nan)]  # one standard error is 0.14
    assert [chosen_setting(close, images) for images in (0, 10_000, 1_000)] == [0, 1, 2]


# ---- recipes ----


def test_the_papers_grid_stages_and_seeds():
    common = FULL(Settings(device="cuda"))
    cells = table(common, quick=False).finals("mnist", list(METHODS))
    by_method = {name: [c for c in cells if c.method.startswith(f"{name}-")] for name in METHODS}
    for rank in RANKS:
        final = by_method[f"slang_{rank}"]
        assert len(final) == (3 if rank in (1, 8, 32) else 1)
        assert final[0].settings["stages"] == [["tuning", 100], ["train", 300]]
        grid = {(need.settings["neg_log_sigma"], need.settings["decay"]) for need in final[0].needs}
        assert grid == {(s, w) for s in (0, 1, 2) for w in (0.52, 0.54, 0.56, 0.58, 0.60)}
        assert {(c.settings["lr"], c.settings["precision_lr"], c.settings["init_precision"]) for c in final} == {
            (0.1, 0.1, 1.0)
        }
    effort = {name: len(final[0].needs) for name, final in by_method.items()}
    assert effort == {name: 8 if name.endswith("_slow") else 15 for name in METHODS}  # ours has no more than others
    assert len({need.label for name in METHODS if name.endswith("_slow") for need in by_method[name][0].needs}) == 8
    # The paper takes the lowest error; ours and its rivals are chosen by one rule.
    papers = {f"slang_{rank}" for rank in RANKS}
    assert {name: final[0].settings.get("ties_of_images") for name, final in by_method.items()} == {
        name: None if name in papers else 10_000 for name in METHODS
    }
    assert by_method["ensemble_5"][0].needs[0].label == by_method["map"][0].needs[0].label
    assert by_method["slang_8"][0].cost == pytest.approx(115_000 * 1.46e-3)
    labels = [c.label for c in cells] + [need.label for c in cells for need in c.needs]
    paths = {c.path(mnist.Path()) for c in (*cells, *(need for c in cells for need in c.needs))}
    assert len(set(labels)) == len(paths)


def test_one_setting_needs_no_choice():
    rows = table(FULL(Settings(quick=True)), quick=True)
    assert rows.tuning("mnist", "slang_8") == []
    assert len(rows.tuning("mnist", "map")) == 2
    assert set(QUICK) <= set(METHODS)


# ---- files and the page ----


@pytest.fixture(scope="module")
def ran(settings):
    return settings, mnist.run(settings)


def test_run_writes_the_tables(ran):
    settings, outcome = ran
    assert [path.name for path in outcome.files] == [
        "mnist.csv",
        "mnist-tuning.csv",
        "mnist-trace.csv",
        "mnist-predictions.npz",
        "mnist.json",
    ]
    header = (settings.out / "mnist.csv").read_text().splitlines()[0]
    assert header == "method,test_error_percent,test_nll,ece,brier,epochs,seed"
    lines = read_table(settings.out / "mnist.csv", header.split(","))
    assert [(line["method"], line["epochs"], line["seed"]) for line in lines] == [
        ("slang_1", "8", "0"),
        ("slang_8", "8", "0"),
        ("slang_1_slow", "2", "0"),
        ("slang_8_slow", "2", "0"),
        ("map", "2", "0"),
    ]
    tuning = read_table(settings.out / "mnist-tuning.csv", _mnist_pages.TUNING_COLUMNS)
    assert [line["method"] for line in tuning] == ["map", "map"]
    assert sorted(line["chosen"] for line in tuning) == ["0", "1"]
    assert {row.metric for row in outcome.rows} == set(METRICS)
    about = json.loads((settings.out / "mnist.json").read_text())
    assert about["settings"]["epochs"] == 2
    assert len(about["cells"]) == 7
    with np.load(settings.out / "mnist-predictions.npz") as file:
        assert file["slang_8/probs"].dtype == np.float16
        expected = (255 * fake_mnist.images("test").x[file["uncertain"]]).round().numpy()
        np.testing.assert_array_equal(file["images"], expected)


def test_a_second_run_computes_nothing(ran, monkeypatch):
    settings, _ = ran
    monkeypatch.setattr(_image_cells, "compute_final", None)
    again = mnist.run(settings)
    assert len(again.rows) == 20


def test_a_shorter_run_does_not_replace_a_longer_one(ran):
    with pytest.raises(ValueError, match="is from a run of 2 epochs"):
        mnist.run(replace(ran[0], epochs=1))


def cloned(settings, folder):
    """Results as in a clone of the repository: without cells."""
    out = folder / "results"
    shutil.copytree(settings.out, out, ignore=shutil.ignore_patterns(".cells"))
    return replace(settings, out=out)


@pytest.mark.parametrize("seed", [0, 4])
def test_what_a_run_does_not_compute_stays_in_the_tables(seed, ran, tmp_path):
    settings = replace(ran[0], seed=seed, out=tmp_path / "first") if seed else ran[0]
    if seed:
        mnist.run(replace(settings, methods=("slang_1_slow", "map")))
    clone = cloned(settings, tmp_path)
    mnist.run(replace(clone, methods=("map",)))
    for name in ("mnist.csv", "mnist-tuning.csv", "mnist-trace.csv"):
        assert (clone.out / name).read_text() == (settings.out / name).read_text(), name
    with np.load(clone.out / "mnist-predictions.npz") as new, np.load(settings.out / "mnist-predictions.npz") as old:
        assert set(new.files) == set(old.files)
        for name in new.files:
            np.testing.assert_array_equal(new[name], old[name])
    new, old = (json.loads((out / "mnist.json").read_text())["cells"] for out in (clone.out, settings.out))
    assert new.keys() == old.keys()
    assert all(new[label] == old[label] for label in new if "map" not in label)


def lines_of(path):
    return path.read_text().splitlines()


def test_a_number_that_is_missing_in_the_table_of_settings_is_told(ran, tmp_path):
    clone = replace(cloned(ran[0], tmp_path), extend=True, splits=2, methods=("map",))
    path = clone.out / "mnist-tuning.csv"
    first, second, *rest = lines_of(path)
    *kept, _, _ = second.split(",")
    path.write_text("\n".join([first, ",".join([*kept, "", "1"]), *rest]))
    with pytest.raises(ValueError, match=r"mnist-tuning.csv has '' for validation_nll in line 2"):
        mnist.run(clone)


def test_tables_are_extended_without_computing_what_they_hold(ran, tmp_path, monkeypatch):
    clone, asked = replace(cloned(ran[0], tmp_path), extend=True), []
    compute = _image_cells.compute_final
    monkeypatch.setattr(_image_cells, "compute_tuning", None)  # what was tried is read from the table
    monkeypatch.setattr(_image_cells, "compute_final", lambda cell, at: asked.append(cell.method) or compute(cell, at))
    shown = mnist.run(clone).rows
    assert asked == []
    assert {row.method for row in shown} == {line.partition(",")[0] for line in lines_of(clone.out / "mnist.csv")[1:]}
    mnist.run(replace(clone, splits=2, methods=("map",)))
    assert asked == ["map-seed1"]
    old, new = ((out / "mnist.csv").read_text().splitlines() for out in (ran[0].out, clone.out))
    assert new[: len(old)] == old
    assert [line.rpartition(",")[2] for line in new[len(old) :]] == ["1"]
    assert (clone.out / "mnist-tuning.csv").read_text() == (ran[0].out / "mnist-tuning.csv").read_text()
    told = [json.loads((out / "mnist.json").read_text())["cells"] for out in (ran[0].out, clone.out)]
    assert told[1].items() >= told[0].items()  # where and how long, too
    assert told[1].keys() - told[0].keys() == {"mnist map-seed1"}
    with np.load(clone.out / "mnist-predictions.npz") as new, np.load(ran[0].out / "mnist-predictions.npz") as old:
        for name in old.files:  # of the first seed, still
            np.testing.assert_array_equal(new[name], old[name])


def test_a_setting_is_tried_again_if_the_table_has_another_of_its_name(ran, tmp_path, monkeypatch):
    clone, tried = replace(cloned(ran[0], tmp_path), extend=True, splits=2, methods=("map",)), []
    about = json.loads((clone.out / "mnist.json").read_text())
    about["cells"]["mnist map-neg_log_sigma1-adam_lr0.003"]["fingerprint"] = "0123456789"
    (clone.out / "mnist.json").write_text(json.dumps(about))
    compute = _image_cells.compute_tuning
    monkeypatch.setattr(_image_cells, "compute_tuning", lambda cell, at: tried.append(cell.method) or compute(cell, at))
    mnist.run(clone)
    assert tried == ["map-neg_log_sigma1-adam_lr0.003"]


def test_a_choice_that_is_taken_over_stays_marked(ran, tmp_path):
    """Cells of the search are here again, the run that chose from them is not."""
    clone = cloned(ran[0], tmp_path)
    for path in (ran[0].cells / "mnist").glob("mnist-map-neg*"):
        (clone.cells / "mnist").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, clone.cells / "mnist")
    mnist.run(replace(clone, methods=("slang_1_slow",)))
    assert (clone.out / "mnist-tuning.csv").read_text() == (ran[0].out / "mnist-tuning.csv").read_text()


def test_settings_that_are_no_longer_searched_are_forgotten(ran, tmp_path):
    clone = cloned(ran[0], tmp_path)
    about = json.loads((clone.out / "mnist.json").read_text())
    for method in ("map", "slang_1"):
        about["cells"][f"mnist {method}-adam_lr7"] = about["cells"]["mnist map-seed0"]
    (clone.out / "mnist.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"has 1 cells .*mnist slang_1-adam_lr7"):
        mnist.run(replace(clone, methods=("map",)))
    del about["cells"]["mnist slang_1-adam_lr7"]
    (clone.out / "mnist.json").write_text(json.dumps(about))
    mnist.run(replace(clone, methods=("map",)))
    assert "mnist map-adam_lr7" not in json.loads((clone.out / "mnist.json").read_text())["cells"]


@pytest.mark.parametrize("other", ["a cell", "all"])
def test_lines_of_other_settings_are_not_mixed_in(other, ran, tmp_path):
    clone = cloned(ran[0], tmp_path)
    about = json.loads((clone.out / "mnist.json").read_text())
    if other == "a cell":
        about["cells"]["mnist slang_8-seed0"]["fingerprint"] = "0123456789"
    else:  # from a time when fingerprints were not told
        about["settings"]["batch"] = 31
        for facts in about["cells"].values():
            del facts["fingerprint"]
    (clone.out / "mnist.json").write_text(json.dumps(about))
    number = 1 if other == "a cell" else 4
    with pytest.raises(ValueError, match=rf"has {number} cells of other settings .*mnist slang_[18].*--out"):
        mnist.run(replace(clone, methods=("map",)))


def test_more_seeds_are_not_other_settings(ran, tmp_path):
    clone = cloned(ran[0], tmp_path)
    mnist.run(replace(clone, methods=("map",), splits=2))
    lines = (clone.out / "mnist.csv").read_text().splitlines()[1:]
    seeds = Counter(line.partition(",")[0] for line in lines)
    assert seeds["map"] == 2
    assert seeds["slang_8"] == 1


def test_the_page_is_written_from_the_files(ran, tmp_path):
    text, pictures = fake_experiments.page_of("mnist", ran[0].out, tmp_path)
    assert "## Digits (MNIST)" in text
    assert "| slang_8 | 1.92 |" in text
    assert {path.name for path in pictures} == {"results-mnist-curves.png", "results-mnist-uncertainty.png"}
    assert all(path.stat().st_size > 5000 for path in pictures)


def line(method, error, nll=0.1, ece=0.01):
    return {"method": method, "test_error_percent": str(error), "test_nll": str(nll), "ece": str(ece), "brier": "0.1"}


def test_verdicts_compare_with_the_paper_and_with_map():
    lines = [line("slang_1", 2.0), line("slang_8", 1.9), line("slang_8", 1.98), line("map", 1.7, 0.1, 0.02)]
    told = _mnist_pages.verdicts(lines, printed("mnist"))
    assert told[0].endswith("at 1 of L = 1, 8; the best, 1.94 % at L = 8, is above 1.6 %.")
    assert told[1].endswith("NLL below that of `map`, 0.1000, at none of L = 1, 8.")
    assert told[2].endswith("ECE below that of `map`, 0.0200, at 1, 8 of L = 1, 8.")
    assert len(told) == 3
    (best,) = _mnist_pages.verdicts([line("slang_32_slow", 1.55)], printed("mnist"))
    assert best.startswith("SLANG by ours: at or below the paper's error at 32 of L = 32")
    assert best.endswith("is at or below 1.6 %.")


def test_every_method_has_its_learner():
    assert {recipe.learner for recipe in METHODS.values()} <= set(IMAGE_LEARNERS)
