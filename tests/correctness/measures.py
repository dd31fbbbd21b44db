"""How far a method is from its reference: one function per kind of comparison, each returns one number."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import slangvi
from correctness import glm, kidscores, longley
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

DRAWS, BURN_IN, STEPS = 4, 20, 100


def averaging(step: int, burn_in: int = BURN_IN) -> float:
    """A rate for which the state after the burn-in is a plain mean over all later draws."""
    return 0.3 if step <= burn_in else 1.0 / (step - burn_in)


def trained(build: Callable[..., Any], model: glm.Model, **options: Any) -> tuple[Tensor, Tensor]:
    """Mean and precision after a run of a functional method on all data."""
    vi = build(
        model.log_likelihood,
        num_data=len(model.x),
        lr=averaging,
        prior_precision=model.prior_precision,
        mc_samples=DRAWS,
        momentum=0.0,
        init_precision=float(len(model.x)),
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    state = vi.init({"w": torch.zeros(model.x.shape[1], dtype=torch.float64)})
    for _ in range(BURN_IN + STEPS):
        state, _ = vi.update(state, (model.x, model.y), generator=generator)
    posterior = vi.posterior(state)
    return posterior.mean, posterior.precision_matrix


def standard_errors(model: glm.Model, kind: str, mean: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean (P,) and the precision (P, P), when both are averages over as many draws as a run takes."""
    draws = torch.distributions.MultivariateNormal(mean, precision_matrix=precision).sample((20000,))
    f = draws @ model.x.T
    gradients = model.residual(f, model.y) @ model.x
    shifts = torch.linalg.solve(precision, gradients.T).T
    curvatures = torch.einsum("sn,np,nq->spq", model.weight(kind, f), model.x, model.x)
    return shifts.std(0) / (DRAWS * STEPS) ** 0.5, curvatures.std(0) / (DRAWS * STEPS) ** 0.5


def in_standard_errors(model: glm.Model, kind: str, found: tuple[Tensor, Tensor], diagonal: bool) -> float:
    """The largest error of a mean or an entry of the precision, in Monte-Carlo standard errors."""
    mean, precision = glm.fixed_point(model, kind, diagonal)
    of_mean, of_precision = standard_errors(model, kind, mean, precision)
    # Entries without noise must agree to rounding: for them an error counts in units of 1e-12.
    floor = 1e-12 * precision.diagonal().max()
    error = (found[1] - precision).abs() / of_precision.clamp_min(floor)
    if diagonal:
        error = error.diagonal()
    return max(float(((found[0] - mean).abs() / of_mean).max()), float(error.max()))


def functional(build: Callable[..., Any], model: Callable[[], glm.Model], kind: str, **options: Any) -> float:
    """A method of the functional interface against its fixed point."""
    problem = model()
    diagonal = build is slangvi.mean_field.build
    return in_standard_errors(problem, kind, trained(build, problem, **options), diagonal)


def optimizer_class(kind: Callable[..., Any], model: Callable[[], glm.Model], **options: Any) -> float:
    """An optimizer on `nn.Linear`, in the loop a user writes, against the fixed point of the empirical Fisher."""
    problem = model()
    module = nn.Linear(problem.x.shape[1], 1, bias=False).double()
    opt = kind(
        module,
        num_data=len(problem.x),
        prior_precision=problem.prior_precision,
        momentum=0.0,
        mc_samples=DRAWS,
        init_precision=float(len(problem.x)),
        generator=torch.Generator().manual_seed(0),
        **options,
    )

    def closure() -> Tensor:
        loss = -problem.log_prob(module(problem.x).squeeze(-1), problem.y).mean()
        loss.backward()
        return loss

    for step in range(1, BURN_IN + STEPS + 1):
        opt.param_groups[0]["lr"] = averaging(step)
        opt.step(closure)
    found = (opt.posterior.mean, opt.posterior.precision_matrix)
    return in_standard_errors(problem, "ef", found, kind is slangvi.VOGN)


