"""Small data: the noisy cubic's law, the bundled patients' shapes and scale."""

from __future__ import annotations

import sys

import pytest
import torch

from slangvi.data.toy import Split, breast_cancer, cubic


@pytest.mark.parametrize("half_width", [4.0, 5.0])
def test_cubic_has_the_range_and_moments_it_says(half_width, generator, global_rng_untouched, within_sigmas):
    x, y = cubic(20_000, half_width, generator)
    noise = y - x**3
    assert x.shape == y.shape == (20_000, 1)
    assert half_width * 0.999 < float(x.abs().max()) <= half_width
    assert within_sigmas(x, torch.zeros(1))
    assert within_sigmas(x**2, torch.tensor([half_width**2 / 3]))
    assert within_sigmas(noise, torch.zeros(1))
    assert within_sigmas(noise**2, torch.tensor([9.0]))
    assert within_sigmas(noise * x, torch.zeros(1))


def test_cubic_has_the_papers_thirty_points_by_default(generator):
    x, y = cubic(generator=generator)
    assert x.shape == y.shape == (30, 1)
    assert float(x.abs().max()) <= 4.0


def test_cubic_follows_its_generator():
    first, again, other = (cubic(generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_cubic_follows_the_global_seed_without_a_generator():
    torch.manual_seed(1)
    first = cubic()
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, cubic(), strict=True))


@pytest.mark.parametrize("num_train", [285, 100, 568])
def test_patients_are_split_and_standardised_on_the_training_part(num_train, global_rng_untouched):
    data = breast_cancer(num_train)
    assert isinstance(data, Split)
    assert [tuple(part.shape) for part in data] == [
        (num_train, 30),
        (num_train,),
        (569 - num_train, 30),
        (569 - num_train,),
    ]
    assert data.x_train.dtype is data.x_test.dtype is torch.float32
    assert data.y_train.dtype is data.y_test.dtype is torch.int64
    assert set(torch.cat([data.y_train, data.y_test]).tolist()) == {0, 1}
    torch.testing.assert_close(data.x_train.mean(0), torch.zeros(30), rtol=0, atol=1e-4)
    torch.testing.assert_close(data.x_train.std(0), torch.ones(30), rtol=1e-4, atol=0)
    assert bool(data.x_test.isfinite().all())


def test_every_patient_is_in_exactly_one_part():
    from sklearn.datasets import load_breast_cancer

    data = breast_cancer()
    labels = torch.cat([data.y_train, data.y_test])
    rows = torch.cat([data.x_train, data.x_test])
    assert int(labels.sum()) == int(load_breast_cancer().target.sum())
    assert len({tuple(row) for row in rows.tolist()}) == 569


def test_patients_are_shuffled_by_the_seed_alone():
    first, again, other = breast_cancer(seed=1), breast_cancer(seed=1), breast_cancer(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.y_train, other.y_train)


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"come with scikit-learn: pip install 'slangvi\[sklearn\]'"):
        breast_cancer()


@pytest.mark.parametrize("num_train", [0, 1, 569, 600, -5])
def test_splits_without_a_scale_or_without_a_test_part_are_refused(num_train):
    with pytest.raises(ValueError, match="num_train must be"):
        breast_cancer(num_train)
