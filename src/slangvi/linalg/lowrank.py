r"""The precision UUᵀ + diag(d), factorised once and then solved, sampled and measured.

With V = diag(d)^(−1/2) U everything goes through one small matrix, the capacitance I + VᵀV (L×L). It is positive
definite for every U, zero and repeated columns included, so no case needs a branch. Solves, inverse diagonal and
logdet go through its Cholesky factor, draws through its symmetric inverse root. It is built and factorised in
float64: only L×L numbers are involved, and a float32 Gram would lose the identity once ‖V‖² passes 1e7.

Throughout, U is stored by rows, as `factor` of shape (..., L, P), because rows are what training writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slangvi.linalg.cholesky import lower_factor
from slangvi.linalg.columns import by_columns, in_parts, over_columns, sliced
from slangvi.linalg.inverse_root import InverseRoot, damping, turn
from slangvi.linalg.kept import kept
from slangvi.linalg.noise import standard_normal
from slangvi.linalg.products import LONG, against, gram_float64, is_long, is_plain, less, lift

__all__ = ["LowRankPrecision", "factorize", "matmul"]

# Relative rounding of the Gram of long rows, with room to spare.
_LONG_ROUNDING = 3e-7
# Up to so many parameters for each column of U products with it are in float64. They are short then, and there is
# little that U does not span: what it takes away from a vector would leave nothing but the rounding of float32.
_NARROW = 4


@dataclass(frozen=True)
class LowRankPrecision:
    """Factorised UUᵀ + diag(d); build it with `factorize`.

    Args:
        factor: U by rows, (..., L, P).
        diag: d > 0, (..., P).
        gram: VᵀV, float64, (..., L, L).
        cholesky: lower Cholesky factor of I + VᵀV, float64, (..., L, L).
    """

    factor: Tensor
    diag: Tensor
    gram: Tensor
    cholesky: Tensor

    @kept
    def shrink(self) -> Tensor:
        """d^(−½), (..., P). V = diag(d)^(−1/2) U is never formed: it would be a second factor to hold and to write."""
        return self.diag.rsqrt()

    def matmul(self, rhs: Tensor) -> Tensor:
        """(UUᵀ + diag d) x for x of shape (..., P)."""
        return matmul(self.factor, self.diag, rhs)

    def solve(self, rhs: Tensor) -> Tensor:
        """(UUᵀ + diag d)⁻¹ x = D⁻¹(x − U (I + VᵀV)⁻¹ Uᵀ D⁻¹x), D = diag d, for x of shape (..., P).

        The subtraction loses as many digits along U as U dominates D by, and a mean that moves by what is left there
        would run away. In float32 it is mended: Uᵀy of the result y is known beforehand, as (I + VᵀV)⁻¹ Uᵀ D⁻¹x.
        """
        if self._is_narrow:
            return self.double.solve(rhs.to(torch.float64)).to(rhs.dtype)
        double, dtype = torch.float64, rhs.dtype
        only = self.cholesky.square() if self.cholesky.shape[-1] == 1 else None
        columns = (self.diag, self.factor, rhs)
        seen = over_columns(lambda diag, factor, x: against(factor, x / diag, double), *columns)
        inner = self._capacitance_solve(seen, only)
        (solved,) = by_columns(lambda diag, factor, x, y: (less(x, factor, y) / diag,), *columns, inner.to(dtype))
        if dtype == double:
            return solved
        columns = (self.diag, self.factor, solved)
        known = over_columns(lambda diag, factor, x: against(factor, x, double), *columns)
        missing = self._capacitance_solve(inner - known, only)
        (mended,) = by_columns(
            lambda diag, factor, x, y: (torch.addcdiv(x, lift(factor, y), diag),), *columns, missing.to(dtype)
        )
        return mended

    def transform_noise(self, noise: Tensor) -> Tensor:
        r"""Turn standard normal noise into a zero-mean draw with covariance (UUᵀ + diag d)⁻¹.

        $$ d^{-1/2} (I + VV^\top)^{-1/2} \varepsilon = d^{-1/2}\bigl(\varepsilon + V K V^\top \varepsilon\bigr) $$

        with K = c(VᵀV), c(s) = −1/(√(1+s)(1+√(1+s))). The symmetric root depends on UUᵀ alone: the same noise gives
        the same draw whatever signs or rotation the columns of U came out with.

        Args:
            noise: ε, shape (..., P).
        """
        if self._is_narrow:
            return self._double_rooted.transform_noise(noise.to(torch.float64)).to(noise.dtype)
        white = noise * self.shrink
        rooted = self._rooted(white)
        return torch.addcdiv(white, lift(self.factor, rooted), self.diag)

    def whiten(self, rows: Tensor) -> Tensor:
        r"""Aᵀx for the root A of the covariance that draws use, so that inner products of results are covariances.

        $$ \langle A^\top x, A^\top y \rangle = x^\top (UU^\top + \mathrm{diag}\,d)^{-1} y, \qquad
           A^\top x = \bigl(I + V K V^\top\bigr)\, d^{-1/2} x $$

        with K of `transform_noise`. A Gram matrix of results is positive semi-definite whatever the rounding, which
        products xᵀ solve(y) are not.

        Args:
            rows: x, shape (..., P).
        """
        if self._is_narrow:
            return self._double_rooted.whiten(rows.to(torch.float64)).to(rows.dtype)
        white = rows * self.shrink
        rooted = self._rooted(white * self.shrink)
        return torch.addcmul(white, lift(self.factor, rooted), self.shrink)

    @kept
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """√(1+s) and Q of VᵀV = Q diag(s) Qᵀ, without gradient."""
        if self.gram.shape[-1] == 1:  # needs no library, and waits for no device
            return self.gram.detach().squeeze(-1).clamp_min(0.0).add_(1.0).sqrt_(), torch.ones_like(self.gram)
        values, vectors = torch.linalg.eigh(self.gram.detach())
        return values.clamp_min_(0.0).add_(1.0).sqrt_(), vectors

    @kept
    def damping(self) -> Tensor:
        """c(s) = −1/(√(1+s)(1+√(1+s))), without gradient, (..., L)."""
        return damping(self.spectrum[0])

    def sample(
        self,
        sample_shape: tuple[int, ...] | torch.Size = (),
        generator: torch.Generator | None = None,
        loc: Tensor | None = None,
    ) -> Tensor:
        """Draws of shape (*sample_shape, ..., P) around `loc`, or around zero."""
        noise = standard_normal((*sample_shape, *self.diag.shape), self.diag, generator)
        alike = self.factor.ndim == self.diag.ndim + 1
        plain = all(is_plain(x) for x in (self.factor, self.diag, loc) if x is not None)
        if self._is_narrow or not (alike and plain):
            drawn = self.transform_noise(noise)
            return drawn if loc is None else loc + drawn
        # The same without a temporary for every step on the way.
        white = noise.mul_(self.shrink)
        rooted, parts = self._rooted(white), in_parts(self.diag) or [slice(None)]
        for diag, factor, place, around in sliced(parts, self.diag, self.factor, white, loc):
            if factor.shape[:-1] == (1,):  # the product of one row with all weights would be as large as the draws
                place.addcmul_(rooted, factor[0] / diag)
            else:
                place.addcdiv_(lift(factor, rooted), diag)
            if around is not None:
                place.add_(around)
        return white

    @kept
    def double(self) -> LowRankPrecision:
        """The same in float64."""
        factor, diag = self.factor.to(torch.float64), self.diag.to(torch.float64)
        return LowRankPrecision(factor, diag, self.gram, self.cholesky)

    @property
    def _is_narrow(self) -> bool:
        rank, size = self.factor.shape[-2:]
        return size <= _NARROW * rank and self.diag.dtype != torch.float64

    @property
    def _double_rooted(self) -> LowRankPrecision:
        """The same in float64, with the eigenvectors found here, or put here by others."""
        for name in ("spectrum", "damping"):
            self.double.__dict__.setdefault(name, getattr(self, name))
        return self.double

    def _rooted(self, white: Tensor) -> Tensor:
        """c(VᵀV) Uᵀx for x of shape (..., P), (..., L); in float64 up to the end, for what it takes away from x."""
        double = against(self.factor, white, torch.float64)
        if self.gram.shape[-1] and not is_plain(self.gram):
            found: Tensor = InverseRoot.apply(self.gram, double, *self.spectrum)  # type: ignore[no-untyped-call]
        else:
            _, vectors = self.spectrum
            found = turn(vectors, turn(vectors.mT, double) * self.damping)
        return found.to(white.dtype)

    def inv_diag(self) -> Tensor:
        """Diagonal of (UUᵀ + diag d)⁻¹, (..., P).

        The subtraction loses as many digits as U dominates by, so that everything in it is in float64, some columns at
        a time; 1/diag(UUᵀ + diag d) bounds every entry from below.
        """
        found, cholesky = [], self._double_cholesky()
        for scaled, diag in self._double_columns():
            half = torch.linalg.solve_triangular(cholesky, scaled, upper=False)
            left, floor = 1.0 - half.square().sum(-2), 1.0 / (1.0 + scaled.square().sum(-2))
            found.append((torch.maximum(left, floor) / diag).to(self.diag.dtype))
        return torch.cat(found, -1)

    def inv_quadratic(self, rows: Tensor) -> Tensor:
        """xᵀ (UUᵀ + diag d)⁻¹ x for x of shape (..., P), (...); the subtraction is in float64 for the same reason."""
        whole, inner = [], []
        for part, (scaled, diag) in zip(rows.split(LONG, -1), self._double_columns(), strict=True):
            white = part * diag.rsqrt()
            whole.append(white.square().sum(-1))
            inner.append(against(scaled, white))
        seen = torch.stack(inner).sum(0).unsqueeze(-1)
        half: Tensor = torch.linalg.solve_triangular(self._double_cholesky(), seen, upper=False)
        return (torch.stack(whole).sum(0) - half.square().sum((-2, -1))).to(rows.dtype)

    def _double_columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """V by rows and d in float64, for some columns at a time, (..., L, p) and (..., p)."""
        pairs = zip(self.factor.split(LONG, -1), self.diag.split(LONG, -1), strict=True)
        for factor, diag in ((x.to(torch.float64) for x in pair) for pair in pairs):
            yield factor * diag.rsqrt().unsqueeze(-2), diag

    def _double_cholesky(self) -> Tensor:
        """The factor of I + VᵀV for a V that was not rounded, as long ones are."""
        if not is_long(self.factor):
            return self.cholesky
        gram: Tensor | float = sum(scaled @ scaled.mT for scaled, _ in self._double_columns())
        eye = torch.eye(self.factor.shape[-2], dtype=torch.float64, device=self.diag.device)
        whole: Tensor = torch.linalg.cholesky_ex(eye + gram).L
        return whole

    def logdet(self) -> Tensor:
        """Log det(UUᵀ + diag d) in float64, since it is large where differences of it are not, (...)."""
        small = 2.0 * self.cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.diag.log().sum(-1, dtype=torch.float64) + small

    def trace(self) -> Tensor:
        """tr(UUᵀ + diag d), (...)."""
        return self.diag.sum(-1) + self.factor.square().sum((-2, -1))

    def _capacitance_solve(self, inner: Tensor, only: Tensor | None) -> Tensor:
        """(I + VᵀV)⁻¹ y for y of shape (..., L); `only` is I + VᵀV at rank 1, and None at any other."""
        columns = inner.to(torch.float64).unsqueeze(-1)
        if only is not None:
            solved = columns / only
        elif columns.is_cuda and not (columns.ndim == 2 and is_plain(columns)):
            # For a batch on a GPU torch.cholesky_solve takes ways that cannot be captured in a graph.
            half = torch.linalg.solve_triangular(self.cholesky, columns, upper=False)
            solved = torch.linalg.solve_triangular(self.cholesky.mT, half, upper=True)
        else:
            solved = torch.cholesky_solve(columns, self.cholesky)
        return solved.squeeze(-1).to(inner.dtype)


def factorize(factor: Tensor, diag: Tensor) -> LowRankPrecision:
    """Factorise UUᵀ + diag(d) once, in O(P L²).

    Args:
        factor: U by rows, (..., L, P); L may be 0 or exceed P.
        diag: d > 0, (..., P).

    Returns:
        An object with `solve`, `sample`, `inv_diag`, `logdet`, `trace`, `matmul`.

    Example:
        >>> p = factorize(torch.tensor([[3.0, 0.0]]), torch.tensor([1.0, 4.0]))
        >>> p.solve(torch.tensor([10.0, 4.0]))
        tensor([1., 1.])
        >>> p.inv_diag()
        tensor([0.1000, 0.2500])
    """
    gram = gram_float64(factor, diag)
    rank = gram.shape[-1]
    # Beyond ‖V‖² ≈ 1e15 the identity is below the Gram's own rounding; there the rounding takes its place, so that the
    # factorisation stays alive.
    unit = _LONG_ROUNDING if is_long(factor) else 4.0 * max(rank, 1) * torch.finfo(torch.float64).eps
    rounding = unit * gram.diagonal(dim1=-2, dim2=-1)
    capacitance = gram.clone()
    capacitance.diagonal(dim1=-2, dim2=-1).add_(rounding.clamp_min(1.0))
    return LowRankPrecision(factor, diag, gram, _cholesky(capacitance))


def _cholesky(matrix: Tensor) -> Tensor:
    """Lower factor of a small matrix, NaN where it cannot be had; rank 1 needs no library.

    Not torch.linalg.cholesky, which waits for the device to say whether it went well. With finite numbers it does, and
    for NaN the callers look anyway.
    """
    if matrix.shape[-1] == 1:
        return matrix.sqrt()
    factor, failed = lower_factor(matrix)
    if matrix.device.type == "cpu" and is_plain(matrix) and not bool(failed.any()):
        return factor
    spoilt: Tensor = factor.where((failed == 0)[..., None, None], torch.nan)
    return spoilt


def matmul(factor: Tensor, diag: Tensor, rhs: Tensor) -> Tensor:
    """(UUᵀ + diag d) x without a factorisation; U by rows (..., L, P), x (..., P)."""
    return diag * rhs + lift(factor, against(factor, rhs))
