"""Modules that are called again: activation checkpointing goes forward a third time, with the values of the second."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import slangvi
from cases import Case, squares
from helpers.captured_gradients import captured, rows_of
from reference import loop_gradients
from slangvi.errors import UnsupportedModuleError


class Checkpointed(nn.Module):
    """A parameter of its own beside checkpointed layers: it alone needs the module to be called again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.randn(4))
        self.calls = 0

    def body(self, x):
        self.calls += 1
        return torch.tanh(self.first(x)) * self.gain

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("engine", ["factored", "dense"])
def test_some_parameters_of_a_checkpointed_module_can_be_asked_for(engine):
    torch.manual_seed(0)
    case = Case(Checkpointed(), (torch.randn(5, 4),), squares).double()
    truth = loop_gradients(case)
    case.model.calls = 0
    torch.testing.assert_close(rows_of(captured(case, engine)), truth, rtol=1e-10, atol=1e-10)
    assert case.model.calls == 2  # forward and its recomputation; what replays add is undone


def test_checkpointing_in_a_functional_call_is_refused_since_it_would_go_forward_with_other_weights():
    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(5, 4).double()
    vi = slangvi.slang.build(
        lambda params, batch: -squares(functional_call(model, params, (batch,))),
        num_data=5,
        rank=1,
        lr=0.1,
        model=model,
    )
    state = vi.init(dict(model.named_parameters()))
    with pytest.raises(UnsupportedModuleError, match="activation checkpointing in a functional_call"):
        vi.update(state, x, generator=torch.Generator().manual_seed(0))
