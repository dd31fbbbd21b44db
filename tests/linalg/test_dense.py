"""A dense precision against plain inverses in float64."""

from __future__ import annotations

import pytest
import torch

from slangvi.linalg import DensePrecision, dense, factorize_dense

BATCHES = [(), (3,), (2, 3)]
SIZES = [1, 4, 190]  # the last is above the size from which members of a batch are taken one by one


def spd(size: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64, source=None) -> torch.Tensor:
    root = torch.randn(*batch, size, 2 * size, dtype=dtype, generator=source)
    return root @ root.mT / size + torch.eye(size, dtype=dtype)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_every_operation_is_that_of_the_matrix(size, batch):
    matrix = spd(size, batch)
    p = factorize_dense(matrix)
    inverse = torch.linalg.inv(matrix)
    rhs = torch.randn(*batch, size, dtype=torch.float64)
    torch.testing.assert_close(p.cholesky @ p.cholesky.mT, matrix)
    assert not p.cholesky.triu(1).any()
    assert p.failed.shape == batch
    assert not p.failed.any()
    torch.testing.assert_close(p.solve(rhs), (inverse @ rhs.unsqueeze(-1)).squeeze(-1))
    white = p.whiten(torch.eye(size, dtype=torch.float64).expand(*batch, size, size))
    torch.testing.assert_close(white @ white.mT, inverse)
    torch.testing.assert_close(p.inv_diag(), inverse.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(p.logdet(), torch.logdet(matrix))


@pytest.mark.parametrize("samples", [(), (5,), (2, 3)])
@pytest.mark.parametrize("batch", BATCHES)
def test_noise_is_turned_by_a_root_of_the_inverse(samples, batch):
    p = factorize_dense(spd(4, batch))
    noise = torch.randn(*samples, *batch, 4, dtype=torch.float64)
    turned = p.transform_noise(noise)
    assert turned.shape == noise.shape
    torch.testing.assert_close((p.cholesky.mT @ turned.unsqueeze(-1)).squeeze(-1), noise)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_draws_have_the_mean_and_covariance(batch, generator, global_rng_untouched, within_sigmas):
    matrix = spd(3, batch, source=generator)
    loc = torch.randn(*batch, 3, dtype=torch.float64, generator=generator)
    drawn = factorize_dense(matrix).sample((10000,), generator, loc)
    assert within_sigmas(drawn, loc)
    centred = drawn - loc
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), torch.linalg.inv(matrix))


def test_draws_without_a_mean_are_around_zero():
    p = factorize_dense(spd(2))
    mine, other = (p.sample((3,), torch.Generator().manual_seed(0), loc) for loc in (None, torch.ones(2).double()))
    torch.testing.assert_close(mine + 1, other)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_members_of_a_batch_are_factorised_as_if_alone(size, dtype):
    matrix = spd(size, (3,), dtype)
    together = factorize_dense(matrix)
    for k in range(3):
        assert torch.equal(together.cholesky[k], factorize_dense(matrix[k]).cholesky)


@pytest.mark.parametrize("size", SIZES[1:])
def test_what_is_not_positive_definite_is_told_by_member(size):
    matrix = spd(size, (2, 2))
    matrix[1, 0, 2, 2] = -1.0
    matrix[0, 1, 1, 1] = torch.nan
    assert factorize_dense(matrix).failed.tolist() == [[0, 2], [3, 0]]


def test_only_the_lower_triangle_is_read():
    matrix = spd(4)
    other = matrix + torch.full((4, 4), 7.0).double().triu(1)
    assert torch.equal(factorize_dense(other).cholesky, factorize_dense(matrix).cholesky)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_pass_through(batch, monkeypatch):
    monkeypatch.setattr(dense, "_LARGE", 0)  # also where members would be taken one by one
    root = torch.randn(*batch, 3, 3, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(2, *batch, 3, dtype=torch.float64)

    def outputs(root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p: DensePrecision = factorize_dense(root @ root.mT + torch.eye(3).double())
        return p.solve(noise[0]), p.transform_noise(noise), p.inv_diag(), p.logdet()

    assert torch.autograd.gradcheck(outputs, root)
