"""Metrics against scikit-learn, torchmetrics and their definitions in slow loops, and on draws of known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from slangvi import metrics

CLASSIFICATION = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece]
BINNED = [metrics.reliability, metrics.risk_coverage]


def predictions(seed: int, n: int, classes: int, sharpness: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=source, dtype=torch.float64) * sharpness
    return logits.softmax(-1), torch.randint(classes, (n,), generator=source)


# Sharper predictions than these reach probabilities below 2e-16, which scikit-learn rounds up and we do not.
cases = st.builds(
    predictions, st.integers(0, 2**20), st.integers(1, 40), st.integers(2, 6), st.sampled_from([0.1, 1.0, 3.0])
)


def slow_ece(probs: torch.Tensor, labels: torch.Tensor, bins: int) -> float:
    total = 0.0
    for k in range(bins):
        inside = []
        for p, y in zip(probs.tolist(), labels.tolist(), strict=True):
            top = max(p)
            if k / bins < top <= (k + 1) / bins:
                inside.append((top, float(p.index(top) == y)))
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            right = sum(r for _, r in inside) / len(inside)
            total += len(inside) / len(labels) * abs(confidence - right)
    return total


@given(case=cases)
def test_accuracy_and_nll_are_those_of_scikit_learn(case):
    probs, labels = case
    classes = list(range(probs.shape[1]))
    assert metrics.accuracy(probs, labels) == pytest.approx(sklearn.metrics.accuracy_score(labels, probs.argmax(-1)))
    assert metrics.nll(probs, labels) == pytest.approx(
        sklearn.metrics.log_loss(labels.numpy(), probs.numpy(), labels=classes), rel=1e-9, abs=1e-9
    )


@given(case=cases)
def test_brier_is_the_squared_distance_to_the_truth(case):
    probs, labels = case
    truth = np.eye(probs.shape[1])[labels.numpy()]
    assert metrics.brier(probs, labels) == pytest.approx(((probs.numpy() - truth) ** 2).sum(1).mean(), rel=1e-12)


@given(case=cases, bins=st.integers(1, 20))
def test_ece_is_that_of_a_slow_loop(case, bins):
    probs, labels = case
    assert metrics.ece(probs, labels, bins) == pytest.approx(slow_ece(probs, labels, bins), rel=1e-9, abs=1e-12)


@given(case=cases, bins=st.integers(2, 20))
def test_ece_is_that_of_torchmetrics(case, bins):
    """Which works in float32, and would count a confidence at the edge of two bins with the upper one."""
    probs, labels = case
    theirs = multiclass_calibration_error(probs, labels, num_classes=probs.shape[1], n_bins=bins, norm="l1")
    assert metrics.ece(probs, labels, bins) == pytest.approx(float(theirs), abs=1e-5)


@pytest.mark.parametrize(
    ("probs", "labels", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0, 1], 0.0),  # certain and right; confidence 1 is in the last bin
        ([[1.0, 0.0], [0.0, 1.0]], [1, 0], 1.0),  # certain and wrong
        ([[0.5, 0.5], [0.5, 0.5]], [0, 1], 0.0),  # undecided and right half the time; 0.5 is an edge of two bins
        ([[0.5, 0.5], [0.75, 0.25]], [0, 0], 0.375),
    ],
)
def test_ece_at_the_edges_of_bins(probs, labels, expected):
    assert metrics.ece(torch.tensor(probs), torch.tensor(labels), bins=2) == pytest.approx(expected)


def test_perfect_and_impossible_predictions_have_finite_scores():
    probs, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert metrics.nll(probs, labels) == 0.0
    assert metrics.brier(probs, labels) == 0.0
    wrong = metrics.nll(probs, torch.tensor([1]))
    assert 700 < wrong < math.inf
    assert metrics.brier(probs, torch.tensor([1])) == 2.0


def test_float32_probabilities_are_scored_in_float64():
    probs, labels = predictions(0, 1000, 3)
    assert metrics.nll(probs.float(), labels) == pytest.approx(metrics.nll(probs, labels), rel=1e-6)
    assert isinstance(metrics.nll(probs.float(), labels), float)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_labels_of_any_integer_type_are_accepted(metric, dtype):
    probs, labels = predictions(0, 20, 3)
    assert metric(probs, labels.to(dtype)) == metric(probs, labels)


BAD = [
    (torch.ones(3), torch.tensor([0, 0, 0]), ValueError, r"probs must be \(n, C\) and labels \(n,\).*got \(3,\)"),
    (torch.ones(3, 2), torch.tensor([0, 0]), ValueError, r"got \(3, 2\) and \(2,\)"),
    (torch.ones(3, 2), torch.tensor([[0], [0], [0]]), ValueError, r"got \(3, 2\) and \(3, 1\)"),
    (torch.ones(0, 2), torch.zeros(0, dtype=torch.long), ValueError, "n ≥ 1"),
    (torch.full((2, 2), 0.5), torch.tensor([0, 2]), ValueError, r"labels 0…1 .*got values from 0 to 2"),
    (torch.full((2, 2), 0.5), torch.tensor([-1, 0]), ValueError, r"got values from -1 to 0"),
    (torch.full((2, 2), 0.5), torch.tensor([0.0, 1.0]), TypeError, "integer class labels"),
]


@pytest.mark.parametrize(("probs", "labels", "error", "message"), BAD)
@pytest.mark.parametrize("metric", CLASSIFICATION + BINNED)
def test_classification_metrics_refuse(metric, probs, labels, error, message):
    with pytest.raises(error, match=message):
        metric(probs, labels)


@pytest.mark.parametrize("probs", [[[0.5, math.nan]], [[math.nan, math.nan]]])
@pytest.mark.parametrize("metric", CLASSIFICATION + BINNED)
def test_probabilities_that_are_nan_are_refused(metric, probs):
    with pytest.raises(ValueError, match=r"probs must lie in \[0, 1\]"):
        metric(torch.tensor(probs), torch.tensor([1]))


@pytest.mark.parametrize("probs", [[[3.0, -2.0]], [[-0.1, 1.1]], [[math.inf, 0.0]]])
@pytest.mark.parametrize("metric", [metrics.nll, metrics.brier, metrics.ece])
def test_logits_in_place_of_probabilities_are_refused(metric, probs):
    with pytest.raises(ValueError, match=r"probs must lie in \[0, 1\]"):
        metric(torch.tensor(probs), torch.tensor([1]))


@pytest.mark.parametrize(("bins", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_ece_refuses_impossible_bins(bins, error):
    with pytest.raises(error, match="bins must be"):
        metrics.ece(*predictions(0, 3, 2), bins=bins)


@given(case=cases, bins=st.integers(1, 20))
def test_reliability_counts_every_example_once_and_agrees_with_ece(case, bins):
    probs, labels = case
    found = metrics.reliability(probs, labels, bins)
    assert int(found.size.sum()) == len(labels)
    there = found.size > 0
    assert bool(found.confidence.isnan().eq(~there).all())
    weighted = (found.size * found.accuracy)[there].sum() / len(labels)
    assert float(weighted) == pytest.approx(metrics.accuracy(probs, labels))
    gap = (found.size * (found.accuracy - found.confidence).abs())[there].sum() / len(labels)
    assert metrics.ece(probs, labels, bins) == pytest.approx(float(gap), abs=1e-12)


# ---- uncertainty ----


@given(case=cases)
def test_entropy_is_that_of_a_categorical_distribution(case):
    expected = torch.distributions.Categorical(probs=case[0]).entropy()
    torch.testing.assert_close(metrics.predictive_entropy(case[0]), expected, rtol=1e-10, atol=1e-10)


def test_mutual_information_is_the_mean_divergence_of_draws_from_their_mean(generator):
    probs = torch.randn(6, 9, 4, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    mean = probs.mean(0)
    expected = [sum(float((probs[s, i] * (probs[s, i] / mean[i]).log()).sum()) for s in range(6)) / 6 for i in range(9)]
    torch.testing.assert_close(metrics.mutual_information(probs), torch.tensor(expected, dtype=torch.float64))


def test_votes_as_whole_numbers_count_as_probabilities():
    votes, labels = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [0, 1]]]), torch.tensor([0, 0])
    assert torch.equal(metrics.mutual_information(votes), metrics.mutual_information(votes.float()))
    found, expected = (metrics.reliability(probs, labels, 2) for probs in (votes[0], votes[0].float()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert metrics.risk_coverage(votes[0], labels).risk.tolist() == [0.5, 0.5]


def test_mutual_information_of_draws_that_agree_is_zero_and_never_negative():
    probs = predictions(0, 200, 5)[0].float()
    found = metrics.mutual_information(probs.expand(7, -1, -1))
    assert found.dtype is torch.float32
    assert bool((found >= 0).all())
    assert float(found.max()) < 1e-12


@pytest.mark.parametrize("shape", [(3,), (0, 4, 3)])
def test_mutual_information_needs_draws(shape):
    with pytest.raises(ValueError, match=r"probs must be \(S, ..., C\) with S ≥ 1"):
        metrics.mutual_information(torch.full(shape, 1 / 3))


# Few values, so that many scores are equal.
scores = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=40).map(torch.tensor)


def truth_of(inside: torch.Tensor, outside: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return np.r_[np.zeros(len(inside)), np.ones(len(outside))], np.r_[inside.numpy(), outside.numpy()]


@given(inside=scores, outside=scores)
def test_auroc_is_that_of_scikit_learn(inside, outside):
    truth, score = truth_of(inside, outside)
    assert metrics.auroc(inside, outside) == pytest.approx(sklearn.metrics.roc_auc_score(truth, score), abs=1e-12)


@given(inside=scores, outside=scores)
def test_auroc_is_that_of_torchmetrics(inside, outside):
    truth, score = map(torch.from_numpy, truth_of(inside / 6, outside / 6))
    assert metrics.auroc(inside, outside) == pytest.approx(float(binary_auroc(score, truth.long())), abs=1e-6)


@given(inside=scores, outside=scores, level=st.sampled_from([0.5, 0.8, 0.95, 1.0]))
def test_fpr95_is_a_point_of_scikit_learns_curve(inside, outside, level):
    truth, score = truth_of(inside, outside)
    false, true, _ = sklearn.metrics.roc_curve(1 - truth, -score, drop_intermediate=False)
    expected = false[np.flatnonzero(true >= level - 1e-12)[0]]
    assert metrics.fpr95(inside, outside, level) == pytest.approx(expected, abs=1e-12)


def test_fpr95_at_the_lowest_level_lets_one_pass():
    assert metrics.fpr95(torch.arange(5.0), torch.arange(5.0), level=1e-12) == 0.2


def test_perfect_and_inverted_separation():
    low, high = torch.arange(20.0), torch.arange(100.0, 130.0)
    assert (metrics.auroc(low, high), metrics.fpr95(low, high)) == (1.0, 0.0)
    assert (metrics.auroc(high, low), metrics.fpr95(high, low)) == (0.0, 1.0)


BAD_SCORES = [torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, math.nan])]


@pytest.mark.parametrize("bad", BAD_SCORES)
@pytest.mark.parametrize("metric", [metrics.auroc, metrics.fpr95])
def test_scores_that_cannot_be_compared_are_refused(metric, bad):
    for pair in ((bad, torch.ones(3)), (torch.ones(3), bad)):
        with pytest.raises(ValueError, match=r"an uncertainty must be \(n,\) with n ≥ 1 and without NaN"):
            metric(*pair)


def slow_risks(wrong: list[float], doubt: list[float]) -> list[float]:
    """Mean over all orders of the rows, by the definition: sort, answer the first k, count errors."""
    found = []
    for k in range(1, len(wrong) + 1):
        bar = sorted(doubt)[k - 1]
        surer = [w for w, u in zip(wrong, doubt, strict=True) if u < bar]
        equal = [w for w, u in zip(wrong, doubt, strict=True) if u == bar]
        found.append((sum(surer) + (k - len(surer)) * sum(equal) / len(equal)) / k)
    return found


@given(case=cases, data=st.data())
def test_risk_coverage_is_that_of_a_slow_loop(case, data):
    probs, labels = case
    size = len(labels)
    doubt = torch.tensor(data.draw(st.lists(st.integers(0, 4).map(float), min_size=size, max_size=size)))
    wrong = (probs.argmax(-1) != labels).double().tolist()
    for given_doubt, used in ((None, (-probs.max(-1).values).tolist()), (doubt, doubt.tolist())):
        found = metrics.risk_coverage(probs, labels, given_doubt)
        assert found.risk.tolist() == pytest.approx(slow_risks(wrong, used))
        assert found.coverage.tolist() == pytest.approx([(k + 1) / size for k in range(size)])
        assert found.area == pytest.approx(float(found.risk.mean()))
        assert float(found.risk[-1]) == pytest.approx(1 - metrics.accuracy(probs, labels))


@pytest.mark.parametrize("bad", [*BAD_SCORES, torch.zeros(4)])
def test_risk_coverage_refuses_another_number_of_scores(bad):
    with pytest.raises(ValueError, match=r"uncertainty must be \("):
        metrics.risk_coverage(*predictions(0, 3, 2), uncertainty=bad)


# ---- regression ----


def test_rmse_is_that_of_scikit_learn(generator):
    mean, y = torch.randn(2, 30, 2, generator=generator, dtype=torch.float64)
    expected = math.sqrt(sklearn.metrics.mean_squared_error(y, mean))
    assert metrics.rmse(mean, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("std", [0.7, torch.tensor(0.7), torch.full((5, 1), 0.7), torch.full((4, 5, 2), 0.7)])
def test_mixture_nll_is_the_log_of_the_mean_density(std, generator):
    means = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    variance = 0.7**2
    density = [
        [math.exp(-float((y[i] - means[s, i]).square().sum()) / 2 / variance) for s in range(4)] for i in range(5)
    ]
    expected = -sum(math.log(sum(row) / 4) for row in density) / 5 + math.log(2 * math.pi * variance)
    assert metrics.mixture_nll(means, std, y) == pytest.approx(expected, rel=1e-6)


def test_mixture_nll_far_from_every_component_is_finite():
    value = metrics.mixture_nll(torch.zeros(3, 1), 1e-3, torch.ones(1))
    assert value == pytest.approx(0.5e6 + math.log(1e-3) + 0.5 * math.log(2 * math.pi), rel=1e-6)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.99])
def test_draws_from_the_truth_cover_it_as_often_as_they_say(level, generator, global_rng_untouched):
    n, S = 2000, 500
    scale = torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.1
    y = scale * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    draws = scale * torch.randn(S, n, 1, generator=generator, dtype=torch.float64)
    # Binomial error of the targets, and the error of an interval whose ends come from S draws.
    error = math.sqrt(level * (1 - level) * (1 / n + 1 / S / n)) + 2 / S
    assert abs(metrics.coverage(draws, y, level) - level) <= 4 * error


def test_interval_error_is_the_mean_gap_and_tells_honest_from_sure(generator):
    y = torch.randn(1000, generator=generator)
    honest = torch.randn(200, 1000, generator=generator)
    gaps = [abs(metrics.coverage(honest, y, k / 10) - k / 10) for k in range(1, 10)]
    assert metrics.interval_error(honest, y) == pytest.approx(sum(gaps) / 9)
    assert metrics.interval_error(honest, y) < 0.05
    assert metrics.interval_error(0.2 * honest, y) > 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draws_cover_what_the_same_numbers_do(dtype, generator):
    draws, targets = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((11, 50), (50,)))
    assert metrics.coverage(draws, targets, 0.5) == metrics.coverage(draws.float(), targets.float(), 0.5)


def test_coverage_includes_the_ends_of_the_interval():
    draws = torch.arange(5.0).unsqueeze(1).expand(5, 4)
    assert metrics.coverage(draws, torch.tensor([0.99, 1.0, 3.0, 3.01]), 0.5) == 0.5


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 90, math.nan])
def test_coverage_refuses_levels_outside_zero_and_one(level):
    with pytest.raises(ValueError, match=r"level must be finite and in \(0, 1\)"):
        metrics.coverage(torch.zeros(3, 2), torch.zeros(2), level)


def test_predictions_and_targets_of_different_shapes_are_refused():
    message = r"predictions and targets must have the same shape, got \(4, 1\) and \(4,\)"
    for call in (
        lambda: metrics.rmse(torch.zeros(4, 1), torch.zeros(4)),
        lambda: metrics.mixture_nll(torch.zeros(3, 4, 1), 1.0, torch.zeros(4)),
        lambda: metrics.coverage(torch.zeros(3, 4, 1), torch.zeros(4), 0.5),
        lambda: metrics.interval_error(torch.zeros(3, 4, 1), torch.zeros(4)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan])
def test_mixture_nll_refuses_noise_that_is_not_positive(std):
    with pytest.raises(ValueError, match=r"scale|std"):
        metrics.mixture_nll(torch.zeros(2, 3), std, torch.zeros(3))


@pytest.mark.parametrize("shape", [(5,), (2, 5), (4, 2, 1)])
def test_mixture_nll_refuses_noise_for_other_predictions(shape):
    with pytest.raises(ValueError, match=r"std must be a number or a tensor that broadcasts to the shape \(2, 1\)"):
        metrics.mixture_nll(torch.zeros(2, 1), torch.ones(shape), torch.zeros(1))


def test_nothing_to_score_is_refused_rather_than_nan():
    for call in (
        lambda: metrics.rmse(torch.zeros(0), torch.zeros(0)),
        lambda: metrics.mixture_nll(torch.zeros(2, 0), 1.0, torch.zeros(0)),
        lambda: metrics.coverage(torch.zeros(2, 0), torch.zeros(0), 0.5),
    ):
        with pytest.raises(ValueError, match="at least one"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.mutual_information(None), "probs must be a tensor of real numbers, got NoneType"),
        (lambda: metrics.coverage([], torch.ones(3), 0.9), "draws must be a tensor of real numbers, got list"),
        (lambda: metrics.interval_error({}, torch.ones(3)), "draws must be a tensor of real numbers, got dict"),
        (lambda: metrics.mixture_nll(3, 1.0, torch.ones(3)), "draws must be a tensor of real numbers, got int"),
        (lambda: metrics.coverage(torch.ones(0, 3), torch.ones(3), 0.9), r"draws must be real, .* got \(0, 3\)"),
        (lambda: metrics.coverage(torch.ones(2, 3).long(), torch.ones(3), 0.9), "draws must be real, .*int64"),
    ],
)
def test_draws_that_are_none_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_probabilities_add_up_to_one(dtype):
    """Sigmoids of several outputs, or one probability of two classes, are no distribution over classes."""
    labels, good = torch.tensor([0, 1]), torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=dtype)
    assert metrics.nll(good, labels) > 0
    for bad, told in ((good * 0.5, "0.5"), (good[:, :1], "0.4")):
        with pytest.raises(ValueError, match=rf"add up to 1 over the classes.*got sums from {told}.*\(1 - p, p\)"):
            metrics.predictive_entropy(bad)
