"""Fitted models: scores, predictions against the definition, and folders that are whole or refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from helpers.csv_tables import fitted, houses, kinds
from slangvi.errors import CheckpointError, DataError
from slangvi.tabular import model as folder
from slangvi.tabular.fitting import KEPT, SHOWN, Settings, fit, score
from slangvi.tabular.model import ABOUT, WEIGHTS, Classes, Numbers, load, save
from slangvi.tabular.output import columns
from slangvi.tabular.reading import read_csv


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two tables, whatever test comes first."""
    folder = tmp_path_factory.mktemp("tables")
    houses(folder / "houses.csv")
    kinds(folder / "kinds.csv")
    return folder


@pytest.fixture(scope="module")
def regression(place):
    return fitted(place / "houses.csv", "price")


@pytest.fixture(scope="module")
def classification(place):
    return fitted(place / "kinds.csv", "=kind")


def test_a_regression_learns_and_knows_its_noise(place):
    path = houses(place / "more.csv", rows=200)
    scores = fitted(path, "price", epochs=30, hidden=(8,), refit=False).record["scores"]
    assert scores["model"]["rmse"] < 0.5 * scores["baseline"]["rmse"]
    assert scores["model"]["nll"] < scores["baseline"]["nll"]


def test_the_baseline_is_the_mean_or_the_frequencies_of_the_training_rows(regression, classification):
    for model, name in ((regression, "rmse"), (classification, "accuracy")):
        assert set(model.record["scores"]["baseline"]) == {"nll", name, "ece"}
    shares = np.array([0.25, 0.75])
    held = torch.tensor([0, 1, 1, 1])
    expected = -np.log(shares[held.numpy()]).mean()
    probs = Classes(np.tile([0.5, 0.5, 0.0], (4, 1)), np.zeros(4), np.zeros(4))
    found = score(classification, np.zeros((4, 1)), held.numpy(), probs, np.array([0, 1, 1, 1]))
    assert found["baseline"]["nll"] == pytest.approx(expected)
    assert found["model"]["nll"] == pytest.approx(math.log(2))


def test_numbers_are_moments_over_draws_plus_noise(regression):
    x = np.random.default_rng(0).normal(size=(5, regression.network.features))
    draws = torch.cat(list(regression.draws(x)), 1)[..., 0].numpy()
    scale, mean, noise = regression.network.scale, regression.network.mean, regression.network.noise
    found = regression.predict(x)
    assert isinstance(found, Numbers)
    np.testing.assert_allclose(found.mean, draws.mean(0) * scale + mean)
    np.testing.assert_allclose(found.std, scale * np.sqrt(draws.var(0, ddof=1) + noise**2))
    np.testing.assert_allclose(found.epistemic_share, draws.var(0, ddof=1) / (draws.var(0, ddof=1) + noise**2))
    lower, upper = found.interval(0.9)
    np.testing.assert_allclose((upper - lower) / found.std, 2 * 1.6448536, rtol=1e-6)


def test_probabilities_are_means_over_draws(classification):
    x = np.random.default_rng(0).normal(size=(5, classification.network.features))
    draws = np.exp(torch.cat(list(classification.draws(x)), 1).log_softmax(-1).numpy())
    found = classification.predict(x)
    assert isinstance(found, Classes)
    np.testing.assert_allclose(found.probs, draws.mean(0))
    entropy = -(found.probs * np.log(found.probs)).sum(1)
    np.testing.assert_allclose(found.entropy, entropy)
    inside = -(draws * np.log(draws)).sum(-1).mean(0)
    np.testing.assert_allclose(found.epistemic_share, (entropy - inside) / entropy, atol=1e-10)


def test_predictions_do_not_depend_on_the_rows_beside_them(regression, monkeypatch):
    x = np.random.default_rng(0).normal(size=(7, regression.network.features))
    whole = regression.predict(x)
    monkeypatch.setattr("slangvi.predict.samples._CHUNK", 1)
    np.testing.assert_allclose(regression.predict(x).std, whole.std, rtol=1e-12)


def test_coverage_is_the_share_inside_each_interval():
    source = np.random.default_rng(0)
    predicted = Numbers(source.normal(size=50), source.uniform(0.5, 2, 50), np.zeros(50))
    y = source.normal(size=50)
    for level, share in zip([k / 10 for k in range(1, 10)], predicted.coverages(y), strict=True):
        lower, upper = predicted.interval(level)
        assert share == np.mean((y >= lower) & (y <= upper))


