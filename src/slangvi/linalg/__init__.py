"""Structured linear algebra: UUᵀ + diag(d) and its best rank-L update; dense precisions beside it."""

from slangvi.linalg.dense import DensePrecision as DensePrecision
from slangvi.linalg.dense import factorize_dense as factorize_dense
from slangvi.linalg.diagonal import DiagonalPrecision as DiagonalPrecision
from slangvi.linalg.lowrank import LowRankPrecision as LowRankPrecision
from slangvi.linalg.lowrank import factorize as factorize
from slangvi.linalg.lowrank import matmul as matmul
from slangvi.linalg.topk import Problem as Problem
from slangvi.linalg.topk import Route as Route
from slangvi.linalg.topk import TopFactor as TopFactor
from slangvi.linalg.topk import choose_route as choose_route
from slangvi.linalg.topk import top_factor as top_factor

__all__ = [
    "DensePrecision",
    "DiagonalPrecision",
    "LowRankPrecision",
    "Problem",
    "Route",
    "TopFactor",
    "choose_route",
    "factorize",
    "factorize_dense",
    "matmul",
    "top_factor",
]
