r"""The precision UUᵀ + diag(d), factorised once and then solved, sampled and measured.

With V = diag(d)^(−1/2) U everything goes through one small matrix, the capacitance I + VᵀV (L×L). It is positive
definite for every U, zero and repeated columns included, so no case needs a branch. Solves, inverse diagonal and
logdet go through its Cholesky factor, draws through its symmetric inverse root. It is built and factorised in
float64: only L×L numbers are involved, and a float32 Gram would lose the identity once ‖V‖² passes 1e7.

Throughout, U is stored by rows, as `factor` of shape (..., L, P), because rows are what training writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slangvi.linalg.kept import kept
from slangvi.linalg.noise import standard_normal
from slangvi.linalg.products import (
    LONG,
    batch_matmul,
    cache_slices,
    combine_rows,
    gram_float64,
    is_long,
    is_plain,
    rows_dot_vector,
)
from slangvi.linalg.threads import one_thread

__all__ = ["LowRankPrecision", "capacitance", "factorize", "matmul", "solve_small", "with_small"]

# Relative rounding of the Gram of long rows, with room to spare.
_LONG_ROUNDING = 3e-7
# Up to so many parameters for each column of U products with it are in float64. They are short then, and there is
# little that U does not span: what it takes away from a vector would leave nothing but the rounding of float32.
_NARROW = 4
# Rank up to which all that is made of VᵀV is made at once, on the host: one wait takes a GPU less time than the many
# small kernels of a library.
_SMALL = 384
_ONCE = (
    "draws of a low-rank precision can be differentiated once, not twice. Take second derivatives of log_prob, entropy "
    "or KL, or draw from DensePrecisionNormal."
)


@dataclass(frozen=True)
class LowRankPrecision:
    """Factorised UUᵀ + diag(d); build it with `factorize`.

    Args:
        factor: U by rows, (..., L, P).
        diag: d > 0, (..., P).
        gram: VᵀV, float64, (..., L, L).
        cholesky: lower Cholesky factor of I + VᵀV, float64, (..., L, L).
        inverse_cholesky: its inverse, where it was made beforehand.
    """

    factor: Tensor
    diag: Tensor
    gram: Tensor
    cholesky: Tensor
    inverse_cholesky: Tensor | None = None

    @cached_property
    def small(self) -> Tensor:
        """Cholesky factor, its inverse, eigenvectors and roots of VᵀV in one tensor, see `solve_small`."""
        return solve_small(self.gram.cpu(), self.factor).to(self.gram.device, non_blocking=True)

    @property
    def shrink(self) -> Tensor:
        """d^(−½), (..., P). V = diag(d)^(−1/2) U is never formed: it would be a second factor to hold and to write."""
        return self.diag.rsqrt()

    def matmul(self, rhs: Tensor) -> Tensor:
        """(UUᵀ + diag d) x for x of shape (..., P)."""
        return matmul(self.factor, self.diag, rhs)

    def solve(self, rhs: Tensor, in_place: bool = False) -> Tensor:
        """(UUᵀ + diag d)⁻¹ x = D⁻¹(x − U (I + VᵀV)⁻¹ Uᵀ D⁻¹x), D = diag d, for x of shape (..., P).

        The subtraction loses as many digits along U as U dominates D by, and a mean that moves by what is left there
        would run away. In float32 it is mended: Uᵀy of the result y is known beforehand, as (I + VᵀV)⁻¹ Uᵀ D⁻¹x.

        Args:
            rhs: x.
            in_place: write the result over x.
        """
        if self.is_narrow:
            return self.double.solve(rhs.to(torch.float64)).to(rhs.dtype)
        solved = rhs.div_(self.diag) if in_place else rhs / self.diag
        if not self.factor.shape[-2]:
            return solved
        inner = self.solve_capacitance(rows_dot_vector(self.factor, solved))
        solved = self._add_combination(solved, -inner)
        if solved.dtype is not torch.float64:
            missing = self.solve_capacitance(inner - rows_dot_vector(self.factor, solved))
            solved = self._add_combination(solved, missing)
        return solved

    def _add_combination(self, solved: Tensor, weights: Tensor) -> Tensor:
        """Return x + D⁻¹Uy, written over x where nobody differentiates."""
        y = weights.to(solved.dtype)
        if not all(is_plain(x) for x in (solved, y, self.factor, self.diag)):
            return torch.addcdiv(solved, combine_rows(y, self.factor), self.diag)
        for cut in cache_slices(solved):
            solved[..., cut].addcdiv_(combine_rows(y, self.factor[..., cut]), self.diag[..., cut])
        return solved

    def transform_noise(self, noise: Tensor) -> Tensor:
        r"""Turn standard normal noise into a zero-mean draw with covariance (UUᵀ + diag d)⁻¹.

        $$ d^{-1/2} (I + VV^\top)^{-1/2} \varepsilon = d^{-1/2}\bigl(\varepsilon + V K V^\top \varepsilon\bigr) $$

        with K = c(VᵀV), c(s) = −1/(√(1+s)(1+√(1+s))). The symmetric root depends on UUᵀ alone: the same noise gives
        the same draw whatever signs or rotation the columns of U came out with.

        Args:
            noise: ε, shape (..., P).
        """
        if self.is_narrow:
            return self._double_rooted.transform_noise(noise.to(torch.float64)).to(noise.dtype)
        white = noise * self.shrink
        rooted = self._rooted(white)
        return torch.addcdiv(white, combine_rows(rooted, self.factor), self.diag)

    def whiten(self, rows: Tensor) -> Tensor:
        r"""Aᵀx for the root A of the covariance that draws use, so that inner products of results are covariances.

        $$ \langle A^\top x, A^\top y \rangle = x^\top (UU^\top + \mathrm{diag}\,d)^{-1} y, \qquad
           A^\top x = \bigl(I + V K V^\top\bigr)\, d^{-1/2} x $$

        with K of `transform_noise`. A Gram matrix of results is positive semi-definite whatever the rounding, which
        products xᵀ solve(y) are not.

        Args:
            rows: x, shape (..., P).
        """
        if self.is_narrow:
            return self._double_rooted.whiten(rows.to(torch.float64)).to(rows.dtype)
        shrink = self.shrink
        white = rows * shrink
        return torch.addcmul(white, combine_rows(self._rooted(white * shrink), self.factor), shrink)

    @kept
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """√(1+s) and Q of VᵀV = Q diag(s) Qᵀ, without gradient."""
        return _spectrum(self.gram.detach())

    @kept
    def damping(self) -> Tensor:
        """c(s) = −1/(√(1+s)(1+√(1+s))), without gradient, (..., L)."""
        return _damping(self.spectrum[0])

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
        if self.is_narrow or not (alike and plain):
            drawn = self.transform_noise(noise)
            return drawn if loc is None else loc + drawn
        # In place: there is one temporary as large as the draws, and none for a single row of U.
        white = noise.mul_(self.shrink)
        rooted = self._rooted(white)
        if self.factor.shape[:-1] == (1,):
            white.addcmul_(rooted, self.factor[0] / self.diag)
        else:
            white.addcdiv_(combine_rows(rooted, self.factor), self.diag)
        return white if loc is None else white.add_(loc)

    @kept
    def double(self) -> LowRankPrecision:
        """A float64 copy."""
        factor, diag = self.factor.to(torch.float64), self.diag.to(torch.float64)
        return replace(self, factor=factor, diag=diag)

    @property
    def is_narrow(self) -> bool:
        """Tell whether there are so few parameters for each column of U that products with it are in float64."""
        rank, size = self.factor.shape[-2:]
        return size <= _NARROW * rank and self.diag.dtype != torch.float64

    @property
    def _double_rooted(self) -> LowRankPrecision:
        """A float64 copy with the eigenvectors found here, or put here by others."""
        for name in ("spectrum", "damping"):
            self.double.__dict__.setdefault(name, getattr(self, name))
        return self.double

    def _rooted(self, white: Tensor) -> Tensor:
        """c(VᵀV) Uᵀx for x of shape (..., P), (..., L); in float64 up to the end, for what it takes away from x."""
        double = rows_dot_vector(self.factor, white)
        if self.gram.shape[-1] and not is_plain(self.gram):
            found: Tensor = _InverseRoot.apply(self.gram, double, *self.spectrum)  # type: ignore[no-untyped-call]
        else:
            _, vectors = self.spectrum
            found = _turn(vectors, _turn(vectors.mT, double) * self.damping)
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
            inner.append(rows_dot_vector(scaled, white))
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

    def solve_capacitance(self, inner: Tensor) -> Tensor:
        """(I + VᵀV)⁻¹ y for y of shape (..., L), in float64."""
        if self.inverse_cholesky is not None:
            return _turn(self.inverse_cholesky.mT, _turn(self.inverse_cholesky, inner.to(torch.float64)))
        columns = inner.to(torch.float64).unsqueeze(-1)
        if self.cholesky.shape[-1] == 1:
            solved = columns / self.cholesky.square()
        elif columns.is_cuda and not (columns.ndim == 2 and is_plain(columns)):
            # For a batch on a GPU torch.cholesky_solve takes ways that cannot be captured in a graph.
            half = torch.linalg.solve_triangular(self.cholesky, columns, upper=False)
            solved = torch.linalg.solve_triangular(self.cholesky.mT, half, upper=True)
        else:
            solved = torch.cholesky_solve(columns, self.cholesky)
        return solved.squeeze(-1)


def factorize(factor: Tensor, diag: Tensor) -> LowRankPrecision:
    """Return UUᵀ + diag(d) as an object that is factorised once, in O(P L²).

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
    if gram.ndim == 2 and 0 < len(gram) <= _SMALL and is_plain(gram):
        return with_small(factor, diag, gram, solve_small(gram.cpu(), factor).to(gram.device, non_blocking=True))
    return LowRankPrecision(factor, diag, gram, capacitance(gram, factor))


