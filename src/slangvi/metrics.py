"""How good a prediction and its uncertainty are: pure functions of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slangvi import _checks
from slangvi.likelihoods import check_labels

__all__ = ["accuracy", "brier", "coverage", "ece", "interval_error", "mixture_nll", "nll", "rmse"]


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of examples whose most probable class is right; probs (n, C), labels (n,)."""
    _check(probs, labels)
    return float((probs.argmax(-1) == labels).double().mean())


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the true class, in nats; probs (n, C), labels (n,).

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), 4)
        0.6931
    """
    _check(probs, labels)
    chosen = probs.double().gather(-1, labels.long().unsqueeze(-1))
    return float(-chosen.clamp_min(torch.finfo(torch.float64).tiny).log().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance to the one-hot truth; probs (n, C), labels (n,)."""
    _check(probs, labels)
    truth = torch.nn.functional.one_hot(labels.long(), probs.shape[-1])
    return float((probs.double() - truth).square().sum(-1).mean())


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal-width bins.

    Example:
        >>> round(ece(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1])), 4)
        0.3
    """
    _check(probs, labels)
    bins = _checks.count("bins", bins)
    confidence, predicted = probs.double().max(-1)
    correct = (predicted == labels).double()
    # Bins are open below and closed above, as is usual; confidence 0 cannot occur.
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = confidence.new_zeros(bins).index_add_(0, place, correct - confidence)
    return float(gaps.abs().sum() / len(labels))


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Root mean squared error; both of the same shape."""
    _same_shape(mean, targets)
    return float((mean.double() - targets.double()).square().mean().sqrt())


def mixture_nll(means: Tensor, std: float | Tensor, targets: Tensor) -> float:
    """Mean of −log (1/S) Σ_s N(y | f_s, σ²), in nats: the log of the averaged likelihood.

    Args:
        means: f_s, (S, n, ...).
        std: σ of the noise, broadcast against `means`.
        targets: (n, ...).

    Example:
        >>> round(mixture_nll(torch.zeros(2, 3, 1), 1.0, torch.zeros(3, 1)), 4)
        0.9189
    """
    _same_shape(means[0], targets)
    normal = torch.distributions.Normal(means.double(), torch.as_tensor(std, dtype=torch.float64))
    logs = normal.log_prob(targets.double()).reshape(len(means), len(targets), -1).sum(-1)
    return float(-(logs.logsumexp(0) - math.log(len(means))).mean())


def coverage(draws: Tensor, targets: Tensor, level: float) -> float:
    """Share of targets inside the central interval that holds `level` of the predictive draws.

    Args:
        draws: predictive draws, noise included, (S, n, ...).
        targets: (n, ...).
        level: between 0 and 1.

    Example:
        >>> coverage(torch.linspace(-1, 1, 101).unsqueeze(1), torch.tensor([0.3]), 0.5)
        1.0
    """
    _same_shape(draws[0], targets)
    level = _checks.number("level", level, 0.0, 1.0)
    tails = torch.tensor([0.5 - level / 2, 0.5 + level / 2], dtype=draws.dtype, device=draws.device)
    low, high = torch.quantile(draws, tails, dim=0)
    return float(((targets >= low) & (targets <= high)).double().mean())


def interval_error(draws: Tensor, targets: Tensor) -> float:
    """Calibration error of a regression: mean |coverage − level| over levels 0.1, 0.2, …, 0.9."""
    levels = [k / 10 for k in range(1, 10)]
    return sum(abs(coverage(draws, targets, level) - level) for level in levels) / len(levels)


def _same_shape(mean: Tensor, targets: Tensor) -> None:
    _checks.tensors(predictions=mean, targets=targets)
    if mean.shape != targets.shape:
        raise ValueError(
            f"predictions and targets must have the same shape, got {tuple(mean.shape)} and {tuple(targets.shape)}."
        )
    if targets.numel() == 0:
        raise ValueError("there is nothing to score: give at least one example.")


def _check(probs: Tensor, labels: Tensor) -> None:
    _checks.tensors(probs=probs, labels=labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"probs must be (n, C) and labels (n,) with n ≥ 1, got {tuple(probs.shape)} and {tuple(labels.shape)}."
        )
    if not bool(((probs >= 0) & (probs <= 1 + 1e-4)).all()):
        raise ValueError("probs must lie in [0, 1], got values outside or NaN. Pass probabilities, not logits.")
    check_labels(labels, probs.shape[-1])
