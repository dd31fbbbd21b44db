r"""The best Gaussian for Bayesian logistic regression, diagonal or full, without sampling.

$$ \max_{\mu,\Sigma}\; \sum_i \mathbb E[\log p(y_i | f_i)] - \mathrm{KL}\bigl(\mathcal N(\mu,\Sigma) \,\|\, p\bigr),
   \qquad f_i = x_i^\top\theta \sim \mathcal N(x_i^\top\mu,\, x_i^\top\Sigma x_i) $$

Other methods come near to this answer along a noisy path; this one is what they are measured against. At the optimum
the precision is that of a linear regression with one weight per example, H(h) = diag λ + Σ_i h_i x_i x_iᵀ (full) or its
diagonal (mean-field), where h_i = E[σ′(f_i)]. So the state is a mean and N weights. A step uses the whole data: there
are no minibatches, no rates to choose, and nothing random.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from slangvi import checks
from slangvi.distributions import DensePrecisionNormal, LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.linalg import DensePrecision, factorize_dense
from slangvi.params import Params, ParamSpec
from slangvi.priors import ELBO, Prior
from slangvi.quadrature import softplus_expectations
from slangvi.types import Transform

__all__ = ["Family", "Fit", "Info", "Regression", "State", "build", "fit", "init", "posterior", "sample", "update"]

Family = Literal["full", "mean_field"]

# Natural-gradient steps before every other step is one of Newton, and the most examples for which it is: it solves N×N.
_PATIENCE = 20
_MOST_EXAMPLES = 4000
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
        """Return H(h) = diag λ + Σ h_i x_i x_iᵀ, factorised."""
        matrix = self.x.mT @ (weights.unsqueeze(-1) * self.x)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.prior.precision)
        return factorize_dense(matrix)

    def columns(self, precision: DensePrecision) -> Tensor:
        """Return R⁻¹x_i with RRᵀ = Σ⁻¹ for a full q, x_i²/d for a mean-field one, (..., P, N)."""
        if self.family == "full":
            columns: Tensor = torch.linalg.solve_triangular(precision.cholesky, self.x.mT, upper=False)
            return columns
        return self.x.mT.square() / precision.matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)

    def variance(self, columns: Tensor) -> Tensor:
        """Return Var[f_i] from the columns, (..., N)."""
        return (columns.square() if self.family == "full" else columns).sum(-2)

    def image(self, columns: Tensor, weights: Tensor) -> Tensor:
        """Return Σ^{1/2} (Σ_i w_i x_i x_iᵀ) Σ^{1/2} up to a rotation, flat: (..., P²), or (..., P) for the diagonal."""
        if self.family == "full":
            return ((columns * weights.unsqueeze(-2)) @ columns.mT).flatten(-2)
        return (columns @ weights.unsqueeze(-1)).squeeze(-1)


class Point(NamedTuple):
    """The objective and its derivatives at one mean and weights."""

    loc: Tensor  # μ, (..., P)
    weights: Tensor  # h, (..., N)
    matrix: Tensor  # H(h), (..., P, P); q has this precision, or its diagonal
    gradient: Tensor  # of the negative ELBO by μ, (..., P)
    wanted: Tensor  # E[σ′(f)], the weights of the fixed point, (..., N)
    expected_log_likelihood: Tensor  # Σ_i E[log p(y_i | f_i)], (...)
    kl: Tensor  # KL(q ‖ prior), (...)
    gradient_norm: Tensor  # see `fit`, (...)

    @property
    def elbo(self) -> Tensor:
        """(...)."""
        return self.expected_log_likelihood - self.kl


@dataclass(frozen=True, eq=False)
class State:
    """State between steps.

    Args:
        point: mean and weights, with the objective there.
        damping: ρ in (0, 1], the share of the next natural-gradient step that is tried, (...).
        newton_damping: the same for the next Newton step, (...).
        step: steps taken or tried so far.
        spec: the layout: one tensor "weight" (P,).
        family: "full" or "mean_field".
    """

    point: Point
    damping: Tensor
    newton_damping: Tensor
    step: int
    spec: ParamSpec
    family: Family

    @property
    def loc(self) -> Tensor:
        """μ, (..., P)."""
        return self.point.loc


@dataclass(frozen=True, eq=False)
class Info:
    """Diagnostics of a step; every tensor has the shape of the batch.

    Args:
        step: number of the step, from 1.
        num_rows: N.
        expected_log_likelihood: Σ_i E[log p(y_i | f_i)].
        kl: KL(q ‖ prior).
        gradient_norm: see `fit`.
        accepted: whether the step was taken; else half of it is tried next.
    """

    step: int
    num_rows: int
    expected_log_likelihood: Tensor
    kl: Tensor
    gradient_norm: Tensor
    accepted: Tensor

    @property
    def loss(self) -> Tensor:
        """Negative expected log-likelihood, the fit part of the negative ELBO."""
        return -self.expected_log_likelihood

    @property
    def elbo(self) -> ELBO:
        """Both parts together."""
        return ELBO(self.expected_log_likelihood, self.kl)  # type: ignore[arg-type]  # one number per member


@dataclass(frozen=True, eq=False)
class Fit:
    """Result of `fit`; all tensors are float64.

    Args:
        posterior: q, a torch distribution over the P weights.
        elbo: the evidence lower bound, (...).
        gradient_norm: of the negative ELBO, (...).
        steps: steps taken, the same for the whole batch.
        state: where the iteration stopped.
    """

    posterior: LowRankPrecisionNormal | DensePrecisionNormal
    elbo: Tensor
    gradient_norm: Tensor
    steps: int
    state: State

    @property
    def loc(self) -> Tensor:
        """μ, (..., P)."""
        return self.posterior.loc

    @property
    def variance(self) -> Tensor:
        """Variance of each weight, (..., P)."""
        return self.posterior.variance

    @property
    def covariance(self) -> Tensor:
        """Σ, (..., P, P)."""
        return self.posterior.covariance_matrix


def init(problem: Regression, loc: Tensor | None = None) -> State:
    """Start at μ = μ₀, or at `loc` (..., P), with h = ¼, the largest weight there is."""
    batch, (size, params) = problem.x.shape[:-2], problem.x.shape[-2:]
    loc = (problem.prior.mean if loc is None else loc).expand(*batch, params)
    weights = problem.x.new_full((*batch, size), 0.25)
    point, _ = _evaluate(problem, loc, weights, problem.precision(weights))
    if not bool(torch.isfinite(point.elbo).all()):
        raise NumericalError(
            "the ELBO at the start is not finite: the precision of the weights cannot be factorised. Scale the inputs "
            "to about 1, drop columns that repeat others, or raise prior_precision."
        )
    spec = ParamSpec.of({"weight": problem.x.new_empty(params)})
    return State(point, problem.x.new_ones(batch), problem.x.new_ones(batch), 0, spec, problem.family)


def update(state: State, problem: Regression) -> tuple[State, Info]:
    r"""Take one step on all data: a damped natural-gradient step, or after 20 of them in turn with Newton's.

    $$ h^+ = h + \rho\,(\mathbb E[\sigma'(f)] - h), \qquad
       \mu^+ = \mu - \rho\,H(h^+)^{-1}\bigl[X^\top(\mathbb E[\sigma(f)] - y) + \lambda(\mu-\mu_0)\bigr] $$

    A step that lowers the ELBO is not taken, and half of it is tried next, for each member of a batch on its own. Most
    problems are done before Newton's steps, which solve N×N equations and are left out for N > 4000. Under flat priors
    they find in a few steps what takes natural gradients hundreds.
    """
    old, size = state.point, problem.x.shape[-2]
    turn = state.step >= _PATIENCE and (state.step - _PATIENCE) % 2 == 0 and size <= _MOST_EXAMPLES
    damping = state.newton_damping if turn else state.damping
    share = damping.unsqueeze(-1)
    if turn:
        by_loc, by_weights = newton_step(problem, old)
        # Weights are positive at the optimum, and stay so on the way.
        weights = torch.maximum(old.weights + share * by_weights, 0.1 * old.weights)
        precision, loc = problem.precision(weights), old.loc + share * by_loc
    else:
        weights = old.weights + share * (old.wanted - old.weights)
        precision = problem.precision(weights)
        loc = old.loc - share * precision.solve(old.gradient)
    new, columns = _evaluate(problem, loc, weights, precision)
    accepted = _improves(problem, old, new, columns)
    point = new
    if not bool(accepted.all()):
        shapes = (accepted.shape + (1,) * (x.ndim - accepted.ndim) for x in new)
        point = Point(*(x.where(accepted.view(shape), y) for x, y, shape in zip(new, old, shapes, strict=True)))
    damping = torch.where(accepted, (1.5 * damping).clamp_max(1.0), 0.5 * damping)
    after = replace(state, point=point, step=state.step + 1)
    after = replace(after, newton_damping=damping) if turn else replace(after, damping=damping)
    return after, Info(after.step, size, point.expected_log_likelihood, point.kl, point.gradient_norm, accepted)


def _evaluate(problem: Regression, loc: Tensor, weights: Tensor, precision: DensePrecision) -> tuple[Point, Tensor]:
    """Return the objective at a mean and weights whose H(h) is known, and the columns of H."""
    x, prior, columns = problem.x, problem.prior, problem.columns(precision)
    mean, variance = (x @ loc.unsqueeze(-1)).squeeze(-1), problem.variance(columns)
    diag = precision.matrix.diagonal(dim1=-2, dim2=-1)
    logdet = precision.logdet() if problem.family == "full" else diag.log().sum(-1)
    softplus, slopes, wanted = softplus_expectations(mean, variance)
    offset = loc - prior.mean
    gradient = (x.mT @ (slopes - problem.y).unsqueeze(-1)).squeeze(-1) + prior.precision * offset
    # tr(λΣ) = P − Σ_i h_i Var[f_i], because Σ⁻¹ is diag λ + Σ_i h_i x_i x_iᵀ or the diagonal of that.
    spread = (prior.precision * offset.square()).sum(-1) - (weights * variance).sum(-1)
    kl = 0.5 * (spread + logdet - prior.precision.log().sum(-1))
    likelihood = (problem.y * mean - softplus).sum(-1).where(precision.failed == 0, torch.nan)
    norm = (gradient.square().sum(-1) + problem.image(columns, wanted - weights).square().sum(-1)).sqrt()
    return Point(loc, weights, precision.matrix, gradient, wanted, likelihood, kl, norm), columns


def _improves(problem: Regression, old: Point, new: Point, columns: Tensor) -> Tensor:
    """Tell whether the ELBO has risen, (...), by its slope where rounding hides the difference."""
    gain, noise = new.elbo - old.elbo, _NOISE * (1 + old.elbo.abs())
    if bool((gain.abs() > noise).all()):
        return gain > noise
    # Along the step, −ELBO has the slope ∇_μ·δμ − ½⟨image(wanted − h), image(δh)⟩.
    change = problem.image(columns, new.weights - old.weights)

    def slope(at: Point) -> Tensor:
        by_scale = (problem.image(columns, at.wanted - at.weights) * change).sum(-1)
        return (at.gradient * (new.loc - old.loc)).sum(-1) - 0.5 * by_scale

    return (gain > noise) | ((gain >= -noise) & (slope(new) <= -_OVERSHOOT * slope(old)))


def newton_step(problem: Regression, point: Point) -> tuple[Tensor, Tensor]:
    r"""Return changes of μ and h that solve the linearised equations of the optimum, in N³ for each member.

    With derivatives $c', c''$ of $c = \mathbb E[\sigma'(f)]$ by the mean (orders 3 and 4 of the expectations),
    $B = X H(c)^{-1} X^\top$ and $A = -\partial v / \partial h$, that is $A_{ij} = (x_i^\top \Sigma x_j)^2$ or
    $\sum_p x_{ip}^2 x_{jp}^2 / d_p^2$:

    $$ \bigl[I + \tfrac12(\mathrm{diag}\,c'' - \mathrm{diag}(c')\,B\,\mathrm{diag}(c'))\,A\bigr]\,\delta h
       = c - h - c' \circ X H(c)^{-1}\nabla_\mu, \qquad
       \delta\mu = -H(c)^{-1}\bigl[\nabla_\mu - \tfrac12 X^\top (c' \circ A\,\delta h)\bigr] $$

    They are not finite where the equations are singular.
    """
    root, columns = problem.precision(point.wanted).cholesky, problem.columns(factorize_dense(point.matrix))
    given = (problem.x, columns, problem.variance(columns), root, point.loc, point.gradient, point.weights)
    lead, steps = problem.x.shape[:-2], []
    # One by one: a batch of N×N matrices may not fit.
    for member in zip(*(value.reshape(-1, *value.shape[len(lead) :]) for value in given), strict=True):
        x, seen, variance, factor, loc, gradient, weights = member
        A = (seen.mT @ seen).square() if problem.family == "full" else seen.mT @ seen
        _, _, c, c1, c2 = softplus_expectations(x @ loc, variance, orders=5)
        half = torch.linalg.solve_triangular(factor, torch.cat([x.mT, gradient.unsqueeze(-1)], dim=1), upper=False)
        by_mean = c1.unsqueeze(-1) * (half[:, :-1].mT @ half)  # diag(c') [B, X H⁻¹∇]
        system = -0.5 * ((by_mean[:, :-1] * c1) @ A) + 0.5 * c2.unsqueeze(-1) * A
        system.diagonal().add_(1.0)
        by_weights = torch.linalg.solve_ex(system, c - weights - by_mean[:, -1]).result
        pull = gradient - 0.5 * (c1 * (A @ by_weights)) @ x
        steps.append((-torch.cholesky_solve(pull.unsqueeze(-1), factor).squeeze(-1), by_weights))
    by_loc, by_weights = (torch.stack(parts) for parts in zip(*steps, strict=True))
    return by_loc.reshape(point.loc.shape), by_weights.reshape(point.weights.shape)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: "weight" → tensor (*sample_shape, ..., P)."""
    return state.spec.unflatten(posterior(state).sample(tuple(sample_shape), generator))


def posterior(state: State) -> LowRankPrecisionNormal | DensePrecisionNormal:
    """Return q as a torch distribution over the weights."""
    loc, matrix = state.loc, state.point.matrix
    if state.family == "full":
        return DensePrecisionNormal(loc, matrix, validate_args=False, param_spec=state.spec)
    diag = matrix.diagonal(dim1=-2, dim2=-1)
    return LowRankPrecisionNormal(loc, diag.unsqueeze(-1)[..., :0], diag, validate_args=False, param_spec=state.spec)


def regression(x: Tensor, y: Tensor, prior_precision: Any, prior_mean: Any, family: Any) -> Regression:
    """Return checked data and prior, in float64."""
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


def build(x: Tensor, y: Tensor, *, prior_precision: Any, prior_mean: Any = 0.0, family: Family = "full") -> Transform:
    """Build the iteration behind `fit` as pure functions, for those who want to watch it.

    Arguments are those of `fit`: the data are given here, because every step uses all of them.

    Returns:
        `init(params=None)` with the start in params["weight"], `update(state)`, `sample(state, shape, generator=None)`
        and `posterior(state)`. `update` also takes a batch and a generator, as that of the other methods does, and has
        no use for them.
    """
    problem = regression(x, y, prior_precision, prior_mean, family)

    def begin(params: Params | None = None) -> State:
        if params is None:
            return init(problem)
        if set(params) != {"weight"}:
            raise ValueError(f'params must have one tensor, "weight", got {sorted(params)}.')
        return init(problem, _per_weight('params["weight"]', params["weight"], problem.x))

    def advance(state: State, batch: Any = None, generator: torch.Generator | None = None) -> tuple[State, Info]:
        return update(state, problem)

    return Transform(begin, advance, sample, posterior)


def fit(
    x: Tensor,
    y: Tensor,
    *,
    prior_precision: Any,
    prior_mean: Any = 0.0,
    family: Family = "full",
    tolerance: float = 1e-8,
    max_steps: int = 500,
) -> Fit:
    r"""Find the Gaussian with the highest ELBO, in float64.

    The gradient whose Euclidean norm falls below `tolerance`, absolutely, is that of the negative ELBO (a sum over
    examples, not a mean) by the mean and by the logarithm of the scale: by μ and log s for a mean-field q with standard
    deviations s, by μ and the symmetric matrix B in $\Sigma^{1/2} e^{2B} \Sigma^{1/2}$ for a full one,

    $$ \nabla_\mu = X^\top(\mathbb E[\sigma(f)] - y) + \lambda(\mu - \mu_0), \qquad
       \nabla_B = \Sigma^{1/2}\bigl(H(\mathbb E[\sigma'(f)]) - \Sigma^{-1}\bigr)\Sigma^{1/2}. $$

    Expectations are accurate to about 1e-13 at any variance, see `slangvi.quadrature.softplus_expectations`. A step
    costs about N·P² per member, one of Newton's N³; a fit takes 15 to 30 steps, up to a few hundred for separable data
    under nearly flat priors.

    Args:
        x: inputs, (..., N, P); leading dimensions are regressions that are fitted at once.
        y: labels 0 or 1, (..., N).
        prior_precision: λ > 0; a number or a tensor that broadcasts to (..., P).
        prior_mean: μ₀, likewise.
        family: "full" or "mean_field".
        tolerance: gradient norm to be reached by every member.
        max_steps: when it is not reached in so many steps, a warning says so and the best found is returned.

    Example:
        >>> x, y = torch.tensor([[1.0, -1.0], [1.0, 0.0], [1.0, 2.0]]), torch.tensor([0.0, 1.0, 1.0])
        >>> best = fit(x, y, prior_precision=1.0)
        >>> best.loc, best.covariance
        (tensor([0.2669, 0.8237], dtype=torch.float64), tensor([[ 0.6566, -0.0188],
                [-0.0188,  0.6011]], dtype=torch.float64))
        >>> bool(best.gradient_norm < 1e-8), round(float(best.elbo), 4)
        (True, -2.0176)
    """
    problem = regression(x, y, prior_precision, prior_mean, family)
    tolerance = checks.number("tolerance", tolerance, 0.0)
    state, limit = init(problem), checks.count("max_steps", max_steps, least=0)
    while state.step < limit and not bool((state.point.gradient_norm <= tolerance).all()):
        state, _ = update(state, problem)
    norm = state.point.gradient_norm
    if not bool((norm <= tolerance).all()):
        warnings.warn(
            f"exact.fit stopped after {state.step} steps at a gradient norm of {float(norm.max()):.1e}, above "
            f"tolerance={tolerance:g}. Raise max_steps, scale the inputs to about 1, or raise prior_precision.",
            UserWarning,
            stacklevel=2,
        )
    return Fit(posterior(state), state.point.elbo, norm, state.step, state)
