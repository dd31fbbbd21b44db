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
from typing import Any

import torch
from torch import Tensor

from slangvi import checks
from slangvi.distributions import DensePrecisionNormal, LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.linalg import DensePrecision
from slangvi.methods._exact_objective import (
    Family,
    Point,
    Regression,
    choose,
    evaluate,
    improves,
    newton_step,
    regression,
    start_of,
)
from slangvi.params import Params, ParamSpec
from slangvi.priors import ELBO
from slangvi.types import Transform

__all__ = ["Family", "Fit", "Info", "Regression", "State", "build", "fit", "init", "posterior", "sample", "update"]


# Natural-gradient steps before every other step is one of Newton, and the most examples for which it is: it solves N×N.
_PATIENCE = 20
_MOST_EXAMPLES = 4000


@dataclass(frozen=True, eq=False)
class State:
    """What the next step needs.

    Args:
        point: where the iteration is, with the objective there.
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
    """What a step can tell besides the new state; every tensor has the shape of the batch.

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
    """What `fit` returns; all tensors are float64.

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
        """Of each weight, (..., P)."""
        return self.posterior.variance

    @property
    def covariance(self) -> Tensor:
        """Σ, (..., P, P)."""
        return self.posterior.covariance_matrix


def init(problem: Regression, loc: Tensor | None = None) -> State:
    """Start at μ = μ₀, or where told, with h = ¼, the largest weight there is.

    Args:
        problem: data, prior and family.
        loc: μ, (..., P).
    """
    batch, (size, params) = problem.x.shape[:-2], problem.x.shape[-2:]
    loc = (problem.prior.mean if loc is None else loc).expand(*batch, params)
    weights = problem.x.new_full((*batch, size), 0.25)
    point, _ = evaluate(problem, loc, weights, problem.precision(weights))
    if not bool(torch.isfinite(point.elbo).all()):
        raise NumericalError(
            "the ELBO at the start is not finite: the precision of the weights cannot be factorised. Scale the inputs "
            "to about 1, drop columns that repeat others, or raise prior_precision."
        )
    spec = ParamSpec.of({"weight": problem.x.new_empty(params)})
    return State(point, problem.x.new_ones(batch), problem.x.new_ones(batch), 0, spec, problem.family)


def update(state: State, problem: Regression) -> tuple[State, Info]:
    r"""One step, for all data: a damped natural-gradient step, or after 20 of them in turn with Newton's.

    $$ h^+ = h + \rho\,(\mathbb E[\sigma'(f)] - h), \qquad
       \mu^+ = \mu - \rho\,H(h^+)^{-1}\bigl[X^\top(\mathbb E[\sigma(f)] - y) + \lambda(\mu-\mu_0)\bigr] $$

    A step that lowers the ELBO is not taken, and half of it is tried next, for each member of a batch on its own. Most
    problems are done before Newton's steps, which solve N×N equations and are left out for N > 4000. Under flat priors
    they find in a few steps what takes natural gradients hundreds.

    Args:
        state: before the step; never modified.
        problem: data, prior and family.

    Returns:
        The state after the step, and what can be told about it.
    """
    old, size = state.point, problem.x.shape[-2]
    turn = state.step >= _PATIENCE and (state.step - _PATIENCE) % 2 == 0 and size <= _MOST_EXAMPLES
    damping = state.newton_damping if turn else state.damping
    weights, precision, loc = (_by_newton if turn else _by_nature)(problem, old, damping.unsqueeze(-1))
    new, space = evaluate(problem, loc, weights, precision)
    accepted = improves(old, new, space)
    point = choose(accepted, new, old)
    damping = torch.where(accepted, (1.5 * damping).clamp_max(1.0), 0.5 * damping)
    after = replace(state, point=point, step=state.step + 1)
    after = replace(after, newton_damping=damping) if turn else replace(after, damping=damping)
    return after, Info(after.step, size, point.expected_log_likelihood, point.kl, point.gradient_norm, accepted)


def _by_nature(problem: Regression, old: Point, share: Tensor) -> tuple[Tensor, DensePrecision, Tensor]:
    """h⁺, H(h⁺) and μ⁺ by the equations of `update`."""
    weights = old.weights + share * (old.wanted - old.weights)
    precision = problem.precision(weights)
    return weights, precision, old.loc - share * precision.solve(old.gradient)


def _by_newton(problem: Regression, old: Point, share: Tensor) -> tuple[Tensor, DensePrecision, Tensor]:
    """The same by a share of a Newton step; weights are positive at the optimum, and stay so on the way."""
    by_loc, by_weights = newton_step(problem, old)
    weights = torch.maximum(old.weights + share * by_weights, 0.1 * old.weights)
    return weights, problem.precision(weights), old.loc + share * by_loc


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: "weight" → tensor (*sample_shape, ..., P)."""
    return state.spec.unflatten(posterior(state).sample(tuple(sample_shape), generator))


def posterior(state: State) -> LowRankPrecisionNormal | DensePrecisionNormal:
    """Q as a torch distribution over the weights."""
    loc, matrix = state.loc, state.point.matrix
    if state.family == "full":
        return DensePrecisionNormal(loc, matrix, validate_args=False, param_spec=state.spec)
    diag = matrix.diagonal(dim1=-2, dim2=-1)
    return LowRankPrecisionNormal(loc, diag.unsqueeze(-1)[..., :0], diag, validate_args=False, param_spec=state.spec)


def build(x: Tensor, y: Tensor, *, prior_precision: Any, prior_mean: Any = 0.0, family: Family = "full") -> Transform:
    """The iteration behind `fit` as pure functions, for those who want to watch it.

    The data are given here, because every step uses all of them.

    Args:
        x: inputs, (..., N, P).
        y: labels 0 or 1, (..., N).
        prior_precision: λ > 0; a number or a tensor that broadcasts to (..., P).
        prior_mean: μ₀, likewise.
        family: "full" or "mean_field".

    Returns:
        `init(params=None)` with the start in params["weight"], `update(state)`, `sample(state, shape, generator=None)`
        and `posterior(state)`. `update` also takes a batch and a generator, as that of the other methods does, and has
        no use for them.
    """
    problem = regression(x, y, prior_precision, prior_mean, family)

    def begin(params: Params | None = None) -> State:
        return init(problem, None if params is None else start_of(problem, params))

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
    r"""The Gaussian with the highest ELBO, in float64.

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
