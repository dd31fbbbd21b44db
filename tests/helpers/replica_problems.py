"""Problems to run in lockstep and one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import slangvi
from slangvi import online_eig, replicas, slang

Streams = list[torch.Generator]
# What `replicas.build(method=...)` may be, and what makes the same run alone.
METHODS = {"slang": slang, "online_eig": online_eig}


@dataclass
class Problem:
    """K small problems: what `replicas.build` takes, and the same for each alone."""

    log_likelihood: Callable[..., Tensor]
    data: Any  # tensors (K, N, ...)
    starts: list[dict[str, Tensor]]
    shared: dict[str, Any]  # options all replicas share
    own: dict[str, list[Any]]  # options with one value for each
    constants: Any = None
    together: dict[str, Any] = field(default_factory=dict)  # options of lockstep alone
    method: str = "slang"

    @property
    def count(self) -> int:
        return len(self.starts)

    def runs(self, **options: Any) -> replicas.Runs:
        every = {"num_replicas": self.count, "constants": self.constants, "method": self.method}
        return replicas.build(self.log_likelihood, **every, **self.shared, **self.own, **self.together, **options)

    def alone(self, k: int) -> Any:
        own = {name: values[k] for name, values in self.own.items()}
        extra = () if self.constants is None else (self.constants[k],)
        build = METHODS[self.method].build
        return build(lambda p, b: self.log_likelihood(p, b, *extra), engine="dense", **self.shared, **own)

    def calmed(self) -> Problem:
        """Precise from the start and with small steps: averages of many eigenvectors amplify rounding otherwise."""
        calm = {"init_precision": [50.0] * self.count, "lr": [0.01] * self.count}
        return replace(self, own=self.own | calm)

    def batch(self, index: Tensor) -> tuple[Tensor, ...]:
        """Examples (K, M) of each."""
        return tuple(x[torch.arange(self.count)[:, None], index] for x in self.data)


def regression(dtype: torch.dtype, count: int = 4, rank: int = 1, draws: int = 2) -> Problem:
    """Networks on standardised data: every setting differs between replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)

    def log_likelihood(params: dict[str, Tensor], batch: Any, tau: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, dict(params), (batch[0],))
        return 0.5 * (tau.log() - tau * (batch[1] - outputs).square()).sum(-1)

    x = torch.randn(count, 40, 3, dtype=dtype)
    y = torch.tanh(x.sum(-1, keepdim=True)) + 0.1 * torch.randn(count, 40, 1, dtype=dtype)
    start = {name: p.detach() for name, p in model.named_parameters()}
    return Problem(
        log_likelihood,
        (x, y),
        [{name: value + 0.02 * k for name, value in start.items()} for k in range(count)],
        {"rank": rank, "mc_samples": draws, "precision_lr": None},
        {
            "num_data": [40 - k for k in range(count)],
            "lr": [0.02, slangvi.inverse_time(0.1, 0.3), 0.01, lambda t: 0.05 / t**0.5, *[0.03] * count][:count],
            "prior_precision": [1.0, {"*.bias": 1e-6, "*": 0.5}, 2.0, torch.linspace(0.5, 2, 41), *[1.0] * count][
                :count
            ],
            "prior_mean": [0.0, 0.1, {"0.*": 0.2, "*": 0.0}, 0.0, *[0.0] * count][:count],
            "momentum": [0.9, 0.5, 0.0, 0.95, *[0.8] * count][:count],
            "temperature": [1.0, 0.5, 2.0, 1.0, *[1.0] * count][:count],
            "init_precision": [5.0, 10.0, 3.0, {"*": 2.0}, *[1.0] * count][:count],
        },
        torch.linspace(1, 5, count, dtype=dtype),
    )


def logistic(dtype: torch.dtype, count: int = 3, rank: int = 2, draws: int = 3) -> Problem:
    """Few parameters and many rows: the eigenproblem is over parameters."""
    torch.manual_seed(1)
    x = torch.cat([torch.ones(count, 30, 1), torch.randn(count, 30, 4)], -1).to(dtype)
    y = (torch.rand(count, 30) < torch.sigmoid(x.sum(-1))).to(dtype)

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        return slangvi.Bernoulli().log_prob(batch[0] @ params["w"], batch[1])

    return Problem(
        log_likelihood,
        (x, y),
        [{"w": torch.zeros(5, dtype=dtype)} for _ in range(count)],
        {"rank": rank, "mc_samples": draws, "lr": slangvi.inverse_time(0.05, 0.51), "temperature": 1.0},
        {
            "num_data": [30 + k for k in range(count)],
            "precision_lr": [0.05, lambda t: 0.1 / t, 0.02, *[0.1] * count][:count],
        },
    )


def whole(state: slang.State) -> Tensor:
    """UUᵀ + diag d, which does not depend on signs."""
    return state.prec_factor.T @ state.prec_factor + torch.diag(state.prec_diag)


def distance(a: slang.State, b: slang.State) -> float:
    """Largest difference of mean, precision and momentum, relative to the largest entry.

    d is what U leaves of the whole diagonal, so its rounding is relative to that.
    """
    pairs = [(a.loc, b.loc), (whole(a), whole(b)), (a.momentum, b.momentum)]
    gaps = [(x - y).abs().max() / y.abs().max().clamp_min(1e-12) for x, y in pairs]
    return max(float(gap) for gap in (*gaps, (a.prec_diag - b.prec_diag).abs().max() / whole(b).abs().max()))
