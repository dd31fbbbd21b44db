"""Structured linear algebra: UUᵀ + diag(d) and its best rank-L update."""

from slangvi.linalg.lowrank import LowRankPrecision as LowRankPrecision
from slangvi.linalg.lowrank import factorize as factorize
from slangvi.linalg.lowrank import matmul as matmul
from slangvi.linalg.topk import TopFactor as TopFactor
from slangvi.linalg.topk import top_factor as top_factor

__all__ = ["LowRankPrecision", "TopFactor", "factorize", "matmul", "top_factor"]
