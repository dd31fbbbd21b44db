"""Memory that is written to before the step: parameters under a view, activations, buffers of the caller."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import assert_same
from slangvi.errors import UnsupportedModuleError


class Queries(nn.Module):
    """Learned inputs of a layer, the same for every example."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.head, self.inward = nn.Linear(8, 8).double(), nn.Linear(4, 8).double()

    def forward(self, x):
        return (self.head(self.queries.expand(len(x), -1)) * self.inward(x)).sum(1)


class Permuting(nn.Module):
    """Looks examples up in the batch, which a batch of one does not have."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3).double(), nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        order = torch.tensor([3, 0, 4, 1, 5, 2])
        return (self.layer(x[order]) * self.scale)[order.argsort()]


def pair(make):
    """The same model with both engines."""
    opts = []
    for engine in ("factored", "dense"):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        opts.append(slangvi.SLANG(make(), num_data=40, rank=4, lr=0.1, engine=engine, generator=generator))
    return opts


@pytest.mark.parametrize("make", [Queries, Permuting])
def test_both_engines_agree(make):
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    factored, dense = pair(make)
    for opt in (factored, dense):
        for _ in range(2):
            for _ in range(2):
                with opt.sampled_params(train=True):
                    opt.model(x).square().sum(tuple(range(1, opt.model(x).ndim))).mean().backward()
            opt.step()
    assert_same(factored, dense)


def test_an_activation_that_is_changed_after_backward_is_told():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            hidden = self.first(x).tanh()
            return self.second(hidden), hidden

    model, x = Stateful(), torch.randn(6, 4)
    opt = slangvi.SLANG(model, num_data=40, rank=2)
    opt.train()
    output, hidden = model(x)
    F.cross_entropy(output, torch.arange(6) % 3).backward()
    hidden.detach()[2:].zero_()
    with pytest.raises(
        UnsupportedModuleError, match=r"activation of shape \(6, 5\) was modified in place after backward"
    ):
        opt.step()


def test_a_buffer_for_output_gradients_may_be_used_again():
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    reused, fresh = pair(lambda: nn.Linear(4, 3).double())
    buffer = torch.empty(6, 3, dtype=torch.float64)
    for opt, hand in ((reused, buffer.copy_), (fresh, torch.clone)):
        for scale in (1.0, -3.0):
            with opt.sampled_params(train=True):
                output = opt.model(x)
                output.backward(hand((scale * output / 6).detach()))
        opt.step()
    assert_same(reused, fresh)


def test_a_sparse_input_is_one_like_any_other():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).relu()
    sparse, dense = pair(lambda: nn.Linear(4, 3).double())
    for opt, given in ((sparse, x.to_sparse()), (dense, x)):
        with opt.sampled_params(train=True):
            F.cross_entropy(opt.model(given), torch.arange(6) % 3).backward()
        opt.step()
    assert_same(sparse, dense)
