"""The prior over the weights, posteriors that become one or are merged, and the evidence lower bound."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.linalg import factorize, matmul
from slangvi.linalg.products import column_squares, combine_rows, gram_float64, rows_dot_vector
from slangvi.linalg.topk import leading_eigenpairs
from slangvi.params import ParamSpec
from slangvi.params.state import layout_mismatch
from slangvi.params.values import per_parameter

__all__ = [
    "ELBO",
    "Prior",
    "check_normal",
    "check_plain",
    "described_prior",
    "merge_posteriors",
    "prior_from",
    "require_same_layout",
]

# Settings that a posterior as the prior takes the place of, and their defaults.
PLAIN = {"prior_precision": 1.0, "prior_mean": 0.0}
# Negative eigenvalues up to so many roundings of the largest one are rounding themselves.
ROUNDINGS = 100


@dataclass(frozen=True, eq=False)
class Prior:
    r"""$\mathcal N\bigl(\mu_0, (CC^\top + \mathrm{diag}\,\lambda)^{-1}\bigr)$.

    Args:
        precision: λ, (P,).
        mean: μ₀, (P,).
        factor: C by rows, (L₀, P); None where the precision is diagonal.
    """

    precision: Tensor
    mean: Tensor
    factor: Tensor | None = None

    @cached_property
    def bounds(self) -> tuple[float, float, float, float]:
        """Smallest and largest λ, the length of μ₀, and the trace of CCᵀ, as numbers."""
        low, high = torch.aminmax(self.precision)
        lengths = [torch.linalg.vector_norm(x) for x in (self.mean, self.factor) if x is not None]
        low, high, mean, *factor = torch.stack([low, high, *lengths]).tolist()
        return low, high, mean, factor[0] * factor[0] if factor else 0.0

    @cached_property
    def diagonal(self) -> Tensor:
        """Diagonal of the precision, (P,)."""
        return self.precision if self.factor is None else self.precision + column_squares(self.factor)

    @cached_property
    def logdet(self) -> Tensor:
        """Log-determinant of the precision, float64, (...)."""
        if self.factor is None:
            return self.precision.log().sum(-1, dtype=torch.float64)
        return factorize(self.factor, self.precision).logdet()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all numbers, by which a checkpoint knows its prior again."""
        found = hashlib.sha256()
        for x in (self.precision, self.mean, self.factor):
            if x is not None:
                found.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def add_slope(self, loc: Tensor, onto: Tensor) -> Tensor:
        """Return y + (CCᵀ + diag λ)(μ − μ₀), where y (..., P) is the gradient of the mean without the prior's."""
        away = loc - self.mean
        found = torch.addcmul(onto, self.precision, away)
        if self.factor is None:
            return found
        return found + combine_rows(rows_dot_vector(self.factor, away).to(away.dtype), self.factor)


def check_normal(name: str, value: Any) -> LowRankPrecisionNormal | MultivariateNormal:
    """Return a value that is one Gaussian posterior, or refuse it."""
    if not isinstance(value, LowRankPrecisionNormal | MultivariateNormal):
        raise TypeError(
            f"{name} must be a Gaussian posterior, got {type(value).__name__}. Pass opt.posterior, "
            "vi.posterior(state), a LowRankPrecisionNormal or a DensePrecisionNormal."
        )
    if value.batch_shape:
        raise ValueError(f"{name} must be one posterior, got a batch of shape {tuple(value.batch_shape)}. Pick one.")
    return value


def check_plain(given: Mapping[str, Any]) -> None:
    """Refuse a prior's precision or mean that is given beside a posterior as the prior."""
    for name, default in PLAIN.items():
        value = given.get(name, default)
        if not (isinstance(value, int | float) and value == default):
            raise ValueError(
                f"{name} and prior are both given, and a prior has a {name[6:]} already. Drop one of them."
            )


