"""Entropies and variances against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.posteriors import seeded
from slangvi import Bernoulli, Gaussian, decompose_uncertainty
from slangvi.likelihoods import Likelihood

shapes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


@given(shapes, st.sampled_from([0.1, 1.0, 30.0]), st.integers(0, 1000))
def test_entropies_are_those_of_the_definition(shape, scale, seed):
    probs = (scale * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)).softmax(-1)
    found = decompose_uncertainty(probs)
    for k in range(shape[1]):
        total, aleatoric = entropy(probs[:, k].mean(0).tolist()), sum(map(entropy, probs[:, k].tolist())) / shape[0]
        assert float(found.total[k]) == pytest.approx(total, abs=1e-12)
        assert float(found.aleatoric[k]) == pytest.approx(aleatoric, abs=1e-12)
    assert bool((found.epistemic >= 0).all())
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    assert bool((found.total <= math.log(shape[2]) + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_draws_hardly_differ_in_is_not_lost_to_rounding(dtype):
    step = 2.0**-12 if dtype is torch.float32 else 2.0**-5
    draws = torch.tensor([[[0.25 + step, 0.75 - step]], [[0.25 - step, 0.75 + step]]]).to(dtype)
    exact = entropy(draws.double().mean(0)[0].tolist()) - sum(entropy(p[0].tolist()) for p in draws.double()) / 2
    found = decompose_uncertainty(draws)
    assert found.epistemic.dtype is dtype
    assert found.epistemic.item() == pytest.approx(exact, rel=torch.finfo(dtype).eps)


def test_votes_as_whole_numbers_count_as_probabilities():
    votes = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [0, 1]]])
    assert torch.equal(decompose_uncertainty(votes).epistemic, decompose_uncertainty(votes.float()).epistemic)


def test_order_of_draws_and_rows_does_not_matter():
    probs = torch.randn(5, 4, 3, generator=seeded(), dtype=torch.float64).softmax(-1)
    whole = decompose_uncertainty(probs)
    mixed = decompose_uncertainty(probs.flip(0)[:, [2, 0, 3, 1]])
    for a, b in zip(whole, mixed, strict=True):
        torch.testing.assert_close(a[[2, 0, 3, 1]], b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("likelihood", ["bernoulli", Bernoulli()])
def test_one_probability_stands_for_two_classes(likelihood):
    p = torch.rand(6, 4, generator=seeded(), dtype=torch.float64)
    found = decompose_uncertainty(p, likelihood)
    both = decompose_uncertainty(torch.stack([1 - p, p], -1))
    for a, b in zip(found, both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("likelihood", "options"), [("gaussian", {"noise_variance": 0.25}), (Gaussian(4.0), {})])
def test_variances_add_up(likelihood, options):
    means = torch.randn(6, 4, 2, generator=seeded(), dtype=torch.float64)
    found = decompose_uncertainty(means, likelihood, **options)
    expected = ((means - means.mean(0)) ** 2).sum(0) / 5
    torch.testing.assert_close(found.epistemic, expected)
    torch.testing.assert_close(found.aleatoric, torch.full_like(expected, 0.25))
    torch.testing.assert_close(found.total, expected + 0.25)


def test_noise_may_differ_between_predictions():
    noise = torch.tensor([1.0, 2.0])
    found = decompose_uncertainty(torch.zeros(3, 4, 2), "gaussian", noise_variance=noise)
    assert torch.equal(found.aleatoric, noise.expand(4, 2))


class Other(Likelihood):
    def log_prob(self, outputs, targets):
        return outputs

    def predictive(self, outputs):
        return outputs


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.zeros(3),), {}, ValueError, r"samples must have shape \(S, n, \.\.\.\).*got \(3,\)"),
        ((torch.zeros(0, 3, 2),), {}, ValueError, "S ≥ 1"),
        (([0.5],), {}, ValueError, "got list"),
        ((torch.full((2, 3, 2), 1.5),), {}, ValueError, r"probabilities in \[0, 1\]"),
        ((torch.full((2, 3, 2), torch.nan),), {}, ValueError, "or NaN"),
        ((torch.zeros(2, 3), "gaussian"), {}, ValueError, "noise_variance is needed with likelihood='gaussian'"),
        ((torch.zeros(2, 3), "gaussian"), {"noise_variance": -1.0}, ValueError, "must be finite and ≥ 0, got -1.0"),
        (
            (torch.zeros(2, 3, 4), "gaussian"),
            {"noise_variance": torch.ones(3)},
            ValueError,
            r"broadcast to the predictions, \(3, 4\), got shape \(3,\). Give one number for each output",
        ),
        ((torch.zeros(2, 3), "gaussian"), {"noise_variance": torch.ones(2, 3)}, ValueError, r"got shape \(2, 3\)"),
        ((torch.zeros(1, 3), Gaussian()), {}, ValueError, "needs S ≥ 2 samples, got 1"),
        ((torch.zeros(2, 3, 2),), {"noise_variance": 1.0}, ValueError, "for the Gaussian likelihood only"),
        ((torch.zeros(2, 3, 2), Other()), {}, TypeError, "got Other"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        decompose_uncertainty(*arguments, **options)
