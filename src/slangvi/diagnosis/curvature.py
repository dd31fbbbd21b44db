"""Curvature of one batch: its spectrum relative to the diagonal, standard deviations it implies, and gradient noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows import FactoredGradients, RowGroup
from slangvi.types import Routes

__all__ = ["BatchCurvature", "GradientNoise"]

# Bytes of rows that are formed at a time, and kept for the next pass if they are all.
FORMED = 1 << 28
# An entry counts as informed by the data where its variance is below this share of the prior's.
INFORMED = 0.9
# A rank is enough where the typical standard deviation is at least this share of the reference.
FAITHFUL = 0.8


@dataclass(frozen=True)
class GradientNoise:
    r"""Noise of gradients, in unbiased estimates from products of rows $g_{s,i}$ (draw s, example i).

    Args:
        by_example: trace of the covariance over examples at one draw, E‖g_{s,i}‖² − E g_{s,i}ᵀg_{s,j}.
        by_draw: trace of the covariance of the expected gradient over draws, E g_{s,i}ᵀg_{s,j} − signal; 0 of one draw.
        signal: squared length of the expected gradient, E g_{s,i}ᵀg_{t,j} with s ≠ t and i ≠ j.
    """

    by_example: float
    by_draw: float
    signal: float

    @property
    def scale(self) -> float:
        """Simple noise scale (McCandlish et al. 2018): the batch size at which noise equals signal; may be infinite."""
        return self.by_example / self.signal if self.signal > 0 else math.inf

    def draw_share(self, num_examples: int) -> float:
        """Return the share of draws in the noise of the gradient of some examples at one draw."""
        draws, whole = max(self.by_draw, 0.0), max(self.by_draw, 0.0) + self.by_example / num_examples
        return draws / whole if whole > 0 else 0.0


class BatchCurvature:
    r"""Curvature $\hat G = A^\top A$ of one batch, A = √(N/R)·G with R = S·M rows, beside the prior's precision λ.

    All that is computed goes through R×R matrices in float64, so that memory and time are linear in P.

    Args:
        spec: layout of the parameters.
        groups: rows of each draw, the examples of all draws in one order.
        num_data: N, divided by the temperature.
        prior: λ.
    """

    def __init__(self, spec: ParamSpec, groups: Sequence[RowGroup], num_data: float, prior: Prior) -> None:
        like, routes = prior.precision.new_empty(0), Routes(layers="form", form_bytes=FORMED)
        rows = self._rows = FactoredGradients(spec, groups, like, routes)
        self.num_draws, self.num_examples, self.height = len(groups), rows.num_rows // len(groups), rows.height
        self._weight = math.sqrt(num_data / rows.num_rows)
        self.prior = prior.diagonal.double().contiguous()
        self._products, squares = self.prior.new_zeros(self.height, self.height), torch.empty_like(self.prior)
        for columns, piece in self._pieces():
            self._products += piece @ piece.mT
            squares[columns] = piece.square().sum(0)
        if not bool(torch.isfinite(self._products).all()):
            raise NumericalError(
                "gradients of the batch are not finite at draws from the posterior. Look for NaN or Inf in it, or for "
                "a run that has diverged."
            )
        # D, the diagonal of the precision that this batch asks for.
        self.diagonal = self.prior + squares
        values, vectors = torch.linalg.eigh(self._gram(self.diagonal))
        size = min(self.height, len(self.prior))
        self.spectrum = values.flip(0)[:size].clamp_min(0)
        self._vectors = vectors.flip(1)[:, :size]

    def _pieces(self, diag: Tensor | None = None, weights: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield B diag^(−1/2) for B = A, or B = WᵀA, some columns at a time, in float64."""
        for columns, rows in self._rows.segments():
            piece = rows.form().double() * (self._weight * self._rows.scale)
            piece = piece if weights is None else weights.mT @ piece
            yield columns, piece if diag is None else piece * diag[columns].rsqrt()

    def _gram(self, diag: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return B diag⁻¹ Bᵀ."""
        size = self.height if weights is None else weights.shape[1]
        found = diag.new_zeros(size, size)
        for _, piece in self._pieces(diag, weights):
            found += piece @ piece.mT
        return found

    def _variances(self, diag: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the diagonal of (BᵀB + diag)⁻¹ by Woodbury's identity, (P,)."""
        cholesky = torch.linalg.cholesky(_plus_one(self._gram(diag, weights)))
        found = torch.empty_like(diag)
        for columns, piece in self._pieces(diag, weights):
            half = torch.linalg.solve_triangular(cholesky, piece, upper=False)
            # Rounding must not take a variance below 1/diag(BᵀB + diag), which bounds it.
            floor = 1.0 / (1.0 + piece.square().sum(0))
            found[columns] = torch.maximum(1.0 - half.square().sum(0), floor) / diag[columns]
        return found

    def captured(self, rank: int) -> float:
        r"""Return the share of the trace of $D^{-1/2}\hat G D^{-1/2}$ that its leading directions hold.

        D = diag(λ + Ĝ) makes the spectrum free of scales: it stays the same when a parameter is measured in other
        units, prior included. With no correlations its eigenvalues are below 1.
        """
        total = float(self.spectrum.sum())
        return float(self.spectrum[:rank].sum()) / total if total > 0 else 1.0

    def enough_rank(self, share: float = 0.9) -> int:
        """Return the smallest rank that captures a share."""
        held = self.spectrum.cumsum(0)
        return int((held < share * held[-1]).sum()) + 1 if float(held[-1]) > 0 else 0

    def variances(self) -> Tensor:
        """Return the reference, the diagonal of (λ + Ĝ)⁻¹ with all correlations, (P,)."""
        return self._variances(self.prior)

    def coverage(self) -> float:
        r"""Return how far half of the examples is from knowing the directions of the other half; 1 is perfectly.

        With Σ_A = (λ + Ĝ_A)⁻¹ of one half, it is $\mathrm{tr}(\Sigma_A \hat G_B) / \mathrm{tr}(\Sigma_A \hat G_A)$,
        averaged over both ways. Where it is large, examples outside the batch have curvature in directions in which
        this batch has none, and the reference takes these for unknown. NaN for fewer than four examples.
        """
        chosen = self.height // self.num_draws
        if chosen < 4:
            return math.nan
        even = (torch.arange(self.height, device=self.prior.device) % chosen) % 2 == 0
        gram, ratios = self._gram(self.prior), []
        for one, other in ((even, ~even), (~even, even)):
            a, b = self.height / int(one.sum()), self.height / int(other.sum())
            own, cross = a * gram[one][:, one], gram[other][:, one]
            inside, across = torch.linalg.solve(_plus_one(own), torch.cat([own, a * cross.mT], 1)).tensor_split(
                [len(own)], 1
            )
            foreign = b * (gram[other][:, other].trace() - (cross * across.mT).sum())
            ratios.append(float(foreign / inside.trace()) if float(inside.trace()) > 0 else 1.0)
        return sum(ratios) / len(ratios)

    def shrinkage(self, variances: Tensor, reference: Tensor) -> float:
        """Return the median ratio of standard deviations to the reference's over informed entries; 1 if there are none.

        Args:
            variances: of the posterior, (P,).
            reference: see `variances`, (P,).
        """
        informed = torch.minimum(reference, 1.0 / self.diagonal) * self.prior < INFORMED
        ratios = (variances[informed] / reference[informed]).sqrt()
        return float(ratios.median()) if len(ratios) else 1.0

    def faithful_rank(self, reference: Tensor) -> int:
        """Return the smallest of 0, 1, 2, 4, … for which low rank plus diagonal keeps 80 % of the typical sd.

        The approximation keeps the leading directions of the spectrum relative to D, and D as its diagonal.
        """
        most, rank = int(self._vectors.shape[1]), 0
        while rank < most:
            weights, kept = self._vectors[:, :rank], torch.zeros_like(self.prior)
            for columns, piece in self._pieces(weights=weights):
                kept[columns] = piece.square().sum(0)
            found = self._variances(torch.maximum(self.diagonal - kept, self.prior), weights)
            if self.shrinkage(found, reference) >= FAITHFUL:
                return rank
            rank = max(1, 2 * rank)
        return most

    def noise(self) -> GradientNoise:
        """Return the noise of the gradients of single examples; NaN for a single example."""
        draws, chosen = self.num_draws, self.height // self.num_draws
        # Rows that stand for more than their own example are longer by the root of that number.
        raw = self._products / self._weight**2 * (self.height / self._rows.num_rows)
        own = torch.eye(chosen, dtype=torch.bool, device=raw.device).repeat(draws, draws)
        place = torch.arange(self.height, device=raw.device) // max(chosen, 1)
        same = place[:, None] == place
        squares, within = raw.diagonal().mean(), raw[same & ~own].mean()
        across = raw[~same & ~own].mean() if draws > 1 else within
        return GradientNoise(float(squares - within), float(within - across), float(across))


def _plus_one(matrix: Tensor) -> Tensor:
    """Return I + a matrix."""
    return matrix + torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
