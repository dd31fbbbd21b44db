"""Assignments against scipy's, over sizes that are enumerated and sizes that are not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.linalg.assignment import best_assignment

optimize = pytest.importorskip("scipy.optimize")


def total(scores, columns):
    return float(scores[torch.arange(len(scores)), columns].sum())


@given(size=st.integers(1, 12), seed=st.integers(0, 10_000), coarse=st.booleans())
def test_the_total_is_that_of_scipy(size, seed, coarse):
    """With coarse scores there are many ties: the assignments may differ then, their totals may not."""
    scores = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = (2 * scores).round() if coarse else scores
    found = best_assignment(scores)
    rows, columns = optimize.linear_sum_assignment(scores.numpy(), maximize=True)
    assert sorted(found.tolist()) == list(range(size))
    assert total(scores, found) == pytest.approx(float(scores.numpy()[rows, columns].sum()), abs=1e-9)


def test_large_problems():
    scores = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, columns = optimize.linear_sum_assignment(scores.numpy(), maximize=True)
    assert best_assignment(scores).tolist() == columns.tolist()
    assert rows.tolist() == list(range(40))


@pytest.mark.parametrize("size", [3, 7])
def test_batches_equal_their_members(size):
    scores = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    together = best_assignment(scores)
    assert together.shape == (2, 3, size)
    for i in range(2):
        for j in range(3):
            assert torch.equal(together[i, j], best_assignment(scores[i, j]))


@pytest.mark.parametrize("size", [4, 8])
def test_a_permuted_diagonal_is_found_and_ties_leave_the_order(size):
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))
    assert torch.equal(best_assignment(torch.eye(size)[order]), order)
    assert best_assignment(torch.zeros(size, size)).tolist() == list(range(size))


def test_no_rows():
    assert best_assignment(torch.zeros(3, 0, 0)).shape == (3, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [3, 7])
def test_what_is_not_finite_ends_and_leaves_other_members_alone(size, bad):
    scores = torch.rand(2, size, size, generator=torch.Generator().manual_seed(3))
    whole = best_assignment(scores)
    scores[1, 0] = bad
    found = best_assignment(scores)
    assert torch.equal(found[0], whole[0])
    assert sorted(found[1].tolist()) == list(range(size))
