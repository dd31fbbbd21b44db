r"""Ways back to the low-rank family: from UUᵀ, D and rows of gradients to the next U and D.

A step makes the precision $(1-\beta)(UU^\top + D) + \beta(\hat G + \lambda)$, which is of higher rank than U. A
projection finds the U⁺ and d⁺ that stand for it. It sees the parameters in parts, twice: `observe` adds up a small
matrix over all parts, `decide` turns it into weights, and `project` gives the new U and d of one part at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slangvi.linalg import kernels
from slangvi.linalg.products import batch_matmul, cache_slices, column_squares, gram_float64, mix_rows, rows_dot
from slangvi.linalg.topk import (
    SMALL,
    TOLERANCE,
    Subspace,
    advance,
    decompose,
    iterate,
    iteration_pays,
    leading_eigenpairs,
    ritz,
    starting_block,
)
from slangvi.rows import factored
from slangvi.rows.blocks import Block, Formed
from slangvi.rows.dense import DenseGradients
from slangvi.rows.factored import Joined
from slangvi.rows.operator import GradientOperator, SegmentRows

__all__ = [
    "Decision",
    "FactorAnalysis",
    "LeadingEigenvectors",
    "Part",
    "Projection",
    "ScaledEigenvectors",
    "choose_route",
]

Number = float | Tensor
# Factor analysis: least share of a variance that is taken to be free of the low-rank part, share of λ that d does not
# fall below, UᵀD⁻¹U of a column that has vanished, and the length of the row that it begins with.
LEAST_FREE = 0.1
LEAST_PRIOR = 0.1
VANISHED = 1e-12
SEED = 1e-3
# Entries of rows that a GPU forms at a time to scale them; a CPU forms as many as a segment may have.
FORMED_ON_GPU = 1 << 24
Route = Literal["gram", "parameters", "diagonal"]


class Part(NamedTuple):
    """Some columns of a step; leading dimensions are runs in lockstep.

    Args:
        factor: U by rows, (..., L, n).
        diag: d, (..., n).
        new_factor: memory for U⁺, which may be that of U.
        new_diag: memory for d⁺, which may be that of d.
        columns: place in the flat vector.
        rows: per-example gradients.
        prior_precision: λ, (..., n).
        precision_lr: β, a number, or (..., 1) where runs differ.
        gain: β times the weight of a squared row in Ĝ; likewise.
    """

    factor: Tensor
    diag: Tensor
    new_factor: Tensor
    new_diag: Tensor
    columns: slice
    rows: SegmentRows
    prior_precision: Tensor
    precision_lr: Number
    gain: Number


class Decision(NamedTuple):
    """Solution of the small problem, for all parts together.

    Args:
        weights: of the rows and U in U⁺, (..., R + L, L), or U⁺ itself transposed, (..., P, L); float64.
        spectrum: leading L eigenvalues of (1−β)UUᵀ + βĜ, largest first, (..., L).
        residual: bound on the relative error of these pairs; 0 if they were computed in full, (...).
    """

    weights: Tensor
    spectrum: Tensor
    residual: Tensor


class Observation(NamedTuple):
    """What a projection is decided on; it is not finite if a gradient is not.

    Args:
        small: matrices, float64, few numbers unless they are decomposed where they are.
        trace: of (1−β)UUᵀ + βĜ, (...).
    """

    small: Tensor
    trace: Tensor


class Projection(Protocol):
    """One way back to the family."""

    def observe(self, parts: Callable[[], Iterable[Part]]) -> Observation:
        """Return sums over all parts."""

    def decide(self, small: Tensor) -> Decision:
        """Solve the small problem, wherever it has been brought; the only place that waits for the device."""

    def project(self, part: Part, decision: Decision) -> Tensor:
        """Write the new precision of one part; return the sum of what rounding would take from d⁺, (...)."""


def choose_route(rank: int, num_params: int, gradients: GradientOperator) -> Route:
    """Return the way to the leading eigenvectors.

    gram         the Gram of U and all rows
    parameters   the P×P matrix, where it is smaller than the Gram
    diagonal     none: there is no eigenvector to be found at rank 0

    Args:
        rank: L.
        num_params: P.
        gradients: whose rows are many or few.
    """
    if rank == 0:
        return "diagonal"
    is_narrow = num_params < rank + gradients.height and gradients.spectrum_route == "auto"
    return "parameters" if is_narrow else "gram"


class LeadingEigenvectors:
    r"""The paper's projection: the leading L eigenvectors of A stay in U, what is left of its diagonal goes to d.

    $$ A = (1-\beta)UU^\top + \beta\hat G, \qquad U^+ = Q_{1:L}\Lambda_{1:L}^{1/2}, \qquad
       d^+ = (1-\beta)d + \beta\lambda + \mathrm{diag}\,A - \mathrm{diag}\,U^+U^{+\top} $$

    With C = [√gain G, √(1−β) U] stacked by rows, the nonzero spectrum of A = CᵀC is that of the small Gram CCᵀ. Its
    leading eigenvectors W give U⁺ = WᵀC without a division by eigenvalues, so that zero and repeated directions need no
    care. The small rows come first: a sum that U is added to last is rounded less. β and gain may differ by part.

    Args:
        factor: U by rows, (..., L, P).
        height: R, rows of gradients.
        route: see `choose_route`.
        is_exact: decompose in full, however many rows there are.
    """

    def __init__(self, factor: Tensor, height: int, route: Route = "gram", is_exact: bool = False) -> None:
        self.factor, self.height, self.route = factor, height, route
        self.rank, self.dtype = factor.shape[-2], factor.dtype
        self.tolerance = 0.0 if is_exact else TOLERANCE.get(self.dtype, 0.0)
        self._kernel = factor  # K, where its iteration begins before the wait
        self._space: Subspace | None = None
        self._last: tuple[Number, Tensor, Tensor] | None = None  # β, W, and Wᵀ with the weights of U and the rows

    def observe(self, parts: Callable[[], Iterable[Part]]) -> Observation:
        """Return the Gram CCᵀ, or A itself, and its trace; of large ones on a GPU what `ritz` has to know."""
        if self.route == "parameters":
            small = self._whole_matrix(parts())
            return Observation(small, small.diagonal(dim1=-2, dim2=-1).sum(-1))
        # Parts that share β are added up before they are weighted: what is small takes a GPU as long as what is not.
        sums: list[tuple[Number, Number, Tensor]] = []
        for part in parts():
            small = self._gram(part) if self.route == "gram" else self._diagonal(part)
            if sums and sums[-1][0] is part.precision_lr:
                sums[-1][2].add_(small)
            else:
                sums.append((part.precision_lr, part.gain, small))
        for beta, new_share, small in sums:
            self._weigh(small, 1 - beta, new_share)
        small = sums[0][2] if len(sums) == 1 else torch.stack([small for _, _, small in sums]).sum(0)
        if self.route == "diagonal":
            return Observation(small, small.sum(-1))
        trace = small.diagonal(dim1=-2, dim2=-1).sum(-1)
        if self._begins_before_wait(small):
            self._kernel = small
            self._space = advance(small, starting_block(small, self.rank, self._start(small)))
            small = self._space.small
        return Observation(small, trace)

    def _begins_before_wait(self, small: Tensor) -> bool:
        """Tell whether a GPU iterates at once; the last digits of float64 need more than `ritz` can be sent."""
        is_large = small.is_cuda and small.ndim == 2 and len(small) > SMALL
        return is_large and self.dtype is torch.float32 and self.tolerance > 0 and iteration_pays(len(small), self.rank)

    def _weigh(self, small: Tensor, keep: Number, gain: Number) -> None:
        """Multiply the rows of U by √(1−β) and those of G by √gain, in sums over parts."""
        height = self.height
        if self.route == "diagonal":  # ΣG² and ΣU²
            small[..., :1] *= gain
            small[..., 1:] *= keep
            return
        keep, gain = _matrix(keep), _matrix(gain)
        small[..., :height, :height] *= gain
        small[..., height:, height:] *= keep
        small[..., :height, height:] *= (keep * gain) ** 0.5
        small[..., height:, :height] *= (keep * gain) ** 0.5

    def _whole_matrix(self, parts: Iterable[Part]) -> Tensor:
        """A itself, float64, (..., P, P)."""
        old, new = [], []
        for part in parts:
            old.append(part.factor.double() * _matrix(1 - part.precision_lr) ** 0.5)
            new.append(part.rows.form().double() * _matrix(part.gain) ** 0.5)
        return gram_float64(torch.cat(old, -1).mT) + gram_float64(torch.cat(new, -1).mT)

    def _gram(self, part: Part) -> Tensor:
        """[[GGᵀ, GUᵀ], [UGᵀ, UUᵀ]] of one part, float64."""
        if part.rows.space is not None:
            return gram_float64(part.rows.space)
        if (formed := _for_kernels(part)) is not None:
            return kernels.gram_of_both(formed, part.factor)
        rows, cross = part.rows.gram().double(), part.rows.mm(part.factor).double()
        return torch.cat([torch.cat([rows, cross], -1), torch.cat([cross.mT, gram_float64(part.factor)], -1)], -2)

    def _diagonal(self, part: Part) -> Tensor:
        """ΣG² and ΣU² of one part, float64, (..., 2)."""
        sums = part.rows.square_sum(), column_squares(part.factor)
        return torch.cat([x.sum(-1, keepdim=True, dtype=torch.float64) for x in sums], -1)

    def _start(self, small: Tensor) -> Tensor:
        """Return columns that nearly span the leading space: the old factor."""
        if self.route == "parameters":
            return self.factor.to(small.device, torch.float64).mT
        return torch.eye(small.shape[-1], self.rank, dtype=torch.float64, device=small.device).flip(0)

    def decide(self, small: Tensor) -> Decision:
        """Return the leading eigenvectors as weights of U and the rows."""
        rank = self.rank
        if self.route == "diagonal":
            none = self.factor.new_empty(*self.factor.shape[:-2], self.height, 0, dtype=torch.float64)
            return Decision(none, none[..., 0, :].to(self.dtype), none.sum((-2, -1)))
        if self._space is not None:
            pairs = ritz(self._space, rank, small)
            if float(pairs.residual) > self.tolerance:
                again = advance(self._kernel, self._space.image)
                pairs, done = iterate(self._kernel, again, rank, self.tolerance)
                pairs = pairs if bool(done) else decompose(self._kernel, rank)
        else:
            pairs = leading_eigenpairs(small, min(rank, small.shape[-1]), self.tolerance, self._start(small))
        weights, values = pairs.vectors, pairs.values
        if self.route == "parameters":
            weights = weights * values.sqrt().unsqueeze(-2)
        missing = rank - values.shape[-1]
        if missing:
            weights, values = F.pad(weights, (0, missing)), F.pad(values, (0, missing))
        return Decision(weights, values.to(self.dtype), pairs.residual)

    def _combine(self, part: Part, weights: Tensor, out: Tensor) -> None:
        """Write WᵀC of one part for W (..., R + L, K) to `out`, (..., K, n), which may be the part's own U."""
        scaled = self._scaled(part, weights)[..., : self.height + self.rank]
        if part.rows.space is not None:
            mix_rows(scaled, part.rows.space, out)
            return
        mix_rows(scaled[..., self.height :], part.factor, out)
        if self.rank:
            part.rows.add_t_mm(scaled[..., : self.height].mT, out)

    def _scaled(self, part: Part, weights: Tensor) -> Tensor:
        """Return Wᵀ, weighted, (..., K, R + L), where U is; a single matrix with β and gain beside it, for kernels."""
        if self._last is None or self._last[0] is not part.precision_lr or self._last[1] is not weights:
            # √(1−β) and √gain are multiplied in before anything is rounded, or √(1−β) would be rounded alike each step.
            keep, gain = _matrix((1 - part.precision_lr) ** 0.5), _matrix(part.gain**0.5)
            both = torch.cat([weights[..., : self.height, :] * gain, weights[..., self.height :, :] * keep], -2).mT
            if both.ndim == 2:
                both = torch.cat([both, *_columns(both, part.precision_lr, part.gain)], 1)
            self._last = part.precision_lr, weights, both.contiguous().to(self.factor, non_blocking=True)
        return self._last[2]

    def project(self, part: Part, decision: Decision) -> Tensor:
        """Write the new precision of one part; return what rounding would take from d⁺."""
        if self.route == "gram" and (formed := _for_kernels(part)) is not None:
            return kernels.project_columns(part, formed, self._scaled(part, decision.weights))
        beta, gain = (x.to(self.dtype) if isinstance(x, Tensor) else x for x in (part.precision_lr, part.gain))
        old, new = column_squares(part.factor), part.rows.square_sum()
        if self.route == "parameters":
            part.new_factor.copy_(decision.weights.mT[..., part.columns])
        else:
            self._combine(part, decision.weights, part.new_factor)
        # What is left of the diagonal beside U⁺ may be far smaller than U⁺, and a rounding that is alike at every step
        # would add up to 1/β of it. The difference of nearly equal sums comes first: it is exact, and what is added to
        # it has the rounding of a share β. Whatever U⁺ does not hold is added with the sign that rounding may give it:
        # the next step has the same rounding of U⁺ with the other sign.
        left = old - column_squares(part.new_factor)
        for vector, share in ((old, -beta), (new, gain)):
            if isinstance(share, Tensor):
                left.addcmul_(vector, share)
            else:
                left.add_(vector, alpha=share)
        base = torch.lerp(part.diag, part.prior_precision, beta)
        left += base
        torch.maximum(left, torch.minimum(base, part.prior_precision, out=base), out=part.new_diag)
        return torch.sub(part.new_diag, left, out=left).sum(-1)


