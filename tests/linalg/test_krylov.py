"""Leading eigenpairs by iteration: against the full decomposition, with the bound they report."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slangvi.grads import DenseGradients
from slangvi.linalg import krylov, top_factor
from slangvi.linalg.krylov import leading_eigenpairs


def matrix(size, decay, seed=0, rank=None):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, rank or 2 * size, generator=generator, dtype=torch.float64)
    rows = rows * torch.arange(1, rows.shape[1] + 1, dtype=torch.float64) ** -decay
    return rows @ rows.T


def product(pairs):
    return (pairs.vectors * pairs.values) @ pairs.vectors.mT


@settings(max_examples=25)
@given(
    size=st.integers(128, 300),
    count=st.integers(1, 24),
    decay=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    start=st.integers(0, 30),
    seed=st.integers(0, 5),
    filters=st.booleans(),
)
def test_iteration_meets_its_own_bound(size, count, decay, start, seed, filters):
    K = matrix(size, decay, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(krylov, "products_are_cheap", lambda matrix: filters)  # as on a GPU
        found, exact = leading_eigenpairs(K, count, 1e-6, start), leading_eigenpairs(K, count)
    largest = float(exact.values[0])
    assert float(found.residual) <= 1e-6 * largest
    assert float((found.values - exact.values).abs().max()) <= 1e-6 * largest
    gram = found.vectors.mT @ found.vectors
    torch.testing.assert_close(gram, torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [1, 8, 20])
@pytest.mark.parametrize("decay", [1.0, 2.0])
def test_the_rank_l_approximation_is_that_of_the_full_decomposition(count, decay):
    K = matrix(400, decay)
    found, exact = leading_eigenpairs(K, count, 1e-6, count), leading_eigenpairs(K, count)
    assert float(found.residual) > 0.0
    assert float((product(found) - product(exact)).norm()) <= 1e-5 * float(exact.values[0])


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("rank", [1, 5])
def test_matrices_of_low_rank_and_zero_are_no_trouble(rank, filters, monkeypatch):
    monkeypatch.setattr(krylov, "products_are_cheap", lambda matrix: filters)
    for K in (matrix(200, 0.0, rank=rank), torch.zeros(200, 200, dtype=torch.float64)):
        found = leading_eigenpairs(K, 8, 1e-6, 8)
        torch.testing.assert_close(product(found), K, rtol=0, atol=1e-6 * max(1.0, float(K.diagonal().max())))


def test_small_or_nearly_full_problems_are_decomposed():
    for size, count in ((20, 2), (200, 60), (200, 0)):
        found = leading_eigenpairs(matrix(size, 1.0), count, 1e-6)
        assert float(found.residual) == 0.0
        assert found.values.shape == (count,)


@pytest.mark.parametrize("plateau", [1e-3, 1e-4, 5e-5, 3e-5, 1e-6])
def test_no_pair_is_lost_beside_far_larger_ones(plateau, monkeypatch):
    """Some eigenvalues near 1, the rest far below: none of the small ones may be given up for zero."""
    monkeypatch.setattr(krylov, "products_are_cheap", lambda matrix: True)
    for seed in range(8):
        source = torch.Generator().manual_seed(seed)
        vectors = torch.linalg.qr(torch.randn(200, 200, dtype=torch.float64, generator=source)).Q
        spectrum = plateau * (1.0 + 0.3 * torch.rand(200, dtype=torch.float64, generator=source))
        spectrum[: 2 + seed] = 1.0 + torch.rand(2 + seed, dtype=torch.float64, generator=source)
        found = leading_eigenpairs((vectors * spectrum) @ vectors.T, 16, 1e-6)
        assert float(found.values.min()) >= 0.9 * plateau
        torch.testing.assert_close(found.vectors.norm(dim=0), torch.ones(16, dtype=torch.float64))


@pytest.mark.parametrize("cheap", [False, True])
def test_where_products_are_cheap_close_eigenvalues_need_no_krylov_space(cheap, monkeypatch):
    calls, real = [], krylov._krylov
    monkeypatch.setattr(krylov, "products_are_cheap", lambda matrix: cheap)
    monkeypatch.setattr(krylov, "_krylov", lambda *given: calls.append(1) or real(*given))
    K = matrix(400, 0.3)
    found, exact = leading_eigenpairs(K, 16, 1e-6, 16), leading_eigenpairs(K, 16)
    torch.testing.assert_close(found.values, exact.values, rtol=1e-6, atol=0)
    assert bool(calls) != cheap


def test_what_does_not_converge_is_decomposed(monkeypatch):
    monkeypatch.setattr(krylov, "MOST_ROUNDS", 1)
    K = matrix(200, 0.0)
    found = leading_eigenpairs(K, 4, 1e-12)
    assert float(found.residual) == 0.0
    torch.testing.assert_close(product(found), product(leading_eigenpairs(K, 4)))


def test_leading_batch_dimensions_are_decomposed():
    K = torch.stack([matrix(130, 1.0, seed) for seed in range(2)])
    found = leading_eigenpairs(K, 3, 1e-6)
    assert found.values.shape == (2, 3)
    assert found.residual.shape == (2,)


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    leading_eigenpairs(matrix(200, 1.0), 4, 1e-6)
    assert torch.equal(before, torch.get_rng_state())


def test_a_previous_factor_of_zero_hides_nothing():
    """Ten equal eigenvalues among two hundred rows, and a start in which the matrix has nothing."""
    rows = torch.zeros(200, 300)
    rows[torch.arange(200), torch.arange(200) % 10] = 1.0
    top = top_factor(torch.zeros(8, 300), DenseGradients.from_rows(rows), 0.9, 1.0)
    torch.testing.assert_close(top.spectrum, torch.full((8,), 20.0))
    assert float(top.residual) <= 1e-6


def test_a_start_orthogonal_to_the_leading_pair_hides_nothing():
    ones = torch.ones(200, 1, dtype=torch.float64)
    K = matrix(200, 1.0) * 1e-3 + ones @ ones.T
    found, exact = leading_eigenpairs(K, 3, 1e-6, 3), leading_eigenpairs(K, 3)
    torch.testing.assert_close(found.values, exact.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("new", [1.01, 1.5, 20.0])
def test_an_old_factor_of_exact_eigenvectors_does_not_hide_what_is_new(new):
    K = torch.diag(torch.tensor([1.0] * 8 + [0.0] * 247 + [new], dtype=torch.float64))
    assert float(leading_eigenpairs(K, 8, 1e-6, start=8).values[0]) == pytest.approx(new, rel=1e-6)


@pytest.mark.parametrize("decays", [(2.0, 2.0), (2.0, 0.0, 1.0, 0.0), (0.0,)])
def test_each_of_a_batch_is_solved_as_well_as_alone(decays):
    """Those for which the iteration is too slow are decomposed; the others keep what it found."""
    batch = torch.stack([matrix(150, decay, seed) for seed, decay in enumerate(decays)])
    found, exact = leading_eigenpairs(batch, 3, 1e-6, 3), leading_eigenpairs(batch, 3)
    for k, decay in enumerate(decays):
        largest = float(exact.values[k, 0])
        assert (float(found.residual[k]) == 0.0) == (decay == 0.0)
        assert float(found.residual[k]) <= 1e-6 * largest
        torch.testing.assert_close(found.values[k], exact.values[k], rtol=1e-6, atol=1e-6 * largest)


def test_no_pairs_can_be_asked_for():
    for K in (matrix(40, 1.0), torch.stack([matrix(40, 1.0)] * 3)):
        found = leading_eigenpairs(K, 0, 1e-6)
        assert found.values.shape == (*K.shape[:-2], 0)
        assert found.vectors.shape == (*K.shape[:-1], 0)
        assert found.residual.shape == K.shape[:-2]
