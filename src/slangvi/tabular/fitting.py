"""From a table to a fitted model: a check on held-out rows first, then a fit on all of them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slangvi import metrics
from slangvi.diagnosis import diagnose
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import DataError
from slangvi.estimators import SLANGClassifier, SLANGRegressor
from slangvi.estimators.network import num_weights
from slangvi.memory import estimate_memory
from slangvi.out_of_memory import human
from slangvi.tabular.model import LEVELS, Classes, Model, Network, Numbers
from slangvi.tabular.reading import Table
from slangvi.tabular.schema import Schema, counters, infer
from slangvi.tabular.target import Target, find_target, held_out

__all__ = ["Settings", "fit", "score"]

Array = NDArray[Any]
Scores = dict[str, float]
Progress = Callable[[str, int, int], None]
Found = Callable[[Target, Schema, int, dict[str, int]], None]

# Held-out predictions kept for the report, rows and columns kept with their cells, and characters of a cell.
KEPT, SHOWN, CELL = 5000, 20, 100
# Smaller networks fit anywhere, and are not worth the seconds of a plan.
LARGE = 1_000_000
# Of a step of the estimators: rows at most, and draws.
ROWS, DRAWS = 32, 4


@dataclass(frozen=True)
class Settings:
    """Options of `slangvi fit`; a task of None is found from the target, `refit` learns from all rows in the end."""

    target: str
    task: str | None = None
    exclude: tuple[str, ...] = ()
    rank: int = 4
    epochs: int = 100
    hidden: tuple[int, ...] = (50,)
    prior_precision: float = 1.0
    temperature: float = 1.0
    seed: int = 0
    device: str = "cpu"
    refit: bool = True


def fit(table: Table, settings: Settings, progress: Progress, found: Found | None = None) -> Model:
    """Fit a model, and keep with it how it did on rows it had not seen; raise a `DataError` if it cannot be done.

    Progress is called with a label, the epochs done and their number; `found` before training with the target, the
    schema, the number of rows used, and the cells in place of a target in rows that are left out, with counts.
    """
    unknown = [name for name in settings.exclude if name not in table.columns]
    if unknown:
        raise DataError(f"there is no column {unknown[0]!r} to exclude. Columns are {list(table.columns)[:20]}.")
    if settings.target in settings.exclude:
        raise DataError(f"the target {settings.target!r} cannot be excluded.")
    counting = counters(table)
    target, rows = find_target(table.without(settings.exclude), settings.target, settings.task)
    kept, lines = set(rows.lines), zip(table.lines, table.columns[settings.target], strict=True)
    left_out = dict(Counter(cell for line, cell in lines if line not in kept).most_common())
    y, inputs = target.encode(rows), rows.without([settings.target])
    train, held = held_out(target, y, settings.seed)
    part = inputs.take(train.tolist())
    first = infer(part, counting)
    last = infer(inputs, counting) if settings.refit else first
    if found is not None:
        found(target, last, len(rows), left_out)
    check_size([last.features, *settings.hidden, target.outputs], settings.rank, settings.device)
    model = _train(part, first, y[train], target, settings, progress, "four fifths")
    record = _evaluate(model, rows.take(held.tolist()), y[held], y[train])
    if settings.refit:
        model = _train(inputs, last, y, target, settings, progress, "all rows")
    used = {"rows": len(rows), "without_target": sum(left_out.values()), "left_out": left_out}
    record |= {**used, "settings": asdict(settings), **model.record}
    return Model(model.schema, model.target, model.network, model.posterior, record)


def check_size(sizes: Sequence[int], rank: int, device: str) -> None:
    """Raise a `DataError` if training would take more memory than there is; sizes are the widths of all layers."""
    num_params, there = num_weights(sizes), memory_of(device)
    if num_params < LARGE or there is None:
        return
    with torch.device("meta"):
        layers = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.ReLU())]
        model, batch = nn.Sequential(*layers[:-1]).double(), torch.empty(ROWS, sizes[0], dtype=torch.float64)
    needed = estimate_memory(model, batch, rank, DRAWS).peak
    if needed > there:
        raise DataError(
            f"a network of {num_params:,} weights with a posterior of rank {rank} takes {human(needed)} to train, and "
            f"{'this machine' if device == 'cpu' else 'the GPU'} has {human(there)}. Choose fewer or narrower --hidden "
            "layers, or a lower --rank."
        )


def memory_of(device: str) -> int | None:
    """Return the bytes of memory of the machine or the GPU; None where the system does not tell."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def _train(
    inputs: Table, schema: Schema, y: Array, target: Target, settings: Settings, progress: Progress, label: str
) -> Model:
    done = iter(range(1, settings.epochs + 1))
    options: dict[str, Any] = {
        "hidden_layer_sizes": settings.hidden,
        "rank": settings.rank,
        "prior_precision": settings.prior_precision,
        "temperature": settings.temperature,
        "max_iter": settings.epochs,
        "random_state": settings.seed % 2**31,
        "device": settings.device,
        "standardize": False,  # inputs and targets are scaled here, so that the folder has all of the model
        "verbose": lambda line: progress(label, next(done), settings.epochs),
    }
    progress(label, 0, settings.epochs)
    regression, mean, scale = target.task == "regression", 0.0, 1.0
    if regression:
        mean, scale = float(y.mean()), float(y.std()) or 1.0
        y = (y - mean) / scale
    estimator = SLANGRegressor(**options) if regression else SLANGClassifier(**options)
    estimator.fit(schema.encode(inputs), y)
    network = Network(
        features=schema.features,
        hidden=settings.hidden,
        outputs=target.outputs,
        activation=estimator.activation,
        samples=estimator.predict_samples,
        seed=settings.seed % 2**31,
        mean=mean,
        scale=scale,
        noise=estimator.noise_std_ if regression else None,
    )
    found = estimator.posterior_
    posterior = LowRankPrecisionNormal(found.loc.cpu(), found.prec_factor.cpu(), found.prec_diag.cpu())
    told = diagnose(estimator, (schema.encode(inputs), y), draws=2)
    findings = [asdict(finding) for finding in told.findings]
    record = {"diagnosis": {"summary": told.summary, "table": told.table, "findings": findings}}
    return Model(schema, target, network, posterior, record)


