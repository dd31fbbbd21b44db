"""Pictures of predictions and their uncertainty; they need matplotlib (`pip install 'slangvi[plot]'`).

Every function draws on the axes it is given, or on new ones, and returns them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slangvi import checks, metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confidence_histogram", "entropy_histograms", "most_uncertain", "reliability_diagram", "risk_coverage_curve"]


def reliability_diagram(
    probs: Tensor, labels: Tensor, bins: int = 15, ax: Axes | None = None, label: str | None = None
) -> Axes:
    """Accuracy against confidence; on the diagonal a prediction is as good as it says.

    Args:
        probs: (n, C).
        labels: (n,).
        bins: of equal width.
        ax: axes to draw on; None makes new ones.
        label: of the line in a legend.

    Example:
        >>> axes = reliability_diagram(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]), bins=5)
        >>> axes.get_xlabel(), axes.get_ylabel()
        ('confidence', 'accuracy')
    """
    found = metrics.reliability(probs, labels, bins)
    there = found.size > 0
    ax = _axes(ax)
    ax.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=0)
    ax.plot(found.confidence[there].tolist(), found.accuracy[there].tolist(), marker="o", ms=4, lw=1.3, label=label)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    return _finished(ax, label)


def confidence_histogram(
    probs: Tensor, labels: Tensor, bins: int = 20, ax: Axes | None = None, label: str | None = None
) -> Axes:
    """How many predictions are how sure, with their mean confidence (dashed) and their accuracy (solid).

    Args:
        probs: (n, C).
        labels: (n,).
        bins: of equal width between 0 and 1.
        ax: axes to draw on; None makes new ones.
        label: of the bars in a legend.
    """
    right, sure = metrics.accuracy(probs, labels), probs.double().max(-1).values.clamp_max(1.0)
    ax = _axes(ax)
    edges = torch.linspace(0, 1, checks.count("bins", bins) + 1).tolist()
    ax.hist(sure.tolist(), bins=edges, weights=[1 / len(labels)] * len(labels), alpha=0.6, label=label)
    color = ax.patches[-1].get_facecolor()[:3]
    ax.axvline(float(sure.mean()), color=color, ls="--", lw=1.3)
    ax.axvline(right, color=color, ls="-", lw=1.3)
    ax.set(xlabel="confidence", ylabel="share of examples", xlim=(0, 1))
    return _finished(ax, label)


def risk_coverage_curve(
    probs: Tensor, labels: Tensor, uncertainty: Tensor | None = None, ax: Axes | None = None, label: str | None = None
) -> Axes:
    """The error rate if only the surest predictions are given, against their share.

    Args:
        probs: (n, C).
        labels: (n,).
        uncertainty: (n,), highest withheld first; None takes 1 − confidence.
        ax: axes to draw on; None makes new ones.
        label: of the line in a legend.
    """
    found = metrics.risk_coverage(probs, labels, uncertainty)
    ax = _axes(ax)
    ax.plot(found.coverage.tolist(), found.risk.tolist(), lw=1.3, label=label)
    ax.set(xlabel="coverage", ylabel="error rate", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    return _finished(ax, label)


def entropy_histograms(probs: Mapping[str, Tensor], bins: int = 40, ax: Axes | None = None) -> Axes:
    """Predictive entropies of several sets of inputs over each other, such as known ones and strangers.

    Args:
        probs: name → (n, C), with the same C.
        bins: of equal width between 0 and log C.
        ax: axes to draw on; None makes new ones.
    """
    if not probs or len({each.shape[-1] for each in probs.values()}) != 1:
        shapes = {name: tuple(each.shape) for name, each in probs.items()}
        raise ValueError(f"probs must be one or more of (n, C) with the same C, got {shapes}.")
    most = math.log(max(2, next(iter(probs.values())).shape[-1]))  # one class has no entropy at all
    edges = torch.linspace(0, most, checks.count("bins", bins) + 1).tolist()
    ax = _axes(ax)
    for name, each in probs.items():
        # Rounding may put even predictions beyond log C, where there is no bin.
        inside = metrics.predictive_entropy(each).double().clamp(edges[0], edges[-1])
        ax.hist(inside.tolist(), bins=edges, density=True, alpha=0.5, label=name)
    ax.set(xlabel="predictive entropy, nats", ylabel="density", xlim=(0, most))
    return _finished(ax, "names")


def most_uncertain(
    images: Tensor, probs: Tensor, labels: Tensor | None = None, count: int = 25, ax: Axes | None = None
) -> Axes:
    """The images whose predictions have the highest entropy, highest first, each with its prediction.

    Args:
        images: (n, height, width), dark is 0.
        probs: (n, C).
        labels: (n,), the truth; a prediction is then written as "predicted (truth)", in red where they differ.
        count: images to show.
        ax: axes to draw on; None makes new ones.
    """
    if images.ndim != 3 or len(images) != len(probs) or len(images) == 0:
        raise ValueError(
            f"images must be (n, height, width) and probs (n, C) with the same n ≥ 1, got {tuple(images.shape)} and "
            f"{tuple(probs.shape)}."
        )
    order = metrics.predictive_entropy(probs).argsort(descending=True)[: checks.count("count", count)]
    ax = _axes(ax)
    height, width = images.shape[1:]
    columns = math.ceil(math.sqrt(len(order)))
    ax.imshow(_mosaic(images[order].detach().cpu(), columns).numpy(), cmap="gray")
    for place, k in enumerate(order.tolist()):
        row, column = divmod(place, columns)
        predicted = int(probs[k].argmax())
        wrong = labels is not None and int(labels[k]) != predicted
        text = str(predicted) if labels is None else f"{predicted} ({int(labels[k])})"
        color = "tomato" if wrong else "lightgreen"
        ax.text((column + 0.04) * width, (row + 0.04) * height, text, color=color, fontsize=8, va="top")
    ax.set_axis_off()
    return ax


def _mosaic(images: Tensor, columns: int) -> Tensor:
    """Images (k, h, w) in rows of a grid, (rows · h, columns · w); what is left over is 0."""
    rows = math.ceil(len(images) / columns)
    padded = torch.cat([images, images.new_zeros(rows * columns - len(images), *images.shape[1:])])
    grid: Tensor = padded.unflatten(0, (rows, columns))
    return grid.transpose(1, 2).flatten(2).flatten(0, 1)


def _axes(ax: Axes | None) -> Axes:
    """Those given, or new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'slangvi[plot]'") from error
    return plt.subplots(layout="constrained")[1]


def _finished(ax: Axes, label: str | None) -> Axes:
    ax.grid(alpha=0.3)
    if label is not None:
        ax.legend(fontsize=8)
    return ax
