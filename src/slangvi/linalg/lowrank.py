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
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from slangvi.linalg.kept import kept
from slangvi.linalg.noise import standard_normal

__all__ = ["LowRankPrecision", "factorize", "matmul"]

# Rows from this length on are long. So many of their columns are summed in float32, as BLAS pleases, and these sums in
# float64. A CPU takes so many of them at once, or more where there would be more parts than this. Not a power of two,
# since rows that far apart would compete for the same lines of its cache.
_LONG = 1 << 16
_BLOCK = 1000
_BLOCKS_AT_ONCE = 64
_MOST_PARTS = 128
# Relative rounding of their Gram, with room to spare.
_LONG_ROUNDING = 3e-7
# From this length on rows are squared one after the other.
_WIDE = 8000
# Up to so many parameters for each column of U products with it are in float64. They are short then, and there is
# little that U does not span: what it takes away from a vector would leave nothing but the rounding of float32.
_NARROW = 4
# Entries of long rows that one block of a GPU multiplies.
_CHUNK = 1 << 10
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
        inner = self._capacitance_solve(_contract(self.factor, rhs / self.diag, double))
        solved = (rhs - _lift(self.factor, inner.to(dtype))) / self.diag
        if dtype == double:
            return solved
        missing = self._capacitance_solve(inner - _contract(self.factor, solved, double))
        return torch.addcdiv(solved, _lift(self.factor, missing.to(dtype)), self.diag)

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
        rooted = self._rooted(_contract(self.factor, white))
        return torch.addcdiv(white, _lift(self.factor, rooted), self.diag)

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
        rooted = self._rooted(_contract(self.factor, white * self.shrink))
        return torch.addcmul(white, _lift(self.factor, rooted), self.shrink)

    @kept
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """√(1+s) and Q of VᵀV = Q diag(s) Qᵀ, without gradient."""
        if self.gram.shape[-1] == 1:  # needs no library, and waits for no device
            return self.gram.detach().squeeze(-1).clamp_min(0.0).add_(1.0).sqrt_(), torch.ones_like(self.gram)
        values, vectors = torch.linalg.eigh(self.gram.detach())
        return values.clamp_min_(0.0).add_(1.0).sqrt_(), vectors

    def sample(
        self,
        sample_shape: tuple[int, ...] | torch.Size = (),
        generator: torch.Generator | None = None,
        loc: Tensor | None = None,
    ) -> Tensor:
        """Draws of shape (*sample_shape, ..., P) around `loc`, or around zero."""
        noise = standard_normal((*sample_shape, *self.diag.shape), self.diag, generator)
        alike = self.factor.ndim == self.diag.ndim + 1 and noise.ndim > 1
        if self._is_narrow or not (alike and _plain(self.factor) and _plain(self.diag)):
            drawn = self.transform_noise(noise)
            return drawn if loc is None else loc + drawn
        # The same without a temporary for every step on the way.
        white = noise.mul_(self.shrink)
        rooted = self._rooted(_contract(self.factor, white))
        white.addcdiv_(_lift(self.factor, rooted), self.diag)
        return white if loc is None else white.add_(loc)

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
        self.double.__dict__.setdefault("spectrum", self.spectrum)
        return self.double

    def _rooted(self, inner: Tensor) -> Tensor:
        """c(VᵀV) y for y of shape (..., L)."""
        double = inner.to(torch.float64)
        if self.gram.shape[-1] and not _plain(self.gram):
            found: Tensor = _InverseRoot.apply(self.gram, double, *self.spectrum)  # type: ignore[no-untyped-call]
        else:
            roots, vectors = self.spectrum
            found = _turn(vectors, _damped(_turn(vectors.mT, double), roots))
        return found.to(inner.dtype)

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
        for part, (scaled, diag) in zip(rows.split(_LONG, -1), self._double_columns(), strict=True):
            white = part * diag.rsqrt()
            whole.append(white.square().sum(-1))
            inner.append(_contract(scaled, white))
        seen = torch.stack(inner).sum(0).unsqueeze(-1)
        half: Tensor = torch.linalg.solve_triangular(self._double_cholesky(), seen, upper=False)
        return (torch.stack(whole).sum(0) - half.square().sum((-2, -1))).to(rows.dtype)

    def _double_columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """V by rows and d in float64, for some columns at a time, (..., L, p) and (..., p)."""
        pairs = zip(self.factor.split(_LONG, -1), self.diag.split(_LONG, -1), strict=True)
        for factor, diag in ((x.to(torch.float64) for x in pair) for pair in pairs):
            yield factor * diag.rsqrt().unsqueeze(-2), diag

    def _double_cholesky(self) -> Tensor:
        """The factor of I + VᵀV for a V that was not rounded, as long ones are."""
        if not _is_long(self.factor):
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

    def _capacitance_solve(self, inner: Tensor) -> Tensor:
        """(I + VᵀV)⁻¹ y for y of shape (..., L)."""
        columns = inner.to(torch.float64).unsqueeze(-1)
        if self.cholesky.shape[-1] == 1:
            solved = columns / self.cholesky.square()
        elif columns.is_cuda and not (columns.ndim == 2 and _plain(columns)):
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
    unit = _LONG_ROUNDING if _is_long(factor) else 4.0 * max(rank, 1) * torch.finfo(torch.float64).eps
    rounding = unit * gram.diagonal(dim1=-2, dim2=-1)
    capacitance = gram + torch.diag_embed(rounding.clamp_min(1.0))
    return LowRankPrecision(factor, diag, gram, _cholesky(capacitance))


