"""Curvature of one batch: its spectrum relative to the diagonal, standard deviations it implies, and gradient noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows import FactoredGradients, RowGroup
from slangvi.types import Routes

__all__ = ["BatchCurvature", "GradientNoise", "rows_of_draws"]

# Numbers of formed rows that are kept from one pass over them to the next; others are formed again.
KEPT = 1 << 26
# Bytes of rows that are formed at a time.
FORMED = 1 << 27
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
        """Share of draws in the noise of a gradient of so many examples at one draw."""
        draws, whole = max(self.by_draw, 0.0), max(self.by_draw, 0.0) + self.by_example / num_examples
        return draws / whole if whole > 0 else 0.0


def rows_of_draws(spec: ParamSpec, groups: list[RowGroup], like: Tensor) -> FactoredGradients:
    """Return the rows of several draws as one operator that forms them some columns at a time."""
    return FactoredGradients(spec, groups, like, Routes(layers="form", form_bytes=FORMED))


class BatchCurvature:
    r"""Curvature $\hat G = A^\top A$ of one batch, A = √(N/R)·G with R = S·M rows, beside the prior's precision λ.

    All that is computed goes through R×R matrices in float64, so that memory and time are linear in P.

    Args:
        gradients: G, draw by draw, the examples of all draws in one order.
        num_draws: S.
        num_data: N, divided by the temperature.
        prior: λ.
    """

    def __init__(self, gradients: FactoredGradients, num_draws: int, num_data: float, prior: Prior) -> None:
        self.num_draws, self.num_examples = num_draws, gradients.num_rows // num_draws
        self.height = gradients.height
        self._gradients, self._weight = gradients, math.sqrt(num_data / gradients.num_rows)
        self._kept: list[tuple[slice, Tensor]] | None = None
        if self.height * gradients.spec.num_params <= KEPT:
            self._kept = list(self._pieces())
        self.prior = prior.diagonal.double().contiguous()
        self._products = torch.zeros(self.height, self.height, dtype=torch.float64, device=self.prior.device)
        squares = torch.empty_like(self.prior)
        for columns, rows in self._pieces():
            self._products += rows @ rows.mT
            squares[columns] = rows.square().sum(0)
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

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield A, some columns at a time, in float64."""
        if self._kept is not None:
            yield from self._kept
            return
        scale = self._weight * self._gradients.scale
        for columns, rows in self._gradients.segments():
            yield columns, rows.form().double() * scale

    def _gram(self, diag: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return B diag⁻¹ Bᵀ for B = A, or B = WᵀA."""
        size = self.height if weights is None else weights.shape[1]
        found = diag.new_zeros(size, size)
        for columns, rows in self._pieces():
            mixed = (rows if weights is None else weights.mT @ rows) * diag[columns].rsqrt()
            found += mixed @ mixed.mT
        return found

    def _variances(self, diag: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the diagonal of (BᵀB + diag)⁻¹ for B = A, or B = WᵀA, by Woodbury's identity, (P,)."""
        gram = self._gram(diag, weights)
        cholesky = torch.linalg.cholesky(gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
        found = torch.empty_like(diag)
        for columns, rows in self._pieces():
            mixed = (rows if weights is None else weights.mT @ rows) * diag[columns].rsqrt()
            half = torch.linalg.solve_triangular(cholesky, mixed, upper=False)
            # Rounding must not take a variance below 1/diag(BᵀB + diag), which bounds it.
            floor = 1.0 / (1.0 + mixed.square().sum(0))
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
        gram = self._gram(self.prior)
        ratios = []
        for one, other in ((even, ~even), (~even, even)):
            a, b = self.height / int(one.sum()), self.height / int(other.sum())
            own = a * gram[one][:, one]
            solved = torch.linalg.solve(own + torch.eye(len(own), dtype=own.dtype, device=own.device), own)
            cross = gram[other][:, one]
            left = torch.linalg.solve(own + torch.eye(len(own), dtype=own.dtype, device=own.device), a * cross.mT)
            foreign = b * (gram[other][:, other].diagonal().sum() - (cross * left.mT).sum())
            known = float(solved.diagonal().sum())
            ratios.append(float(foreign) / known if known > 0 else 1.0)
        return sum(ratios) / len(ratios)

    def informed(self, variances: Tensor) -> Tensor:
        """Tell which entries the data say something about, by variances or by the curvature's diagonal, (P,)."""
        return torch.minimum(variances, 1.0 / self.diagonal) * self.prior < INFORMED

    def shrinkage(self, variances: Tensor, reference: Tensor) -> float:
        """Return the median ratio of standard deviations to the reference's over informed entries; 1 if there are none.

        Args:
            variances: of the posterior, (P,).
            reference: see `variances`, (P,).
        """
        there = self.informed(reference)
        return float((variances[there] / reference[there]).sqrt().median()) if bool(there.any()) else 1.0

    def faithful_rank(self, reference: Tensor) -> int:
        """Return the smallest of 0, 1, 2, 4, … for which low rank plus diagonal keeps 80 % of the typical sd.

        The approximation keeps the leading directions of the spectrum relative to D, and D as its diagonal.
        """
        most, rank = int(self._vectors.shape[1]), 0
        while rank < most:
            weights = self._vectors[:, :rank]
            kept = torch.zeros_like(self.prior)
            for columns, rows in self._pieces():
                kept[columns] = (weights.mT @ rows).square().sum(0)
            found = self._variances(torch.maximum(self.diagonal - kept, self.prior), weights)
            if self.shrinkage(found, reference) >= FAITHFUL:
                return rank
            rank = max(1, 2 * rank)
        return most

    def noise(self) -> GradientNoise:
        """Return the noise of the gradients of single examples; NaN for a single example."""
        draws, chosen = self.num_draws, self.height // self.num_draws
        # Rows that stand for more than their own example are longer by the root of that number.
        raw = self._products / self._weight**2 * (self.height / self._gradients.num_rows)
        own = torch.eye(chosen, dtype=torch.bool, device=raw.device).repeat(draws, draws)
        place = torch.arange(self.height, device=raw.device) // max(chosen, 1)
        same = place[:, None] == place
        squares, within = raw.diagonal().mean(), raw[same & ~own].mean()
        across = raw[~same & ~own].mean() if draws > 1 else within
        return GradientNoise(float(squares - within), float(within - across), float(across))