def closed_form_update() -> float:
    """One step of rate 1 of `full.update` with Hessians, gradients at the mean: the conjugate posterior itself."""
    model, noise = glm.linear(noise=0.7), 0.7
    mean, precision = glm.closed_form(model, noise)
    found = one_newton_step(model.x, model.y, noise, model.prior_precision)
    return max(relative(found.loc, mean), relative(found.prec_matrix, precision))


def one_newton_step(x: Tensor, y: Tensor, noise: float, prior_precision: float) -> slangvi.full.State:
    """From zero, with the gradients and the Hessian of a linear model."""
    state = slangvi.full.init({"w": torch.zeros(x.shape[1], dtype=torch.float64)})
    rows = (x @ state.loc - y)[:, None] * x / noise**2
    one, zero = torch.full_like(state.loc, prior_precision), torch.zeros_like(state.loc)
    state, _ = slangvi.full.update(
        state,
        DenseGradients.from_rows(rows),
        num_data=len(x),
        prior=Prior(one, zero),
        lr=Rate(1.0),
        curvature=x.T @ x / noise**2,
    )
    return state


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs() / expected.abs().max()).max())


def certified() -> float:
    """Longley's data: worst relative error of seven means and standard deviations, in the original units."""
    y, raw = longley.ROWS[:, 0], longley.ROWS[:, 1:]
    centre, scale = raw.mean(0), raw.std(0)
    x = torch.column_stack([torch.ones(len(y)).double(), (raw - centre) / scale])
    state = one_newton_step(x, y, longley.NOISE, prior_precision=1e-12 / longley.NOISE**2)
    back = torch.diag(torch.cat([torch.ones(1).double(), 1 / scale]))
    back[0, 1:] = -centre / scale
    posterior = slangvi.full.posterior(state)
    mean = back @ posterior.mean
    deviation = (back @ posterior.covariance_matrix @ back.T).diagonal().sqrt()
    errors = [(mean / longley.ESTIMATES - 1).abs().max(), (deviation / longley.DEVIATIONS - 1).abs().max()]
    return float(max(errors))


@lru_cache
def kid_scores() -> tuple[float, float]:
    """Three linear models with unknown noise against Stan's draws: worst mean in sd, worst sd relative, raw units."""
    gaps = [_kid_score_gaps(reference) for reference in kidscores.REFERENCES.values()]
    return max(gap[0] for gap in gaps), max(gap[1] for gap in gaps)


def _kid_score_gaps(reference: kidscores.Reference, seed: int = 0) -> tuple[float, float]:
    rows = kidscores.rows()
    y, x = rows[:, 0], torch.cat([torch.ones_like(rows[:, :1]), rows[:, list(reference.columns)]], 1)

    def log_likelihood(params: Any, batch: Any) -> Tensor:
        """With the prior of log σ, a half-Cauchy for σ, shared out among the rows."""
        log_sigma = params["log_sigma"]
        prior = log_sigma - ((log_sigma.exp() / kidscores.CAUCHY_SCALE) ** 2).log1p()
        residual = (batch[1] - batch[0] @ params["beta"]) / log_sigma.exp()
        return -log_sigma - 0.5 * residual.square() + prior / len(y)

    vi = slangvi.full.build(
        log_likelihood,
        num_data=len(y),
        lr=lambda step: averaging(step, 3 * BURN_IN),  # the start is far off along some directions, in raw units
        curvature="hessian",
        prior_precision=1e-9,
        mc_samples=16 * DRAWS,
        momentum=0.0,
        init_precision=float(len(y)),
    )
    beta = torch.zeros(x.shape[1], dtype=torch.float64)
    beta[0] = y.mean()
    state, generator = vi.init({"beta": beta, "log_sigma": y.std().log()}), torch.Generator().manual_seed(seed)
    for _ in range(3 * BURN_IN + STEPS):
        state, _ = vi.update(state, (x, y), generator=generator)
    q = vi.posterior(state)
    mean, variance = q.mean, q.covariance_matrix.diagonal()
    sigma = (mean[-1] + 0.5 * variance[-1]).exp()  # log-normal
    found = torch.cat([mean[:-1], sigma[None]])
    deviations = torch.cat([variance[:-1].sqrt(), (sigma * variance[-1].expm1().sqrt())[None]])
    away = (found - torch.tensor(reference.means).double()).abs() / reference.deviations
    return float(away.max()), float((deviations / reference.deviations - 1).abs().max())