def require_same_layout(posterior: Any, spec: ParamSpec, name: str = "prior") -> None:
    """Raise ValueError naming the first parameter in which a posterior is not of this layout."""
    own, size = getattr(posterior, "param_spec", None), posterior.event_shape[0]
    unlike = "" if own is None else layout_mismatch(own.names, own.shapes, spec)
    if own is None and size != spec.num_params:
        unlike = f"it has P = {size}, and P = {spec.num_params} is expected"
    if unlike:
        raise ValueError(
            f"{name} is of other parameters: {unlike}. Pass the posterior of the same parameters, in the same order."
        )


def prior_from(posterior: Any, spec: ParamSpec, like: Tensor) -> Prior:
    """Return a posterior as the prior of parameters.

    Args:
        posterior: its factor is held, not copied, if it has the dtype and device already.
        spec: layout of the parameters.
        like: tensor whose dtype and device the prior has.
    """
    require_same_layout(posterior, spec)
    factor, diag = (x.detach().to(like) for x in low_rank(posterior))
    found = Prior(diag, posterior.loc.detach().to(like), factor.contiguous() if len(factor) else None)
    finite = all(bool(x.isfinite().all()) for x in (found.mean, diag, factor))
    if not (finite and bool((diag > 0).all())):
        raise ValueError(f"prior must be finite, with a positive diagonal, in {like.dtype}, the dtype of the state.")
    return found


def described_prior(settings: Any, spec: ParamSpec, like: Tensor) -> Prior:
    """Return the prior that the settings of a method describe; arguments as those of `prior_from`."""
    if getattr(settings, "prior", None) is not None:
        return prior_from(settings.prior, spec, like)
    mean = per_parameter("prior_mean", getattr(settings, "prior_mean", 0.0), spec, like, positive=False)
    return Prior(per_parameter("prior_precision", settings.prior_precision, spec, like), mean)


def low_rank(normal: Any) -> tuple[Tensor, Tensor]:
    """Return C by rows and λ with CCᵀ + diag λ the precision; of a dense one λ is its smallest eigenvalue."""
    if isinstance(normal, LowRankPrecisionNormal):
        return normal.prec_factor.mT, normal.prec_diag
    return split(normal.precision_matrix)


