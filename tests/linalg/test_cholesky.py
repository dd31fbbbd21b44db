"""Factors of small matrices, by whichever kernel."""

from __future__ import annotations

import pytest
import torch

from helpers.fake_gpu_tensor import on_gpu
from slangvi.linalg.cholesky import lower_factor

DOUBLE = torch.float64


def symmetric(*shape: int) -> torch.Tensor:
    half = torch.randn(*shape, shape[-1] + 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    return half @ half.mT


@pytest.mark.parametrize("pretend", [lambda x: x, on_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(2, 2), (8, 8), (32, 32), (33, 33), (3, 5, 5)], ids=str)
def test_factors_give_the_matrix_back(pretend, shape):
    matrix = symmetric(*shape[:-1])
    factor, failed = (x.as_subclass(torch.Tensor) for x in lower_factor(pretend(matrix)))
    assert factor.shape == matrix.shape
    assert failed.shape == matrix.shape[:-2]
    assert not failed.any()
    torch.testing.assert_close(factor @ factor.mT, matrix, rtol=1e-12, atol=1e-12)
    assert torch.equal(factor, factor.tril())


@pytest.mark.parametrize("pretend", [lambda x: x, on_gpu], ids=["cpu", "gpu"])
def test_a_matrix_without_a_factor_is_told(pretend):
    assert int(lower_factor(pretend(-torch.eye(3, dtype=DOUBLE)))[1]) == 1


def test_small_matrices_go_as_a_batch_of_two_on_a_gpu_unless_somebody_watches(monkeypatch):
    seen, own = [], torch.linalg.cholesky_ex

    def spy(matrix):
        seen.append(tuple(matrix.shape))
        return own(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", spy)
    for matrix in (symmetric(8), on_gpu(symmetric(8)), on_gpu(symmetric(33)), on_gpu(symmetric(8)).requires_grad_()):
        lower_factor(matrix)
    assert seen == [(8, 8), (2, 8, 8), (33, 33), (8, 8)]
