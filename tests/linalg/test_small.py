"""UUᵀ + diag(d) of few parameters against the P×P matrix, and against its low-rank form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slangvi.linalg import LowRankPrecision, factorize
from slangvi.linalg.small import SmallPrecision, factorize_batch

BATCHES = [(1,), (3,), (2, 2)]


def make(batch: tuple[int, ...], rank: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    factor = torch.randn(*batch, rank, size, generator=source, dtype=torch.float64)
    return factor, torch.rand(*batch, size, generator=source, dtype=torch.float64) + 0.1


def dense(factor: Tensor, diag: Tensor) -> Tensor:
    return factor.mT @ factor + torch.diag_embed(diag)


@given(batch=st.sampled_from(BATCHES), rank=st.integers(0, 9), size=st.integers(1, 6), seed=st.integers(0, 50))
def test_everything_is_that_of_the_matrix(batch, rank, size, seed):
    factor, diag = make(batch, rank, size, seed)
    p, matrix = factorize_batch(factor, diag), dense(factor, diag)
    assert isinstance(p, SmallPrecision)
    assert p.factor is factor
    assert p.diag is diag
    rhs = torch.randn(*batch, size, dtype=torch.float64)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(p.solve(rhs), torch.linalg.solve(matrix, rhs), **close)
    torch.testing.assert_close(p.inv_diag(), torch.linalg.inv(matrix).diagonal(dim1=-2, dim2=-1), **close)
    torch.testing.assert_close(p.logdet(), torch.logdet(matrix), **close)
    eye = torch.eye(size, dtype=torch.float64).reshape(size, *(1,) * len(batch), size).expand(size, *batch, size)
    root = p.transform_noise(eye).movedim(0, -1)
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(matrix), **close)


@pytest.mark.parametrize("batch", BATCHES)
def test_draws_have_the_moments_and_their_samples_in_front(batch, within_sigmas, generator):
    factor, diag = make(batch, 2, 3)
    loc = torch.randn(*batch, 3, dtype=torch.float64)
    draws = factorize_batch(factor, diag).sample((20000,), generator, loc)
    assert draws.shape == (20000, *batch, 3)
    assert within_sigmas(draws, loc)
    away = draws - loc
    assert within_sigmas(away.unsqueeze(-1) * away.unsqueeze(-2), torch.linalg.inv(dense(factor, diag)))
    assert factorize_batch(factor, diag).sample().shape == (*batch, 3)


def test_draws_do_not_depend_on_the_rotation_of_the_factor(generator):
    factor, diag = make((3,), 2, 5)
    turn = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64)).Q
    noise = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator)
    one, other = (factorize_batch(U, diag).transform_noise(noise) for U in (factor, turn @ factor))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("power", [0, 2, 4, 6, 9, 13, 18])
def test_variances_keep_their_digits_however_large_the_factor(power):
    factor, diag = make((3,), 4, 30)
    factor = factor * (10**power * diag.amax() / factor.square().sum(-2).amax()).sqrt()
    p, plain = factorize_batch(factor, diag), factorize(factor, diag)
    torch.testing.assert_close(p.inv_diag(), plain.inv_diag(), rtol=1e-9, atol=0)
    assert isinstance(p, LowRankPrecision) == (power > 4)


@pytest.mark.parametrize(
    ("batch", "size", "dtype"), [((), 3, torch.float64), ((3,), 3, torch.float32), ((20,), 60, torch.float64)]
)
def test_single_states_float32_and_large_problems_keep_the_low_rank_form(batch, size, dtype):
    factor, diag = (x.to(dtype) for x in make(batch, 2, size))
    p = factorize_batch(factor, diag)
    assert isinstance(p, LowRankPrecision)
    assert torch.equal(p.cholesky, factorize(factor, diag).cholesky)