def with_small(factor: Tensor, diag: Tensor, gram: Tensor, small: Tensor) -> LowRankPrecision:
    """Return a precision with what `solve_small` has found for it, (5, L, L)."""
    cholesky, inverse, vectors, roots, damping = small.unbind()
    precision = LowRankPrecision(factor, diag, gram, cholesky, inverse)
    precision.__dict__.update(small=small, spectrum=(roots[:1].flatten(), vectors), damping=damping[:1].flatten())
    return precision


def capacitance(gram: Tensor, factor: Tensor) -> Tensor:
    """Return the lower Cholesky factor of I + VᵀV, NaN where it cannot be had.

    Args:
        gram: VᵀV, float64, (..., L, L).
        factor: U by rows, whose length decides how exact VᵀV is.
    """
    rank = gram.shape[-1]
    # Beyond ‖V‖² ≈ 1e15 the identity is below the Gram's own rounding; there the rounding takes its place, so that the
    # factorisation stays alive.
    unit = _LONG_ROUNDING if is_long(factor) else 4.0 * max(rank, 1) * torch.finfo(torch.float64).eps
    rounding = unit * gram.diagonal(dim1=-2, dim2=-1)
    matrix = gram.clone()
    matrix.diagonal(dim1=-2, dim2=-1).add_(rounding.clamp_min(1.0))
    if rank == 1:  # needs no library
        return matrix.sqrt()
    # Not torch.linalg.cholesky, which waits for the device to say whether it went well. With finite numbers it does,
    # and for NaN the callers look anyway.
    lower, failed = torch.linalg.cholesky_ex(matrix)
    spoilt: Tensor = lower.where((failed == 0)[..., None, None], torch.nan)
    return spoilt


