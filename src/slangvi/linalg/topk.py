r"""Best rank-L factor of a·UUᵀ + b·GᵀG, where G is seen only as an operator.

With C = [√a U, √b G] stacked by rows, the nonzero spectrum of CᵀC (P×P) is that of the small Gram CCᵀ ((L+R)×(L+R)).
Its leading eigenvectors W give the new factor directly as WᵀC: no division by eigenvalues, so zero and repeated
directions need no care. Three routes lead to W:

- **gram**: CCᵀ is formed, once.
- **randomized**: CCᵀ is only applied, X ↦ C(CᵀX), to the few columns of a warm-started subspace iteration. It pays
  when the Gram is dear: many rows, or layers with many positions.
- **parameters**: with P < L+R the P×P matrix is the smaller one and is decomposed instead.

Where only U⁺ is wanted and not its single columns, a float64 matrix that is formed need not be decomposed: its leading
space is followed from the previous factor (see `tracking`).

`Problem` holds the pieces apart, so that the products, the eigenproblem and the recombination can be run one by one:
inside a captured graph, or for many replicas at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.linalg import krylov
from slangvi.linalg.krylov import Eigenpairs, decomposed, iteration_pays, leading_eigenpairs
from slangvi.linalg.products import column_squares, contract, gram_float64, mix, product, times
from slangvi.linalg.subspace import OVERSAMPLING, projected, ritz, sharpened, starting_block
from slangvi.linalg.tracking import first_rounds, tracked, tracking_pays
from slangvi.types import GradientOperator

__all__ = [
    "Averaged",
    "Problem",
    "Route",
    "Solved",
    "TopFactor",
    "averaged_diagonal",
    "choose_route",
    "pairs_of",
    "top_factor",
]

Route = Literal["gram", "randomized", "parameters"]
_Weighed = tuple[Tensor, float | Tensor]

# Residual allowed relative to the largest eigenvalue: far below the 1e-4 that float32 promises, far above its rounding.
# Pairs asked for in float64 are those of the full decomposition.
TOLERANCE = {torch.float32: 1e-6}
# The products of the randomized route are rounded to the factor's own dtype every time.
_APPLIED_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
# Looks at the residual before the randomized route gives up and forms the Gram.
_APPLIED_LOOKS = 4
# Error of U⁺U⁺ᵀ allowed relative to the largest eigenvalue when the previous factor is followed instead of decomposing
# in full: as far below the 1e-10 that float64 promises as above its rounding.
TRACKED_TOLERANCE = {torch.float64: 1e-12}


class TopFactor(NamedTuple):
    """What `top_factor` returns.

    Args:
        factor: U⁺ by rows, (..., L, P).
        spectrum: the L leading eigenvalues, largest first, (..., L).
        total: trace of a·UUᵀ + b·GᵀG, i.e. the sum of all eigenvalues, (...).
        residual: bound on the error of the leading pairs relative to the largest eigenvalue; 0 when the full
            decomposition was used, (...).
    """

    factor: Tensor
    spectrum: Tensor
    total: Tensor
    residual: Tensor


class Solved(NamedTuple):
    """What `Problem.solve` returns.

    Args:
        factor: U⁺ by rows, (..., L, P).
        leading: the L leading eigenvalues in any order, (..., L), or matrices that have them, (..., L, L).
        residual: bound on the error of U⁺U⁺ᵀ or of the pairs relative to the largest eigenvalue, 0 in full, (...).
    """

    factor: Tensor
    leading: Tensor
    residual: Tensor


@dataclass(frozen=True)
class Problem:
    """The eigenproblem of A = a·UUᵀ + b·GᵀG, by one route.

    Args:
        factor: U by rows, (..., L, P).
        gradients: operator G with R rows.
        keep: a ≥ 0, a number or a tensor without dimensions; a (P,) tensor weighs columns, A = √a UUᵀ √a + …
        gain: b ≥ 0; likewise.
        gain_per_tensor: the same b with one number per parameter tensor, needed when `gain` is a (P,) tensor.
        route: how W is found.
        roots: √a, √b and √(ab) where they are at hand.
    """

    factor: Tensor
    gradients: GradientOperator
    keep: float | Tensor
    gain: float | Tensor
    gain_per_tensor: Tensor | None
    route: Route
    roots: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Rows of the small matrix."""
        rank, params = self.factor.shape[-2:]
        return params if self.route == "parameters" else rank + _height(self.gradients)

    @property
    def known(self) -> int:
        """Leading coordinates along which the previous factor lies."""
        return 0 if self.route == "parameters" else self.factor.shape[-2]

    @cached_property
    def matrix(self) -> Tensor:
        """The small matrix itself, float64, (..., n, n)."""
        if self.route == "parameters":
            return self._parameters_matrix()
        old, (a, b) = self._old, self._roots
        both = a * b if self.roots is None else self.roots[2]
        cross = self.gradients.mm(old if self._columns is None else old * self._columns)
        uniform = self.gain_per_tensor is None
        gram, gain = (self.gradients.gram(), self.gain) if uniform else (self.gradients.gram(self.gain_per_tensor), 1.0)
        # In float32 the other parts are rounded to it as well.
        corner = gram_float64(old) if old.dtype == torch.float64 or old.ndim > 2 else contract(old, old)
        share = a * a if self.roots is None else self.keep
        return _bordered((corner.to(torch.float64), share), (cross, both), (gram, gain))

    def _parameters_matrix(self) -> Tensor:
        """A, float64, (..., P, P)."""
        rows, factor, keep, gain = self.gradients.form(), self.factor, self.keep, self.gain
        batches = rows.dtype == torch.float64 and rows.ndim == factor.ndim == 3
        if batches and isinstance(keep, float) and isinstance(gain, float):
            return torch.baddbmm(torch.bmm(rows.mT, rows), factor.mT, factor, beta=gain, alpha=keep)
        # Weights are multiplied in afterwards: what is rounded of √(1−β) would be the same at every step.
        return _weighed(gram_float64(factor.mT), self._keep_root) + _weighed(gram_float64(rows.mT), self._gain_root)

    def prepare(self) -> None:
        """Compute now what is otherwise computed when first needed: what is captured must be captured in order."""
        _ = self._roots, self._columns, self._old
        if self.route != "randomized":
            _ = self.matrix

    def apply(self, block: Tensor) -> Tensor:
        """K X in float64, (n, b), with K formed or not as the route says."""
        if self.route != "randomized":
            return self.matrix @ block
        # Columns of length one: those of K X, K² X, … need not fit float32 where K does.
        lengths = torch.linalg.vector_norm(block, dim=0).clamp_min(torch.finfo(block.dtype).tiny)
        (a, b), rows = self._roots, self.combined(block / lengths)
        seen = rows if self._columns is None else rows * self._columns
        image = torch.cat([contract(self._old, rows) * a, self.gradients.mm(seen) * b]).to(torch.float64)
        return image.mul_(lengths)

    def combined(self, vectors: Tensor) -> Tensor:
        """WᵀC for W given by its columns, (..., n, K) → (..., K, P).

        Roots are multiplied in before anything is rounded: that of √(1−β) would be the same at every step.
        """
        (a, b), rank, dtype = self._roots, self.factor.shape[-2], self.factor.dtype
        kept, new = times(vectors[..., :rank, :], a, dtype), times(vectors[..., rank:, :], b, dtype)
        kept = mix(kept.mT, self._old)
        if self._columns is not None:
            return kept + self.gradients.t_mm(new) * self._columns
        return self.gradients.t_mm(new, onto=kept)

    def solution(self, values: Tensor, vectors: Tensor) -> Tensor:
        """U⁺ from leading eigenpairs, (..., L, P); ranks beyond P are filled with zeros."""
        if self.route != "parameters":
            return self.combined(vectors)
        new = (vectors * values.sqrt().unsqueeze(-2)).mT.to(self.factor.dtype)
        missing = self.factor.shape[-2] - new.shape[-2]
        return F.pad(new, (0, 0, 0, missing)) if missing else new

    def diagonal(self) -> Averaged | Tensor:
        """The diagonal of A, float64, (..., P), where it is at hand; else what `averaged_diagonal` makes it from."""
        if self.route == "parameters" and self.factor.shape[-2] and self.factor.dtype == torch.float64:
            return self.matrix.diagonal(dim1=-2, dim2=-1)  # without a factor the matrix is not needed
        return Averaged(self.factor, self.gradients.square_sum(), self.keep, self.gain)

    def solve(self) -> Solved:
        """U⁺ with U⁺U⁺ᵀ the best approximation; its rows need not be single eigenvectors."""
        tolerance, rank = TRACKED_TOLERANCE.get(self.factor.dtype, 0.0), self.factor.shape[-2]
        lanes = self.factor.shape[:-2].numel()
        if tolerance == 0.0 or self.route == "randomized" or not tracking_pays(lanes, self.size, rank):
            return self._solved_in_full()
        # The previous factor lies along the first L coordinates of the Gram, and is its own start otherwise.
        matrix, spanned = self.matrix, self.route == "gram"
        image = matrix[..., :rank] if spanned else product(matrix, self.factor.mT)
        share = 0.0 if isinstance(self.keep, Tensor) else 1.0 - self.keep
        rows, leading, errors = tracked(matrix, image, tolerance, first_rounds(tolerance, share), spanned)
        missed = [k for k, error in enumerate(errors) if error > tolerance]
        if len(missed) == lanes:
            return self._solved_in_full()
        residual = torch.tensor(errors, dtype=matrix.dtype, device=matrix.device)
        if missed:  # these are decomposed on their own
            values, vectors, exact = leading_eigenpairs(matrix.view(lanes, self.size, -1)[missed], rank)
            whole = vectors if spanned else vectors * values.sqrt().unsqueeze(-2)
            rows.view(lanes, rank, -1)[missed] = whole.mT
            leading.view(lanes, rank, -1)[missed] = torch.diag_embed(values)
            residual[missed] = exact
        return Solved(self.combined(rows.mT) if spanned else rows, leading, residual.view(matrix.shape[:-2]))

    def _solved_in_full(self) -> Solved:
        rank = self.factor.shape[-2]
        if self.route != "parameters" or not 0 < rank <= self.size:
            pairs = self.pairs()
            factor = self.solution(pairs.values, pairs.vectors)
            return Solved(factor, padded_spectrum(pairs.values, factor), relative_residual(pairs))
        values, vectors = decomposed(self.matrix)
        leading = values[..., -rank:].clamp_min(0.0)
        factor = self.solution(leading, vectors[..., -rank:])
        return Solved(factor, leading.to(factor.dtype), values.new_zeros(values.shape[:-1]))

    def pairs(self, tried: bool = False) -> Eigenpairs:
        """Leading eigenpairs of the small matrix; `tried` when subspace iteration is known to be too slow for it."""
        rank = min(self.factor.shape[-2], self.size)
        if rank == 0:
            empty = self.factor.new_zeros(*self.factor.shape[:-2], self.size, 0, dtype=torch.float64)
            return Eigenpairs(empty[..., 0, :], empty, empty.sum((-2, -1)))
        if self.route == "randomized":
            found = self._applied_pairs(rank)
            if found is not None:
                return found
            return replace(self, route="gram").pairs()
        return pairs_of(self.matrix, self.factor, self.route, tried)

    def _applied_pairs(self, rank: int) -> Eigenpairs | None:
        """Without ever forming K; None when the iteration is too slow."""
        block = starting_block(self.size, rank, self.known, torch.float64, self.factor.device)
        tolerance = _APPLIED_TOLERANCE[self.factor.dtype]
        for _ in range(_APPLIED_LOOKS):
            block = sharpened(self.apply, block, krylov.STEPS)
            values, inner, residual, _ = ritz(projected(self.apply, block), rank)
            if bool(residual <= tolerance * values[0].clamp_min(torch.finfo(torch.float64).tiny)):
                return Eigenpairs(values, block @ inner, residual)
        return None

    @cached_property
    def _keep_root(self) -> float | Tensor:
        if self.roots is not None:
            return self.roots[0]
        # A rounded root of what differs by column would be rounded alike at every step.
        return self.keep.to(torch.float64) ** 0.5 if isinstance(self.keep, Tensor) else self.keep**0.5

    @cached_property
    def _gain_root(self) -> float | Tensor:
        return self.gain**0.5 if self.roots is None else self.roots[1]

    @cached_property
    def _columns(self) -> Tensor | None:
        """√b when it differs by column."""
        return self._gain_root if isinstance(self._gain_root, Tensor) and self._gain_root.ndim else None

    @cached_property
    def _old(self) -> Tensor:
        """U, weighed where a differs by column: numbers scale the small matrices, vectors the columns."""
        by_column = isinstance(self._keep_root, Tensor) and self._keep_root.ndim > 0
        return (self._keep_root * self.factor).to(self.factor.dtype) if by_column else self.factor

    @property
    def _roots(self) -> tuple[float | Tensor, float | Tensor]:
        """√a and √b where they are numbers, else 1."""
        a, b = (1.0 if isinstance(root, Tensor) and root.ndim else root for root in (self._keep_root, self._gain_root))
        return a, b


