"""Structured linear algebra: UUᵀ + diag(d) and its best rank-L update."""

from slangvi.linalg.lowrank import LowRankPrecision as LowRankPrecision
from slangvi.linalg.lowrank import factorize as factorize
from slangvi.linalg.lowrank import matmul as matmul
from slangvi.linalg.topk import Problem as Problem
from slangvi.linalg.topk import Route as Route
from slangvi.linalg.topk import TopFactor as TopFactor
from slangvi.linalg.topk import choose_route as choose_route
from slangvi.linalg.topk import top_factor as top_factor

__all__ = [
    "LowRankPrecision",
    "Problem",
    "Route",
    "TopFactor",
    "choose_route",
    "factorize",
    "matmul",
    "top_factor",
]
