"""What the tests of captured steps share: a network whose eigenproblem is iterated, runs, and when two agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slangvi
from helpers.optimizer_runs import flat

N = 200


class Net(nn.Module):
    """Classes from ten numbers; if asked for, with dropout or with a buffer."""

    def __init__(self, dropout: float = 0.0, buffer: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 3)
        self.dropout = dropout
        if buffer:
            self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if "shift" in self._buffers:
            hidden = hidden + self.shift
        return self.second(F.dropout(hidden, self.dropout, self.training and self.dropout > 0))


def problem(dtype=torch.float32, dropout=0.0, examples=40, device="cpu", buffer=False):
    """A model and a batch; the same whatever was drawn before."""
    torch.manual_seed(0)
    model = Net(dropout, buffer).to(dtype)
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


class Words(nn.Module):
    """An embedding, a convolution over positions, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(9, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids):
        x = self.twice(torch.tanh(self.twice(self.table(ids))))
        return self.head(torch.tanh(self.conv(x.transpose(1, 2))).mean(2))


def words(seed=0):
    torch.manual_seed(seed)
    return Words(), (torch.randint(9, (30, 5)), torch.arange(30) % 3)


def optimizer(model, compiled, own=True, **options):
    generator = torch.Generator().manual_seed(1) if own else None
    defaults = {"num_data": N, "rank": 3, "lr": 0.02, "init_precision": 50.0, "generator": generator}
    return slangvi.SLANG(model, compile=compiled, **(defaults | options))


def draw_and_step(opt, batch, draws=2, call=lambda model, x: model(x)):
    """One step; returns the weights that were drawn."""
    seen = []
    for _ in range(draws):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            seen.append(flat(opt.model))
            F.cross_entropy(call(opt.model, batch[0]), batch[1]).backward()
    opt.step()
    return seen


def pair(own=True, make=problem, **options):
    """The same optimizer twice: eager, and replayed."""
    (first, batch), (second, _) = make(), make()
    return optimizer(first, False, own, **options), optimizer(second, True, own, **options), batch


def assert_agree(eager, replayed, tolerance=1e-6):
    assert_same_state(eager._state, replayed._state, tolerance)
    for opt in (eager, replayed):
        written = torch.cat([p.detach().flatten() for group in opt.param_groups for p in group["params"]])
        assert torch.equal(written, opt._state.loc)