def pairs_of(matrix: Tensor, factor: Tensor, route: Route, tried: bool = False) -> Eigenpairs:
    """Leading eigenpairs of formed small matrices (..., n, n), for the factors (..., L, P) they belong to."""
    rank = factor.shape[-2]
    if route == "parameters":
        return leading_eigenpairs(matrix, min(rank, matrix.shape[-1]))
    return leading_eigenpairs(matrix, rank, TOLERANCE.get(factor.dtype, 0.0), start=rank, tried=tried)


def choose_route(factor: Tensor, gradients: GradientOperator) -> Route:
    """The route with the fewest counted multiplications, or the one wished for where it can be gone.

    gram         cost of the Gram, once
    randomized   (STEPS+1) products G·, Gᵀ· with L + OVERSAMPLING columns each
    parameters   whenever P < L + R
    """
    rank, params = factor.shape[-2:]
    rows, wish = _height(gradients), gradients.spectrum_route
    if wish == "gram":
        return "gram"
    if params < rank + rows:
        return "parameters"
    if factor.ndim > 2 or not iteration_pays(rank + rows, rank):
        return "gram"
    gram, column = gradients.costs
    applied = 2 * (krylov.STEPS + 1) * (rank + OVERSAMPLING) * column
    # In float64 the tolerance is so small that the Gram would be formed in the end anyway.
    pays = applied < gram and factor.dtype == torch.float32
    return "randomized" if pays or wish == "randomized" else "gram"


