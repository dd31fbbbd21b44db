"""Two models whose answers are known without sampling: linear and logistic regression through f = Xθ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The trapezoid rule under a normal density: its error falls like exp(−2π²/(s·h)) for a logistic function of a normal
# with deviation s, which Gauss–Hermite nodes do not reach when s is large.
GRID = torch.linspace(-10, 10, 201, dtype=torch.float64)


@dataclass(frozen=True)
class Model:
    """Data, and the log-likelihood of an example with its two derivatives by f.

    Args:
        x: inputs, (N, P), float64.
        y: targets, (N,).
        log_prob: (f, y) → log p(y | f).
        residual: (f, y) → r = −∂ log p / ∂f.
        curvature: (f, y) → −∂² log p / ∂f².
        prior_precision: λ.
    """

    x: Tensor
    y: Tensor
    log_prob: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor]
    prior_precision: float

    def log_likelihood(self, params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return self.log_prob(x @ params["w"], y)

    def weight(self, kind: str, f: Tensor) -> Tensor:
        """Of xxᵀ in the curvature: r² for the empirical Fisher, the second derivative for the Hessian."""
        return self.residual(f, self.y).square() if kind == "ef" else self.curvature(f, self.y)


def design(num_data: int, seed: int) -> Tensor:
    """A column of ones and three correlated ones, so that covariances matter."""
    random = np.random.default_rng(seed)
    mix = np.array([[1.0, 0.6, 0.0], [0.0, 1.0, -0.5], [0.0, 0.0, 1.0]])
    return torch.tensor(np.column_stack([np.ones(num_data), random.normal(size=(num_data, 3)) @ mix]))


def linear(noise: float = 0.7, prior_precision: float = 2.0) -> Model:
    x, random = design(60, 1), np.random.default_rng(2)
    y = x @ torch.tensor([0.5, -1.0, 0.3, 0.8]).double() + noise * torch.tensor(random.normal(size=60))
    return Model(
        x,
        y,
        lambda f, y: -0.5 * ((y - f) / noise) ** 2,
        lambda f, y: (f - y) / noise**2,
        lambda f, y: torch.full_like(f, noise**-2),
        prior_precision,
    )


def logistic(prior_precision: float = 1.0) -> Model:
    x, random = design(120, 3), np.random.default_rng(4)
    y = x @ torch.tensor([0.2, 1.0, -0.7, 0.5]).double() > torch.tensor(random.logistic(size=120))
    return logistic_on(x, y.double(), prior_precision)


def logistic_on(x: Tensor, y: Tensor, prior_precision: float) -> Model:
    return Model(
        x,
        y,
        lambda f, y: y * f - torch.nn.functional.softplus(f),
        lambda f, y: torch.sigmoid(f) - y,
        lambda f, y: torch.sigmoid(f) * torch.sigmoid(-f),
        prior_precision,
    )


def closed_form(model: Model, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and precision of the conjugate posterior, as in every textbook."""
    precision = model.x.T @ model.x / noise**2 + model.prior_precision * torch.eye(model.x.shape[1]).double()
    return torch.linalg.solve(precision, model.x.T @ model.y / noise**2), precision


def fixed_point(model: Model, kind: str, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    r"""Where a Gaussian method stands still: expectations by quadrature over f, no draws.

    $$ \Lambda = \lambda I + X^\top \mathrm{diag}(\mathbb E[w(f)]) X, \qquad X^\top \mathbb E[r(f)] + \lambda\mu = 0 $$

    Args:
        model: data, likelihood and prior.
        kind: "ef" or "hessian", what w is.
        diagonal: only the diagonal of Λ is kept.

    Returns:
        μ (P,) and Λ (P, P).
    """
    nodes, weights = GRID, torch.softmax(-0.5 * GRID.square(), 0)
    x, lam = model.x, model.prior_precision
    eye = torch.eye(x.shape[1], dtype=torch.float64)
    mean, precision = torch.zeros(x.shape[1], dtype=torch.float64), eye * (lam + len(x))
    for _ in range(500):
        spread = torch.einsum("np,pq,nq->n", x, torch.linalg.inv(precision), x).sqrt()
        f = (x @ mean)[None, :] + nodes[:, None] * spread
        wanted = lam * eye + (x.T * (weights @ model.weight(kind, f))) @ x
        if diagonal:
            wanted = torch.diag(wanted.diagonal())
        gradient = x.T @ (weights @ model.residual(f, model.y)) + lam * mean
        # Half steps: a diagonal Λ is not the curvature along correlated directions.
        step = 0.5 * torch.linalg.solve(wanted, gradient)
        change = max(float(step.abs().max()), float((wanted - precision).abs().max() / precision.abs().max()))
        mean, precision = mean - step, wanted
        if change < 1e-14:
            return mean, precision
    raise AssertionError(f"the fixed point was not reached: {change:.1e}")
