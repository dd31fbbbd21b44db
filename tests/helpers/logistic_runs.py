"""What the tests of SLANG's relatives share: logistic data, batches of states, and their dense oracle."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

import slangvi
from reference import GaussianState
from slangvi import full, mean_field
from slangvi.priors import Prior

METHODS = {"mean_field": mean_field, "full": full}


def logistic(N: int, P: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, P, generator=generator, dtype=torch.float64)
    y = (
        torch.rand(N, generator=generator, dtype=torch.float64) < (x @ torch.linspace(-1, 1, P).double()).sigmoid()
    ).double()
    return x, y


def log_likelihood(params, batch):
    x, y = batch
    return slangvi.Bernoulli().log_prob(x @ params["w"], y)


def start(method, P: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64):
    """A state whose tensors differ everywhere, with leading dimensions."""
    state = method.init({"a": torch.zeros(P - 1, dtype=dtype), "b": torch.zeros((), dtype=dtype)})
    changed = {"loc": torch.randn(*batch, P, dtype=dtype), "momentum": torch.randn(*batch, P, dtype=dtype)}
    if method is full:
        root = torch.randn(*batch, P, P, dtype=dtype)
        changed["prec_matrix"] = root @ root.mT + torch.eye(P, dtype=dtype)
    else:
        changed["prec_diag"] = torch.rand(*batch, P, dtype=dtype) + 0.5
    return replace(state, **changed)


def tensors(state) -> dict[str, Tensor]:
    values = {entry.name: getattr(state, entry.name) for entry in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def member(state, place):
    """One run of a batch."""
    return replace(state, **{name: value[place] for name, value in tensors(state).items()})


def matrix_of(state) -> Tensor:
    return state.prec_matrix if hasattr(state, "prec_matrix") else torch.diag_embed(state.prec_diag)


def oracle(state) -> GaussianState:
    return GaussianState(state.loc, matrix_of(state), state.momentum, state.step)


def unit_prior(P: int, dtype: torch.dtype = torch.float64) -> Prior:
    return Prior(torch.ones(P, dtype=dtype), torch.zeros(P, dtype=dtype))


def assert_close(a, b, tolerance: float = 1e-10) -> None:
    for name, value in tensors(a).items():
        torch.testing.assert_close(value, getattr(b, name), rtol=tolerance, atol=tolerance)
