"""Simulation-based calibration: parameters from the prior, data from the parameters, ranks among posterior draws.

If the posterior is right, the rank of the true parameter among its draws is uniform (Talts et al. 2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

import slangvi
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

RUNS, NUM_DATA, SIZE, RANKS, BINS = 1000, 20, 3, 99, 10
DRAWS, STEPS = 8, 60


def simulate(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """θ from N(0, I) (K, P), correlated inputs (K, N, P), and y with noise of variance 1 (K, N)."""
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    theta, x = draw(RUNS, SIZE), draw(RUNS, NUM_DATA, SIZE)
    x[..., 1] += 2.0 * x[..., 0]
    return theta, x, (x @ theta.unsqueeze(-1)).squeeze(-1) + draw(RUNS, NUM_DATA)


def inferred(x: Tensor, y: Tensor, generator: torch.Generator) -> slangvi.full.State:
    """All runs in lockstep by `full.update` with Hessians, gradients at draws of the weights, rates 1/t."""
    start = torch.zeros(RUNS, SIZE, dtype=torch.float64)
    spec = ParamSpec.of({"w": start[0]})
    eye = torch.eye(SIZE, dtype=torch.float64).expand(RUNS, SIZE, SIZE)
    state = slangvi.full.State(start, NUM_DATA * eye, start.clone(), 0, spec)
    prior = Prior(torch.ones_like(start), torch.zeros_like(start))
    hessian = DRAWS * x.mT @ x
    for step in range(1, STEPS + 1):
        theta = slangvi.full.sample(state, (DRAWS,), generator)["w"]
        residual = torch.einsum("knp,skp->skn", x, theta) - y
        rows = (residual.unsqueeze(-1) * x).movedim(0, 1).flatten(1, 2)
        state, _ = slangvi.full.update(
            state, DenseGradients.from_rows(rows), num_data=NUM_DATA, prior=prior, lr=Rate(1 / step), curvature=hessian
        )
    return state


def chi_squares(diagonal: bool = False, seed: int = 0) -> Tensor:
    """Of the ranks of each coordinate in 10 bins, (P,); `diagonal` forgets the correlations, to see it noticed."""
    generator = torch.Generator().manual_seed(seed)
    theta, x, y = simulate(generator)
    state = inferred(x, y, generator)
    if diagonal:
        kept = torch.diag_embed(state.prec_matrix.diagonal(dim1=-2, dim2=-1))
        state = slangvi.full.State(state.loc, kept, state.momentum, state.step, state.spec)
    draws = slangvi.full.sample(state, (RANKS,), generator)["w"]
    ranks = (draws < theta).sum(0)
    counts = torch.stack([torch.bincount(ranks[:, p] * BINS // (RANKS + 1), minlength=BINS) for p in range(SIZE)])
    expected = RUNS / BINS
    return ((counts - expected) ** 2 / expected).sum(1)


def worst() -> float:
    """The largest of the chi-squares."""
    return float(chi_squares().max())