def _cholesky(matrix: Tensor) -> Tensor:
    """Lower factor of a small matrix, NaN where it cannot be had; rank 1 needs no library.

    Not torch.linalg.cholesky, which waits for the device to say whether it went well. With finite numbers it does, and
    for NaN the callers look anyway.
    """
    if matrix.shape[-1] == 1:
        return matrix.sqrt()
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if matrix.device.type == "cpu" and _plain(matrix) and not bool(failed.any()):
        return factor
    spoilt: Tensor = factor + torch.where(failed > 0, torch.nan, 0.0)[..., None, None]
    return spoilt


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
        return _turn(vectors, _damped(_turn(vectors.mT, y), roots))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gram, y, roots, vectors = ctx.saved_tensors
        grad, turned = (_turn(vectors.mT, x) for x in (grads[0], y))
        inner = _slopes(roots) * (grad.unsqueeze(-1) * turned.unsqueeze(-2)).sum_to_size(gram.shape)
        by_gram, by_y = vectors @ inner @ vectors.mT, _turn(vectors, _damped(grad, roots))
        if torch.is_grad_enabled():
            by_gram, by_y = (_Final.apply(x, gram, y) for x in (by_gram, by_y))  # type: ignore[no-untyped-call]
        return by_gram, by_y, None, None

    @staticmethod
    def jvp(ctx: Any, gram: Tensor, y: Tensor, *rest: None) -> Tensor:
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
    return turned / -torch.addcmul(roots, roots, roots)