class ScaledEigenvectors:
    r"""`LeadingEigenvectors` in coordinates in which diag Λ is the identity: the start of factor analysis.

    A parameter that varies much but alone has an eigenvalue of 1 there, and those that share a direction have more. In
    other coordinates its length decides, and factor analysis does not part with it later: moving u² of one parameter to
    d changes nothing.

    Args:
        factor: U by rows, (..., L, P).
        height: R, rows of gradients.
        route: see `choose_route`.
        is_exact: decompose in full, however many rows there are.
    """

    def __init__(self, factor: Tensor, height: int, route: Route = "gram", is_exact: bool = False) -> None:
        self.inner = LeadingEigenvectors(factor, height, route, is_exact)

    def observe(self, parts: Callable[[], Iterable[Part]]) -> Observation:
        """Return the small problem in scaled coordinates; its trace is that of A in the coordinates of the state."""
        traces: list[Tensor] = []

        def scaled() -> Iterator[Part]:
            for part in parts():
                shares = column_squares(part.factor) * (1 - part.precision_lr) + part.rows.square_sum() * part.gain
                traces.append(shares.sum(-1, dtype=torch.float64))
                yield from (self._scaled(piece)[0] for piece in _pieces(part))

        small = self.inner.observe(scaled).small
        return Observation(small, torch.stack(traces).sum(0))

    def decide(self, small: Tensor) -> Decision:
        """Return the leading eigenvectors as weights of U and the rows."""
        return self.inner.decide(small)

    def project(self, part: Part, decision: Decision) -> Tensor:
        """Write the new precision of one part; return what rounding would take from d⁺, relative to diag Λ."""
        clipped = torch.zeros_like(part.diag[..., 0])
        for piece in _pieces(part):
            scaled, scale = self._scaled(piece)
            clipped += self.inner.project(scaled, decision)
            torch.mul(scaled.new_factor, scale.unsqueeze(-2), out=piece.new_factor)
            torch.mul(scaled.new_diag, scale.square(), out=piece.new_diag)
        return clipped

    def _scaled(self, part: Part) -> tuple[Part, Tensor]:
        """Return a part in scaled coordinates, and the roots of diag Λ that it was divided by."""
        beta, gain = (x.to(part.diag) if isinstance(x, Tensor) else x for x in (part.precision_lr, part.gain))
        whole = (part.diag + column_squares(part.factor)) * (1 - beta) + part.prior_precision * beta
        scale = (whole + part.rows.square_sum() * gain).sqrt()
        factor, diag = part.factor / scale.unsqueeze(-2), part.diag / scale.square()
        rows = DenseGradients.from_rows(part.rows.form() / scale.unsqueeze(-2))
        lam = part.prior_precision / scale.square()
        new = torch.empty_like(factor), torch.empty_like(diag)
        return part._replace(
            factor=factor, diag=diag, new_factor=new[0], new_diag=new[1], rows=rows, prior_precision=lam
        ), scale