def exact_fit(model: Callable[[], glm.Model], family: str) -> float:
    """`exact.fit` against the fixed point of the expected Hessian: worst error of mean (in sd) and sd (relative)."""
    problem = model()
    mean, precision = glm.fixed_point(problem, "hessian", family == "mean_field")
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    best = slangvi.exact.fit(problem.x, problem.y, prior_precision=problem.prior_precision, family=family)
    return max(float(((best.loc - mean).abs() / sd).max()), float((best.variance.sqrt() / sd - 1).abs().max()))


def breast_cancer() -> glm.Model:
    """Real data with 31 columns, from scikit-learn."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import StandardScaler

    x, y = load_breast_cancer(return_X_y=True)
    x = np.column_stack([np.ones(len(y)), StandardScaler().fit_transform(x)])
    return glm.logistic_on(torch.tensor(x), torch.tensor(y).double(), 1.0)


def true_posterior() -> float:
    """`exact.fit` against the posterior itself, by integration over a grid: two weights, N = 120."""
    full = glm.logistic()
    model = glm.logistic_on(full.x[:, :2].contiguous(), full.y, 1.0)
    best = slangvi.exact.fit(model.x, model.y, prior_precision=1.0)
    sd = best.variance.sqrt()
    axes = [m + s * torch.linspace(-8, 8, 401).double() for m, s in zip(best.loc, sd, strict=True)]
    theta = torch.cartesian_prod(*axes)
    log_joint = model.log_prob(theta @ model.x.T, model.y).sum(1) - 0.5 * theta.square().sum(1)
    weight = torch.softmax(log_joint, 0)
    mean = weight @ theta
    true_sd = (weight @ (theta - mean).square()).sqrt()
    return max(float(((best.loc - mean).abs() / true_sd).max()), float((sd / true_sd - 1).abs().max()))


def log_prob_of_scipy() -> float:
    """`LowRankPrecisionNormal.log_prob` and `entropy` against `scipy.stats.multivariate_normal`, relative."""
    from scipy.stats import multivariate_normal

    generator = torch.Generator().manual_seed(0)
    loc, factor = torch.randn(6, generator=generator).double(), torch.randn(6, 2, generator=generator).double()
    diag, value = torch.rand(6, generator=generator).double() + 0.1, torch.randn(9, 6, generator=generator).double()
    ours = slangvi.LowRankPrecisionNormal(loc, factor, diag)
    theirs = multivariate_normal(loc.numpy(), np.linalg.inv((factor @ factor.T + torch.diag(diag)).numpy()))
    errors = [ours.log_prob(value).numpy() - theirs.logpdf(value.numpy()), ours.entropy().numpy() - theirs.entropy()]
    return float(max(np.abs(error).max() for error in errors))


def draws_of_torch() -> float:
    """Covariance of 200 000 draws of SLANG's posterior against torch's dense normal, in standard errors."""
    generator = torch.Generator().manual_seed(1)
    factor, diag = (
        2 * torch.randn(5, 2, generator=generator).double(),
        torch.rand(5, generator=generator).double() + 0.2,
    )
    ours = slangvi.LowRankPrecisionNormal(torch.zeros(5).double(), factor, diag)
    precision = factor @ factor.T + torch.diag(diag)
    theirs = torch.distributions.MultivariateNormal(torch.zeros(5).double(), precision_matrix=precision)
    draws = ours.sample((200_000,), generator=generator)
    products = draws[:, :, None] * draws[:, None, :]
    errors = (products.mean(0) - theirs.covariance_matrix).abs() / (products.std(0) / len(draws) ** 0.5)
    return float(errors.max())