def _turn(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix (..., L, L) times vector (..., L); a leading dimension more is samples, which go through one product."""
    if vector.ndim == matrix.ndim:
        return product(vector.movedim(0, -2), matrix.mT).movedim(-2, 0)
    return product(matrix, vector.unsqueeze(-1)).squeeze(-1)


def matmul(factor: Tensor, diag: Tensor, rhs: Tensor) -> Tensor:
    """(UUᵀ + diag d) x without a factorisation; U by rows (..., L, P), x (..., P)."""
    return diag * rhs + _lift(factor, _contract(factor, rhs))


def gram_float64(rows: Tensor, diag: Tensor | None = None) -> Tensor:
    """Rows times their transpose, in float64.

    Long float32 rows are multiplied in float32, some thousand columns at a time, and the products are added in float64:
    the rounding of many short sums averages out (to about 1e-7, tested), and float64 products would take several times
    as long.

    Args:
        rows: (..., K, P).
        diag: columns are divided by its square root first, (..., P).

    Returns:
        (..., K, K).
    """
    plain = rows.is_cuda or (_plain(rows) and (diag is None or _plain(diag)))
    if _is_long(rows) and plain:
        return _gram_of_long_rows(rows, None if diag is None else diag.rsqrt())
    weights = None if diag is None else diag.to(torch.float64).rsqrt().unsqueeze(-2)
    double = rows.to(torch.float64) if weights is None else rows * weights
    return product(double, double.mT)


def _is_long(rows: Tensor) -> bool:
    return rows.ndim == 2 and rows.dtype is torch.float32 and rows.shape[-1] >= _LONG


def _gram_of_long_rows(rows: Tensor, weights: Tensor | None) -> Tensor:
    if rows.device.type == "cuda":
        scaled = rows if weights is None else rows * weights
        return contract(scaled, scaled, torch.float64)
    rank, size = rows.shape
    width = max(_BLOCKS_AT_ONCE, -(-size // (_MOST_PARTS * _BLOCK))) * _BLOCK
    total = rows.new_zeros(rank, rank, dtype=torch.float64)
    scratch = rows.new_empty(0 if weights is None else rank * min(width, size))
    for start in range(0, size, width):
        part = rows[:, start : start + width]
        if weights is not None:
            space = scratch[: part.numel()].view(part.shape)
            part = torch.mul(part, weights[start : start + width], out=space)
        total += _in_blocks(part, part, _BLOCK)
    return total


def _plain(x: Tensor) -> bool:
    """Neither autograd nor vmap watches, so that results may be written in place."""
    if x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None


def column_squares(rows: Tensor) -> Tensor:
    """Diagonal of UUᵀ for U by rows, (..., L, P) → (..., P)."""
    if rows.device.type == "cpu" and rows.ndim == 2 and len(rows) and rows.shape[1] >= _WIDE and _plain(rows):
        total = rows[0].square()
        for row in rows[1:]:
            total.addcmul_(row, row)  # one row after the other stays in the cache, all squares together do not
        return total
    if rows.device.type == "cuda":
        lengths: Tensor = torch.linalg.vector_norm(rows, dim=rows.ndim - 2)  # one pass, without the squares in between
        return lengths.square_() if _plain(lengths) else lengths.square()
    return rows.square().sum(-2)


def contract(rows: Tensor, others: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Inner products over long rows, (L, P) and (K, P) → (L, K), in the rows' dtype or another.

    A GPU has no good kernel for matrices this thin; on many chunks at once it does well. The sums of the chunks are
    added in float64.
    """
    many = rows.device.type == "cuda" and rows.shape[-1] >= 2 * _CHUNK
    found = _in_blocks(rows, others, _CHUNK) if many else rows @ others.mT
    return found.to(dtype or rows.dtype)


def _in_blocks(rows: Tensor, others: Tensor, block: int) -> Tensor:
    """Inner products, (L, P) and (K, P) → (L, K), float64: within blocks of columns in the rows' dtype, then added."""
    count = rows.shape[-1] // block
    left, right = (x[:, : count * block].unflatten(-1, (count, block)).transpose(0, 1) for x in (rows, others))
    total: Tensor = torch.bmm(left, right.mT).sum(0, dtype=torch.float64)
    if rows.shape[-1] > count * block:
        total = total + rows[:, count * block :] @ others[:, count * block :].mT
    return total


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrices or batches of them multiplied, without the reshaping that matmul does to a batch first."""
    return torch.bmm(a, b) if a.ndim == 3 == b.ndim and len(a) == len(b) else a @ b


def _contract(rows: Tensor, vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows (..., L, P) against x (..., P) → (..., L), in x's dtype or another; further dimensions of x are samples."""
    if rows.ndim == 2 and vector.ndim <= 2:
        return contract(vector, rows, dtype) if vector.ndim == 2 else contract(vector[None], rows, dtype)[0]
    if rows.ndim == 2:
        found = vector @ rows.mT
    elif vector.ndim == rows.ndim:  # samples go through one product for each member of the batch
        found = product(vector.movedim(0, -2), rows.mT).movedim(-2, 0)
    else:
        found = product(rows, vector.unsqueeze(-1)).squeeze(-1)
    return found.to(dtype or vector.dtype)


def sums(*vectors: Tensor) -> Tensor:
    """The sum of each vector (..., P), (..., K); short ones of one dtype are added in one go, and so does a GPU."""
    alike = all(vector.dtype == vectors[0].dtype for vector in vectors)
    if alike and (vectors[0].device.type == "cuda" or vectors[0].numel() < _LONG):
        return torch.stack(vectors, -2).sum(-1)
    return torch.stack([vector.sum(-1) for vector in vectors], -1)


def mix(weights: Tensor, rows: Tensor) -> Tensor:
    """Rows combined with weights, (..., K, L) and (..., L, P) → (..., K, P); an outer product is no work for a GEMM."""
    return weights * rows if rows.shape[-2] == 1 else product(weights, rows)


def _lift(rows: Tensor, inner: Tensor) -> Tensor:
    """Rows (..., L, P) combined with the weights y (..., L) → (..., P)."""
    if rows.ndim == 2 and inner.ndim > 1:
        return mix(inner, rows)
    if rows.ndim == 2:
        return inner * rows[0] if len(rows) == 1 else inner @ rows
    if inner.ndim == rows.ndim:
        return mix(inner.movedim(0, -2), rows).movedim(-2, 0)
    return product(inner.unsqueeze(-2), rows).squeeze(-2)