class Averaged(NamedTuple):
    """What the diagonal of A is made from.

    Args:
        old: U by rows, (..., L, P), or the diagonal of UUᵀ, (..., P).
        fresh: diagonal of GᵀG, (..., P).
        keep: a.
        gain: b.
    """

    old: Tensor
    fresh: Tensor
    keep: float | Tensor
    gain: float | Tensor


def averaged_diagonal(old: Tensor, fresh: Tensor, keep: float | Tensor, gain: float | Tensor) -> Tensor:
    """a·diag UUᵀ + b·diag GᵀG in float64, (..., P); arguments as in `Averaged`.

    What is left of it beside U⁺ may be far smaller, and a rounding that is alike at every step would add up.
    """
    kept = _doubled(column_squares(old) if old.ndim > fresh.ndim else old, keep)
    return torch.addcmul(kept, fresh, _double(gain)) if isinstance(gain, Tensor) else kept + _doubled(fresh, gain)


def _doubled(vector: Tensor, weight: float | Tensor) -> Tensor:
    """The product in float64."""
    return vector * _double(weight) if isinstance(weight, Tensor) else vector.to(torch.float64) * weight


def _double(weight: Tensor) -> Tensor:
    """In float64, with a dimension: that makes products with it float64, and vectors need not be copied to it first."""
    return (weight if weight.ndim else weight.unsqueeze(0)).to(torch.float64)


