"""What the tests of captured steps share: a network whose eigenproblem is iterated, runs, and when two agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slangvi

N = 200


class Net(nn.Module):
    """Classes from ten numbers, with a buffer and, if asked for, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 3)
        self.dropout = dropout
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + self.shift
        return self.second(F.dropout(hidden, self.dropout, self.training and self.dropout > 0))


def problem(dtype=torch.float32, dropout=0.0, examples=40, device="cpu"):
    """A model and a batch; the same whatever was drawn before."""
    torch.manual_seed(0)
    model = Net(dropout).to(dtype)
    x, y = torch.randn(examples, 10, dtype=dtype), torch.arange(examples) % 3
    return model.to(device), (x.to(device), y.to(device))


def functional(model, **options):
    """The method and its first state; precise from the start, so that steps are small."""
    defaults = {"num_data": N, "rank": 3, "lr": 0.02, "mc_samples": 2, "init_precision": 50.0, "model": model}
    likelihood = slangvi.Categorical().of(model)
    vi = slangvi.slang.build(options.pop("log_likelihood", likelihood), **(defaults | options))
    return vi, vi.init({name: p.detach().clone() for name, p in model.named_parameters()})


def steps(vi, state, batches, generator=None):
    """The state after a step with each batch, and the last info."""
    info = None
    for batch in batches:
        state, info = vi.update(state, batch, generator=generator)
    return state, info


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp_min(1e-30))


def assert_same_state(eager, replayed, tolerance=1e-6) -> None:
    """The mean, the diagonal and the momentum, and UUᵀ through its action on a few vectors and its size."""
    assert eager.step == replayed.step
    for name in ("loc", "prec_diag", "momentum"):
        assert relative(getattr(eager, name), getattr(replayed, name)) <= tolerance, name
    U, V = eager.prec_factor.double(), replayed.prec_factor.double()
    # The eigenproblem is solved to 1e-6 of its largest value, at every step.
    gap = (U.mT @ U - V.mT @ V).norm() / (U.mT @ U).norm().clamp_min(1e-30)
    assert float(gap) <= 10 * tolerance
