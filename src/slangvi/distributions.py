"""Multivariate normals given by their precision, not their covariance: low-rank plus diagonal, or dense."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, constraints, register_kl

from slangvi.linalg.dense import DensePrecision, factorize_dense
from slangvi.linalg.kept import kept
from slangvi.linalg.lowrank import LowRankPrecision, factorize
from slangvi.params import ParamSpec

__all__ = ["DensePrecisionNormal", "LowRankPrecisionNormal", "Posterior"]


class Posterior(Distribution):
    """A distribution over flat vectors, perhaps a network's weights with a known layout, drawn by any generator."""

    param_spec: ParamSpec | None

    @abstractmethod
    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Differentiable draws, (*sample_shape, ..., P); `generator` keeps the global RNG untouched."""

    @torch.no_grad()
    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradients, (*sample_shape, ..., P)."""
        return self.rsample(sample_shape, generator)


class LowRankPrecisionNormal(Posterior):
    r"""N(μ, (UUᵀ + diag d)⁻¹), with every operation linear in P.

    $$ \log q(\theta) = \tfrac12\bigl[\log\det(UU^\top + \mathrm{diag}\,d) - P\log 2\pi
       - (\theta-\mu)^\top (UU^\top + \mathrm{diag}\,d)(\theta-\mu)\bigr] $$

    Mirrors `torch.distributions.LowRankMultivariateNormal`, which is low-rank in the *covariance*.

    Args:
        loc: μ, shape (..., P).
        prec_factor: U, shape (..., P, L); L may be 0.
        prec_diag: d > 0, shape (..., P).
        validate_args: as in torch.
        param_spec: names and shapes behind the flat vector, when the distribution is over a network's weights.

    Example:
        >>> q = LowRankPrecisionNormal(torch.zeros(2), torch.tensor([[3.0], [0.0]]), torch.tensor([1.0, 4.0]))
        >>> q.variance
        tensor([0.1000, 0.2500])
        >>> q.log_prob(torch.zeros(2))
        tensor(0.0066)
    """

    arg_constraints = {  # noqa: RUF012 - torch reads this class attribute
        "loc": constraints.real_vector,
        "prec_factor": constraints.independent(constraints.real, 2),
        "prec_diag": constraints.independent(constraints.positive, 1),
    }
    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        prec_factor: Tensor,
        prec_diag: Tensor,
        validate_args: bool | None = None,
        param_spec: ParamSpec | None = None,
    ) -> None:
        _check_tensors(loc=loc, prec_factor=prec_factor, prec_diag=prec_diag)
        if loc.ndim < 1:
            raise ValueError("loc must be at least one-dimensional, (..., P), got a scalar.")
        size = loc.shape[-1]
        if prec_factor.ndim < 2 or prec_factor.shape[-2] != size:
            raise ValueError(
                f"prec_factor must have shape (..., P, L) with P = {size} as in loc, got {tuple(prec_factor.shape)}."
            )
        if prec_diag.ndim < 1 or prec_diag.shape[-1] != size:
            raise ValueError(f"prec_diag must have shape (..., {size}) as loc, got {tuple(prec_diag.shape)}.")
        batch = torch.broadcast_shapes(loc.shape[:-1], prec_factor.shape[:-2], prec_diag.shape[:-1])
        self.loc = loc.expand(*batch, size)
        self.prec_factor = prec_factor.expand(*batch, size, prec_factor.shape[-1])
        self.prec_diag = prec_diag.expand(*batch, size)
        self.param_spec = param_spec
        super().__init__(batch, torch.Size((size,)), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> LowRankPrecisionNormal:
        """The same distribution with a larger batch shape, without copying."""
        new: LowRankPrecisionNormal = self._get_checked_instance(LowRankPrecisionNormal, _instance)  # type: ignore[no-untyped-call]
        batch = torch.Size(batch_shape)
        new.loc = self.loc.expand(batch + self.event_shape)
        new.prec_factor = self.prec_factor.expand(batch + self.prec_factor.shape[-2:])
        new.prec_diag = self.prec_diag.expand(batch + self.event_shape)
        new.param_spec = self.param_spec
        super(LowRankPrecisionNormal, new).__init__(batch, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @kept
    def precision(self) -> LowRankPrecision:
        """The factorised precision: solve, sample, inverse diagonal, logdet."""
        return factorize(self.prec_factor.mT, self.prec_diag)

    @property
    def mean(self) -> Tensor:
        """μ, (..., P)."""
        return self.loc

    mode = mean

    @kept
    def variance(self) -> Tensor:
        """Diag of the covariance, (..., P)."""
        return self.precision.inv_diag()

    @kept
    def precision_matrix(self) -> Tensor:
        """UUᵀ + diag d, dense (..., P, P)."""
        return self.prec_factor @ self.prec_factor.mT + torch.diag_embed(self.prec_diag)

    @kept
    def covariance_matrix(self) -> Tensor:
        """(UUᵀ + diag d)⁻¹, dense (..., P, P)."""
        size = self.event_shape[0]
        eye = torch.eye(size, dtype=torch.float64, device=self.loc.device)
        # One right-hand side per leading "sample" dimension: (P, ..., P). In float64, since what a large factor leaves
        # of a variance is small beside 1/d.
        solved = self.precision.double.solve(eye.reshape(size, *(1,) * len(self.batch_shape), size))
        dense = solved.to(self.loc.dtype).movedim(0, -1).expand(*self.batch_shape, size, size)
        return 0.5 * (dense + dense.mT)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Differentiable draws, (*sample_shape, ..., P); `generator` keeps the global RNG untouched."""
        return self.loc + self.precision.sample(torch.Size(sample_shape), generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of `value` (..., P)."""
        if self._validate_args:
            self._validate_sample(value)
        diff = value - self.loc
        volume = self.precision.logdet() - self.event_shape[0] * math.log(2 * math.pi)
        return (0.5 * (volume - self._quadratic(diff))).to(diff.dtype)

    def entropy(self) -> Tensor:
        """½ (P (1 + log 2π) − logdet precision)."""
        constant = self.event_shape[0] * (1.0 + math.log(2 * math.pi))
        return (0.5 * (constant - self.precision.logdet())).to(self.loc.dtype)

    def _quadratic(self, diff: Tensor) -> Tensor:
        """xᵀ (UUᵀ + diag d) x as a sum of squares, so never negative; float64."""
        batched = self.prec_factor.ndim > 2
        inner = (diff.unsqueeze(-2) @ self.prec_factor).squeeze(-2) if batched else diff @ self.prec_factor
        return _sum(self.prec_diag * diff.square()) + _sum(inner.square())


class DensePrecisionNormal(Posterior, MultivariateNormal):
    """N(μ, P⁻¹) with a dense P: torch's `MultivariateNormal` that draws from a generator and knows a network's layout.

    Args:
        loc: μ, shape (..., P).
        precision_matrix: P, positive definite, shape (..., P, P).
        validate_args: as in torch.
        param_spec: names and shapes behind the flat vector, when the distribution is over a network's weights.

    Example:
        >>> q = DensePrecisionNormal(torch.zeros(2), torch.tensor([[10.0, 0.0], [0.0, 4.0]]))
        >>> q.variance
        tensor([0.1000, 0.2500])
    """

    def __init__(
        self,
        loc: Tensor,
        precision_matrix: Tensor,
        validate_args: bool | None = None,
        param_spec: ParamSpec | None = None,
    ) -> None:
        _check_tensors(loc=loc, precision_matrix=precision_matrix)
        super().__init__(loc, precision_matrix=precision_matrix, validate_args=validate_args)
        self.param_spec = param_spec

    def expand(self, batch_shape: Any, _instance: Any = None) -> DensePrecisionNormal:
        """The same distribution with a larger batch shape, without copying."""
        new: DensePrecisionNormal = self._get_checked_instance(DensePrecisionNormal, _instance)  # type: ignore[no-untyped-call]
        new.param_spec = self.param_spec
        super().expand(batch_shape, _instance=new)  # type: ignore[no-untyped-call]
        return new

    @kept
    def precision(self) -> DensePrecision:
        """The factorised precision: solve, sample, inverse diagonal, logdet."""
        return factorize_dense(self.precision_matrix)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Differentiable draws, (*sample_shape, ..., P); `generator` keeps the global RNG untouched."""
        return self.precision.sample(torch.Size(sample_shape), generator, self.loc)


def _check_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a tensor of floating-point numbers, got {got}.")


def _sum(terms: Tensor, dims: int = 1) -> Tensor:
    """Sum over the last dimensions, in float64: sums over many parameters are large, and nearly cancel in the end."""
    return terms.sum(tuple(range(-dims, 0)), dtype=torch.float64)


def _as_vector(normal: Any, size: int, dtype: torch.dtype) -> Any:
    """Return a diagonal normal as one of rank 0 over P coordinates, for all of which one number may stand."""
    if isinstance(normal, Independent):
        if not isinstance(normal.base_dist, Normal) or len(normal.event_shape) != 1:
            raise NotImplementedError(
                "KL with LowRankPrecisionNormal is known for Independent(Normal, 1) only, got "
                f"Independent({type(normal.base_dist).__name__}) with event shape {tuple(normal.event_shape)}."
            )
        normal = normal.base_dist
    if not isinstance(normal, Normal):
        return normal
    given = normal.loc.shape[-1:] or torch.Size((1,))
    shape = (*normal.loc.shape[:-1], size if given[0] == 1 else given[0])
    loc, scale = normal.loc.expand(shape).to(dtype), normal.scale.expand(shape).to(dtype)
    return LowRankPrecisionNormal(loc, loc.new_zeros(*shape, 0), scale.square().reciprocal(), validate_args=False)


def _kl(q: Any, p: Any) -> Tensor:
    """Return ½ [tr(P_p Σ_q) + (μ_q−μ_p)ᵀP_p(μ_q−μ_p) − P + logdet P_q − logdet P_p] of two normals."""
    dtype = torch.promote_types(q.mean.dtype, p.mean.dtype)
    size = (q if isinstance(p, Normal | Independent) else p).event_shape[0]
    q, p = _as_vector(q, size, dtype), _as_vector(p, size, dtype)
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"KL needs distributions of the same event shape, got {tuple(q.event_shape)} and {tuple(p.event_shape)}."
        )
    batch = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    q, p = (x if x.batch_shape == batch else x.expand(batch) for x in (q, p))
    distance = _trace(q, p) + _quadratic(p, q.loc - p.loc)
    kl: Tensor = 0.5 * (distance - size + _logdet(q) - _logdet(p))
    return kl.to(dtype)


def _trace(q: Any, p: Any) -> Tensor:
    """Return tr(P_p Σ_q)."""
    if not isinstance(p, LowRankPrecisionNormal):
        return _sum(p.precision_matrix * q.covariance_matrix, 2)
    trace = _sum(p.prec_diag * q.variance)
    if isinstance(q, LowRankPrecisionNormal):
        return trace + q.precision.inv_quadratic(p.prec_factor.movedim(-1, 0)).sum(0)
    return trace + _sum((q.scale_tril.mT @ p.prec_factor).square(), 2)


def _quadratic(p: Any, diff: Tensor) -> Tensor:
    """Return xᵀ P_p x."""
    if isinstance(p, LowRankPrecisionNormal):
        return p._quadratic(diff)
    if isinstance(p, DensePrecisionNormal):
        return _sum((diff.unsqueeze(-2) @ p.precision.cholesky).square(), 2)
    return _sum(torch.linalg.solve_triangular(p.scale_tril, diff.unsqueeze(-1), upper=False).square(), 2)


def _logdet(normal: Any) -> Tensor:
    """Return the logdet of a precision."""
    if isinstance(normal, LowRankPrecisionNormal | DensePrecisionNormal):
        return normal.precision.logdet()
    return -2.0 * _sum(normal.scale_tril.diagonal(dim1=-2, dim2=-1).log())


register_kl(LowRankPrecisionNormal, LowRankPrecisionNormal)(_kl)
register_kl(LowRankPrecisionNormal, MultivariateNormal)(_kl)
register_kl(MultivariateNormal, LowRankPrecisionNormal)(_kl)
for _kind in (Normal, Independent):
    for _ours in (LowRankPrecisionNormal, DensePrecisionNormal):
        register_kl(_ours, _kind)(_kl)
        register_kl(_kind, _ours)(_kl)