def _evaluate(model: Model, rows: Table, y: Array, seen: Array) -> dict[str, Any]:
    """Return scores on held-out rows, and what a report shows of them; `seen` are targets that were trained on."""
    inputs = model.schema.encode(rows)
    predicted = model.predict(inputs)
    uncertainty = predicted.entropy if isinstance(predicted, Classes) else predicted.std
    unsure = np.argsort(-uncertainty, kind="stable")[:SHOWN]
    picked = slice(None) if len(y) <= KEPT else np.linspace(0, len(y) - 1, KEPT).round().astype(int)
    kept = {name: values[picked].tolist() for name, values in vars(predicted).items()}
    return {
        "held_out_rows": len(y),
        "scores": score(model, inputs, y, predicted, seen),
        "held_out": {"target": y[picked].tolist(), **kept},
        "most_uncertain": [_row_record(model, rows, int(k), predicted) for k in unsure],
    }


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
    gaps = [abs(share - level) for share, level in zip(predicted.coverages(y), LEVELS, strict=True)]
    rmse = metrics.rmse(torch.from_numpy(predicted.mean), torch.from_numpy(y))
    return _plain("rmse", nll, rmse, sum(gaps) / len(gaps))


def _plain(name: str, nll: float, value: float, ece: float) -> Scores:
    """Return scores that JSON can hold, which has no infinity; a calibration error of rounding alone is 0."""
    scores = {"nll": nll, name: value, "ece": round(ece, 12)}
    return {key: number if math.isfinite(number) else 1e308 for key, number in scores.items()}


def _row_record(model: Model, rows: Table, k: int, predicted: Numbers | Classes) -> dict[str, Any]:
    """Return one held-out row and its prediction as plain values."""
    record = {
        "line": rows.lines[k],
        "target": rows.columns[model.target.name][k][:CELL],
        "cells": {column.name: rows.columns[column.name][k][:CELL] for column in model.schema.columns[:SHOWN]},
        "epistemic_share": float(predicted.epistemic_share[k]),
    }
    if isinstance(predicted, Classes):
        best = int(predicted.probs[k].argmax())
        return record | {"class": model.target.classes[best], "probability": float(predicted.probs[k, best])}
    return record | {"mean": float(predicted.mean[k]), "std": float(predicted.std[k])}