def solve_small(gram: Tensor, factor: Tensor) -> Tensor:
    """Return all that is made of VᵀV, (5, L, L) for L ≥ 1: see `with_small`.

    Args:
        gram: VᵀV, float64, (L, L).
        factor: U by rows, see `capacitance`.
    """
    if not bool(gram.isfinite().all()):  # as the results would be, but for libraries that raise
        return gram.new_full((5, *gram.shape), torch.nan)
    with one_thread():
        cholesky, (roots, vectors) = capacitance(gram, factor), _spectrum(gram)
        wide = (x.expand_as(gram) for x in (roots, _damping(roots)))
        return torch.stack([cholesky, _inverse_triangle(cholesky), vectors, *wide])


def _inverse_triangle(lower: Tensor) -> Tensor:
    """Return the inverse of lower triangular matrices, float64, (..., L, L)."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return inverse


def _spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return √(1+s) and Q of Q diag(s) Qᵀ, (..., L) and (..., L, L)."""
    if gram.shape[-1] == 1:  # needs no library, and waits for no device
        return gram.squeeze(-1).clamp_min(0.0).add_(1.0).sqrt_(), torch.ones_like(gram)
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp_min_(0.0).add_(1.0).sqrt_(), vectors


def matmul(factor: Tensor, diag: Tensor, rhs: Tensor) -> Tensor:
    """(UUᵀ + diag d) x without a factorisation; U by rows (..., L, P), x (..., P)."""
    return diag * rhs + combine_rows(rows_dot_vector(factor, rhs, None), factor)


