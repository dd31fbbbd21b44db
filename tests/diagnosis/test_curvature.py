"""Curvature of a batch against dense matrices and loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.diagnosis import curvature as module
from slangvi.diagnosis.curvature import BatchCurvature
from slangvi.errors import NumericalError
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows import Formed, RowGroup

N = 30.0
SHAPES = [(1, 6, 4), (3, 7, 5), (2, 5, 40)]


def rows_and_prior(draws, examples, size, seed=0, mixed=True):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(draws, examples, size, dtype=torch.float64, generator=generator) + 0.3
    if mixed:  # correlations, and columns of different sizes
        rows = rows @ torch.randn(size, size, dtype=torch.float64, generator=generator) / size**0.5
        rows = rows * torch.logspace(-1, 1, size, dtype=torch.float64)
    lam = torch.rand(size, dtype=torch.float64, generator=generator) + 0.5
    return rows, Prior(lam, torch.zeros_like(lam))


def curvature_of(rows, prior):
    _, examples, size = rows.shape
    cut = size // 2
    spec = ParamSpec.of({"a": torch.zeros(cut), "b": torch.zeros(size - cut)})
    groups = [RowGroup(examples, {"a": Formed(r[:, :cut]), "b": Formed(r[:, cut:])}, r.sum(0)) for r in rows]
    return BatchCurvature(spec, groups, N, prior)


def dense_of(rows):
    flat = rows.flatten(0, 1)
    return N / len(flat) * flat.T @ flat


def relative(matrix, prior):
    scale = (prior.precision + matrix.diagonal()).rsqrt()
    return scale[:, None] * matrix * scale


def covariance(precision):
    return torch.linalg.inv(precision)


@pytest.fixture(params=SHAPES, ids=str)
def case(request):
    rows, prior = rows_and_prior(*request.param)
    return rows, prior, curvature_of(rows, prior)


def test_spectrum_is_that_of_the_curvature_relative_to_its_diagonal(case):
    rows, prior, found = case
    expected = torch.linalg.eigvalsh(relative(dense_of(rows), prior)).flip(0)
    torch.testing.assert_close(found.spectrum, expected[: len(found.spectrum)], rtol=1e-9, atol=1e-10)
    assert float(expected[len(found.spectrum) :].abs().sum()) < 1e-9
    for rank in range(len(found.spectrum) + 1):
        assert found.captured(rank) == pytest.approx(float(expected[:rank].sum() / expected.sum()))


def test_enough_rank_is_the_smallest_that_captures_the_share(case):
    found = case[2]
    for share in (0.1, 0.5, 0.9, 0.999):
        enough = found.enough_rank(share)
        assert found.captured(enough) >= share > found.captured(enough - 1)


def test_reference_variances_are_those_of_the_dense_inverse(case):
    rows, prior, found = case
    expected = covariance(prior.precision.diag() + dense_of(rows)).diagonal()
    torch.testing.assert_close(found.variances(), expected, rtol=1e-8, atol=0)


def test_coverage_is_the_curvature_of_one_half_seen_by_the_other(case):
    rows, prior, found = case
    ratios = []
    for one, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        sigma = covariance(prior.precision.diag() + dense_of(rows[:, one]))
        ratios.append(float((sigma @ dense_of(rows[:, other])).trace() / (sigma @ dense_of(rows[:, one])).trace()))
    assert found.coverage() == pytest.approx(sum(ratios) / 2)


def test_shrinkage_is_the_median_ratio_over_informed_entries(case):
    rows, prior, found = case
    reference, generator = found.variances(), torch.Generator().manual_seed(3)
    variances = reference * (0.1 + torch.rand(len(reference), dtype=torch.float64, generator=generator))
    diagonal = prior.precision + dense_of(rows).diagonal()
    ratios = [
        math.sqrt(float(variances[k] / reference[k]))
        for k in range(len(reference))
        if float(min(reference[k], 1 / diagonal[k]) * prior.precision[k]) < 0.9
    ]
    assert found.shrinkage(variances, reference) == pytest.approx(sorted(ratios)[(len(ratios) - 1) // 2])


def test_faithful_rank_is_the_first_power_of_two_whose_approximation_keeps_sds(case):
    rows, prior, found = case
    whole, reference = dense_of(rows), found.variances()
    target = prior.precision + whole.diagonal()
    vectors = torch.linalg.eigh(relative(whole, prior))
    ratios = {}
    for rank in (0, 1, 2, 4, 8, 16):
        values, directions = vectors[0].flip(0)[:rank], vectors[1].flip(1)[:, :rank]
        factor = target.sqrt()[:, None] * directions * values.clamp_min(0).sqrt()
        low = factor @ factor.T
        low.diagonal().copy_(target)  # low rank off the diagonal, and the batch's own on it
        ratios[rank] = found.shrinkage(covariance(low).diagonal(), reference)
    most = len(found.spectrum)
    expected = next((rank for rank, ratio in ratios.items() if ratio >= 0.8 and rank < most), most)
    assert found.faithful_rank(reference) == expected


def test_rank_zero_is_faithful_where_nothing_is_correlated():
    rows = 3.0 * torch.eye(6, dtype=torch.float64).unsqueeze(0)
    found = curvature_of(rows, Prior(torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)))
    assert found.faithful_rank(found.variances()) == 0
    assert bool((found.spectrum < 1).all())


@pytest.mark.parametrize("shape", [(1, 6, 4), (3, 7, 5)], ids=str)
def test_noise_is_that_of_loops_over_pairs_of_rows(shape):
    rows, prior = rows_and_prior(*shape)
    draws, examples, _ = shape
    places = list(itertools.product(range(draws), range(examples)))
    product = {(p, q): float(rows[p] @ rows[q]) for p in places for q in places}
    mean = lambda chosen: sum(chosen) / len(chosen)  # noqa: E731
    squares = mean([product[p, p] for p in places])
    within = mean([product[p, q] for p in places for q in places if p[0] == q[0] and p[1] != q[1]])
    across = [product[p, q] for p in places for q in places if p[0] != q[0] and p[1] != q[1]]
    signal = mean(across) if across else within
    found = curvature_of(rows, prior).noise()
    assert found.by_example == pytest.approx(squares - within)
    assert found.by_draw == pytest.approx(within - signal, abs=1e-12)
    assert found.signal == pytest.approx(signal)
    # By example it is the trace of the sample covariance at each draw.
    assert found.by_example == pytest.approx(mean([float(r.T.cov().trace()) for r in rows]))
    assert found.scale == pytest.approx(found.by_example / signal if signal > 0 else math.inf)


def test_noise_scale_is_infinite_without_a_signal_and_shares_add_up():
    there = torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64)
    noise = curvature_of(there.repeat(1, 1, 2), rows_and_prior(1, 2, 2)[1]).noise()
    assert noise.scale == math.inf
    assert module.GradientNoise(8.0, 1.0, 1.0).draw_share(8) == 0.5
    assert module.GradientNoise(0.0, 0.0, 1.0).draw_share(8) == 0.0


def test_rows_that_do_not_fit_are_formed_again_with_the_same_result(monkeypatch):
    rows, prior = rows_and_prior(2, 5, 40)
    kept = curvature_of(rows, prior)
    monkeypatch.setattr(module, "FORMED", 10 * 8 * 7)  # seven columns at a time
    streamed = curvature_of(rows, prior)
    assert len(list(streamed._pieces())) > 4
    torch.testing.assert_close(streamed.spectrum, kept.spectrum)
    torch.testing.assert_close(streamed.variances(), kept.variances())
    assert streamed.faithful_rank(streamed.variances()) == kept.faithful_rank(kept.variances())


def test_some_examples_that_stand_for_all_have_the_same_noise_and_the_curvature_of_all():
    rows, prior = rows_and_prior(2, 6, 4)
    spec = ParamSpec.of({"w": torch.zeros(4)})

    def group(r, count, chosen):
        return RowGroup(count, {"w": Formed(r)}, r.sum(0), num_chosen=chosen)

    plain = BatchCurvature(spec, [group(r, 6, None) for r in rows], N, prior)
    some = BatchCurvature(spec, [group(r, 60, 6) for r in rows], N, prior)
    assert (plain.num_examples, some.num_examples) == (6, 60)
    torch.testing.assert_close(some.diagonal, plain.diagonal)
    assert some.noise().by_example == pytest.approx(plain.noise().by_example)
    assert some.noise().signal == pytest.approx(plain.noise().signal)


@given(st.lists(st.floats(0.01, 100.0), min_size=5, max_size=5), st.sampled_from([1e-3, 1.0, 1e3]))
def test_units_of_parameters_do_not_matter(units, overall):
    rows, prior = rows_and_prior(2, 6, 5)
    scale = overall * torch.tensor(units, dtype=torch.float64)
    other = curvature_of(rows * scale, Prior(prior.precision * scale**2, prior.mean))
    plain = curvature_of(rows, prior)
    torch.testing.assert_close(other.spectrum, plain.spectrum, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.variances() * scale**2, plain.variances(), rtol=1e-6, atol=0)
    assert other.coverage() == pytest.approx(plain.coverage(), rel=1e-6)
    assert other.faithful_rank(other.variances()) == plain.faithful_rank(plain.variances())


def test_half_the_examples_know_nothing_of_the_others_where_all_point_elsewhere():
    rows, prior = torch.eye(12, dtype=torch.float64).unsqueeze(0), rows_and_prior(1, 1, 12)[1]
    assert curvature_of(rows, prior).coverage() > 1.5
    together = torch.ones(1, 12, 12, dtype=torch.float64)
    assert curvature_of(together, prior).coverage() == pytest.approx(1.0)
    assert math.isnan(curvature_of(rows[:, :3], prior).coverage())


def test_nothing_is_captured_of_nothing():
    found = curvature_of(torch.zeros(1, 4, 3, dtype=torch.float64), rows_and_prior(1, 1, 3)[1])
    assert (found.captured(0), found.enough_rank(), found.faithful_rank(found.variances())) == (1.0, 0, 0)
    assert found.shrinkage(found.variances(), found.variances()) == 1.0
    assert found.coverage() == 1.0


def test_gradients_that_are_not_finite_are_named():
    rows, prior = rows_and_prior(1, 4, 3)
    rows[0, 1, 2] = math.nan
    with pytest.raises(NumericalError, match="gradients of the batch are not finite"):
        curvature_of(rows, prior)
