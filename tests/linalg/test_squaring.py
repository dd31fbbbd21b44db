"""Leading eigenpairs by squaring: those of the full decomposition, for any spectrum, without a look at a number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.linalg.krylov import leading_eigenpairs
from slangvi.linalg.squaring import pairs_by_squaring
from slangvi.linalg.topk import relative_residual

TOLERANCE = 1e-6


def turned(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Matrices with these eigenvalues, (..., n)."""
    source = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(*values.shape, values.shape[-1], generator=source, dtype=torch.float64)).Q
    return basis @ (values.unsqueeze(-1) * basis.mT)


def best(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """How much of the matrix the leading vectors hold at best, (...)."""
    return torch.linalg.eigvalsh(matrix)[..., -count:].clamp_min(0).sum(-1)


spectra = st.lists(st.sampled_from([0.0, 1e-12, 1e-3, 0.5, 0.9, 0.999, 0.9999999, 1.0, 1e4]), min_size=2, max_size=24)


@given(values=spectra, count=st.integers(1, 6), scale=st.sampled_from([1e-150, 1.0, 1e100]), seed=st.integers(0, 99))
def test_close_and_repeated_and_zero_eigenvalues_need_no_care(values, count, scale, seed):
    count = min(count, len(values))
    matrix = turned(torch.tensor(values, dtype=torch.float64), seed) * scale
    pairs = pairs_by_squaring(matrix, count, TOLERANCE)
    largest = max(values) * scale
    assert float(pairs.residual) <= TOLERANCE * largest
    assert float(pairs.values.sum()) >= float(best(matrix, count)) - count * TOLERANCE * largest
    inner = pairs.vectors.mT @ pairs.vectors
    there = inner.diagonal() > 0.5  # zero columns where nothing is left
    torch.testing.assert_close(inner, torch.diag(there.double()), rtol=0, atol=1e-9)
    assert there.sum() >= min(count, sum(value > 0 for value in values) and 1)


@pytest.mark.parametrize("count", [1, 3])
def test_batches_are_single_problems_side_by_side(count):
    matrices = turned(torch.rand(2, 5, 30, dtype=torch.float64))
    together = pairs_by_squaring(matrices, count, TOLERANCE)
    for index in [(0, 0), (1, 4)]:
        alone = pairs_by_squaring(matrices[index], count, TOLERANCE)
        torch.testing.assert_close(together.values[index], alone.values)
        torch.testing.assert_close(together.vectors[index].abs(), alone.vectors.abs())


def test_well_separated_pairs_are_those_of_the_full_decomposition():
    matrix = turned(2.0 ** -torch.arange(40, dtype=torch.float64))
    found, expected = pairs_by_squaring(matrix, 5, TOLERANCE), leading_eigenpairs(matrix, 5)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.vectors.abs(), expected.vectors.abs(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("gap", [1.0, 1e-3, 1e-6, 1e-9, 0.0])
def test_the_residual_is_small_whatever_the_gap(gap):
    matrix = turned(torch.cat([torch.tensor([1.0, 1.0 - gap]), torch.linspace(0.5, 0, 60)]).double())
    assert float(relative_residual(pairs_by_squaring(matrix, 1, TOLERANCE))) <= TOLERANCE


def test_a_large_matrix_with_a_known_start_is_restricted_first():
    values = torch.cat([torch.tensor([100.0, 60.0]), torch.rand(298)]).double()
    basis = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64)).Q
    basis[:, :2] = 0.05 * basis[:, :2] + torch.eye(300, 2, dtype=torch.float64)  # the previous factor is close
    basis = torch.linalg.qr(basis).Q
    matrix = basis @ (values.unsqueeze(-1) * basis.mT)
    found = pairs_by_squaring(matrix, 2, TOLERANCE, start=2)
    assert float(relative_residual(found)) <= TOLERANCE
    torch.testing.assert_close(found.values, torch.tensor([100.0, 60.0]).double(), rtol=1e-9, atol=0)


def test_a_subspace_that_is_not_good_enough_is_told_by_the_residual():
    matrix = turned(torch.linspace(1, 0.99, 300).double())
    pairs = pairs_by_squaring(matrix, 1, TOLERANCE)
    true = torch.linalg.vector_norm(matrix @ pairs.vectors - pairs.values * pairs.vectors)
    assert float(pairs.residual) > TOLERANCE
    torch.testing.assert_close(pairs.residual, true, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [20, 200])
def test_what_is_not_finite_spoils_its_own_pairs_only(size):
    matrices = turned(2.0 ** -torch.arange(size, dtype=torch.float64).expand(3, size))
    expected = pairs_by_squaring(matrices, 1, TOLERANCE)
    matrices[1, 0, 0] = torch.nan
    found = pairs_by_squaring(matrices, 1, TOLERANCE)
    assert not bool(torch.isfinite(found.vectors[1]).all())
    assert torch.equal(found.vectors[[0, 2]], expected.vectors[[0, 2]])


def test_a_zero_matrix_has_zero_vectors():
    pairs = pairs_by_squaring(torch.zeros(2, 4, 4, dtype=torch.float64), 2, TOLERANCE)
    assert all(float(x.abs().max()) == 0.0 for x in pairs)
