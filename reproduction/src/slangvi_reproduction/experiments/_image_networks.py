"""Networks for images of 28 × 28, a row each. All are sequences that end in a linear layer for ten classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CLASSES", "NETWORKS", "lenet", "mlp", "network", "resnet"]

CLASSES = 10
_SIDE, _GROUPS = 28, 8


def mlp(hidden: Sequence[int]) -> nn.Sequential:
    """Layers of rectified units."""
    layers: list[nn.Module] = [nn.Flatten(1)]
    for width, after in zip([_SIDE * _SIDE, *hidden], [*hidden, CLASSES], strict=True):
        layers += [nn.Linear(width, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Sequential:
    """LeNet-5 with rectified units and maxima: two convolutions and three linear layers, 61,706 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(1), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


class _Block(nn.Module):
    """Two convolutions and a shortcut, which is a convolution too where the width changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(_GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, outputs)
        self.short = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet(widths: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """A residual network with GroupNorm, a block for each width; the first layer halves the image."""
    first = widths[0]
    stem = (nn.Conv2d(1, first, 3, 2, padding=1, bias=False), nn.GroupNorm(_GROUPS, first), nn.ReLU())
    blocks = (_Block(inputs, outputs) for inputs, outputs in zip((first, *widths), widths, strict=False))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(widths[-1], CLASSES))
    return nn.Sequential(*stem, *blocks, *head)


NETWORKS: dict[str, Callable[[Mapping[str, Any]], nn.Sequential]] = {
    "mlp": lambda settings: mlp(settings["hidden"]),
    "lenet": lambda settings: lenet(),
    "resnet": lambda settings: resnet(),
}


def network(settings: Mapping[str, Any], seed: int | None = None) -> nn.Sequential:
    """The network that settings name, with torch's own initial weights; the caller's random state is left alone.

    Args:
        settings: with "network", and "hidden" for "mlp".
        seed: of the weights; None goes on from the caller's.
    """
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return NETWORKS[settings["network"]](settings)