def _height(gradients: GradientOperator) -> int:
    """Rows of the operator's Gram: fewer than R where it has merged parallel ones."""
    return int(getattr(gradients, "num_merged", gradients.num_rows))


def top_factor(
    factor: Tensor,
    gradients: GradientOperator,
    keep: float | Tensor,
    gain: float | Tensor,
    gain_per_tensor: Tensor | None = None,
    route: Route | None = None,
) -> TopFactor:
    r"""Leading L eigenpairs of A = a·UUᵀ + b·GᵀG as a factor, U⁺U⁺ᵀ = best rank-L approximation of A.

    Args:
        factor: U by rows, (..., L, P).
        gradients: operator G with R rows.
        keep: a ≥ 0; a (P,) tensor weighs columns, A = √a UUᵀ √a + …
        gain: b ≥ 0; likewise.
        gain_per_tensor: the same b with one number per parameter tensor, needed when `gain` is a (P,) tensor.
        route: None takes the one with the fewest counted multiplications.

    Example:
        >>> from slangvi.grads.dense import DenseGradients
        >>> rows = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> top = top_factor(torch.zeros(1, 2), DenseGradients.from_rows(rows), keep=0.5, gain=1.0)
        >>> top.factor.abs(), top.spectrum, top.total
        (tensor([[2., 0.]]), tensor([4.]), tensor(5.))
    """
    problem = Problem(factor, gradients, keep, gain, gain_per_tensor, route or choose_route(factor, gradients))
    pairs = problem.pairs()
    total = (keep * factor.square().sum(-2) + gain * gradients.square_sum()).sum(-1)
    return TopFactor(
        problem.solution(pairs.values, pairs.vectors),
        padded_spectrum(pairs.values, factor),
        total,
        relative_residual(pairs).to(factor.dtype),
    )


