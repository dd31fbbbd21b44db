"""What the tests of the optimizer share: a small model, a loop, and what it means for two optimizers to agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from slangvi.params.state import tensors_of

N = 40
# One row for every optimizer.
CLASSES = {
    "SLANG": (slangvi.SLANG, {"rank": 2}),
    "VOGN": (slangvi.VOGN, {}),
    "FullGaussian": (slangvi.FullGaussian, {}),
    "OnlineEig": (slangvi.OnlineEig, {"rank": 2}),
    "BBB": (slangvi.BBB, {}),
    "MCDropout": (slangvi.MCDropout, {"rates": 0.2}),
}


def model_and_data(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return model, torch.randn(12, 4, dtype=dtype), torch.arange(12) % 3


def make(model, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    return slangvi.SLANG(model, **({"num_data": N, "rank": 2, "lr": 0.1, "generator": generator} | options))


def train(opt, x, y, steps=3, draws=2, sched=None):
    for _ in range(steps):
        for _ in range(draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(opt.model(x), y).backward()
        opt.step()
        if sched is not None:
            sched.step()
    return opt


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same(a, b, **tolerance):
    options = {"rtol": 1e-10, "atol": 1e-12} | tolerance
    torch.testing.assert_close(a._state.loc, b._state.loc, **options)
    torch.testing.assert_close(a._state.prec_diag, b._state.prec_diag, **options)
    U, V = a._state.prec_factor, b._state.prec_factor
    torch.testing.assert_close(U.T @ U, V.T @ V, rtol=1e-8, atol=1e-9)


def assert_identical(a, b):
    pairs = zip(tensors_of(a._state), tensors_of(b._state), strict=True)
    assert all(torch.equal(x, y) for (_, x), (_, y) in pairs)
    assert torch.equal(flat(a.model), flat(b.model))


def backward(loss):
    loss.backward()
    return loss
