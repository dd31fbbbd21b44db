"""Cholesky factors of small matrices without a look at the device."""

from __future__ import annotations

import torch
from torch import Tensor

from slangvi.linalg.products import is_plain

__all__ = ["lower_factor"]

# Rows up to which a GPU is quicker with its kernel for batches.
_FEW = 32


def lower_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factor of (..., L, L), and numbers that are not zero where there is none, (...).

    As `torch.linalg.cholesky_ex`. On a GPU a single small matrix goes with itself as a batch of two: the kernel for one
    matrix is made for large ones, and takes 22 microseconds over 8 rows where that for batches takes 10.

    Example:
        >>> lower_factor(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))[0]
        tensor([[2., 0.],
                [1., 2.]])
    """
    if matrix.is_cuda and matrix.ndim == 2 and len(matrix) <= _FEW and is_plain(matrix):
        factors, failed = torch.linalg.cholesky_ex(matrix.expand(2, -1, -1))
        return factors[0], failed[0]
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor, failed
