"""Estimators that were saved, interrupted or failed half way go on as if nothing had happened, to the last bit."""

from __future__ import annotations

import copy
import io
import pickle

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError

import slangvi
from slangvi import SLANGClassifier, SLANGRegressor
from slangvi.params.state import tensors_of

X, LABELS = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[LABELS]
QUICK = {
    **{"hidden_layer_sizes": (4,), "max_iter": 3, "batch_size": 25, "mc_samples": 1, "rank": 1},
    **{"predict_samples": 8, "random_state": 0},
}
# How an estimator may be kept: all of these go on.
KEPT = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "joblib": lambda model: joblib.load(io.BytesIO(_dumped(model))),
    "deepcopy": copy.deepcopy,
}
# Estimator, inputs, targets, and what differs from QUICK.
MODELS = {
    "classifier": (SLANGClassifier, X, NAMES, {}),
    "regressor": (SLANGRegressor, X[:, :3], X[:, 3], {}),
    "given noise": (SLANGRegressor, X[:, :3], X[:, 3], {"noise": 0.3}),
    "columns": (SLANGRegressor, X[:, :2], X[:, 2:], {}),
    "module": (SLANGClassifier, X, NAMES, {"module": torch.nn.Linear}),
    "own source": (SLANGClassifier, X, NAMES, {"random_state": np.random.RandomState(3)}),
}


def _dumped(model):
    file = io.BytesIO()
    joblib.dump(model, file)
    return file.getvalue()


def make(name, **changes):
    kind, x, y, own = MODELS[name]
    return copy.deepcopy(kind(**(QUICK | own | changes))), x, y


def more(model, x, y, k):
    """A part of the rows, another one each time."""
    part = np.arange(k % 3, len(x), 3)
    classes = {"classes": np.unique(y)} if isinstance(model, SLANGClassifier) else {}
    return model.partial_fit(x[part], y[part], **classes)


def assert_identical(a, b, x):
    pairs = zip(tensors_of(a.state_), tensors_of(b.state_), strict=True)
    assert all(torch.equal(first, second) for (_, first), (_, second) in pairs)
    assert a.state_.step == b.state_.step
    assert a.loss_curve_ == b.loss_curve_
    assert a.n_samples_seen_ == b.n_samples_seen_
    np.testing.assert_array_equal(a.predict(x), b.predict(x))
    if isinstance(a, SLANGRegressor):
        np.testing.assert_array_equal(a.predict(x, return_std=True)[1], b.predict(x, return_std=True)[1])


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("name", MODELS)
def test_partial_fits_go_on_from_every_moment(name, how):
    model, x, y = make(name)
    taken_up, _, _ = make(name)
    for k in range(4):
        more(model, x, y, k)
        taken_up = KEPT[how](more(taken_up, x, y, k))
    assert_identical(taken_up, model, x)


@pytest.mark.parametrize("name", MODELS)
def test_warm_starts_go_on_from_a_pickle(name):
    (model, x, y), (other, _, _) = make(name, warm_start=True), make(name, warm_start=True)
    for _ in range(2):
        model.fit(x, y)
        other = KEPT["pickle"](other.fit(x, y))
    more(model, x, y, 0)
    assert_identical(more(other, x, y, 0), model, x)


class Stop:
    """Something for `verbose` that fails after so many epochs."""

    def __init__(self, error, after):
        self.error, self.left = error, after

    def __call__(self, line):
        self.left -= 1
        if self.left < 0:
            raise self.error("stopped here")


@pytest.mark.parametrize("error", [KeyboardInterrupt, slangvi.NumericalError, MemoryError])
@pytest.mark.parametrize("name", ["classifier", "regressor"])
@pytest.mark.parametrize("call", ["fit", "warm fit", "partial_fit"])
def test_a_call_that_ends_early_leaves_the_estimator_as_it_was(call, name, error):
    """So that it can be made again, and then gives what it would have given."""
    warm = call == "warm fit"
    (model, x, y), (other, _, _) = make(name, warm_start=warm), make(name, warm_start=warm)

    def again(one):
        return more(one, x, y, 1) if call == "partial_fit" else one.fit(x[::-1], y[::-1])

    for one in (model, other):
        more(one, x, y, 0)
    kept, before = set(vars(other)), other.predict(x)
    other.set_params(verbose=Stop(error, 0 if call == "partial_fit" else 1))
    with pytest.raises(error, match="stopped here"):
        again(other)
    other.set_params(verbose=False)
    assert set(vars(other)) == kept
    np.testing.assert_array_equal(other.predict(x), before)
    assert_identical(again(other), again(model), x)


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_a_first_call_that_ends_early_leaves_nothing(name):
    model, x, y = make(name)
    fresh = dict(vars(model))
    for call in (model.fit, lambda x, y: more(model, x, y, 0)):
        model.set_params(verbose=Stop(KeyboardInterrupt, 0))
        with pytest.raises(KeyboardInterrupt):
            call(x, y)
        assert vars(model).keys() == fresh.keys()
        with pytest.raises(NotFittedError):
            model.predict(x)
    model.set_params(verbose=False)
    assert_identical(model.fit(x, y), clone(model).fit(x, y), x)


def test_a_source_that_was_handed_in_is_not_set_back():
    source = np.random.RandomState(0)
    model = SLANGClassifier(**(QUICK | {"random_state": source, "verbose": Stop(KeyboardInterrupt, 0)}))
    before = source.get_state()[2]
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, NAMES)
    assert source.get_state()[2] != before


def test_rows_that_are_refused_change_nothing():
    model, x, y = make("classifier")
    more(model, x, y, 0)
    kept = dict(vars(model))
    with pytest.raises(ValueError, match="not among the classes"):
        model.partial_fit(x, np.full(150, "else"))
    with pytest.raises(ValueError, match="expecting 4 features"):
        model.partial_fit(x[:, :2], y)
    assert all(vars(model)[key] is value for key, value in kept.items())
    assert vars(model).keys() == kept.keys()


def test_an_estimator_from_before_a_parameter_has_its_default():
    x, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20) % 2
    fitted = SLANGClassifier(max_iter=1, random_state=0).fit(x, y)
    saved = {name: value for name, value in fitted.__getstate__().items() if name not in ("curvature", "projection")}
    again = SLANGClassifier.__new__(SLANGClassifier)
    again.__setstate__(saved)
    assert again.get_params() == fitted.get_params()
    again.partial_fit(x, y)
