"""The objective of logistic regression with a Gaussian q, and what a step on it needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from slangvi import checks
from slangvi.linalg import DensePrecision, factorize_dense
from slangvi.params import Params
from slangvi.priors import Prior
from slangvi.quadrature import softplus_expectations

__all__ = ["Family", "Point", "Regression", "choose", "evaluate", "improves", "newton_step", "regression", "start_of"]

Family = Literal["full", "mean_field"]

# Below this share of the ELBO a difference of two ELBOs is rounding, and slopes decide whether a step is good.
_NOISE = 1e-11
# How far beyond the best point along its direction a step may go, as a share of the slope it started with.
_OVERSHOOT = 0.8


@dataclass(frozen=True, eq=False)
class Regression:
    """Data and prior of one logistic regression, or of many that have the same size.

    Args:
        x: inputs, (..., N, P); a column of ones makes a bias.
        y: labels 0 or 1, (..., N).
        prior: λ and μ₀, (..., P).
        family: "full" or "mean_field".
    """

    x: Tensor
    y: Tensor
    prior: Prior
    family: Family

    def precision(self, weights: Tensor) -> DensePrecision:
        """H(h) = diag λ + Σ h_i x_i x_iᵀ, factorised."""
        matrix = self.x.mT @ (weights.unsqueeze(-1) * self.x)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.prior.precision)
        return factorize_dense(matrix)


class Point(NamedTuple):
    """The objective and what a step needs to know of it, at one mean and weights.

    Args:
        loc: μ, (..., P).
        weights: h, (..., N).
        matrix: H(h), (..., P, P); q has this precision, or its diagonal.
        gradient: of the negative ELBO by μ, (..., P).
        wanted: E[σ′(f)], the weights of the fixed point, (..., N).
        expected_log_likelihood: Σ_i E[log p(y_i | f_i)], (...).
        kl: KL(q ‖ prior), (...).
        gradient_norm: see `fit`, (...).
    """

    loc: Tensor
    weights: Tensor
    matrix: Tensor
    gradient: Tensor
    wanted: Tensor
    expected_log_likelihood: Tensor
    kl: Tensor
    gradient_norm: Tensor

    @property
    def elbo(self) -> Tensor:
        """(...)."""
        return self.expected_log_likelihood - self.kl


class Space(NamedTuple):
    """Changes of the precision, as seen by q.

    Args:
        columns: R⁻¹x_i with RRᵀ = Σ⁻¹ for a full q, x_i²/d for a mean-field one, (..., P, N).
        family: of q.
    """

    columns: Tensor
    family: Family

    def image(self, weights: Tensor) -> Tensor:
        """Σ^{1/2} (Σ_i w_i x_i x_iᵀ) Σ^{1/2} up to a rotation, flat: (..., P²), or (..., P) for the diagonal."""
        if self.family == "full":
            return ((self.columns * weights.unsqueeze(-2)) @ self.columns.mT).flatten(-2)
        return (self.columns @ weights.unsqueeze(-1)).squeeze(-1)


def evaluate(problem: Regression, loc: Tensor, weights: Tensor, precision: DensePrecision) -> tuple[Point, Space]:
    """The objective at a mean and weights whose H(h) is known."""
    x, prior = problem.x, problem.prior
    mean = (x @ loc.unsqueeze(-1)).squeeze(-1)
    if problem.family == "full":
        space = Space(torch.linalg.solve_triangular(precision.cholesky, x.mT, upper=False), "full")
        variance, logdet = space.columns.square().sum(-2), precision.logdet()
    else:
        diag = precision.matrix.diagonal(dim1=-2, dim2=-1)
        space = Space(x.mT.square() / diag.unsqueeze(-1), "mean_field")
        variance, logdet = space.columns.sum(-2), diag.log().sum(-1)
    softplus, slopes, wanted = softplus_expectations(mean, variance)
    offset = loc - prior.mean
    gradient = (x.mT @ (slopes - problem.y).unsqueeze(-1)).squeeze(-1) + prior.precision * offset
    # tr(λΣ) = P − Σ_i h_i Var[f_i], because Σ⁻¹ is diag λ + Σ_i h_i x_i x_iᵀ or the diagonal of that.
    spread = (prior.precision * offset.square()).sum(-1) - (weights * variance).sum(-1)
    kl = 0.5 * (spread + logdet - prior.precision.log().sum(-1))
    likelihood = (problem.y * mean - softplus).sum(-1).where(precision.failed == 0, torch.nan)
    norm = (gradient.square().sum(-1) + space.image(wanted - weights).square().sum(-1)).sqrt()
    return Point(loc, weights, precision.matrix, gradient, wanted, likelihood, kl, norm), space


def improves(old: Point, new: Point, space: Space) -> Tensor:
    """Whether the ELBO has risen, (...); where that is hidden by rounding, whether the slope says so."""
    gain, noise = new.elbo - old.elbo, _NOISE * (1 + old.elbo.abs())
    if bool((gain.abs() > noise).all()):
        return gain > noise
    # Along the step, −ELBO has the slope ∇_μ·δμ − ½⟨image(wanted − h), image(δh)⟩.
    change = space.image(new.weights - old.weights)

    def slope(at: Point) -> Tensor:
        by_scale = (space.image(at.wanted - at.weights) * change).sum(-1)
        return (at.gradient * (new.loc - old.loc)).sum(-1) - 0.5 * by_scale

    return (gain > noise) | ((gain >= -noise) & (slope(new) <= -_OVERSHOOT * slope(old)))


def newton_step(problem: Regression, point: Point) -> tuple[Tensor, Tensor]:
    r"""Changes of μ and h that solve the linearised equations of the optimum, in N³ for each member of a batch.

    With derivatives $c', c''$ of $c = \mathbb E[\sigma'(f)]$ by the mean (orders 3 and 4 of the expectations),
    $B = X H(c)^{-1} X^\top$ and $A = -\partial v / \partial h$, that is $A_{ij} = (x_i^\top \Sigma x_j)^2$ or
    $\sum_p x_{ip}^2 x_{jp}^2 / d_p^2$:

    $$ \bigl[I + \tfrac12(\mathrm{diag}\,c'' - \mathrm{diag}(c')\,B\,\mathrm{diag}(c'))\,A\bigr]\,\delta h
       = c - h - c' \circ X H(c)^{-1}\nabla_\mu, \qquad
       \delta\mu = -H(c)^{-1}\bigl[\nabla_\mu - \tfrac12 X^\top (c' \circ A\,\delta h)\bigr] $$

    Args:
        problem: data, prior and family.
        point: where it starts.

    Returns:
        δμ (..., P) and δh (..., N); not finite where the equations are singular.
    """
    size, params = problem.x.shape[-2:]
    lead = problem.x.shape[:-2]
    # One by one: a batch of N×N matrices may not fit.
    members = zip(
        problem.x.reshape(-1, size, params),
        problem.precision(point.wanted).cholesky.reshape(-1, params, params),
        point.matrix.reshape(-1, params, params),
        point.loc.reshape(-1, params),
        point.gradient.reshape(-1, params),
        point.weights.reshape(-1, size),
        strict=True,
    )
    steps = [_newton(problem.family, *member) for member in members]
    by_loc, by_weights = (torch.stack(parts) for parts in zip(*steps, strict=True))
    return by_loc.reshape(*lead, params), by_weights.reshape(*lead, size)


def _newton(
    family: Family, x: Tensor, root: Tensor, matrix: Tensor, loc: Tensor, gradient: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """δμ and δh of one member; `root` is the Cholesky factor of H(c), `matrix` is H(h)."""
    if family == "full":
        seen = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), x.mT, upper=False)
        variance, A = seen.square().sum(0), (seen.mT @ seen).square()
    else:
        seen = x.mT.square() / matrix.diagonal().unsqueeze(-1)
        variance, A = seen.sum(0), seen.mT @ seen
    _, _, c, c1, c2 = softplus_expectations(x @ loc, variance, orders=5)
    half = torch.linalg.solve_triangular(root, torch.cat([x.mT, gradient.unsqueeze(-1)], dim=1), upper=False)
    by_mean = c1.unsqueeze(-1) * (half[:, :-1].mT @ half)  # diag(c') [B, X H⁻¹∇]
    system = -0.5 * ((by_mean[:, :-1] * c1) @ A) + 0.5 * c2.unsqueeze(-1) * A
    system.diagonal().add_(1.0)
    by_weights = torch.linalg.solve_ex(system, c - weights - by_mean[:, -1]).result
    pull = gradient - 0.5 * (c1 * (A @ by_weights)) @ x
    return -torch.cholesky_solve(pull.unsqueeze(-1), root).squeeze(-1), by_weights


def choose(accepted: Tensor, new: Point, old: Point) -> Point:
    """The new point for the members that took the step, the old one for the others."""
    if bool(accepted.all()):
        return new
    return Point(*(_where(accepted, a, b) for a, b in zip(new, old, strict=True)))


def _where(accepted: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(accepted.reshape(accepted.shape + (1,) * (new.ndim - accepted.ndim)), new, old)


def regression(x: Tensor, y: Tensor, prior_precision: Any, prior_mean: Any, family: Any) -> Regression:
    """Checked data and prior, in float64."""
    checks.choice("family", family, ("full", "mean_field"))
    for name, values in (("x", x), ("y", y)):
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(values).__name__}. Convert with torch.as_tensor.")
    if x.ndim < 2 or y.shape != x.shape[:-1] or x.numel() == 0:
        raise ValueError(
            f"x must have shape (..., N, P) and y (..., N), neither empty, got {tuple(x.shape)} and {tuple(y.shape)}."
        )
    x, y = x.detach().to(torch.float64), y.detach().to(torch.float64)
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"x must be finite, got {int((~torch.isfinite(x)).sum())} NaN or Inf. Clean the data.")
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("y must be 0 or 1 everywhere, got other values. Code the classes as 0 and 1.")
    lam, mean = (
        _per_weight(name, v, x) for name, v in (("prior_precision", prior_precision), ("prior_mean", prior_mean))
    )
    if not bool((lam > 0).all()):
        raise ValueError(f"prior_precision must be > 0 everywhere, got {float(lam.min()):g}.")
    return Regression(x, y, Prior(lam, mean), family)


def start_of(problem: Regression, params: Params) -> Tensor:
    """μ to start from, checked."""
    if set(params) != {"weight"}:
        raise ValueError(f'params must have one tensor, "weight", got {sorted(params)}.')
    return _per_weight('params["weight"]', params["weight"], problem.x)


def _per_weight(name: str, value: Any, x: Tensor) -> Tensor:
    wanted = (*x.shape[:-2], x.shape[-1])
    allowed = f"{name} must be a number or a tensor that broadcasts to {wanted}, got"
    try:
        values = torch.as_tensor(value, dtype=torch.float64, device=x.device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{allowed} {value!r}.") from error
    try:
        values = values.expand(wanted)
    except RuntimeError as error:
        raise ValueError(f"{allowed} shape {tuple(values.shape)}.") from error
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name} must be finite everywhere, got NaN or Inf.")
    return values
