"""How good predictions for images are: on images like those of training, on turned ones, and on strangers."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi import metrics
from slangvi_reproduction.experiments._image_networks import CLASSES
from slangvi_reproduction.experiments._regression import outputs_of

__all__ = ["METRICS", "STRANGER_METRICS", "Drawn", "Predicted", "predict", "scores", "strangeness", "turned"]

METRICS = ("test_error_percent", "test_nll", "ece", "brier")
# By predictive entropy, and by mutual information.
STRANGER_METRICS = ("entropy_auroc", "entropy_fpr95", "information_auroc", "information_fpr95")
# Draws of the weights and images that are looked at together.
_DRAWS, _ROWS = 8, 2_000


class Drawn(Protocol):
    """Whatever draws weights: a `Learner`."""

    def draw(self, count: int) -> dict[str, Tensor]:
        """Name → (1, count, ...)."""


class Predicted(NamedTuple):
    """Predictions averaged over draws of the weights.

    Args:
        probs: (n, C) float64.
        expected_entropy: mean over draws of the entropy of each prediction, (n,).
    """

    probs: Tensor
    expected_entropy: Tensor

    @property
    def mutual_information(self) -> Tensor:
        """What the label would tell about the weights, nats, (n,)."""
        return (metrics.predictive_entropy(self.probs) - self.expected_entropy).clamp_min(0.0)


@torch.no_grad()
def predict(model: nn.Module, learner: Drawn, x: Tensor, draws: int) -> Predicted:
    """Predictive probabilities of inputs (n, ...), from so many draws of one network's weights, a few at a time."""
    probs = torch.zeros(len(x), CLASSES, dtype=torch.float64, device=x.device)
    entropy = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for first in range(0, draws, _DRAWS):
        weights = learner.draw(min(_DRAWS, draws - first))
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            # In float64, so that the mutual information of draws that agree is 0 and not rounding.
            each = outputs_of(model, weights, x[rows].unsqueeze(0))[0].double().softmax(-1)
            probs[rows] += each.sum(0)
            entropy[rows] += torch.special.entr(each).sum((0, 2))
    return Predicted(probs / draws, entropy / draws)


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """The four metrics."""
    found = (100 * (1 - metrics.accuracy(probs, y)), metrics.nll(probs, y), metrics.ece(probs, y))
    return dict(zip(METRICS, (*found, metrics.brier(probs, y)), strict=True))


def strangeness(inside: Predicted, outside: Predicted) -> dict[str, float]:
    """How well strangers are told, by either kind of uncertainty."""
    found = []
    for pair in (
        (metrics.predictive_entropy(inside.probs), metrics.predictive_entropy(outside.probs)),
        (inside.mutual_information, outside.mutual_information),
    ):
        found += [metrics.auroc(*pair), metrics.fpr95(*pair)]
    return dict(zip(STRANGER_METRICS, found, strict=True))


def turned(x: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise around their centre, linearly interpolated, 0 outside.

    Args:
        x: (n, 1, height, width).
        degrees: angle.

    Example:
        >>> turned(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90).round()
        tensor([[[[2., 4.], [1., 3.]]]])
    """
    angle = math.radians(degrees)
    matrix = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    theta = torch.tensor(matrix, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
