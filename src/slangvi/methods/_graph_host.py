"""What the host does for a captured step: small numbers it works out, and the memory in which they travel."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slangvi.linalg.threads import one_thread
from slangvi.methods._launched import Numbers
from slangvi.methods.lowrank_step import shares

__all__ = ["Received", "Sent", "flaws", "pinned", "reach", "root_of"]

Array = npt.NDArray[np.float64]
# What a device waits for is written for speed: methods of arrays take twice as long as this.
_most = np.maximum.reduce
_TINY = float(np.finfo(np.float64).tiny)
# Above this size LAPACK shares an eigenproblem out between threads, and waits for those that get no core at once: for a
# tenth of a millisecond of work, up to ten. Only torch can be told not to.
_UNDIVIDED = 25


class Received(NamedTuple):
    """What a captured step reads of `Sent`, all float64 and on its device.

    Args:
        numbers: α, β and 1 − γᵗ, (3,).
        keep: 1 − β.
        gain: β N/R.
        roots: of `keep`, of `gain`, and of both together.
        spectrum: of VᵀV with eigenvalues s, see `LowRankPrecision.spectrum`.
        damping: c(s), see `LowRankPrecision.damping`, (L,).
    """

    numbers: Tensor
    keep: Tensor
    gain: Tensor
    roots: tuple[Tensor, Tensor, Tensor]
    spectrum: tuple[Tensor, Tensor]
    damping: Tensor


class Sent:
    """Small numbers for the steps to come, in page-locked memory that graphs copy from.

    Whatever follows from numbers alone is worked out here: a GPU would need a kernel for each.

    Args:
        rank: L.
    """

    _COUNT = len(Numbers._fields) + 5

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.memory = pinned(self._COUNT + 2 * rank + rank * rank)
        self._values = self.memory.numpy()
        self._values[: self._COUNT] = 1.0
        self.root(np.ones(rank), np.eye(rank))

    @property
    def numbers(self) -> Numbers:
        """The rates that were sent last."""
        return Numbers(*self._values[: len(Numbers._fields)].tolist())

    def rates(self, numbers: Numbers, weight: float) -> None:
        """Of the next step; `weight` is N/R."""
        keep, gain = shares(numbers.precision_lr, weight)
        roots = math.sqrt(keep), math.sqrt(gain)
        self._values[: self._COUNT] = (*numbers, keep, gain, *roots, roots[0] * roots[1])

    def root(self, roots: Array, turns: Array) -> None:
        """What a draw needs of VᵀV: √(1+s) and its eigenvectors."""
        self._values[self._COUNT :] = np.concatenate([roots, -1.0 / (roots + roots * roots), turns.reshape(-1)])

    def received(self, device: torch.device) -> Received:
        """All of it on the device; captured."""
        here, first = self.memory.to(device, non_blocking=True), len(Numbers._fields)
        keep, gain, *roots = here[first : self._COUNT].unbind()
        stretch, damping, turns = here[self._COUNT :].split([self.rank, self.rank, self.rank**2])
        a, b, both = roots
        spectrum = stretch, turns.view(self.rank, self.rank)
        return Received(here[:first], keep, gain, (a, b, both), spectrum, damping)


def reach(numbers: Numbers, push: float, total: float, pull: float, pushed: float, least: float) -> float:
    """More than the mean moves, and than is met on the way: finite, it need not be waited for to know that it is.

    P⁻¹ ≤ 1/min d. All numbers are finite, and on the host: a GPU would need a dozen kernels for them.

    Args:
        numbers: rates of the step.
        push: bound on the length of (N/R) Σ_r g_r.
        total: trace of (1−β)UUᵀ + βĜ.
        pull: length of the prior's pull.
        pushed: length of the momentum.
        least: min d⁺.
    """
    gradient = (push + pushed) / numbers.correction + pull
    return float(numbers.lr * gradient * (1 + math.sqrt(max(0.0, total))) / least)


def flaws(small: Array, left: Array, gram: Array) -> tuple[float, float]:
    """How far `Pursued` is from leading vectors, by its numbers on the host: so many small sums cost a GPU more.

    Returns:
        The worst of `left` relative to the largest entry of `small`'s diagonal, and the worst entry of XᵀX − I; NaN
        where anything is.
    """
    largest = np.maximum(_most(small.diagonal()), _TINY)
    return float(_most(left) / largest), float(_most(np.abs(gram - _identity(len(gram))), axis=None))


def root_of(gram: Array) -> tuple[Array, Array]:
    """What the next draw needs of VᵀV, whose eigenproblem is too small for a GPU: √(1+s) and the eigenvectors."""
    if not np.isfinite(gram).all():  # to be found out by the checks that follow
        return np.ones(len(gram)), _identity(len(gram))
    values, vectors = (gram[0], _identity(1)) if len(gram) == 1 else _eigenpairs(gram)
    return np.sqrt(np.maximum(values, 0.0) + 1.0), vectors


def _eigenpairs(gram: Array) -> tuple[Array, Array]:
    """Values and vectors of a symmetric matrix, by this thread alone."""
    if len(gram) <= _UNDIVIDED:
        return np.linalg.eigh(gram)
    with one_thread():
        values, vectors = torch.linalg.eigh(torch.from_numpy(gram))
    return values.numpy(), vectors.numpy()


@cache
def _identity(size: int) -> Array:
    return np.eye(size)


def pinned(size: int) -> Tensor:
    """Zeros in page-locked memory, float64."""
    return torch.zeros(size, dtype=torch.float64, device="cpu", pin_memory=True)
