"""Structured linear algebra: UUᵀ + diag(d), dense and diagonal precisions, products of long rows, eigenvectors."""

from slangvi.linalg.dense import DensePrecision as DensePrecision
from slangvi.linalg.dense import factorize_dense as factorize_dense
from slangvi.linalg.diagonal import DiagonalPrecision as DiagonalPrecision
from slangvi.linalg.lowrank import LowRankPrecision as LowRankPrecision
from slangvi.linalg.lowrank import factorize as factorize
from slangvi.linalg.lowrank import matmul as matmul

__all__ = [
    "DensePrecision",
    "DiagonalPrecision",
    "LowRankPrecision",
    "factorize",
    "factorize_dense",
    "matmul",
]