# ---- the symmetric inverse root, for draws


class _InverseRoot(torch.autograd.Function):
    """c(S) y for symmetric S ⪰ 0, c(s) = −1/(√(1+s)(1+√(1+s))), given √(1+s) and the eigenvectors of S.

    Q and Qᵀ are applied one after the other, never multiplied out: the product would lose what Qᵀy tells apart when S
    is large and nearly singular. Autograd's own eigh divides by differences of eigenvalues, which are zero at U = 0;
    the derivative of a matrix function needs only divided differences of c, and these are smooth: with a = √(1+s_i),
    b = √(1+s_j), (c_i − c_j)/(s_i − s_j) = [1/(ab) − 1/((1+a)(1+b))]/(a+b).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor, y: Tensor, roots: Tensor, vectors: Tensor) -> Tensor:
        """c(S) y, (..., L)."""
        return _turn(vectors, _damped(_turn(vectors.mT, y), roots))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """All inputs are needed."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """By S and by y."""
        gram, y, roots, vectors = ctx.saved_tensors
        grad, turned = (_turn(vectors.mT, x) for x in (grads[0], y))
        inner = _slopes(roots) * (grad.unsqueeze(-1) * turned.unsqueeze(-2)).sum_to_size(gram.shape)
        by_gram, by_y = vectors @ inner @ vectors.mT, _turn(vectors, _damped(grad, roots))
        if torch.is_grad_enabled():
            by_gram, by_y = (_Final.apply(x, gram, y) for x in (by_gram, by_y))  # type: ignore[no-untyped-call]
        return by_gram, by_y, None, None

    @staticmethod
    def jvp(ctx: Any, gram: Tensor, y: Tensor, *rest: None) -> Tensor:
        """Along a direction of S and y."""
        _, old, roots, vectors = ctx.saved_tensors
        inner = _slopes(roots) * (vectors.mT @ gram @ vectors)
        return _turn(vectors, _turn(inner, _turn(vectors.mT, old)) + _damped(_turn(vectors.mT, y), roots))


class _Final(torch.autograd.Function):
    """A derivative whose own derivative is refused.

    Torch's `once_differentiable` is passed over where `torch.autograd.grad` is told by what to differentiate: the graph
    does not lead from its error to there. Here it does, through `gram` and `y`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, gram: Tensor, y: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(_ONCE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise NotImplementedError(_ONCE)


def _slopes(roots: Tensor) -> Tensor:
    """Divided differences of c, (..., L, L), given √(1+s)."""
    a, b = roots.unsqueeze(-1), roots.unsqueeze(-2)
    slopes: Tensor = (1.0 / (a * b) - 1.0 / ((1.0 + a) * (1.0 + b))) / (a + b)
    return slopes


def _damped(turned: Tensor, roots: Tensor) -> Tensor:
    """c(s) y in the eigenbasis, given √(1+s)."""
    return turned * _damping(roots)


def _damping(roots: Tensor) -> Tensor:
    """c(s), given √(1+s)."""
    return -1.0 / torch.addcmul(roots, roots, roots)


def _turn(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix (..., L, L) times vector (..., L); a leading dimension more is samples, which go through one product."""
    if vector.ndim == matrix.ndim:
        return batch_matmul(vector.movedim(0, -2), matrix.mT).movedim(-2, 0)
    return batch_matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)
