"""The experiment on the noisy cubic: densities, the full Gaussian, selection, resuming, tables, the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from helpers import fake_experiments
from slangvi import full
from slangvi.params import ParamSpec
from slangvi_reproduction.experiments import _cubic, _toy_cells, _toy_chains, _toy_pages, toy
from slangvi_reproduction.experiments._cells import Attempt, Stopped
from slangvi_reproduction.experiments._logistic import Gaussian
from slangvi_reproduction.experiments._regression import network, starts
from slangvi_reproduction.experiments._task import Cosine, Task
from slangvi_reproduction.experiments._toy_learners import LEARNERS, Dense, moments
from slangvi_reproduction.experiments.results import Row, read_rows, read_table
from slangvi_reproduction.experiments.settings import Settings

FAST = {
    "common": {"hidden": 4},
    "fit": {"mc_samples": 3, "trace_every": 2, "elbo_draws": 20, "test_draws": 200},
    "hmc": {"chains": 8, "warmup": 10, "draws": 20, "thin": 2, "longest": 4},
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    chosen = toy.chosen
    monkeypatch.setattr(toy, "chosen", lambda given: {k: v | FAST[k] for k, v in chosen(given).items()})
    return Settings(out=tmp_path / "results", epochs=7, splits=2, command="slangvi reproduce toy")


@pytest.fixture
def problem():
    return _cubic.problem(30, seed=0, hidden=4, prior_precision=2.0)


def weights(*shape, seed=0, hidden=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 3 * hidden + 1, generator=generator, dtype=torch.float64)


def task(count=2, **settings):
    common = toy.chosen(Settings())["fit"] | {"mc_samples": 5, "bias_precision": 2.0} | settings
    sizes, tau, lam = torch.full((count,), 30), torch.full((count,), 50.0), torch.full((count,), 2.0)
    begin = lambda member: starts(1, 4, list(range(count)))  # noqa: E731
    return Task(network(1, 4), begin, sizes, tau, lam, 30, 10, common, torch.Generator().manual_seed(0))


def batch(problem, count=2):
    return problem.x.float().view(1, -1, 1).repeat(count, 1, 1), problem.y.float().repeat(count, 1)


# ---- the model ----


def test_outputs_are_the_networks(problem):
    model = network(1, 4).double()
    spec = ParamSpec.of_module(model)
    for theta in weights(3):
        expected = torch.func.functional_call(model, spec.unflatten(theta), (problem.x.unsqueeze(1),))
        torch.testing.assert_close(_cubic.outputs(theta, problem.x), expected)
    many = weights(2, 3)
    assert _cubic.outputs(many, problem.x).shape == (2, 3, 30)
    torch.testing.assert_close(_cubic.outputs(many, problem.x)[1, 2], _cubic.outputs(many[1, 2], problem.x))


def test_the_log_density_is_that_of_noise_and_prior_in_their_own_units(problem):
    theta = weights(4)
    means = problem.unscaled(_cubic.outputs(theta, problem.x))
    observed = problem.unscaled(problem.y)
    # Densities of y and of its standardised value differ by the scale.
    expected = Normal(means, 3.0).log_prob(observed).sum(1) + 30 * math.log(problem.scale[1])
    torch.testing.assert_close(problem.log_likelihood(theta), expected)
    prior = Normal(torch.zeros_like(theta), 2.0**-0.5).log_prob(theta).sum(1)
    rest = problem.log_density(theta) - expected - prior
    torch.testing.assert_close(rest, rest[:1].expand(4))


def test_the_task_has_the_same_likelihood_and_prior(problem):
    job = replace(task(), tau=torch.full((2,), problem.tau))
    theta = weights(1)[0].float()
    x, y = batch(problem)
    found = job.log_likelihood(job.spec.unflatten(theta), (x[0], y[0]), job.tau[0]).sum()
    torch.testing.assert_close(found.double(), problem.log_likelihood(theta.double()), rtol=1e-4, atol=1e-2)
    assert bool((job.prior.precision == 2.0).all()), "biases too"


def test_biases_have_the_papers_prior_where_nothing_else_is_said():
    job = replace(task(), settings={})
    assert job.prior.precision[0].unique().tolist() == pytest.approx([1e-6, 2.0])


def test_the_elbo_is_expectation_minus_divergence(problem):
    loc, root = weights(2), weights(2, 13, seed=1) / 4
    q = Gaussian(loc, root @ root.mT + 0.1 * torch.eye(13).double())
    prior = Independent(Normal(torch.zeros(13).double(), 2.0**-0.5), 1)
    expected = kl_divergence(
        MultivariateNormal(q.loc, q.covariance), MultivariateNormal(prior.mean, prior.variance.diag())
    )
    torch.testing.assert_close(_cubic.negative_kl(q, 2.0), -expected)
    still = Gaussian(loc, 1e-16 * torch.eye(13).double().expand(2, 13, 13))
    fit = _cubic.elbo(still, problem, weights(5, seed=2)) - _cubic.negative_kl(still, 2.0)
    torch.testing.assert_close(fit, problem.log_likelihood(loc), rtol=1e-5, atol=1e-5)


def test_no_gaussian_has_an_elbo_above_the_evidence():
    """With one unit the evidence is an average over draws of the prior."""
    problem = _cubic.problem(3, seed=0, hidden=1, prior_precision=1.0)
    prior = weights(400_000, hidden=1)
    evidence = float(problem.log_likelihood(prior).logsumexp(0)) - math.log(len(prior))
    for shift in range(5):
        q = Gaussian(weights(1, seed=shift, hidden=1), 0.3 * torch.eye(4).double().unsqueeze(0))
        assert float(_cubic.elbo(q, problem, weights(2000, seed=9, hidden=1))) < evidence + 0.5


def test_predictions_are_those_of_the_draws(problem):
    q = Gaussian(weights(2), 0.05 * torch.eye(13).double().expand(2, 13, 13))
    found = _cubic.predict(q, problem, 4000, torch.Generator().manual_seed(0))
    draws = q.loc[1] + 0.05**0.5 * weights(4000, seed=3)
    curves = problem.unscaled(_cubic.outputs(draws, problem.grid))
    torch.testing.assert_close(found.sd[1], curves.std(0), rtol=0.08, atol=0.0)
    assert bool(((found.mean[1] - curves.mean(0)).abs() < 0.1 * curves.std(0)).all())


def test_the_grid_meets_the_ends_of_the_data():
    assert toy.REGIONS["cubic_inside"].sum() == 81
    assert toy.REGIONS["cubic_outside"].sum() == 40
    assert 4.0 in _cubic.GRID.tolist()


# ---- learners ----


def test_the_full_gaussian_is_that_of_a_single_run(problem):
    job = replace(task(count=1), steps=4)
    learner, (x, y) = Dense(job), batch(problem, 1)
    chosen = job.settings
    vi = full.build(
        lambda params, data: job.log_likelihood(params, data, job.tau[0]),
        num_data=30,
        lr=Cosine(chosen["lr"], 4),
        precision_lr=Cosine(chosen["precision_lr"], 4),
        prior_precision=2.0,
        momentum=0.9,
        mc_samples=5,
        init_precision=chosen["init_precision"],
    )
    state, source = vi.init({name: value[0] for name, value in job.starts(0).items()}), torch.Generator().manual_seed(0)
    for _ in range(3):
        learner.step(x, y)
        state, _ = vi.update(state, (x[0], y[0]), generator=source)
    torch.testing.assert_close(learner.state.loc[0], state.loc, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(learner.state.prec_matrix[0], state.prec_matrix, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("method", LEARNERS)
def test_moments_are_those_of_the_draws(method, problem):
    job = task()
    learner = LEARNERS[method](job)
    for _ in range(4):
        learner.step(*batch(problem))
    q = moments(learner)
    draws = job.spec.flatten(learner.draw(20_000)).double()
    for k in range(2):
        scale = q.covariance[k].diagonal().sqrt()
        assert bool(((draws[k].mean(0) - q.loc[k]).abs() < 0.05 * scale).all())
        assert bool(((draws[k].T.cov() - q.covariance[k]).abs() < 0.06 * scale * scale[:, None]).all())


# ---- cells ----


def test_the_best_state_along_the_way_is_kept(settings, monkeypatch):
    told = iter([[-5.0, -9.0], [-3.0, -8.0], [-4.0, -2.0], [math.nan, -2.5], [0.0, 0.0], [1.0, 1.0]])
    seen = []

    def pretend(q, problem, noise):
        value = torch.tensor(next(told), dtype=torch.float64)
        seen.append((q, len(noise)))
        return value[:1] if len(q.loc) == 1 else value

    used = []
    monkeypatch.setattr(_toy_cells, "elbo", pretend)
    real = _toy_cells.predict
    monkeypatch.setattr(_toy_cells, "predict", lambda q, *args: used.append(q) or real(q, *args))
    cell = next(cell for cell in toy.plan(toy.chosen(settings), ["bbb"]) if cell.method == "bbb")
    found = _toy_cells.compute_fit(cell, Attempt(cell, settings.out, lambda done, steps: False))
    assert found["trace_steps"].tolist() == [2, 4, 6, 7]
    assert found["best_step"].tolist() == [4, 6]
    assert torch.equal(used[0].loc[0], seen[1][0].loc[0])
    assert torch.equal(used[0].loc[1], seen[2][0].loc[1])
    assert torch.equal(used[0].covariance[1], seen[2][0].covariance[1])
    assert [count for _, count in seen] == [20] * 4 + [200] * 2
    assert found["elbo"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("method", toy.METHODS)
def test_a_cell_stopped_anywhere_ends_where_it_would_have(settings, method):
    cell = next(cell for cell in toy.plan(toy.chosen(settings), toy.METHODS) if cell.method == method)
    work = _toy_chains.compute_chains if method == "hmc" else _toy_cells.compute_fit
    straight = work(cell, Attempt(cell, settings.out / "a", lambda done, steps: False))
    stops = iter([4, 16] if method == "hmc" else [2, 4])
    left = [next(stops)]

    def report(done, steps):
        if done == left[0]:
            left[0] = next(stops, 0)
            return True
        return False

    for _ in range(2):
        with pytest.raises(Stopped):
            work(cell, Attempt(cell, settings.out / "b", report))
    resumed = work(cell, Attempt(cell, settings.out / "b", report))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


def test_chains_are_summed_up_over_draws_after_warming_up(settings):
    (cell,) = toy.plan(toy.chosen(settings), [])
    run = _toy_chains._Chains(cell)
    while run.done < run.total:
        run.block()
    found = run.result()
    curves = torch.stack(run.curves, 1)
    assert curves.shape == (8, 10, 121)
    assert np.allclose(found["sd"][0], curves.reshape(80, 121).std(0))
    assert np.allclose(found["group_sd"][1], curves[2:4].reshape(20, 121).std(0))
    assert np.allclose(found["others_sd"][1], curves[[0, 1, 4, 5, 6, 7]].reshape(60, 121).std(0))
    assert bool(((found["acceptance"] >= 0) & (found["acceptance"] <= 1)).all())
    assert run.chains.adaptation.count == 10


# ---- tables and page ----


def test_tables_and_how_they_came_about(settings):
    outcome = toy.run(settings)
    rows = read_rows(settings.out / "toy.csv")
    assert [row[:3] for row in rows] == [row[:3] for row in outcome.rows]
    assert len(rows) == 2 * 3 * 5
    assert {row.dataset for row in rows} == {"cubic_inside", "cubic_outside"}
    assert all(np.isfinite(row.mean) for row in rows)
    assert {row.method: row.n for row in rows} == {"slang_1": 2, "slang_5": 2, "bbb": 2, "full": 2, "hmc": 4}
    grid = read_table(settings.out / "toy-grid.csv", _toy_pages.GRID_COLUMNS)
    assert len(grid) == (4 * 2 + 1) * 121
    sd = {(line["method"], line["seed"]): [] for line in grid}
    for line in grid:
        sd[line["method"], line["seed"]].append(float(line["sd"]))
        assert float(line["y_sd"]) == pytest.approx(math.hypot(float(line["sd"]), 3.0), rel=1e-6)
    inside = np.abs([float(line["x"]) for line in grid[:121]]) <= 4.0
    ratios = [np.abs(np.log(np.array(sd["bbb", k]) / sd["hmc", "0"]))[inside].mean() for k in "01"]
    row = next(row for row in rows if row[:3] == ("cubic_inside", "sd_log_ratio", "bbb"))
    assert row.mean == pytest.approx(np.mean(ratios), rel=1e-5)
    traces = read_table(settings.out / "toy-trace.csv", _toy_pages.TRACE_COLUMNS)
    assert len(traces) == 4 * 2 * 4
    assert sum(line["selected"] == "1" for line in traces) == 4 * 2
    about = json.loads((settings.out / "toy.json").read_text())
    assert about["settings"]["epochs"] == 7
    assert set(about["cells"]["cubic hmc"]) >= {"acceptance", "rhat"}
    assert len(about["cells"]["cubic slang_5"]["elbo"]) == 2


def test_a_method_alone_comes_with_the_reference(settings):
    rows = toy.run(replace(settings, methods=("bbb",))).rows
    assert {row.method for row in rows} == {"bbb", "hmc"}


def test_a_clone_goes_on_where_the_table_is(settings):
    fake_experiments.assert_alike_in_two_places(toy, settings, {"methods": ("bbb",)}, {"methods": ("slang_1",)})


def test_what_is_not_the_reference_is_measured_by_it():
    ones = np.ones((1, 3))
    assert toy.measured("sd_log_ratio", 2 * ones, ones) == pytest.approx([math.log(2)])
    assert toy.measured("sd_log_bias", ones / 2, ones) == pytest.approx([-math.log(2)])
    noisy = 0.5 * math.log((16 + 9) / (1 + 9))
    assert toy.measured("y_sd_log_ratio", 4 * ones, ones) == pytest.approx([noisy])


def test_a_gpu_is_refused(settings):
    with pytest.raises(ValueError, match="Use --device cpu"):
        toy.run(replace(settings, device="cuda"))


def test_a_shorter_run_does_not_replace_a_longer_one(settings):
    toy.run(replace(settings, methods=("bbb",)))
    with pytest.raises(ValueError, match="from a run of 7 epochs and 2 splits"):
        toy.run(replace(settings, methods=("bbb",), epochs=6))


def test_the_page_shows_curves_traces_and_the_table(settings, tmp_path):
    pytest.importorskip("matplotlib")
    toy.run(settings)
    text, pictures = toy.section(settings.out, tmp_path)
    assert [path.name for path in pictures] == ["results-toy.png", "results-toy-trace.png"]
    assert all(path.stat().st_size > 5000 for path in pictures)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {method}" for method in toy.METHODS]
    assert len({line.count("|") for line in table}) == 1, "a line has as many cells as any other"
    assert "split $\\hat R$" in text
    assert "bbb, " in text


@pytest.mark.parametrize(("mine", "expected"), [(0.2, "slang_5 is nearer"), (0.4, "slang_5 is not nearer")])
def test_the_page_says_who_is_nearer(mine, expected):
    values = {"slang_5": mine, "bbb": 0.3}
    rows = [Row("cubic_inside", "sd_log_ratio", name, value, 0.0, value, value, 5) for name, value in values.items()]
    cells = {"cubic hmc": {"acceptance": 0.8, "least_acceptance": 0.7, "rhat": 1.01, "rhat_density": 1.0}}
    assert expected in _toy_pages.said(rows, cells)[1]


def test_the_best_seed_is_drawn():
    line = {"method": "bbb", "step": "1", "selected": "1"}
    lines = [line | {"seed": "0", "elbo": "-9.5"}, line | {"seed": "1", "elbo": "-10.2"}]
    lines.append(line | {"seed": "1", "elbo": "-1.0", "selected": "0"})
    assert _toy_pages._best_seeds(lines) == {"bbb": "0"}
