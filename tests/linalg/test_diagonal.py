"""diag(s) against the dense precision of the same matrix."""

from __future__ import annotations

import pytest
import torch

from slangvi.linalg import DiagonalPrecision, factorize_dense


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_every_operation_is_that_of_the_matrix(batch):
    diag = torch.rand(*batch, 4, dtype=torch.float64) + 0.1
    mine, other = DiagonalPrecision(diag), factorize_dense(torch.diag_embed(diag))
    rhs, noise = torch.randn(*batch, 4).double(), torch.randn(5, *batch, 4).double()
    torch.testing.assert_close(mine.solve(rhs), other.solve(rhs))
    torch.testing.assert_close(mine.transform_noise(noise), other.transform_noise(noise))
    rows = torch.randn(*batch, 6, 4).double()
    torch.testing.assert_close(mine.whiten(rows.movedim(-2, 0)).movedim(0, -2), other.whiten(rows))
    torch.testing.assert_close(mine.inv_diag(), other.inv_diag())
    torch.testing.assert_close(mine.logdet(), other.logdet())
    draws = [p.sample((2,), torch.Generator().manual_seed(0), loc) for p in (mine, other) for loc in (None, rhs)]
    torch.testing.assert_close(draws[:2], draws[2:])


def test_draws_have_the_mean_and_variance(generator, global_rng_untouched, within_sigmas):
    loc = torch.tensor([1.0, -2.0], dtype=torch.float64)
    drawn = DiagonalPrecision(torch.tensor([0.25, 9.0], dtype=torch.float64)).sample((10000,), generator, loc)
    assert within_sigmas(drawn, loc)
    assert within_sigmas((drawn - loc).square(), torch.tensor([4.0, 1 / 9], dtype=torch.float64))
