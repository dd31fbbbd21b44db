"""Scores of held-out predictions, beside a baseline that knows no inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slangvi import metrics
from slangvi.tabular.model import Classes, Model, Numbers

__all__ = ["LEVELS", "coverages", "score"]

Array = NDArray[Any]
Scores = dict[str, float]

LEVELS = tuple(k / 10 for k in range(1, 10))


def coverages(predicted: Numbers, y: Array) -> list[float]:
    """Return the share of targets (n,) inside the central interval of each of `LEVELS`.

    Example:
        >>> sure = Numbers(np.zeros(4), np.ones(4), np.zeros(4))
        >>> coverages(sure, np.array([0.0, 0.1, -1.0, 5.0]))[:3]
        [0.5, 0.5, 0.5]
    """
    places = torch.special.ndtr(torch.from_numpy((y - predicted.mean) / predicted.std)).numpy()
    return [float((np.abs(2 * places - 1) <= level).mean()) for level in LEVELS]


def score(model: Model, inputs: Array, y: Array, predicted: Numbers | Classes, seen: Array) -> dict[str, Scores]:
    """Return NLL, RMSE or accuracy, and calibration error of the model and of the baseline on held-out rows.

    The baseline predicts the mean and standard deviation, or the class frequencies, of `seen`, the targets that were
    trained on. The calibration error of a regression is the mean of |coverage − level| over nine levels, that of
    classes the expected calibration error.
    """
    if isinstance(predicted, Classes):
        shares = np.bincount(seen, minlength=model.target.outputs) / len(seen)
        constant = np.tile(shares, (len(y), 1))
        return {"model": _class_scores(predicted.probs, y), "baseline": _class_scores(constant, y)}
    spread = float(seen.std()) or 1.0
    flat = Numbers(np.full(len(y), seen.mean()), np.full(len(y), spread), np.zeros(len(y)))
    losses, start = 0.0, 0
    for means in model.means(inputs):
        part = torch.from_numpy(y[start : start + means.shape[1]])
        losses += metrics.mixture_nll(means, model.noise, part) * len(part)
        start += len(part)
    plain = metrics.mixture_nll(torch.from_numpy(flat.mean)[None], spread, torch.from_numpy(y))
    return {"model": _number_scores(predicted, y, losses / len(y)), "baseline": _number_scores(flat, y, plain)}


def _class_scores(probs: Array, y: Array) -> Scores:
    p, labels = torch.from_numpy(probs), torch.from_numpy(y)
    return _plain("accuracy", metrics.nll(p, labels), metrics.accuracy(p, labels), metrics.ece(p, labels))


def _number_scores(predicted: Numbers, y: Array, nll: float) -> Scores:
    gaps = [abs(share - level) for share, level in zip(coverages(predicted, y), LEVELS, strict=True)]
    rmse = metrics.rmse(torch.from_numpy(predicted.mean), torch.from_numpy(y))
    return _plain("rmse", nll, rmse, sum(gaps) / len(gaps))


def _plain(name: str, nll: float, value: float, ece: float) -> Scores:
    """Return scores that JSON can hold, which has no infinity; a calibration error of rounding alone is 0."""
    scores = {"nll": nll, name: value, "ece": round(ece, 12)}
    return {key: number if math.isfinite(number) else 1e308 for key, number in scores.items()}