def padded_spectrum(values: Tensor, factor: Tensor) -> Tensor:
    """Eigenvalues in the factor's dtype, zeros beyond P, (..., L)."""
    missing = factor.shape[-2] - values.shape[-1]
    return (F.pad(values, (0, missing)) if missing else values).to(factor.dtype)


def relative_residual(pairs: Eigenpairs) -> Tensor:
    """Residual relative to the largest eigenvalue, (...)."""
    if not pairs.values.shape[-1]:
        return pairs.residual
    return pairs.residual / pairs.values.amax(-1).clamp_min(torch.finfo(pairs.values.dtype).tiny)


def _weighed(gram: Tensor, root: float | Tensor) -> Tensor:
    """√w A √w in float64, for √w that is a number or differs by column."""
    if not isinstance(root, Tensor):
        return gram * (root * root)
    root = root.to(torch.float64)
    return gram * (root.unsqueeze(-1) * root.unsqueeze(-2) if root.ndim else root * root)


def _bordered(corner: _Weighed, cross: _Weighed, gram: _Weighed) -> Tensor:
    """[[corner, crossᵀ], [cross, gram]] in float64, each times its weight: (..., L+R, L+R)."""
    rank, R = corner[0].shape[-1], gram[0].shape[-1]
    whole = gram[0].new_empty(*gram[0].shape[:-2], rank + R, rank + R, dtype=torch.float64)
    upper, lower = whole.split([rank, R], -2)
    for (values, weight), place in zip(
        (corner, cross, gram), (upper[..., :rank], *lower.split([rank, R], -1)), strict=True
    ):
        times(values, weight, torch.float64, onto=place)
    upper[..., rank:] = lower[..., :rank].mT
    return whole
