"""Slow dense oracles: everything in float64, P×P matrices formed, eigh and inv used freely."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cases import Case


def loop_gradients(case: Case) -> Tensor:
    """Per-example gradients by a Python loop over the examples of one full batch: (M, P), float64."""
    params = [p for p in case.model.parameters() if p.requires_grad]
    state = torch.get_rng_state()
    rows = []
    for example in range(case.num_examples):
        torch.set_rng_state(state)
        loss = case.losses(case.model(*case.args))[example]
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        filled = (torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True))
        rows.append(torch.cat([g.flatten() for g in filled]))
    torch.set_rng_state(state)
    return torch.stack(rows).double()


@dataclass
class DenseState:
    """loc (P,), low (P, P) = UUᵀ, diag (P,), momentum (P,), step."""

    loc: Tensor
    low: Tensor
    diag: Tensor
    momentum: Tensor
    step: int = 0

    @property
    def precision(self) -> Tensor:
        return self.low + torch.diag(self.diag)


def dense_step(
    state: DenseState,
    rows: Tensor,
    rank: int,
    num_data: float,
    lr: float | Tensor,
    precision_lr: float | Tensor,
    prior_precision: float | Tensor,
    prior_mean: float | Tensor = 0.0,
    momentum: float = 0.9,
    prior_factor: Tensor | None = None,
) -> DenseState:
    """One step of the algorithm, as written in its definition, with P×P matrices; the prior may have a factor."""
    size, weight = len(state.loc), num_data / len(rows)
    beta = torch.as_tensor(precision_lr, dtype=torch.float64).expand(size)
    others = torch.zeros(size, size, dtype=torch.float64) if prior_factor is None else prior_factor.T @ prior_factor
    fisher = weight * rows.T @ rows + others
    keep, gain = (1 - beta).sqrt(), beta.sqrt()
    A = keep[:, None] * state.low * keep + gain[:, None] * fisher * gain
    values, vectors = torch.linalg.eigh(A)
    top = min(rank, size)
    values, vectors = values[size - top :].clamp_min(0), vectors[:, size - top :]
    low = (vectors * values) @ vectors.T
    correction = (A.diagonal() - low.diagonal()).clamp_min(0)
    diag = (1 - beta) * state.diag + beta * prior_precision + correction
    average = momentum * state.momentum + (1 - momentum) * weight * rows.sum(0)
    step = state.step + 1
    gradient = average / (1 - momentum**step) + prior_precision * (state.loc - prior_mean)
    gradient += others @ (state.loc - prior_mean)
    loc = state.loc - lr * torch.linalg.solve(low + torch.diag(diag), gradient)
    return DenseState(loc, low, diag, average, step)


@dataclass
class GaussianState:
    """loc (P,), precision (P, P), momentum (P,), step."""

    loc: Tensor
    precision: Tensor
    momentum: Tensor
    step: int = 0


def gaussian_step(
    state: GaussianState,
    rows: Tensor,
    num_data: float,
    lr: float | Tensor,
    precision_lr: float | Tensor,
    prior_precision: float | Tensor,
    prior_mean: float | Tensor = 0.0,
    momentum: float = 0.0,
    hessian: Tensor | None = None,
    diagonal: bool = False,
    prior_factor: Tensor | None = None,
) -> GaussianState:
    """One step of an unrestricted Gaussian, or of its diagonal, as written in its definition; `hessian` is a sum."""
    size, weight, step = len(state.loc), num_data / len(rows), state.step + 1
    beta = torch.as_tensor(precision_lr, dtype=torch.float64).expand(size)
    curvature = weight * (rows.T @ rows if hessian is None else hessian)
    keep, gain = torch.diag((1 - beta).sqrt()), torch.diag(beta.sqrt())
    prior = torch.eye(size, dtype=torch.float64) * prior_precision
    prior += 0 if prior_factor is None else prior_factor.T @ prior_factor
    target = curvature + prior
    precision = keep @ state.precision @ keep + gain @ target @ gain
    if diagonal:
        precision = torch.diag(precision.diagonal())
    average = momentum * state.momentum + (1 - momentum) * weight * rows.sum(0)
    gradient = average / (1 - momentum**step) + prior @ (state.loc - prior_mean)
    loc = state.loc - lr * (torch.linalg.inv(precision) @ gradient)
    return GaussianState(loc, precision, average, step)


def factor_analysis(
    rows: Tensor, diag: Tensor, target: Tensor, beta: float, least_free: float
) -> tuple[Tensor, Tensor]:
    """U⁺U⁺ᵀ and d⁺ of one step of factor analysis of a matrix, from U by rows and d.

    Args:
        rows: U, (L, P).
        diag: d, (P,).
        target: Λ, (P, P).
        beta: the largest β.
        least_free: least value of w.
    """
    U = rows.T
    Z = U / diag[:, None]
    A = target - (1 - beta) * torch.diag(diag)
    eye = torch.eye(U.shape[1], dtype=torch.float64)
    F = Z.T @ A @ Z + beta * (U.T @ Z + beta * eye)
    root = torch.linalg.solve_triangular(torch.linalg.cholesky(F), Z.T @ A, upper=False)
    low = root.T @ root
    change = (target - low).diagonal() - diag
    inverse = torch.linalg.inv(U @ U.T + torch.diag(diag))
    free = (inverse.diagonal() * diag).clamp_min(least_free)
    fewer = diag * (diag + change) / (diag + change - change / free)
    return low, torch.where(change > 0, diag + change / free, fewer)


def flat_params(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
