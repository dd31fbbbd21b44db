"""The estimators as users meet them: fits, predictions, pipelines, searches, pickles, and errors."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from torch import nn

import slangvi
from helpers.allocated_bytes import allocated
from slangvi import SLANGClassifier, SLANGRegressor
from slangvi.estimators._training import Rows

X, LABELS = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[LABELS]
Y = X[:, 3]
INPUTS = X[:, :3]
QUICK: dict[str, Any] = {
    **{"hidden_layer_sizes": (4,), "max_iter": 8, "batch_size": 50, "mc_samples": 1, "rank": 1},
    **{"predict_samples": 8, "learning_rate_init": 0.2, "random_state": 0},
}


def classifier(**changes: Any) -> SLANGClassifier:
    return SLANGClassifier(**(QUICK | changes))


def regressor(**changes: Any) -> SLANGRegressor:
    return SLANGRegressor(**(QUICK | changes))


@pytest.fixture(scope="module")
def fitted() -> SLANGClassifier:
    return classifier(max_iter=30).fit(X, NAMES)


@pytest.fixture(scope="module")
def fitted_regressor() -> SLANGRegressor:
    return regressor(max_iter=30).fit(INPUTS, Y)


# ---- fits and predictions ----


def test_classes_are_learnt_under_their_own_names(fitted):
    assert fitted.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert fitted.score(X, NAMES) > 0.9
    probs = fitted.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1.0)
    np.testing.assert_allclose(np.exp(fitted.predict_log_proba(X)), probs, rtol=1e-9)
    assert (fitted.classes_[probs.argmax(1)] == fitted.predict(X)).all()


def test_targets_are_learnt_with_their_spread(fitted_regressor):
    mean, std = fitted_regressor.predict(INPUTS, return_std=True)
    assert fitted_regressor.score(INPUTS, Y) > 0.85
    assert mean.shape == std.shape == Y.shape
    assert (std > fitted_regressor.noise_std_).all()
    far = fitted_regressor.predict(10 * INPUTS, return_std=True)[1]
    assert np.median(far) > 1.5 * np.median(std)


def test_probabilities_are_the_average_over_the_posterior(fitted):
    """By hand, from what the estimator shows: module, posterior, and scale of the inputs."""
    x = torch.from_numpy(fitted.input_scale_.apply(X[::40]))
    draws = slangvi.predictive_samples(fitted.module_, fitted.posterior_, x, 500, generator=torch.Generator())
    error = draws.std(0) * (1 / 8 + 1 / 500) ** 0.5
    assert (np.abs(fitted.predict_proba(X[::40]) - draws.mean(0).numpy()) < 4 * error.numpy()).all()


def test_predictions_do_not_depend_on_the_rows_beside_or_the_chunk(fitted, monkeypatch):
    whole = fitted.predict_proba(X)
    np.testing.assert_allclose(fitted.predict_proba(X[::-1])[::-1], whole, rtol=1e-12)
    monkeypatch.setattr("slangvi.predict.samples._CHUNK", 1)
    np.testing.assert_allclose(fitted.predict_proba(X[:7]), whole[:7], rtol=1e-12)


def test_the_score_of_held_out_rows_does_not_depend_on_the_chunk(monkeypatch):
    settings = {"early_stopping": True, "max_iter": 2, "validation_fraction": 0.3}
    whole = classifier(**settings).fit(X, NAMES).validation_nll_
    monkeypatch.setattr("slangvi.predict.samples._CHUNK", 100)  # four rows at a time
    assert classifier(**settings).fit(X, NAMES).validation_nll_ == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("hidden", "samples"), [((1000,), 1), ((), 50)])
def test_memory_of_predictions_and_scores_does_not_grow_with_the_rows(hidden, samples, monkeypatch):
    """All rows at once would take 160 MB for a hidden layer, and 8 for the draws."""
    monkeypatch.setattr("slangvi.predict.samples._CHUNK", 1 << 16)
    inputs = np.random.RandomState(0).randn(20_000, 2)
    settings = {"hidden_layer_sizes": hidden, "predict_samples": samples, "max_iter": 1, "mc_samples": 1, "rank": 1}
    model = SLANGRegressor(**settings, random_state=0).fit(inputs[:40], inputs[:40, 0])
    held = Rows(torch.from_numpy(inputs), torch.zeros(20_000, 1).double(), torch.ones(20_000).double())
    assert allocated(lambda: model.predict(inputs)) < 5e6
    assert allocated(lambda: model._loss_on(held, model.state_, model._kept_noise())) < 5e6


def test_float32_data_are_learnt_in_float32():
    model = classifier().fit(X.astype(np.float32), NAMES)
    assert model.state_.loc.dtype is torch.float32
    assert model.predict_proba(X).dtype == np.float32


def test_several_target_columns_are_learnt_together():
    targets = np.stack([Y, 100 * X[:, 0]], axis=1)
    model = regressor(max_iter=30).fit(X, targets)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (150, 2)
    assert model.score(X, targets) > 0.7
    assert model.noise_std_.shape == (2,)
    assert (model.noise_std_ < targets.std(0)).all()


def test_noise_may_be_given():
    model = regressor(noise=0.3).fit(INPUTS, Y)
    assert model.noise_std_ == pytest.approx(0.3)
    assert (model.predict(INPUTS, return_std=True)[1] > 0.3).all()


def test_without_standardising_numbers_are_taken_as_they_are():
    model = regressor(standardize=False, max_iter=60).fit(INPUTS - INPUTS.mean(0), Y)
    assert (model.input_scale_.scale == 1).all()
    assert (model.target_scale_.mean == 0).all()
    assert model.score(INPUTS - INPUTS.mean(0), Y) > 0.5


def test_an_input_constant_up_to_rounding_says_nothing():
    inputs = np.column_stack([INPUTS, np.where(np.arange(150) % 2, 0.3, 0.1 + 0.2)])
    model = regressor().fit(inputs, Y)
    inputs[:, 3] = 0.31
    np.testing.assert_allclose(model.predict(inputs), Y, atol=2.0)


def test_the_mean_is_the_best_one_for_weighted_rows():
    """With weights, noise and prior given the mean goes to the minimum of a ridge regression, known in closed form."""
    source = np.random.RandomState(1)
    x, weights = source.randn(60, 2), source.randint(0, 5, 60) * 0.7
    y = x @ [1.0, -2.0] + 0.3 * source.randn(60)
    y[weights == 0] = 1e3  # would be seen
    settings = {"noise": 1.5, "standardize": False, "prior_precision": 5.0, "batch_size": 20, "random_state": 0}
    model = SLANGRegressor((), **settings).fit(x, y, sample_weight=weights)
    design = np.column_stack([x, np.ones(60)])
    curvature = (design.T * weights) @ design / 1.5**2 + 5.0 * np.eye(3)
    best = np.linalg.solve(curvature, (design.T * weights) @ y / 1.5**2)
    np.testing.assert_allclose(model.posterior_.loc.numpy(), best, atol=0.05)
    plain = np.linalg.solve(
        design[weights > 0].T @ design[weights > 0] / 1.5**2 + 5.0 * np.eye(3), (design.T * (weights > 0)) @ y / 1.5**2
    )
    assert np.abs(plain - best).max() > 0.1  # so that the weights matter


def test_a_low_temperature_counts_as_more_data():
    """Weights of nine and a temperature of a ninth are the same posterior, by other draws."""
    cold, heavy = regressor(temperature=1 / 9).fit(INPUTS, Y), regressor().fit(INPUTS, Y, np.full(150, 9.0))
    torch.testing.assert_close(cold.posterior_.variance, heavy.posterior_.variance)
    streams = (regressor(temperature=t).partial_fit(INPUTS, Y).posterior_.variance.mean() for t in (1.0, 0.01))
    assert next(streams) > 2 * next(streams)


def test_equal_weights_count_as_more_data():
    plain, heavy = (regressor().fit(INPUTS, Y, sample_weight=w) for w in (None, np.full(150, 9.0)))
    assert float(heavy.posterior_.variance.mean()) < 0.5 * float(plain.posterior_.variance.mean())
    same = regressor().fit(INPUTS, Y, sample_weight=np.ones(150))
    np.testing.assert_array_equal(same.predict(INPUTS), plain.predict(INPUTS))


# ---- early stopping, warm start, partial fits ----


@pytest.mark.parametrize("make", [classifier, regressor])
def test_early_stopping_keeps_the_best_state(make):
    data = (X, NAMES) if make is classifier else (INPUTS, Y)
    model = make(early_stopping=True, n_iter_no_change=2, tol=10.0, validation_fraction=0.2, max_iter=20).fit(*data)
    before = 0 if make is classifier else 6  # epochs of the first 30 % do not count: noise is not learnt yet
    assert model.n_iter_ == before + 3  # the first counts against infinity, no later one is better by ten
    assert len(model.validation_nll_) == len(model.loss_curve_) == before + 3
    assert model.best_validation_nll_ == min(model.validation_nll_[before:])
    best = before + int(np.argmin(model.validation_nll_[before:])) + 1
    assert model.state_.step == best * 3  # 120 rows, 50 at a time


@pytest.mark.parametrize("noise", ["learn", 0.5])
def test_early_stopping_waits_until_the_noise_is_what_it_is(noise):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 4))
    targets = inputs[:, 0] + rng.normal(size=300)  # nothing is learnt after the first few epochs
    model = SLANGRegressor(early_stopping=True, noise=noise, max_iter=60, n_iter_no_change=3, random_state=0)
    model.fit(inputs, targets)
    assert model.n_iter_ > (0.3 if noise == "learn" else 0.6) * 60
    assert model.noise_std_ == pytest.approx(1.0 if noise == "learn" else 0.5, rel=0.15)


def test_early_stopping_does_not_keep_a_precision_that_is_still_at_its_start():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 10))
    model = SLANGClassifier(early_stopping=True, random_state=0).fit(inputs, inputs[:, 0] + rng.normal(size=400) > 0)
    deviations = model.posterior_.variance.sqrt()
    assert deviations.max() > 2.0 * deviations.min()
    assert deviations.max() > 0.5  # of a prior of 1, for weights that hardly matter


def test_early_stopping_holds_out_a_share_of_every_class(monkeypatch):
    """Of a class of a single row, none."""
    real, parts = SLANGClassifier._split, []
    monkeypatch.setattr(SLANGClassifier, "_split", lambda *args: parts.append(real(*args)) or parts[-1])
    names = np.repeat(["common", "rare", "single"], [119, 30, 1])
    for seed in range(8):
        classifier(early_stopping=True, random_state=seed, max_iter=1).fit(X, names)
    counts = [(train.y.bincount(minlength=3).tolist(), held.y.bincount(minlength=3).tolist()) for train, held in parts]
    assert all(train[1:] == [27, 1] and held[1:] == [3, 0] for train, held in counts)


CHANGES = [
    {"rank": 3},
    {"hidden_layer_sizes": (7,)},
    {"activation": "tanh"},
    {"standardize": False},
    {"module": nn.Linear(4, 3, dtype=torch.float64)},
]


@pytest.mark.parametrize("noise", [0.5, "given"])
def test_what_was_learned_does_not_go_on_with_other_noise(noise):
    model = regressor(warm_start=True).fit(INPUTS, Y).set_params(noise=noise)
    for go_on in (model.fit, model.partial_fit):
        with pytest.raises((ValueError, TypeError), match=r"noise (was 'learn' when|must be a number, got 'given')"):
            go_on(INPUTS, Y)
    model.set_params(noise="learn").partial_fit(INPUTS, Y)


def test_a_module_is_told_by_its_kind_when_it_changes():
    model = classifier(warm_start=True, module=nn.Linear(4, 3, dtype=torch.float64)).fit(X, NAMES)
    model.fit(X, NAMES).set_params(module=nn.Linear(4, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="module was another Linear when"):
        model.fit(X, NAMES)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_learned_does_not_go_on_with_other_sizes(change):
    model = classifier(warm_start=True).fit(X, NAMES)
    (name,) = change
    before, kept = getattr(model, name), model.state_
    model.set_params(**change)
    for go_on in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=f"{name} was .* when this estimator was first fitted.*warm_start=False"):
            go_on(X, NAMES)
    assert model.state_ is kept
    model.set_params(**{name: before}).fit(X, NAMES)
    model.set_params(warm_start=False, **change).fit(X, NAMES)


def test_warm_start_goes_on():
    model = classifier(warm_start=True).fit(X, NAMES)
    steps, module = model.state_.step, model.module_
    model.fit(X, NAMES)
    assert model.module_ is module
    assert model.state_.step == 2 * steps
    with pytest.raises(ValueError, match=r"y holds \['else'\], which are not among the classes"):
        model.fit(X, np.where(LABELS == 0, "else", NAMES))
    cold = classifier().fit(X, NAMES).fit(X, NAMES)
    assert cold.state_.step == steps


def test_partial_fits_learn_from_one_part_after_the_other():
    model = classifier(learning_rate_init=0.4)
    order = np.random.RandomState(0).permutation(150)
    for k in range(12):
        part = order[(k % 3) * 50 : (k % 3 + 1) * 50]
        model.partial_fit(X[part], NAMES[part], classes=np.unique(NAMES))
    assert model.score(X, NAMES) > 0.85
    assert model.n_samples_seen_ == 600
    assert model.n_iter_ == 12


@pytest.mark.parametrize("first", [1, 5])
def test_a_stream_that_begins_without_spread_is_told_and_does_not_become_sure(first):
    source = np.random.RandomState(0)
    inputs = source.randn(400, 2)
    targets = 1000 * inputs[:, 0] + 5000 + 200 * source.randn(400)
    targets[:first] = 5000.0
    model = SLANGRegressor(hidden_layer_sizes=(), mc_samples=1, random_state=0)
    with pytest.warns(
        UserWarning, match=f"y does not vary among the {first} rows of the first .* Give some dozen rows"
    ):
        model.partial_fit(inputs[:first], targets[:first])
    for start in range(first, 400, 20):
        model.partial_fit(inputs[start : start + 20], targets[start : start + 20])
    mean, std = model.predict(inputs, return_std=True)
    assert np.mean(np.abs(mean - targets) < 1.645 * std) > 0.8


def test_streams_that_are_not_scaled_may_begin_without_spread():
    model = regressor(standardize=False).partial_fit(INPUTS[:1], Y[:1])  # without a warning
    assert np.isfinite(model.predict(INPUTS)).all()


def test_partial_fits_of_targets_with_the_number_of_rows_told():
    few, many = (regressor(num_data=n).partial_fit(INPUTS, Y).partial_fit(INPUTS, Y) for n in (15, 15_000))
    assert float(many.posterior_.variance.mean()) < float(few.posterior_.variance.mean())
    with pytest.raises(ValueError, match="y has 2 columns, but this estimator began with 1"):
        few.partial_fit(INPUTS, np.stack([Y, Y], 1))


# ---- modules ----


def test_any_module_can_be_trained():
    given = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    before = given[0].weight.clone()
    model = classifier(module=given, max_iter=30).fit(X, NAMES)
    assert model.score(X, NAMES) > 0.85
    assert torch.equal(given[0].weight, before)
    assert model.predict_proba(X).dtype == np.float32
    assert clone(model).module is not given


def test_a_function_makes_a_module_for_the_data(global_rng_untouched):
    first, second = (classifier(module=nn.Linear).fit(X, NAMES) for _ in range(2))
    assert first.module_.weight.shape == (3, 4)
    np.testing.assert_array_equal(first.predict_proba(X), second.predict_proba(X))


def test_modules_keep_their_mode():
    """So that one with batch statistics can be trained when it does not take them from the batch."""
    given = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(slangvi.UnsupportedModuleError, match=r"Put it in eval mode \(module.eval\(\)\)"):
        classifier(module=given).fit(X, NAMES)
    assert classifier(module=given.eval(), max_iter=30).fit(X, NAMES).score(X, NAMES) > 0.8


def test_modules_with_other_outputs_are_refused():
    with pytest.raises(ValueError, match=r"module must return 3 outputs for every row.*got \(2, 2\)"):
        classifier(module=nn.Linear(4, 2)).fit(X, NAMES)


# ---- in scikit-learn's company ----


def test_pipelines_searches_and_cross_validation():
    pipe = make_pipeline(MinMaxScaler(), classifier(max_iter=20))
    search = GridSearchCV(pipe, {"slangclassifier__prior_precision": [0.1, 1000.0]}, cv=2).fit(X, NAMES)
    assert search.best_params_ == {"slangclassifier__prior_precision": 0.1}
    predicted = cross_val_predict(classifier(max_iter=40), X, NAMES, cv=2, method="predict_proba")
    assert predicted.shape == (150, 3)
    assert (predicted.argmax(1) == LABELS).mean() > 0.8


def test_calibration_takes_it():
    features, labels = make_moons(80, noise=0.2, random_state=0)
    calibrated = CalibratedClassifierCV(classifier(max_iter=20), cv=2).fit(features, labels)
    assert calibrated.predict_proba(features).shape == (80, 2)


@pytest.mark.parametrize("name", ["fitted", "fitted_regressor"])
def test_pickles_predict_the_same(name, request):
    model, rows = request.getfixturevalue(name), X[:, : request.getfixturevalue(name).n_features_in_]
    twin = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(twin.predict(rows), model.predict(rows))
    assert clone(model).get_params() == model.get_params()


def test_a_pickle_goes_on_as_the_original_does():
    model = classifier().partial_fit(X, NAMES, classes=np.unique(NAMES))
    twin = pickle.loads(pickle.dumps(model))
    for one in (model, twin):
        one.partial_fit(X, NAMES)
    np.testing.assert_array_equal(twin.predict_proba(X), model.predict_proba(X))


def test_column_names_are_kept():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    model = classifier().fit(frame, pandas.Series(NAMES))
    assert model.feature_names_in_.tolist() == list("abcd")
    np.testing.assert_array_equal(model.predict(frame), classifier().fit(X, NAMES).predict(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[list("dcba")])


# ---- nothing else changes ----


def dropping(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, outputs))


def test_dropout_in_a_module_draws_from_the_seed_too(global_rng_untouched):
    first, second, other = (classifier(module=dropping, random_state=seed) for seed in (0, 0, 1))
    torch.testing.assert_close(first.fit(X, NAMES).state_.loc, second.fit(X, NAMES).state_.loc, rtol=0, atol=0)
    assert not torch.equal(first.state_.loc, other.fit(X, NAMES).state_.loc)
    copied = pickle.loads(pickle.dumps(first))
    first.partial_fit(X, NAMES)
    torch.testing.assert_close(copied.partial_fit(X, NAMES).state_.loc, first.state_.loc, rtol=0, atol=0)


def test_one_seed_gives_one_fit_and_touches_no_global_state(global_rng_untouched):
    numpy_before, threads = np.random.get_state()[1].copy(), torch.get_num_threads()
    with torch.no_grad():
        first, second = (classifier().fit(X, NAMES).predict_proba(X) for _ in range(2))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert (np.random.get_state()[1] == numpy_before).all()
    assert torch.get_num_threads() == threads
    np.testing.assert_array_equal(first, second)
    other = classifier(random_state=1).fit(X, NAMES).predict_proba(X)
    assert np.abs(other - first).max() > 1e-3


def test_scikit_learn_is_imported_on_first_use_only():
    code = "import sys, slangvi; dir(slangvi); assert not {'torch', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_scikit_learn_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "slangvi.estimators")
    with pytest.raises(ImportError, match=r"need scikit-learn 1\.6 or later.*pip install 'slangvi\[sklearn\]'"):
        slangvi.SLANGClassifier  # noqa: B018


def test_numbers_and_flags_of_numpy_are_taken():
    model = classifier(hidden_layer_sizes=np.array([5]), early_stopping=np.True_, max_iter=np.int64(2)).fit(X, NAMES)
    assert model.module_[0].out_features == 5
    assert len(model.validation_nll_) == 2


def test_progress_is_told_when_asked_for(capsys):
    lines: list[str] = []
    classifier(verbose=lines.append, early_stopping=True, max_iter=2).fit(X, NAMES)
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1 of 2: nll ")
    assert "validation nll" in lines[0]
    regressor(verbose=True, max_iter=1).fit(INPUTS, Y)
    assert capsys.readouterr().err.startswith("[SLANGRegressor] epoch 1 of 1: nll ")
    classifier(max_iter=1).fit(X, NAMES)
    assert capsys.readouterr() == ("", "")


# ---- what is refused ----

BAD = [
    ({"hidden_layer_sizes": (0,)}, ValueError, "hidden_layer_sizes must be ≥ 1"),
    ({"activation": "swish"}, ValueError, "activation must be one of 'relu'"),
    ({"rank": -1}, ValueError, "rank must be ≥ 0"),
    ({"prior_precision": 0.0}, ValueError, "prior_precision must be finite and in"),
    ({"temperature": 0.0}, ValueError, "temperature must be finite"),
    ({"learning_rate_init": 0.0}, ValueError, "learning_rate_init must be finite"),
    ({"precision_learning_rate_init": 2.0}, ValueError, "precision_learning_rate_init must be finite"),
    ({"mc_samples": 0}, ValueError, "mc_samples must be ≥ 1"),
    ({"batch_size": 0}, ValueError, "batch_size must be ≥ 1, got 0. Or 'auto'"),
    ({"max_iter": 0}, ValueError, "max_iter must be ≥ 1"),
    ({"predict_samples": 1.5}, TypeError, "predict_samples must be a whole number"),
    ({"validation_fraction": 1.0}, ValueError, "validation_fraction must be finite"),
    ({"early_stopping": 1}, TypeError, "early_stopping must be True or False"),
    ({"num_data": 0}, ValueError, "num_data must be finite"),
    ({"tol": -1.0}, ValueError, "tol must be finite"),
    ({"n_iter_no_change": 0}, ValueError, "n_iter_no_change must be ≥ 1"),
    ({"noise": "given"}, TypeError, "noise must be a number, got 'given'"),
    ({"noise": -1.0}, ValueError, "noise must be finite .* standard deviation on the scale of y"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_parameters_are_refused_when_fitting(change, error, message):
    model = regressor(**change)
    with pytest.raises(error, match=message):
        model.fit(INPUTS, Y)
    with pytest.raises(NotFittedError):
        model.predict(INPUTS)


def test_noise_is_not_told_before_a_fit():
    with pytest.raises(NotFittedError, match="not fitted yet"):
        _ = regressor().noise_std_


def test_data_that_cannot_be_learnt_from_are_refused():
    with pytest.raises(ValueError, match=r"[Ss]ample.weight"):
        classifier().fit(X, NAMES, sample_weight=np.zeros(150))
    with pytest.raises(ValueError, match="Negative values"):
        classifier().fit(X, NAMES, sample_weight=-np.ones(150))
    with pytest.raises(ValueError, match="leaves none to train on"):
        classifier(early_stopping=True).fit(X[:1], NAMES[:1])


def test_numerical_trouble_is_explained():
    model = regressor(learning_rate_init=1e200, max_iter=3)
    with pytest.raises(
        slangvi.NumericalError, match=r"fit met NaN or Inf in epoch \d: .* Lower learning_rate_init \(it"
    ):
        model.fit(INPUTS, Y)
    with pytest.raises(NotFittedError):
        model.predict(INPUTS)
