"""Convergence of networks, on a tiny set: what is measured, what is trained, resuming, files, the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import fake_libsvm
from slangvi import replicas
from slangvi_reproduction.experiments import _bnn_cells, bnn_convergence, uci
from slangvi_reproduction.experiments._bnn_cells import METRICS, measure
from slangvi_reproduction.experiments._cells import Attempt, Stopped
from slangvi_reproduction.experiments._learners import GAUSSIANS, LEARNERS
from slangvi_reproduction.experiments._logistic_tables import TRACE_COLUMNS
from slangvi_reproduction.experiments._regression import network, starts
from slangvi_reproduction.experiments._task import FALLS, Cosine, Task, bernoulli, gaussian
from slangvi_reproduction.experiments.results import read_rows, read_table
from slangvi_reproduction.experiments.settings import Settings

FAST = {"hidden": 5, "mc_samples": 3, "draws": 30, "trace_points": 6, "lr": 0.1, "precision_lr": 0.1, "adam_lr": 0.1}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    fake_libsvm.inject(monkeypatch)
    chosen = bnn_convergence.chosen
    monkeypatch.setattr(bnn_convergence, "chosen", lambda settings: chosen(settings) | FAST)
    return Settings(out=tmp_path / "results", epochs=8, splits=3, command="slangvi reproduce bnn-convergence")


def cell_of(settings, method="slang_8", **other):
    common = bnn_convergence.chosen(settings) | other
    (cell,) = bnn_convergence.plan(common, ["breast_cancer"], [method])
    return cell


def computed(cell, folder, report=lambda done, steps: False):
    return _bnn_cells.compute_cell(cell, Attempt(cell, folder, report))


# ---- what is measured


@pytest.mark.parametrize("method", ["slang_8", "bbb"])
def test_the_elbo_is_that_of_the_definition(settings, method):
    """Network by network and draw by draw, with the KL from dense matrices."""
    run = _bnn_cells._Run(cell_of(settings, method))
    run.advance(1)
    q, task, data = run.learner.posterior(), run.task, run.problems
    found = measure(q, task, data, 7, torch.Generator().manual_seed(3))
    thetas = q.sample((7,), torch.Generator().manual_seed(3))
    assert thetas.shape == (7, 3, 5 * 2 + 5 + 5 + 1)
    for k in range(3):
        fits, chances = [], []
        for theta in thetas[:, k]:
            hidden = lambda x, t=theta: F.relu(x @ t[:10].view(5, 2).T + t[10:15]) @ t[15:20] + t[20]  # noqa: E731
            p = torch.sigmoid(hidden(data.x_train[k]).double())
            fits.append(torch.where(data.y_train[k] == 1, p, 1 - p).log().sum())
            p = torch.sigmoid(hidden(data.x_test[k]).double())
            chances.append(torch.where(data.y_test[k] == 1, p, 1 - p))
        lam = torch.full((21,), 8.0, dtype=torch.float64)
        lam[10:15] = lam[20] = 1e-6
        precision = q.precision_matrix[k].double()
        mean = q.loc[k].double()
        kl = 0.5 * (lam @ precision.inverse().diagonal() + lam @ mean.square() - 21 - lam.log().sum())
        kl += 0.5 * precision.logdet()
        elbo = torch.stack(fits).mean() - kl
        torch.testing.assert_close(found.negative_elbo[k], -elbo / 40, rtol=1e-4, atol=1e-4)
        nll = -torch.stack(chances).mean(0).log().mean()
        torch.testing.assert_close(found.test_nll[k], nll, rtol=1e-4, atol=1e-4)


def test_draws_in_portions_measure_the_same(settings, monkeypatch):
    run = _bnn_cells._Run(cell_of(settings))
    q = run.learner.posterior()
    whole = measure(q, run.task, run.problems, 4, torch.Generator().manual_seed(0))
    draws = q.sample((4,), torch.Generator().manual_seed(0))
    parts = iter(draws.split(3))
    monkeypatch.setattr(_bnn_cells, "portions", lambda model, y, count: [3, 1])
    monkeypatch.setattr(type(q), "sample", lambda self, shape, generator: next(parts))
    torch.testing.assert_close(measure(q, run.task, run.problems, 4, torch.Generator()), whole)


def test_a_network_that_failed_has_no_measure(settings):
    run = _bnn_cells._Run(cell_of(settings))
    x, y = run.problems.x_train[:, :10].clone(), run.problems.y_train[:, :10]
    x[1, 0, 0] = torch.inf
    run.learner.step(x, y)
    found = measure(run.learner.posterior(), run.task, run.problems, 5, torch.Generator().manual_seed(0))
    for values in found:
        assert torch.isnan(values).tolist() == [False, True, False]


def test_logits_of_classes():
    logits, y = torch.tensor([-2.0, 0.5, 90.0, -90.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    expected = -F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    torch.testing.assert_close(bernoulli(logits, y, torch.tensor(1.0)), expected)


# ---- what is trained


def test_the_papers_settings_are_the_default():
    common = bnn_convergence.chosen(Settings())
    assert (common["lr"], common["precision_lr"], common["adam_lr"]) == (0.02154435, 0.02154435, 0.01)
    assert (common["epochs"], common["mc_samples"], common["hidden"]) == (500, 20, 50)
    assert common["splits"] == [1] * 10
    cells = {cell.dataset: cell.settings for cell in bnn_convergence.plan(common, bnn_convergence.DATASETS, ["bbb"])}
    chosen = {name: (cell["prior_precision"], cell["batch"]) for name, cell in cells.items()}
    assert chosen == {"usps_3vs5": (32.0, 64), "breast_cancer": (8.0, 32), "australian": (8.0, 32)}


@pytest.mark.parametrize("rank", [8, 16, 32])
def test_slang_is_the_papers(settings, monkeypatch, rank):
    seen = {}
    real = replicas.build
    monkeypatch.setattr(replicas, "build", lambda *args, **options: seen.update(options) or real(*args, **options))
    run = _bnn_cells._Run(cell_of(settings, f"slang_{rank}", lr=0.02154435, precision_lr=0.02154435))
    assert (seen["rank"], seen["lr"], seen["precision_lr"]) == (rank, 0.02154435, 0.02154435)
    assert (seen["precision_warmup"], seen["init_precision"], seen["mc_samples"]) == (False, 1.0, 3)
    assert "momentum" not in seen, "the default is the paper's 0.9"
    assert run.task.log_prob is bernoulli


def test_adam_keeps_its_rate(settings):
    run = _bnn_cells._Run(cell_of(settings, "bbb"))
    run.advance(1)
    run.advance(2)
    assert float(run.learner.lr) == pytest.approx(0.1)


def test_methods_start_from_the_same_weights_and_all_but_one_as_widely(settings):
    first = {name: _bnn_cells._Run(cell_of(settings, name)).learner.posterior() for name in bnn_convergence.METHODS}
    for name, q in first.items():
        assert torch.equal(q.loc, first["slang_8"].loc)
        torch.testing.assert_close(q.variance, torch.full_like(q.loc, 0.01 if name == "bbb_narrow" else 1.0))
    assert not torch.equal(q.loc[0], q.loc[1]), "seeds differ"


@pytest.mark.parametrize("method", bnn_convergence.METHODS)
def test_curves_fall(settings, method):
    found = computed(cell_of(replace(settings, epochs=60), method, bias_precision=8.0), settings.out)
    assert (found["trace_elbo"][-1] < 0.7 * found["trace_elbo"][0]).all()


def test_training_does_not_depend_on_how_often_one_looks(settings):
    often, rarely = (computed(cell_of(settings, trace_points=points), settings.out) for points in (6, 2))
    assert len(rarely["trace_steps"]) == 2 < len(often["trace_steps"])
    assert all(np.array_equal(often[name], rarely[name]) for name in METRICS)


def test_traces_are_taken_at_steps_spread_in_the_logarithm(settings):
    found = computed(cell_of(settings), settings.out)
    assert found["trace_steps"].tolist() == [1, 2, 3, 5, 8]  # 8 epochs of one minibatch of 32
    for name, metric in (("trace_elbo", METRICS[0]), ("trace_nll", METRICS[1])):
        assert found[name].shape == (5, 3)
        assert np.array_equal(found[name][-1], found[metric])


@pytest.mark.parametrize("method", ["slang_8", "bbb"])
def test_a_run_stopped_anywhere_ends_where_it_would_have(settings, method):
    cell = cell_of(settings, method)
    straight = computed(cell, settings.out / "a")
    left = [1, 4, 7]

    def report(done, steps):
        assert steps == 8
        return bool(left) and done == left[0] and bool(left.pop(0))

    for _ in range(3):
        with pytest.raises(Stopped):
            computed(cell, settings.out / "b", report)
    resumed = computed(cell, settings.out / "b", report)
    assert straight.keys() == resumed.keys()
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


# ---- what others rely on


def test_regression_is_as_it_was():
    """Kept cells of other experiments stand for what these defaults compute."""
    trained = [name for name in uci.METHODS if name not in uci.VARIANTS]
    assert trained == ["slang_1", "slang_8", "slang_32", "bbb", "mc_dropout", "ensemble_5"]
    assert set(trained) | {own["learner"] for own in uci.VARIANTS.values()} <= set(LEARNERS)
    assert LEARNERS["slang_8"] is GAUSSIANS["slang_8"]
    assert Task.__dataclass_fields__["log_prob"].default is gaussian
    assert FALLS == ("lr", "precision_lr", "adam_lr", "ivon_lr")
    plans = uci.plan(uci.chosen(Settings()), ["boston"], uci.METHODS)
    for cell in plans:
        assert not cell.settings.keys() & {"falls", "bias_precision"}


@pytest.mark.parametrize("method", ["bbb", "mc_dropout"])
def test_gradients_of_regression_are_as_they_were_to_the_last_bit(method):
    given = uci.chosen(Settings())
    tau, ones = torch.tensor([0.3, 7.1]), torch.ones(2)
    begin = lambda member: starts(2, 5, [0, 1])  # noqa: E731
    task = Task(network(2, 5), begin, 40 * ones, tau, ones, 10, 50, given, torch.Generator())
    learner, source = LEARNERS[method](task), torch.Generator().manual_seed(0)
    y, outputs = torch.randn(2, 10, generator=source), torch.randn(4, 2, 10, generator=source)
    squares = lambda at: 0.5 * tau.unsqueeze(1) * (y - at).square()  # noqa: E731
    new, old = (learner.gradient(outputs, energy) for energy in (lambda at: learner.misfit(at, y), squares))
    assert torch.equal(new, old)
    assert isinstance(learner.rate, Cosine)
    assert sorted(set(task.prior.precision[0].tolist())) == pytest.approx([1e-6, 1.0])


@pytest.mark.parametrize(("falls", "expected"), [(None, True), ([], False), (["adam_lr"], True), (["lr"], False)])
def test_rates_fall_unless_told_otherwise(falls, expected):
    given = {"adam_lr": 0.2} | ({} if falls is None else {"falls": falls})
    ones = torch.ones(1)
    task = Task(torch.nn.Linear(1, 1), lambda member: {}, ones, ones, ones, 1, 10, given, torch.Generator())
    rate = task.rate("adam_lr")
    assert rate(5) == pytest.approx(0.1) if expected else rate == 0.2
    assert isinstance(rate, Cosine) == expected


def test_the_gaussian_has_its_constant():
    found = gaussian(torch.tensor(1.0), torch.tensor(3.0), torch.tensor(4.0))
    normal = torch.distributions.Normal(1.0, 0.5).log_prob(torch.tensor(3.0))
    torch.testing.assert_close(found, normal)


# ---- files and the page


def test_files_and_how_they_came_about(settings, monkeypatch):
    asked = fake_libsvm.inject(monkeypatch)
    some = {"datasets": ("usps_3vs5", "australian"), "methods": ("slang_8", "bbb")}
    outcome = bnn_convergence.run(replace(settings, **some))
    assert asked == ["usps_3vs5", "australian"]
    names = ["bnn-convergence.csv", "bnn-convergence-trace.csv", "bnn-convergence.json"]
    assert [path.name for path in outcome.files] == names
    rows = read_rows(settings.out / names[0])
    assert [row[:3] for row in rows] == [
        (dataset, metric, method) for metric in METRICS for dataset in some["datasets"] for method in ("bbb", "slang_8")
    ]
    assert all(row.n == 3 and math.isfinite(row.mean) and row.worst >= row.median for row in rows)
    traces = read_table(settings.out / names[1], TRACE_COLUMNS)
    last = {(line["dataset"], line["metric"], line["method"]): line for line in traces}
    for row in rows:
        line = last[row[:3]]
        assert (float(line["mean"]), int(line["n"]), float(line["epoch"])) == (row.mean, 3, 8.0)
    about = json.loads((settings.out / names[2]).read_text())
    told = about["settings"]
    assert (told["epochs"], told["splits"], told["prior_precision"]["usps_3vs5"]) == (8, 3, 32.0)
    assert set(about["cells"]) == {f"{d} {m}" for d in some["datasets"] for m in some["methods"]}


def test_finished_cells_are_used_again_and_shorter_runs_refused(settings, monkeypatch):
    one = replace(settings, datasets=("breast_cancer",), methods=("bbb",))
    first = bnn_convergence.run(one)
    monkeypatch.setattr(_bnn_cells, "compute_cell", lambda cell, attempt: pytest.fail("computed twice"))
    assert bnn_convergence.run(one).rows == first.rows
    with pytest.raises(ValueError, match="from a run of 8 epochs and 3 splits"):
        bnn_convergence.run(replace(one, epochs=4))


def test_unknown_names_are_refused(settings):
    with pytest.raises(ValueError, match="unknown method 'slang_1'"):
        bnn_convergence.run(replace(settings, methods=("slang_1",)))


def test_the_page_has_a_figure_and_a_table_of_each_metric(settings, tmp_path):
    outcome = bnn_convergence.run(replace(settings, methods=("slang_8", "bbb")))
    text, pictures = bnn_convergence.section(settings.out, tmp_path)
    assert [path.name for path in pictures] == ["results-bnn-convergence-elbo.png", "results-bnn-convergence-nll.png"]
    assert all(0 < path.stat().st_size < 300_000 for path in pictures)
    assert text.count("```{image}") == 2
    assert "| −ELBO/N at the end | bbb | slang_8 |" in text
    row = next(row for row in outcome.rows if row[:3] == ("australian", METRICS[1], "slang_8"))
    line = next(line for line in reversed(text.splitlines()) if line.startswith("| Australian |"))
    assert line.endswith(f"| {row.mean:.4f} ± {row.standard_error:.4f} |")


def test_curves_that_met_nan_are_drawn_as_far_as_they_go(settings, tmp_path):
    bnn_convergence.run(replace(settings, datasets=("australian",), methods=("bbb",)))
    path = settings.out / "bnn-convergence-trace.csv"
    lines = path.read_text().splitlines()
    header, columns = lines[0].split(","), lines[1].split(",")
    columns[header.index("mean")] = "nan"
    path.write_text("\n".join([lines[0], ",".join(columns), *lines[2:]]) + "\n")
    assert bnn_convergence.section(settings.out, tmp_path)[1]
