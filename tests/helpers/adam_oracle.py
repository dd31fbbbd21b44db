"""What the tests of methods that move by Adam share: torch's own Adam on an objective written out, and a tape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.fake_cuda import Tape


class Descent:
    """Leaves moved by `torch.optim.Adam` on a function of them; autograd takes the gradient."""

    def __init__(self, *leaves: Tensor, lr: float = 0.05, **options: object) -> None:
        self.leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        self.adam = torch.optim.Adam(self.leaves, lr=lr, **options)

    def step(self, objective: Callable[..., Tensor]) -> list[Tensor]:
        self.adam.zero_grad()
        objective(*self.leaves).sum().backward()
        self.adam.step()
        return [leaf.detach().clone() for leaf in self.leaves]


def replayed(function: Callable[..., object], buffers: list[Tensor], later: list[Tensor]) -> object:
    """What a function of buffers gives when its operations are recorded once and played with other contents.

    The tape refuses to look at a number.
    """
    tape = Tape([], [])
    with torch.no_grad(), tape:
        result = function(*buffers)
    for place, value in zip(buffers, later, strict=True):
        place.copy_(value)
    tape.play()
    return result
