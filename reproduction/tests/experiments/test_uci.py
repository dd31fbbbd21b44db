"""The experiment with small networks, on a tiny set: learners, search, resuming, tables, the page."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import fake_experiments, fake_uci
from slangvi import online_eig, replicas, slang
from slangvi_reproduction.data import standardise
from slangvi_reproduction.experiments import _uci_cells, uci, uci_stability
from slangvi_reproduction.experiments._cells import Attempt, Stopped, write
from slangvi_reproduction.experiments._learners import LEARNERS
from slangvi_reproduction.experiments._regression import batches, network, scores, side_by_side, starts
from slangvi_reproduction.experiments._task import FALLS, Cosine, Task
from slangvi_reproduction.experiments._uci_pages import verdict
from slangvi_reproduction.experiments.paper import Printed, printed
from slangvi_reproduction.experiments.results import Row, read_rows
from slangvi_reproduction.experiments.settings import Settings

pytest.importorskip("optuna")
FAST = {"evaluations": 4, "at_once": 2, "folds": 2, "hidden": 5, "search_draws": 10, "test_draws": 20, "mc_samples": 2}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    fake_uci.inject(monkeypatch)
    chosen = uci.chosen
    monkeypatch.setattr(uci, "chosen", lambda settings: chosen(settings) | FAST)
    chance = lambda box, histories, count, seeds, jobs: [  # noqa: E731
        [tuple(np.random.RandomState(seed + k).uniform(*zip(*box, strict=True))) for k in range(count)]
        for seed in seeds
    ]
    monkeypatch.setattr(_uci_cells, "propose_all", chance)
    return Settings(out=tmp_path / "results", epochs=3, splits=2, command="slangvi reproduce uci")


def task(count=2, steps=200, **settings):
    data = fake_uci.tiny()
    problems = side_by_side([standardise(data, data.splits[k]) for k in range(count)], "cpu")
    common = uci.chosen(Settings()) | {"hidden": 8} | settings
    begin = lambda member: starts(2, 8, [10 * member + k for k in range(count)])  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    tau = torch.full((count,), 30.0)
    model = network(2, 8)
    return Task(model, begin, problems.num_train, tau, torch.ones(count), 10, steps, common, generator), problems


@pytest.mark.parametrize("method", LEARNERS)
def test_every_method_learns(method):
    job, problems = task(lr=0.2, precision_lr=0.05, dropout_rate=0.01)  # so that few steps suffice
    learner = LEARNERS[method](job)
    before = scores(job.model, learner.draw, 50, problems, job.tau)
    for _ in range(66):
        for x, y in batches(problems, 10, job.generator):
            learner.step(x, y)
    after = scores(job.model, learner.draw, 50, problems, job.tau)
    assert bool((after.rmse < 0.6 * before.rmse).all())
    draws = learner.draw(100)
    assert draws["0.weight"].shape == (2, 100, 8, 2)
    spread = float(draws["0.weight"].std(1).mean())
    assert spread > 0.0


@pytest.mark.parametrize("method", LEARNERS)
def test_a_learner_goes_on_to_the_last_bit_from_what_it_kept(method):
    job, problems = task(steps=9)
    first = LEARNERS[method](job)
    for x, y in batches(problems, 10, job.generator):
        first.step(x, y)
    kept, random = {name: value.copy() for name, value in first.arrays().items()}, job.generator.get_state()
    second = LEARNERS[method](job)
    second.restore(kept)
    ends = []
    for learner in (first, second):
        job.generator.set_state(random)
        for x, y in batches(problems, 10, job.generator):
            learner.step(x, y)
        ends.append((learner.draw(2), learner.arrays()))
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    assert all(np.array_equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])


def test_members_of_an_ensemble_differ_and_take_turns():
    job, _ = task()
    drawn = LEARNERS["ensemble_5"](job).draw(10)["0.weight"]
    assert len({tuple(one.flatten().tolist()) for one in drawn[0]}) == 5
    assert torch.equal(drawn[:, :5], drawn[:, 5:])
    assert torch.equal(drawn[:, 0], starts(2, 8, [0, 1])["0.weight"])


@pytest.mark.parametrize(("method", "module"), [("slang_1", slang), ("online_eig_1", online_eig)])
def test_low_ranks_are_those_of_a_single_run(method, module):
    job, problems = task(count=1, steps=4)
    learner = LEARNERS[method](job)
    source = torch.Generator().manual_seed(0)
    s = job.settings
    vi = module.build(
        lambda params, batch: job.log_likelihood(params, batch, job.tau[0]),
        num_data=38,
        rank=1,
        lr=job.rate("lr"),
        precision_lr=job.rate("precision_lr"),
        precision_warmup=s["precision_warmup"],
        prior_precision={"*.bias": 1e-6, "*": 1.0},
        init_precision=job.init_precision[0],
        mc_samples=s["mc_samples"],
    )
    state = vi.init({name: value[0] for name, value in job.starts(0).items()})
    pieces = [(problems.x_train[:, k : k + 10], problems.y_train[:, k : k + 10]) for k in (0, 10, 20)]
    for x, y in pieces:
        learner.step(x, y)
        state, _ = vi.update(state, (x[0], y[0]), generator=source)
    torch.testing.assert_close(learner.state.loc[0], state.loc, rtol=1e-5, atol=1e-5)


def test_tables_and_how_they_came_about(settings):
    outcome = uci.run(replace(settings, datasets=("yacht", "energy"), methods=("slang_1", "bbb")))
    rows = read_rows(settings.out / "uci.csv")
    assert [row[:3] for row in outcome.rows] == [row[:3] for row in rows]
    assert len(rows) == 2 * 2 * 2
    assert all(np.isfinite(row.mean) and row.n == 2 for row in rows)
    for row in rows:
        higher = row.metric == "test_log_likelihood"
        assert row.worst <= row.median if higher else row.worst >= row.median
    lines = (settings.out / "uci-splits.csv").read_text().splitlines()
    assert lines[0] == "dataset,method,split,test_rmse,test_log_likelihood,log_tau,log_lambda"
    assert len(lines) == 1 + 2 * 2 * 2
    about = json.loads((settings.out / "uci.json").read_text())
    assert about["settings"]["epochs"] == 3
    assert set(about["cells"]) == {f"{d} {m}" for d in ("yacht", "energy") for m in ("slang_1", "bbb")}
    box = _uci_cells.SETS["energy"].box
    for line in lines[1:]:
        name, _, _, _, _, tau, lam = line.split(",")
        if name == "energy":
            assert box.log_tau[0] <= float(tau) <= box.log_tau[1]
            assert box.log_lambda[0] <= float(lam) <= box.log_lambda[1]


def test_the_best_point_of_every_split_is_taken(settings):
    uci.run(replace(settings, datasets=("yacht",), methods=("bbb",)))
    (path,) = (settings.cells / "uci").glob("yacht-bbb-*.npz")
    kept = np.load(path)
    assert kept["search_values"].shape == (4, 2)
    best = kept["search_values"].argmax(0)
    for split in range(2):
        assert kept["log_tau"][split] == kept["search_points"][best[split], split, 0]
        assert kept["log_lambda"][split] == kept["search_points"][best[split], split, 1]


def test_higher_ranks_take_noise_and_prior_from_rank_one(settings):
    rows = uci.run(replace(settings, datasets=("yacht",), methods=("slang_8",))).rows
    assert {row.method for row in rows} == {"slang_1", "slang_8"}
    lender, borrower = (np.load(next((settings.cells / "uci").glob(f"yacht-slang_{rank}-*.npz"))) for rank in (1, 8))
    for name in ("log_tau", "log_lambda"):
        assert np.array_equal(lender[name], borrower[name])
    assert not np.array_equal(lender["test_rmse"], borrower["test_rmse"])
    assert "search_values" in lender
    assert "search_values" not in borrower


def test_a_cold_posterior_is_the_same_method_with_a_search_of_its_own(settings):
    warm, cold = uci.plan(uci.chosen(settings), ["yacht"], ["slang_1", "slang_1_cold"])
    assert cold.settings == {**warm.settings, "learner": "slang_1", "temperature": uci.COLD}
    rows = uci.run(replace(settings, datasets=("yacht",), methods=("slang_1", "slang_1_cold"))).rows
    assert [row.method for row in rows] == ["slang_1", "slang_1_cold"] * 2
    assert rows[0].mean != rows[1].mean
    text, _ = uci.section(settings.out, settings.out)
    lines = [line for line in text.splitlines() if line.startswith("| Yacht, slang_1")]
    assert all("1.08 ± 0.06" in line for line in lines[:2])
    assert all("-1.88 ± 0.01" in line for line in lines[2:])
    assert len(lines) == 4


def test_a_search_goes_on_from_what_was_found_elsewhere(settings):
    (cell,) = uci.plan(uci.chosen(settings), ["yacht"], ["slang_1_cold"])
    whole = _uci_cells.compute_cell(cell, Attempt(cell, settings.out / "a", lambda done, steps: False))
    first = {"points": whole["search_points"][:2], "values": whole["search_values"][:2], "round": np.array(-1)}
    write(cell.partial_path(settings.out / "b"), first, {"seconds": 1.0})
    resumed = _uci_cells.compute_cell(cell, Attempt(cell, settings.out / "b", lambda done, steps: False))
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("method", ["slang_1", "mc_dropout"])
def test_a_run_stopped_anywhere_ends_where_it_would_have(settings, method):
    (cell,) = uci.plan(uci.chosen(settings), ["yacht"], [method])
    straight = _uci_cells.compute_cell(cell, Attempt(cell, settings.out / "a", lambda done, steps: False))
    stops = iter([2, 4, 8])
    left = [next(stops)]

    def report(done, steps):
        assert steps == 3 * 3
        if left and done == left[0]:
            left[0] = next(stops, 0)
            return True
        return False

    for _ in range(3):
        with pytest.raises(Stopped):
            _uci_cells.compute_cell(cell, Attempt(cell, settings.out / "b", report))
    resumed = _uci_cells.compute_cell(cell, Attempt(cell, settings.out / "b", report))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


def test_a_failed_evaluation_is_bad_but_not_endlessly_bad(settings, monkeypatch):
    seen = []

    def spy(box, histories, count, seeds, jobs):
        seen.append(histories)
        return [[(-1.0, 0.0)] * count for _ in seeds]

    monkeypatch.setattr(_uci_cells, "propose_all", spy)
    real = _uci_cells.scores

    def broken(*args):
        found = real(*args)
        found.log_likelihood[:2] = torch.nan  # both folds of the first point of the first split
        return found

    monkeypatch.setattr(_uci_cells, "scores", broken)
    (cell,) = uci.plan(uci.chosen(settings), ["yacht"], ["bbb"])
    _uci_cells.compute_cell(cell, Attempt(cell, settings.out, lambda done, steps: False))
    values = [value for _, value in seen[1][0]]
    assert values[0] == pytest.approx(values[1] - 5.0)


def test_the_rate_falls_along_a_half_cosine():
    rate = Cosine(0.4, 10)
    assert [rate(t) for t in (5, 10, 99)] == pytest.approx([0.2, 0.0004, 0.0004])
    assert rate(1) == pytest.approx(0.4 * (1 + np.cos(np.pi / 10)) / 2)


@pytest.mark.parametrize(("steps", "lr"), [(100, 0.4), (10_000, 0.104)])
def test_all_networks_move_as_far_whatever_the_number_of_steps(steps, lr):
    job, _ = task(steps=steps)
    assert job.rate("lr").lr == pytest.approx(lr)
    assert job.rate("precision_lr").lr == pytest.approx(10 / steps)
    assert job.rate("adam_lr").lr == uci.ADAM_LR
    total = sum(job.rate("lr")(t) for t in range(1, steps + 1))
    assert total == pytest.approx(min(uci.TOTAL, 0.2 * steps), rel=0.02)
    even, _ = task(steps=steps, lr=0.1, precision_lr=0.03, total=130.0)
    assert even.rate("precision_lr").lr == pytest.approx(0.3 * even.rate("lr").lr)
    assert even.rate("lr").lr == pytest.approx(lr / 4)


def test_the_noise_falls_to_its_own_and_never_rises():
    job, _ = task(count=3, steps=100, noise_start=25.0, noise_fall=0.2)
    job = replace(job, tau=torch.tensor([100.0, 25.0, 3.0]))
    at = lambda *steps: job.noise(torch.tensor(steps)).tolist()  # noqa: E731
    assert at(10, 10, 10) == pytest.approx([50.0, 25.0, 3.0])  # half way: the geometric mean
    assert at(1, 5, 99)[1:] == [25.0, 3.0]
    assert at(19, 1, 1)[0] < 100.0
    assert at(20, 20, 20) == at(99, 20, 20) == [100.0, 25.0, 3.0]
    assert at(99, 1, 1) == pytest.approx([100.0, 25.0, 3.0])  # one that has failed stands still


def test_without_a_start_the_noise_is_its_own():
    job, _ = task()
    job = replace(job, settings={})
    assert job.noise(torch.tensor([1, 1])) is job.tau


def test_methods_are_told_their_own_settings_only():
    common = uci.chosen(Settings())
    slang, bbb = (set(uci.plan(common, ["yacht"], [name])[0].settings) for name in ("slang_1", "bbb"))
    assert slang - bbb == set(uci.OF_SLANG)
    assert bbb - slang == set(uci.OF_ADAM)
    assert slang | bbb == {*common, "box", "batch"}


def test_a_shorter_run_does_not_replace_a_longer_one(settings):
    uci.run(replace(settings, datasets=("yacht",), methods=("bbb",)))
    with pytest.raises(ValueError, match="from a run of 3 epochs and 2 splits"):
        uci.run(replace(settings, datasets=("yacht",), methods=("bbb",), epochs=2))


def test_a_clone_goes_on_where_the_table_is(settings):
    fake_experiments.assert_alike_in_two_places(
        uci, settings, *({"datasets": (name,), "methods": ("bbb",)} for name in ("yacht", "boston"))
    )


def test_the_page_says_where_cells_were_computed(settings, tmp_path):
    uci.run(replace(settings, datasets=("yacht", "energy"), methods=("bbb",)))
    path = settings.out / "uci.json"
    about = json.loads(path.read_text())
    assert all(cell["device"] == about["device"] for cell in about["cells"].values())
    about["cells"]["energy bbb"] |= {"seconds": 90.0, "device": "a far machine", "torch": "9.9"}
    path.write_text(json.dumps(about))
    text, _ = uci.section(settings.out, tmp_path)
    assert f"1.5 process minutes on a far machine (Python {about['python']}, torch 9.9)" in text
    assert f"process minutes on {about['device']} (Python {about['python']}, torch {torch.__version__})" in text
    assert "The last command" not in text  # it took seconds, which says nothing
    path.write_text(json.dumps(about | {"wall_seconds": 150.0, "jobs": 2}))
    assert "The last command took 2.5 minutes, 2 at a time." in uci.section(settings.out, tmp_path)[0]


def test_the_page_says_where_ours_is_as_good(settings, tmp_path):
    uci.run(replace(settings, datasets=("yacht",), methods=("slang_1", "ensemble_5")))
    text, pictures = uci.section(settings.out, tmp_path)
    assert "| Yacht, slang_1 | 1.08 ± 0.06 |" in text
    assert "| Yacht, ensemble_5 |  |" in text
    assert "slang_1, RMSE: as good as the paper's on" in text
    assert pictures == []


@pytest.mark.parametrize(
    ("metric", "mean", "expected"),
    [
        ("test_rmse", 1.0, "✓ better"),
        ("test_rmse", 1.13, "✓"),
        ("test_rmse", 1.15, "✗"),
        ("test_log_likelihood", 1.15, "✓ better"),
        ("test_log_likelihood", 1.03, "✓"),
        ("test_log_likelihood", 1.0, "✗"),
    ],
)
def test_verdicts_know_which_way_is_better(metric, mean, expected):
    row = Row("yacht", metric, "slang_1", mean, 0.1, mean, mean, 20)
    assert verdict(row, Printed(1.08, 0.06, 0.01)) == expected


def test_the_papers_table_is_there():
    paper = printed("uci")
    assert paper["boston", "test_rmse", "slang_1"] == Printed(3.21, 0.19, 0.01)
    assert {key[0] for key in paper} == set(uci.DATASETS)


def test_recipes_are_judged_on_data_held_out_of_the_training_part(settings, monkeypatch, tmp_path):
    seen = []
    real = _uci_cells.standardise
    monkeypatch.setattr(_uci_cells, "standardise", lambda data, pair: seen.append(pair) or real(data, pair))
    outcome = uci_stability.run(replace(settings, datasets=("boston",), methods=("noise_falls", "cold")))
    data = fake_uci.tiny()
    assert len(seen) == 2 * 2
    for k, pair in enumerate(seen):
        train = set(data.splits[k % 2].train.tolist())
        assert set(pair.train.tolist()) | set(pair.test.tolist()) == train
    assert [row.metric for row in outcome.rows] == ["validation_rmse"] * 2 + ["validation_log_likelihood"] * 2
    text, _ = uci_stability.section(settings.out, tmp_path)
    assert "| noise_falls | ≤ 0.1 | ≤ 0.033 | 10 | ✓ | α, β | ✓ |" in text
    assert "| cold | 0.05 | 0.02 | 10 |  | α, β |  |" in text


@pytest.mark.parametrize("name", uci_stability.RECIPES)
def test_a_recipe_is_what_the_learner_is_given(name, monkeypatch):
    seen = {}
    real = replicas.build
    monkeypatch.setattr(replicas, "build", lambda *args, **options: seen.update(options) or real(*args, **options))
    recipe = uci_stability.RECIPES[name]
    job, _ = task(**uci_stability._plain(recipe))
    LEARNERS["slang_1"](job)
    assert seen["precision_warmup"] is recipe.precision_warmup
    assert seen["temperature"] == recipe.temperature
    assert torch.equal(seen["prior_precision"], task()[0].prior.precision / recipe.temperature)
    starts = [30.0 * float(n) / recipe.temperature for n in job.num_data]  # Nτ
    assert seen["init_precision"] == (starts if recipe.init_precision == "curvature" else recipe.init_precision)
    for rate in ("lr", "precision_lr"):
        falls, expected = isinstance(seen[rate], Cosine), getattr(recipe, rate)
        assert falls == (rate in recipe.falls)
        assert (seen[rate].lr if falls else seen[rate]) == (10 / 200 if expected == "slow" else expected)


def test_slow_is_what_the_table_uses():
    common, recipe = uci.chosen(Settings()), uci_stability.RECIPES["slow"]
    names = ("lr", "precision_lr", "init_precision", "precision_warmup")
    assert tuple(common[name] for name in names) == recipe[:4]
    assert recipe[4:7] == (FALLS[:2], common["total"], common["noise_start"])  # what falls is the learner's default
    assert uci_stability._plain(recipe)["noise_fall"] == common["noise_fall"]
    assert recipe.temperature == common.get("temperature", 1.0)
