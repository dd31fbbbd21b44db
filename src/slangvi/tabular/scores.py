"""How good held-out predictions are, beside a baseline that knows no inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slangvi import metrics
from slangvi.tabular.model import Classes, Model, Numbers

__all__ = ["LEVELS", "coverages", "readable", "score"]

Array = NDArray[Any]
Scores = dict[str, float]

LEVELS = tuple(k / 10 for k in range(1, 10))


def readable(value: float) -> str:
    """Four digits, without powers of ten for what people count in thousands, such as prices.

    Example:
        >>> readable(0.03636), readable(43328.1), readable(1e15), readable(1.5e-15)
        ('0.03636', '43,328', '1e+15', '1.5e-15')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def coverages(predicted: Numbers, y: Array) -> list[float]:
    """Share of targets (n,) inside the central interval of each of `LEVELS`.

    Example:
        >>> sure = Numbers(np.zeros(4), np.ones(4), np.zeros(4))
        >>> coverages(sure, np.array([0.0, 0.1, -1.0, 5.0]))[:3]
        [0.5, 0.5, 0.5]
    """
    places = torch.special.ndtr(torch.from_numpy((y - predicted.mean) / predicted.std)).numpy()
    return [float((np.abs(2 * places - 1) <= level).mean()) for level in LEVELS]


def score(model: Model, inputs: Array, y: Array, predicted: Numbers | Classes, seen: Array) -> dict[str, Scores]:
    """NLL, RMSE or accuracy, and calibration error of the model and of the baseline.

    The baseline predicts the mean and standard deviation, or the class frequencies, of the rows that were trained on.
    The calibration error of a regression is the mean of |coverage − level| over nine levels, that of classes the
    expected calibration error.

    Args:
        model: fitted on other rows.
        inputs: of the held-out rows, (n, D).
        y: their targets, (n,).
        predicted: for them.
        seen: targets that were trained on.
    """
    if isinstance(predicted, Classes):
        shares = np.bincount(seen, minlength=model.target.outputs) / len(seen)
        return {"model": _of_classes(predicted.probs, y), "baseline": _of_classes(np.tile(shares, (len(y), 1)), y)}
    spread = float(seen.std()) or 1.0
    flat = Numbers(np.full(len(y), seen.mean()), np.full(len(y), spread), np.zeros(len(y)))
    losses, start = 0.0, 0
    for means in model.means(inputs):
        part = torch.from_numpy(y[start : start + means.shape[1]])
        losses += metrics.mixture_nll(means, model.noise, part) * len(part)
        start += len(part)
    plain = metrics.mixture_nll(torch.from_numpy(flat.mean)[None], spread, torch.from_numpy(y))
    return {"model": _of_numbers(predicted, y, losses / len(y)), "baseline": _of_numbers(flat, y, plain)}


def _of_classes(probs: Array, y: Array) -> Scores:
    p, labels = torch.from_numpy(probs), torch.from_numpy(y)
    return _finite(
        nll=metrics.nll(p, labels), accuracy=metrics.accuracy(p, labels), ece=_rounded(metrics.ece(p, labels))
    )


def _of_numbers(predicted: Numbers, y: Array, nll: float) -> Scores:
    gaps = [abs(share - level) for share, level in zip(coverages(predicted, y), LEVELS, strict=True)]
    rmse = metrics.rmse(torch.from_numpy(predicted.mean), torch.from_numpy(y))
    return _finite(nll=nll, rmse=rmse, ece=_rounded(sum(gaps) / len(gaps)))


def _rounded(ece: float) -> float:
    """What is left of differences by rounding would only confuse; other scores may be as small as their targets."""
    return round(ece, 12)


def _finite(**scores: float) -> Scores:
    """JSON has no infinity; a probability of zero for what happened is as bad as the largest number."""
    return {name: value if math.isfinite(value) else 1e308 for name, value in scores.items()}