def _pieces(part: Part) -> Iterator[Part]:
    """Yield a part in pieces, few enough columns each for their rows to be formed; dense rows are there already."""
    blocks = part.rows.parts if isinstance(part.rows, Joined) else [part.rows]
    first = 0
    for block in blocks:
        if not isinstance(block, Block):
            yield part
            return
        most = (FORMED_ON_GPU if part.factor.is_cuda else factored.CPU_ENTRIES) // max(1, block.num_rows)
        step = max(1, most // block.grain) * block.grain
        for start in range(0, block.num_params, step):
            stop = min(start + step, block.num_params)
            cut, begin = slice(first + start, first + stop), part.columns.start + first
            yield part._replace(
                factor=part.factor[..., cut],
                diag=part.diag[..., cut],
                new_factor=part.new_factor[..., cut],
                new_diag=part.new_diag[..., cut],
                columns=slice(begin + start, begin + stop),
                rows=block.narrow(start, stop),
                prior_precision=part.prior_precision[..., cut],
            )
        first += block.num_params


class FactorAnalysis:
    r"""One step of maximum-likelihood factor analysis of the new precision, which lowers KL(q ‖ N(μ, Λ⁻¹)).

    $$ \Lambda = (1-\beta)(UU^\top + D) + \beta(\hat G + \lambda), \qquad
       A = \Lambda - (1-\beta)D = (1-\beta)UU^\top + \beta(\hat G + \lambda) $$
    $$ Z = D^{-1}U, \quad F = Z^\top AZ + \beta\,(U^\top Z + \beta I), \qquad U^+U^{+\top} = AZF^{-1}Z^\top A $$
    $$ \delta = \mathrm{diag}\,(\Lambda - U^+U^{+\top}) - d, \qquad d^+ \approx d + \delta/w, \qquad
       w = 1 - \mathrm{rowsum}(U \circ Z(I + U^\top Z)^{-1}) $$

    U⁺ is a Nyström approximation of the best factor for the noise D, and d⁺ follows the diagonal; docs/projection.md
    derives both. w is the share of the variance that is not the low-rank part's, at least `LEAST_FREE`; where δ < 0, d⁺
    is d (d + δ) / (d + δ − δ/w), which is positive. d does not fall below `LEAST_PRIOR` λ, where the likelihood of some
    matrices has its maximum at 0. Where β differs by part, A is Λ − (1−c)D with the largest β as c.

    All of it comes from small matrices and U, Z and G once more. With F^(−1/2), which is symmetric, U⁺ differs from U
    by a share of the size of β, and the step is written as that difference, so that its rounding has the size of β too.

    U = 0 is a fixed point: begin with `ScaledEigenvectors`. Columns that have vanished later are given short rows.

    Args:
        factor: U by rows, (..., L, P), L ≥ 1.
        height: R, rows of gradients.
    """

    def __init__(self, factor: Tensor, height: int) -> None:
        self.rank, self.height, self.dtype, self.device = factor.shape[-2], height, factor.dtype, factor.device
        self._fastest: Number = 0.0  # c, the largest β of a part
        self._last: tuple[Number, Tensor, list[Tensor]] | None = None  # β, weights, and what a part multiplies by

    def observe(self, parts: Callable[[], Iterable[Part]]) -> Observation:
        """Return sums over all parts by rows, float64, (..., R + 3L, L), and the trace of (1−β)UUᵀ + βĜ.

        The sums are √gain GZ, √(1−β) UᵀZ, UᵀZ and Zᵀ((1−β)D + βλ)Z.
        """
        total: Tensor | None = None
        for part in parts():
            self._fastest = _larger(self._fastest, part.precision_lr)
            beta, gain = _matrix(part.precision_lr), _matrix(part.gain)
            if (formed := _for_kernels(part)) is not None:
                products, by_row = kernels.products_with_scaled(part, formed)
                squares = [x.sum() for x in by_row.split([self.height, self.rank])][::-1]
            else:
                sums = [self._products(part, cut) for cut in _strips(part)]
                products = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
                both = column_squares(part.factor), part.rows.square_sum()
                squares = [x.sum(-1, dtype=torch.float64) for x in both]
            new, old, prior = products.split([self.height, self.rank, self.rank], -2)
            trace, added = (x[..., None, None] for x in squares)
            traces = F.pad(trace * (1 - beta) + added * gain, (0, self.rank - 1))
            found = [new * gain**0.5, old * (1 - beta) ** 0.5, old, old * (1 - beta) + prior * beta, traces]
            stacked = torch.cat(found, -2)
            total = stacked if total is None else total.add_(stacked)
        assert total is not None
        return Observation(total[..., :-1, :], total[..., -1, :].sum(-1))

    def _products(self, part: Part, cut: slice) -> Tensor:
        """Return GZ, UᵀZ and ZᵀλZ of some columns by rows, float64, (..., R + 2L, L)."""
        factor, lam = part.factor[..., cut], part.prior_precision[..., cut]
        scaled = factor / part.diag[..., cut].unsqueeze(-2)
        prior = _inner(scaled * lam.unsqueeze(-2), scaled)
        if part.rows.space is not None:
            return torch.cat([_inner(part.rows.space[..., cut], scaled), prior], -2)
        return torch.cat([part.rows.mm(scaled).double(), _inner(factor, scaled), prior], -2)

    def decide(self, small: Tensor) -> Decision:
        """Return GZH, (√(1−β) UᵀZ)H, H = F^(−1/2), and (I + UᵀZ)⁻¹ by rows; the spectrum is that of UᵀD⁻¹U."""
        rank, height = self.rank, self.height
        new, kept, old, diagonal = small.split([height, rank, rank, rank], -2)
        fastest = self._fastest_beside(small)
        eye = torch.eye(rank, dtype=small.dtype, device=small.device)
        old = 0.5 * (old + old.mT)
        inner = kept.mT @ kept + new.mT @ new + 0.5 * (diagonal + diagonal.mT)
        values, vectors = torch.linalg.eigh(inner + (2 * fastest - 1) * old + fastest**2 * eye)
        # Directions below rounding hold nothing of U; what is added keeps the inverse of their length finite.
        least = rank * torch.finfo(small.dtype).eps * values[..., -1:] + torch.finfo(small.dtype).tiny
        root = (vectors * torch.maximum(values, least).rsqrt().unsqueeze(-2)) @ vectors.mT
        seeded = new @ root + self._seeds(old.diagonal(dim1=-2, dim2=-1))
        spectrum = torch.linalg.eigvalsh(old).flip(-1).clamp_min(0.0)
        weights = torch.cat([seeded, kept @ root, root, torch.linalg.inv(eye + old)], -2)
        return Decision(weights, spectrum.to(self.dtype), torch.zeros_like(spectrum[..., 0]))

    def _seeds(self, squares: Tensor) -> Tensor:
        """Return weights that put a short row into each column that is zero, (..., R, L), a different row each."""
        empty = squares <= VANISHED
        number = torch.where(empty, empty.cumsum(-1), 0).unsqueeze(-2)  # 1, 2, … where empty; there may be more than R
        rows = torch.arange(1, self.height + 1, device=squares.device).unsqueeze(-1)
        return SEED * (rows == number).to(squares.dtype)

    def project(self, part: Part, decision: Decision) -> Tensor:
        """Write the new precision of one part; return the sum of what rounding would take from d⁺."""
        if self._last is None or self._last[0] is not part.precision_lr or self._last[1] is not decision.weights:
            self._last = part.precision_lr, decision.weights, self._weights(part, decision.weights)
        if (formed := _for_kernels(part)) is not None:
            drop, prior, inverse = self._last[2]
            weights = torch.cat([drop, prior, inverse, *_columns(drop, part.precision_lr, part.gain)], 1)
            return kernels.analyse_columns(part, formed, weights, LEAST_FREE, LEAST_PRIOR)
        beta, gain = (x.to(self.dtype) if isinstance(x, Tensor) else x for x in (part.precision_lr, part.gain))
        change = (part.prior_precision - part.diag) * beta  # δ; it is complete when c (2U − c) is added below
        for vector, share in ((column_squares(part.factor), -beta), (part.rows.square_sum(), gain)):
            if isinstance(share, Tensor):
                change.addcmul_(vector, share)
            else:
                change.add_(vector, alpha=share)
        lost = None
        if part.rows.space is None:
            lost = batch_matmul(self._last[2][0][..., self.height :], part.factor)
            part.rows.add_t_mm(self._last[2][0][..., : self.height].mT, lost)
        clipped = [self._project(part, cut, change[..., cut], lost) for cut in cache_slices(part.factor)]
        return clipped[0] if len(clipped) == 1 else torch.stack(clipped).sum(0)

    def _project(self, part: Part, cut: slice, change: Tensor, lost: Tensor | None) -> Tensor:
        """Write the new precision of some columns.

        Args:
            part: all columns.
            cut: which of them.
            change: terms of δ that do not need U − U⁺, of these columns; overwritten.
            lost: U − U⁺ of all columns but for the term of λ, where rows are not held as a matrix with U.
        """
        assert self._last is not None
        drop, prior, inverse = self._last[2]
        old, diag, lam = part.factor[..., cut], part.diag[..., cut], part.prior_precision[..., cut]
        if lost is not None:
            lost = lost[..., cut]
        else:
            assert part.rows.space is not None
            lost = drop @ part.rows.space[..., cut]
        scaled = old / diag.unsqueeze(-2)
        held = (inverse @ scaled).mul_(old).sum(-2)
        lost -= prior @ scaled.mul_(lam.unsqueeze(-2))
        change += torch.mul(old, 2, out=scaled).sub_(lost).mul_(lost).sum(-2)
        free = held.neg_().add_(1.0).clamp_(LEAST_FREE, 1.0)
        left = diag + change
        clipped = left.clamp_max(0.0).sum(-1).abs_()
        fewer = diag * left / torch.addcmul(diag, change.clamp_max(0.0), 1 - free.reciprocal())
        more = torch.addcdiv(diag, change, free)
        least = torch.minimum(diag, lam * LEAST_PRIOR)
        torch.sub(old, lost, out=part.new_factor[..., cut])
        torch.maximum(torch.where(change > 0, more, fewer), least, out=part.new_diag[..., cut])
        return clipped

    def _weights(self, part: Part, weights: Tensor) -> list[Tensor]:
        """Return what G above U, λ∘Z and Z are multiplied by in a part, in the dtype and on the device of U."""
        new, kept, root, inverse = weights.split([self.height, self.rank, self.rank, self.rank], -2)
        beta, gain = _matrix(part.precision_lr), _matrix(part.gain)
        eye = torch.eye(self.rank, dtype=weights.dtype, device=weights.device)
        drop = eye - kept * (1 - beta) ** 0.5 - root * (self._fastest_beside(weights) - beta)
        made = (torch.cat([-new * gain**0.5, drop], -2).mT, root * beta, inverse)
        return [x.to(self.device, self.dtype, non_blocking=True).contiguous() for x in made]

    def _fastest_beside(self, small: Tensor) -> Number:
        """Return c as a factor of small matrices."""
        fastest = _matrix(self._fastest)
        return fastest.to(small.device, small.dtype) if isinstance(fastest, Tensor) else fastest


def _for_kernels(part: Part) -> Tensor | None:
    """Return the rows of a part where `kernels` take them, and None elsewhere."""
    rows = part.rows
    if isinstance(rows, Formed) and rows.space is None and kernels.serves(part.factor, rows.num_rows):
        return rows.rows
    return None


def _columns(like: Tensor, *numbers: Number) -> list[Tensor]:
    """Return numbers as columns beside a matrix (L, ...), (L, 1) each."""
    return [torch.as_tensor(x, dtype=like.dtype, device=like.device).expand(len(like), 1) for x in numbers]


def _larger(one: Number, other: Number) -> Number:
    """Return the larger of two numbers, or of those of each run."""
    if isinstance(one, Tensor):
        return torch.maximum(one, torch.as_tensor(other, dtype=one.dtype, device=one.device))
    return _larger(other, one) if isinstance(other, Tensor) else max(one, other)


def _strips(part: Part) -> list[slice]:
    """Return columns that are worked on at once: what a cache holds, or all where rows are not held as a matrix."""
    return [slice(None)] if part.rows.space is None else cache_slices(part.factor)


def _inner(rows: Tensor, others: Tensor) -> Tensor:
    """Return inner products of rows, float64, (..., K, n) and (..., L, n) → (..., K, L)."""
    return rows_dot(rows, others, torch.float64) if rows.ndim == 2 else batch_matmul(rows, others.mT).double()


def _matrix(number: Number) -> Number:
    """Return a number of each run, (..., 1), as a factor of its small matrices, (..., 1, 1)."""
    return number.unsqueeze(-1) if isinstance(number, Tensor) and number.ndim else number
