"""Training in lockstep: one step by definition, convergence to the exact answer, and going on to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import fake_experiments
from slangvi.linalg import LowRankPrecision, factorize_dense
from slangvi.methods import exact
from slangvi.rows.dense import DenseGradients
from slangvi.schedules import Rate
from slangvi_reproduction.experiments import _lockstep
from slangvi_reproduction.experiments._cells import Attempt, Stopped, compute, read_cell
from slangvi_reproduction.experiments._lockstep import BLOCK, METHODS, seed_of, trace_steps, train
from slangvi_reproduction.experiments._logistic import Gaussian, negative_elbo_per_example, symmetric_kl

SETTINGS = {"batch_size": 8, "epochs": 45, "mc_samples": 3, "lr": 0.05, "decay": 0.51, "trace_points": 5}


@pytest.fixture(scope="module")
def problem():
    return fake_experiments.problem()


@pytest.fixture(scope="module")
def reference(problem):
    fit = exact.fit(problem.x_train, problem.y_train, prior_precision=problem.prior.precision)
    return Gaussian(fit.loc, fit.covariance)


class Desk(Attempt):
    """Keeps checkpoints in memory, and stops after a number of steps."""

    def __init__(self, stop_at=None, kept=None):
        self.stop_at, self.kept, self.ticks = stop_at, kept, []

    def restored(self):
        return self.kept

    def tick(self, done, steps, capture):
        self.ticks.append((done, steps))
        if done == self.stop_at:
            self.kept = {name: np.copy(value) for name, value in capture().items()}
            raise Stopped


def trained(method, problem, reference, desk, seed=7, **settings):
    return train(METHODS[method], problem, reference, SETTINGS | settings, seed, desk)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_goes_on_to_the_last_bit(method, problem, reference):
    whole = trained(method, problem, reference, Desk())
    desk = Desk(stop_at=BLOCK)
    with pytest.raises(Stopped):
        trained(method, problem, reference, desk)
    again = trained(method, problem, reference, Desk(kept=desk.kept), seed=99)
    for name in ("steps", "elbo", "kl"):
        assert torch.equal(getattr(whole, name), getattr(again, name))
    assert torch.equal(whole.q.loc, again.q.loc)
    assert torch.equal(whole.q.covariance, again.q.covariance)


@pytest.mark.parametrize("method", METHODS)
def test_one_step_is_the_methods_own_update_with_gradients_by_definition(method, problem, reference):
    run = _lockstep._Run(METHODS[method], problem, reference, SETTINGS, seed=3)
    run.block()
    before, index = run.state, torch.arange(8) * 3
    picks = torch.cat([index, index + 24])
    kept = run.generator.get_state()
    after = run._step(before, picks)
    run.generator.set_state(kept)
    noise = torch.randn(3, 2, 4, generator=run.generator).double()
    thetas = before.loc + before.precision.transform_noise(noise)
    x, y = problem.x_train[:, index], problem.y_train[:, index]
    probability = torch.einsum("kmp,skp->ksm", x, thetas).sigmoid()
    options = {}
    if METHODS[method].curvature == "hessian":
        weights = (probability * (1 - probability)).sum(1)
        hessian = torch.einsum("km,kmp,kmq->kpq", weights, x, x)
        options["curvature"] = hessian if "full" in method else hessian.diagonal(dim1=-2, dim2=-1)
    for k in range(2):
        rows = ((probability - y[:, None])[k][..., None] * x[k]).reshape(-1, 4)
        single = _lockstep._mapped(before, lambda value, k=k: value[k])
        expected, _ = run.module.update(
            single,
            DenseGradients.from_rows(rows),
            num_data=24,
            prior=problem.prior,
            lr=Rate(run.rate(before.step + 1)),
            momentum=METHODS[method].momentum,
            **{name: value[k] for name, value in options.items()},
        )
        torch.testing.assert_close(after.loc[k], expected.loc, rtol=1e-9, atol=1e-12)
        found = run.module.posterior(after).covariance_matrix[k]
        torch.testing.assert_close(found, run.module.posterior(expected).covariance_matrix, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("method", "far"), [("full_hess", 0.1), ("full_ef", 0.7), ("slang_5", 0.7), ("mf_hess", 3.0)])
def test_training_comes_near_the_exact_answer(method, far, problem, reference):
    found = trained(method, problem, reference, Desk(), epochs=300, mc_samples=8)
    assert float(found.kl[-1].max()) < far
    assert bool((found.kl[-1] < found.kl[0]).all())


# Low-rank methods turn the same noise into other draws in float32.
@pytest.mark.parametrize("method", ["mf_ef", "mf_hess", "full_ef", "full_hess"])
def test_float32_is_as_good_where_the_precision_is_well_conditioned(method, problem, reference):
    double, single = (trained(method, problem, reference, Desk(), dtype=dtype) for dtype in ("float64", "float32"))
    assert single.q.loc.dtype == single.elbo.dtype == torch.float64
    assert not torch.equal(single.q.loc, double.q.loc)
    torch.testing.assert_close(single.elbo, double.elbo, rtol=1e-5, atol=1e-6)
    assert float(symmetric_kl(single.q, double.q).max()) < 1e-6


def test_a_run_in_float32_goes_on_to_the_last_bit(problem, reference):
    whole, desk = trained("full_ef", problem, reference, Desk(), dtype="float32"), Desk(stop_at=BLOCK)
    with pytest.raises(Stopped):
        trained("full_ef", problem, reference, desk, dtype="float32")
    again = trained("full_ef", problem, reference, Desk(kept=desk.kept), dtype="float32")
    assert torch.equal(whole.q.covariance, again.q.covariance)
    assert torch.equal(whole.elbo, again.elbo)


def test_full_rank_slang_is_full_ef(problem, reference, monkeypatch):
    """With the same draws: those of low-rank precisions come from another root of the covariance."""

    def transform_noise(precision, noise):
        matrix = precision.factor.mT @ precision.factor + torch.diag_embed(precision.diag)
        return factorize_dense(matrix).transform_noise(noise)

    monkeypatch.setattr(LowRankPrecision, "transform_noise", transform_noise)
    monkeypatch.setitem(METHODS, "slang_4", _lockstep.Method("slang", 4))
    low, full = (trained(method, problem, reference, Desk(), epochs=20) for method in ("slang_4", "full_ef"))
    torch.testing.assert_close(low.q.loc, full.q.loc, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(low.q.covariance, full.q.covariance, rtol=1e-10, atol=1e-10)


def test_the_trace_ends_where_training_does(problem, reference):
    desk = Desk()
    found = trained("mf_ef", problem, reference, desk)
    total = 45 * 24 // 8
    assert found.steps.tolist() == trace_steps(total, 5)
    assert desk.ticks == [(64, 135), (128, 135), (135, 135)]
    assert torch.equal(found.elbo[-1], negative_elbo_per_example(found.q, problem))
    assert torch.equal(found.kl[-1], symmetric_kl(found.q, reference))
    assert found.elbo.shape == (5, 2)


def test_seeds_and_names_decide_the_stream(problem, reference):
    one, same, other = (trained("mf_ef", problem, reference, Desk(), seed=seed, epochs=9) for seed in (1, 1, 2))
    assert torch.equal(one.q.loc, same.q.loc)
    assert not torch.equal(one.q.loc, other.q.loc)
    assert len({seed_of(seed, data, "m") for seed in (0, 1) for data in ("a", "b")}) == 4


def test_members_of_a_cell_draw_for_themselves(reference):
    twins = fake_experiments.problem(splits=(1, 1))
    found = trained("mf_ef", twins, reference, Desk(), epochs=9)
    assert not torch.equal(found.q.loc[0], found.q.loc[1])


def test_constant_rates_stay():
    assert _lockstep._schedule(0.02, None)(1000) == 0.02
    assert _lockstep._schedule(0.02, 0.51)(1) == 0.01


def test_global_randomness_is_left_alone(problem, reference, global_rng_untouched):
    found = trained("slang_1", problem, reference, Desk(), epochs=9)
    assert bool(torch.isfinite(found.q.loc).all())  # the fixture looks at the random state afterwards


def test_a_cell_on_disk_goes_on_to_the_last_bit(tmp_path, problem, monkeypatch):
    from slangvi_reproduction.experiments import _logistic_cells

    monkeypatch.setattr(_logistic_cells, "load_problem", fake_experiments.problem)
    recipe = _logistic_cells.Recipe(
        "toy", 300, lambda dataset: (1, 2), seed=0, lr=lambda dataset, method: 0.05, decay=0.51, mc_samples=2
    )
    cell = recipe.cell("breast_cancer", "slang_2")
    for folder in (tmp_path / "whole", tmp_path / "halves"):
        compute(cell.needs[0], folder, lambda done, steps: False)
    compute(cell, tmp_path / "whole", lambda done, steps: False)
    with pytest.raises(Stopped):
        compute(cell, tmp_path / "halves", lambda done, steps: done == 128)
    compute(cell, tmp_path / "halves", lambda done, steps: False)
    one, two = (read_cell(cell, tmp_path / name).arrays for name in ("whole", "halves"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
