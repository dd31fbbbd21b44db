"""Merging posteriors of parts of the data: dense algebra, regression in parts, fewer columns, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slangvi import DensePrecisionNormal, LowRankPrecisionNormal, merge_posteriors
from slangvi.params import ParamSpec


def normal(source: torch.Generator, size: int, rank: int, least: float = 0.0, factor: Tensor | None = None):
    """Some posterior, whose diagonal is above a bound and whose factor holds that of a prior."""
    draw = lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)  # noqa: E731
    columns = torch.cat([draw(size, rank), draw(size, 0) if factor is None else factor], 1)
    return LowRankPrecisionNormal(draw(size), columns, least + draw(size).exp())


def dense_merge(parts, prior) -> tuple[Tensor, Tensor]:
    """Precision and mean as they are written."""
    more = len(parts) - 1
    precision = sum(part.precision_matrix for part in parts) - more * prior.precision_matrix
    pull = sum(part.precision_matrix @ part.loc for part in parts) - more * prior.precision_matrix @ prior.loc
    return precision, torch.linalg.solve(precision, pull)


@given(
    size=st.integers(1, 7),
    ranks=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    prior_rank=st.integers(0, 3),
    is_dense=st.booleans(),
    seed=st.integers(0, 50),
)
def test_merging_is_exact(size, ranks, prior_rank, is_dense, seed):
    source = torch.Generator().manual_seed(seed)
    prior = normal(source, size, prior_rank)
    parts = [normal(source, size, rank, prior.prec_diag, prior.prec_factor) for rank in ranks]
    precision, mean = dense_merge(parts, prior)
    if is_dense:
        parts[0] = DensePrecisionNormal(parts[0].loc, parts[0].precision_matrix)
    merged = merge_posteriors(parts, prior)
    torch.testing.assert_close(merged.precision_matrix, precision, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(merged.loc, mean, rtol=1e-7, atol=1e-7)


@given(size=st.integers(2, 7), rank=st.integers(0, 9), seed=st.integers(0, 50))
def test_fewer_columns_are_the_leading_ones_and_keep_the_diagonal(size, rank, seed):
    source = torch.Generator().manual_seed(seed)
    parts = [normal(source, size, 2, 1.0) for _ in range(3)]
    exact, merged = merge_posteriors(parts, 1.0), merge_posteriors(parts, 1.0, rank=rank)
    values, vectors = torch.linalg.eigh(exact.prec_factor @ exact.prec_factor.mT)
    kept = (vectors * values.clamp_min(0))[:, max(0, size - rank) :] @ vectors[:, max(0, size - rank) :].mT
    assert merged.prec_factor.shape == (size, rank)
    torch.testing.assert_close(merged.prec_factor @ merged.prec_factor.mT, kept, rtol=1e-8, atol=1e-8)
    diagonal = merged.precision_matrix.diagonal()
    torch.testing.assert_close(diagonal, exact.precision_matrix.diagonal(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(merged.loc, exact.loc)


def test_parts_of_a_regression_give_the_posterior_of_all_data():
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=source).double(), torch.randn(60, generator=source).double()
    parts = []
    for pick in torch.arange(60).split(20):
        precision = torch.eye(3).double() + x[pick].mT @ x[pick]
        mean = torch.linalg.solve(precision, x[pick].mT @ y[pick])
        parts.append(LowRankPrecisionNormal(mean, x[pick].mT, torch.ones(3).double()))
    precision = torch.eye(3).double() + x.mT @ x
    for shards in (parts, [DensePrecisionNormal(part.loc, part.precision_matrix) for part in parts]):
        merged = merge_posteriors(shards, prior=1.0)
        torch.testing.assert_close(merged.precision_matrix, precision)
        torch.testing.assert_close(merged.loc, torch.linalg.solve(precision, x.mT @ y))


def test_what_a_part_of_low_rank_lost_goes_to_the_diagonal_if_a_rank_is_given():
    """A part that kept nothing of the prior's factor but its diagonal."""
    prior = LowRankPrecisionNormal(torch.zeros(2), torch.tensor([[1.0], [1.0]]), torch.ones(2))
    part = LowRankPrecisionNormal(torch.ones(2), torch.zeros(2, 0), 2 * torch.ones(2))
    with pytest.raises(ValueError, match="the parts know less than their prior in a direction"):
        merge_posteriors([part, part], prior)
    merged = merge_posteriors([part, part], prior, rank=1)
    torch.testing.assert_close(merged.precision_matrix, 2 * torch.eye(2))


def test_the_layout_of_the_parts_is_kept():
    spec = ParamSpec(("w",), (torch.Size((2,)),))
    part = LowRankPrecisionNormal(torch.ones(2), torch.zeros(2, 0), 2 * torch.ones(2), param_spec=spec)
    assert merge_posteriors([part, part], 1.0).param_spec == spec


def test_what_cannot_be_merged_is_refused():
    spec = ParamSpec(("w",), (torch.Size((2,)),))
    part = LowRankPrecisionNormal(torch.ones(2), torch.zeros(2, 0), torch.tensor([2.0, 1.2]), param_spec=spec)
    with pytest.raises(ValueError, match="not positive at entry 1, in parameter 'w'"):
        merge_posteriors([part, part], 3.0)
    with pytest.raises(ValueError, match="posteriors is empty"):
        merge_posteriors([], 1.0)
    with pytest.raises(TypeError, match="posteriors must be a Gaussian posterior, got float"):
        merge_posteriors([part, 1.0], 1.0)
    with pytest.raises(TypeError, match="prior must be a number"):
        merge_posteriors([part], "flat")
    with pytest.raises(ValueError, match="prior must be finite and in"):
        merge_posteriors([part], -1.0)
    other = LowRankPrecisionNormal(torch.ones(3), torch.zeros(3, 0), torch.ones(3))
    with pytest.raises(ValueError, match="posteriors is of other parameters"):
        merge_posteriors([part, other], 1.0)
    with pytest.raises(ValueError, match="rank must be"):
        merge_posteriors([part], 1.0, rank=-1)