def split(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return C by rows, (P, P), and λ, (P,), of a dense precision, with the smallest λ for all parameters."""
    values, vectors = torch.linalg.eigh(matrix.double())
    factor = (vectors * (values - values[0]).sqrt()).mT
    return factor.to(matrix.dtype), values[:1].to(matrix.dtype).expand(len(values))


def merge_posteriors(posteriors: Sequence[Any], prior: Any, rank: int | None = None) -> LowRankPrecisionNormal:
    r"""Return the posterior of all data, given those of K parts of it that were learnt with one prior.

    $$ \Lambda = \sum_k \Lambda_k - (K-1)\Lambda_0, \qquad
       \mu = \mu_0 + \Lambda^{-1} \sum_k \Lambda_k (\mu_k - \mu_0) $$

    is exact for Gaussians: the prior is in each of them, and counts once.

    Args:
        posteriors: of the parts, each learnt with `num_data` of its part.
        prior: of each of them; a posterior, or λ of $\mathcal N(0, \lambda^{-1})$.
        rank: columns to keep of the merged factor, by its leading eigenvectors, as a step of SLANG keeps them; None
            keeps all, which is exact.

    Example:
        >>> half = LowRankPrecisionNormal(torch.ones(2), torch.tensor([[1.0], [0.0]]), torch.tensor([3.0, 2.0]))
        >>> whole = merge_posteriors([half, half], prior=1.0)
        >>> whole.precision_matrix.diagonal(), whole.loc
        (tensor([7., 3.]), tensor([1.1429, 1.3333]))
    """
    parts = [check_normal("posteriors", part) for part in posteriors]
    if not parts:
        raise ValueError("posteriors is empty: there is nothing to merge.")
    first, spec = parts[0], next(filter(None, (getattr(part, "param_spec", None) for part in parts)), None)
    if not isinstance(prior, LowRankPrecisionNormal | MultivariateNormal):
        zero = torch.zeros_like(first.loc)
        diag = torch.full_like(zero, checks.number("prior", prior, 0.0))
        prior = LowRankPrecisionNormal(zero, zero.new_zeros(len(zero), 0), diag)
    layout = spec or ParamSpec(("θ",), (first.event_shape,))
    for name, part in (*(("posteriors", part) for part in parts), ("prior", check_normal("prior", prior))):
        require_same_layout(part, layout, name)
    more, shift = len(parts) - 1, torch.stack([_times(part, part.loc - prior.loc) for part in parts]).sum(0)
    if any(isinstance(part, MultivariateNormal) for part in (*parts, prior)):
        factor, diag = split(sum(part.precision_matrix for part in parts) - more * prior.precision_matrix)
    else:
        factors, diags = zip(*map(low_rank, (*parts, prior)), strict=True)
        diag = sum(diags[:-1]) - more * diags[-1]
        factor = torch.cat(factors[:-1])
        if more and len(factors[-1]):
            factor, lost = _signed(factor, factors[-1] * more**0.5, rank is None)
            diag = diag - lost
    if not bool((diag > 0).all()):
        place = int((~(diag > 0)).nonzero()[0, 0])
        where = next(name for name, columns in layout.slices.items() if place < columns.stop)
        raise ValueError(
            f"the merged precision is not positive at entry {place}, in parameter {where!r}: the parts know less there "
            "than the prior that is taken away from them. Pass the prior that each of them was learnt with."
        )
    loc = prior.loc + factorize(factor.contiguous(), diag).solve(shift)
    if rank is not None:
        kept = _leading(factor, checks.rank("rank", rank))
        factor, diag = kept, diag + (column_squares(factor) - column_squares(kept)).clamp_min(0.0)
    return LowRankPrecisionNormal(loc, factor.mT, diag, validate_args=False, param_spec=spec)


def _times(normal: Any, x: Tensor) -> Tensor:
    """Return the product of a precision with a vector."""
    if isinstance(normal, LowRankPrecisionNormal):
        return matmul(normal.prec_factor.mT, normal.prec_diag, x)
    product: Tensor = normal.precision_matrix @ x
    return product


def _signed(more: Tensor, fewer: Tensor, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Return U by rows and the diagonal of NNᵀ, with UUᵀ − NNᵀ = AᵀA − BᵀB for A and B by rows.

    Args:
        more: A.
        fewer: B.
        is_exact: raise ValueError unless N is 0 but for rounding.
    """
    rows = torch.cat([more, fewer])
    values, vectors = torch.linalg.eigh(gram_float64(rows))
    there = values > torch.finfo(values.dtype).eps * len(rows) * values[-1]
    roots, vectors = values[there].sqrt(), vectors[:, there]
    signed = vectors * roots
    signed[len(more) :] *= -1
    # The span of the rows has the orthonormal basis (V/√values)ᵀ rows, in which the difference is small.
    values, turn = torch.linalg.eigh((vectors * roots).mT @ signed)
    if is_exact and bool(values[0] < -ROUNDINGS * torch.finfo(rows.dtype).eps * values.abs().max()):
        raise ValueError(
            "the parts know less than their prior in a direction of its factor, as parts of low rank may, and the "
            "merged precision is no factor plus a diagonal. Pass rank=, which moves what is missing to the diagonal."
        )
    mixed = ((vectors / roots) @ turn * values.abs().sqrt()).mT.to(rows.dtype) @ rows
    return mixed[values > 0], column_squares(mixed[values < 0])


def _leading(factor: Tensor, rank: int) -> Tensor:
    """Return the leading scaled eigenvectors of UUᵀ by rows, (L, P), zeros beyond its rank."""
    if rank == 0:
        return factor[:0]
    factor = F.pad(factor, (0, 0, 0, max(0, rank - len(factor))))
    return leading_eigenpairs(gram_float64(factor), rank).vectors.mT.to(factor.dtype) @ factor


class ELBO(NamedTuple):
    """The evidence lower bound in its two parts.

    Args:
        expected_log_likelihood: Σ_i E_q[log p(y_i | θ)], estimated.
        kl: KL(q ‖ prior), in closed form.
    """

    expected_log_likelihood: float
    kl: float

    @property
    def value(self) -> float:
        """Expected log-likelihood − KL."""
        return self.expected_log_likelihood - self.kl
