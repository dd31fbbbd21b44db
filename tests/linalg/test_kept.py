"""Properties that are computed once: what is kept has its history, wherever it was asked for first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slangvi.linalg.kept import kept


class Root:
    """Counts how often the root of its number is taken."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.times = x, 0

    @kept
    def root(self) -> Tensor:
        """The square root."""
        self.times += 1
        return self.x.sqrt()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_is_computed_once_and_can_be_differentiated(mode):
    x = torch.tensor(4.0, requires_grad=True)
    four = Root(x)
    with mode():
        assert float(four.root.detach()) == 2.0
    (slope,) = torch.autograd.grad(four.root, x)
    assert float(slope) == 0.25
    assert four.times == 1


def test_numbers_made_in_inference_mode_are_taken():
    with torch.inference_mode():
        four = Root(torch.tensor(4.0))
        inside = float(four.root)
    assert inside == float(four.root) == 2.0


def test_it_keeps_its_docstring():
    assert Root.root.__doc__ == "The square root."