def test_the_same_seed_gives_the_same_model_and_another_does_not(regression, place):
    again, other = fitted(place / "houses.csv", "price"), fitted(place / "houses.csv", "price", seed=1)
    assert torch.equal(again.posterior.loc, regression.posterior.loc)
    assert not torch.equal(other.posterior.loc, regression.posterior.loc)


def test_no_refit_keeps_the_model_that_was_scored(place):
    seen = []
    settings = Settings("price", epochs=1, hidden=(), refit=False)
    model = fit(read_csv(place / "houses.csv"), settings, lambda *told: seen.append(told))
    assert seen == [("four fifths", 0, 1), ("four fifths", 1, 1)]
    assert len(model.posterior.loc) == model.schema.features + 1


def test_what_a_report_needs_is_kept(regression, classification):
    for model in (regression, classification):
        record = model.record
        assert record["held_out_rows"] == len(record["held_out"]["target"]) <= KEPT
        assert 0 < len(record["most_uncertain"]) <= SHOWN
    stds = [row["std"] for row in regression.record["most_uncertain"]]
    assert stds == sorted(stds, reverse=True)


def test_excluded_columns_are_not_used(place):
    table = read_csv(place / "houses.csv")
    model = fitted(place / "houses.csv", "price", exclude=("town",))
    assert [column.name for column in model.schema.columns] == ["size"]
    for wrong, message in (("colour", "no column 'colour' to exclude"), ("price", "'price' cannot be excluded")):
        with pytest.raises(DataError, match=message):
            fit(table, Settings("price", exclude=(wrong,)), lambda *told: None)


# ---- folders ----


@pytest.mark.parametrize("which", ["regression", "classification"])
def test_a_folder_gives_the_same_model_back(which, request, tmp_path):
    model = request.getfixturevalue(which)
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    x = np.random.default_rng(0).normal(size=(4, model.network.features))
    assert columns(again, x, 0.9) == columns(model, x, 0.9)
    assert (again.schema, again.target, again.network) == (model.schema, model.target, model.network)
    assert json.loads(json.dumps(model.record)) == again.record
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [ABOUT, WEIGHTS]


@pytest.fixture
def saved(regression, tmp_path):
    save(regression, tmp_path)
    return tmp_path


def edit(path, change):
    about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    change(about)
    body = {key: value for key, value in about.items() if key not in ("format", "version", "sha256")}
    (path / ABOUT).write_text(json.dumps(about | {"sha256": folder._digest(body)}), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(version=2), r"version 2, and this slangvi reads 1\. Upgrade"),
        (lambda about: about.update(version="x"), "checksum"),
        (lambda about: about.update(format="other"), "another format"),
        (lambda about: about.pop("schema"), "KeyError"),
        (lambda about: about["schema"].update(columns=[]), "does not fit the columns"),
        (lambda about: about["network"].update(hidden=[10**9]), "does not fit the network"),
        (lambda about: about["network"].update(hidden=[-1]), "impossible sizes"),
        (lambda about: about["network"].update(activation="eval"), "impossible sizes"),
        (lambda about: about["network"].update(samples=10**9), "1000000000 draws"),
        (lambda about: about["network"].update(scale=float("nan")), "impossible scales"),
        (lambda about: about["network"].update(extra=1), "TypeError"),
        (lambda about: about.update(weights_sha256="0"), "not of the same fit"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(saved, change, message):
    edit(saved, change)
    with pytest.raises(DataError, match=message):
        load(saved)


def test_a_changed_byte_is_seen(saved):
    content = (saved / ABOUT).read_bytes()
    (saved / ABOUT).write_bytes(content.replace(b"Bern", b"Born", 1))
    with pytest.raises(DataError, match="its checksum is not the one"):
        load(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_description_is_refused(saved, content):
    (saved / ABOUT).write_bytes(content)
    with pytest.raises(DataError, match="is damaged, or is no model of slangvi"):
        load(saved)


def test_missing_files_are_named(saved, tmp_path):
    (saved / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"no file .*{WEIGHTS}"):
        load(saved)
    with pytest.raises(DataError, match=r"it has no model\.json"):
        load(tmp_path / "nowhere")


def test_weights_of_another_fit_are_refused(saved, classification, tmp_path):
    save(classification, tmp_path / "other")
    (tmp_path / "other" / WEIGHTS).replace(saved / WEIGHTS)
    with pytest.raises(DataError, match="not of the same fit"):
        load(saved)
