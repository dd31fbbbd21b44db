"""From a table to a fitted model: a check on held-out rows first, then a fit on all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import DataError
from slangvi.estimators import SLANGClassifier, SLANGRegressor
from slangvi.tabular.model import Classes, Model, Network, Numbers
from slangvi.tabular.reading import Table
from slangvi.tabular.schema import Schema, counters, infer
from slangvi.tabular.scores import score
from slangvi.tabular.size import check_size
from slangvi.tabular.target import Target, find_target, held_out

__all__ = ["Settings", "fit"]

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
Found = Callable[[Target, Schema, int, dict[str, int]], None]

# Held-out predictions kept for the report, and rows kept with all their cells.
KEPT, SHOWN, CELL = 5000, 20, 100


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Args:
        target: column to predict.
        task: "classification", "regression", or None to find out.
        exclude: columns that are not used.
        rank: L.
        epochs: passes over the rows.
        hidden: widths of the hidden layers.
        prior_precision: λ.
        temperature: 𝒯; every row counts 1/𝒯 times.
        seed: of the held-out rows, initial weights and draws.
        device: to train on.
        refit: learn from all rows after the check.
    """

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
    """Fit a model, and keep with it how it did on rows it had not seen.

    Args:
        table: all columns and rows.
        settings: what to do.
        progress: called with a label, the epochs done and their number.
        found: called before training with the target, what becomes of the columns, the rows used, and what stands in
            place of a target in rows that are left out, with counts.

    Raises:
        DataError: the table has nothing to learn from, or the network does not fit into memory.
    """
    unknown = [name for name in settings.exclude if name not in table.columns]
    if unknown:
        raise DataError(f"there is no column {unknown[0]!r} to exclude. Columns are {list(table.columns)[:20]}.")
    if settings.target in settings.exclude:
        raise DataError(f"the target {settings.target!r} cannot be excluded.")
    counting = counters(table)
    target, rows = find_target(table.without(settings.exclude), settings.target, settings.task)
    left_out = _left_out(table, rows, settings.target)
    y, inputs = target.encode(rows), rows.without([settings.target])
    train, held = held_out(target, y, settings.seed)
    part = inputs.take(train.tolist())
    first = infer(part, counting)
    last = infer(inputs, counting) if settings.refit else first
    if found is not None:
        found(target, last, len(rows), left_out)
    check_size([last.features, *settings.hidden, target.outputs], settings.rank, settings.device)
    model = _fitted(part, first, y[train], target, settings, progress, "four fifths")
    record = _judged(model, rows.take(held.tolist()), y[held], y[train])
    if settings.refit:
        model = _fitted(inputs, last, y, target, settings, progress, "all rows")
    record |= {"rows": len(rows), "without_target": sum(left_out.values()), "left_out": left_out}
    record |= {"settings": asdict(settings)}
    return Model(model.schema, model.target, model.network, model.posterior, record)


def _left_out(table: Table, rows: Table, name: str) -> dict[str, int]:
    """Cells of the target in rows that are not used → how often, commonest first."""
    used = set(rows.lines)
    cells = (cell for line, cell in zip(table.lines, table.columns[name], strict=True) if line not in used)
    return dict(Counter(cells).most_common())


def _fitted(
    inputs: Table, schema: Schema, y: Array, target: Target, settings: Settings, progress: Progress, label: str
) -> Model:
    estimator, mean, scale = _estimator(target, settings, y)
    done = iter(range(1, settings.epochs + 1))
    estimator.set_params(verbose=lambda line: progress(label, next(done), settings.epochs))
    progress(label, 0, settings.epochs)
    estimator.fit(schema.encode(inputs), y if target.task == "classification" else (y - mean) / scale)
    network = Network(
        features=schema.features,
        hidden=settings.hidden,
        outputs=target.outputs,
        activation=estimator.activation,
        samples=estimator.predict_samples,
        seed=settings.seed % 2**31,
        mean=mean,
        scale=scale,
        noise=estimator.noise_std_ if target.task == "regression" else None,
    )
    found = estimator.posterior_
    posterior = LowRankPrecisionNormal(found.loc.cpu(), found.prec_factor.cpu(), found.prec_diag.cpu())
    return Model(schema, target, network, posterior, {})


def _estimator(target: Target, settings: Settings, y: Array) -> tuple[Any, float, float]:
    """With the mean and scale of its targets; inputs and targets are scaled here, so that the folder tells it all."""
    options: dict[str, Any] = {
        "hidden_layer_sizes": settings.hidden,
        "rank": settings.rank,
        "prior_precision": settings.prior_precision,
        "temperature": settings.temperature,
        "max_iter": settings.epochs,
        "random_state": settings.seed % 2**31,
        "device": settings.device,
        "standardize": False,
    }
    if target.task == "classification":
        return SLANGClassifier(**options), 0.0, 1.0
    spread = float(y.std())
    return SLANGRegressor(**options), float(y.mean()), spread if spread > 0 else 1.0


def _judged(model: Model, rows: Table, y: Array, seen: Array) -> dict[str, Any]:
    """Scores on held-out rows, and what a report shows of them."""
    inputs = model.schema.encode(rows)
    predicted = model.predict(inputs)
    unsure = np.argsort(-_uncertainty(predicted), kind="stable")[:SHOWN]
    picked = slice(None) if len(y) <= KEPT else np.linspace(0, len(y) - 1, KEPT).round().astype(int)
    kept = {name: values[picked].tolist() for name, values in vars(predicted).items()}
    return {
        "held_out_rows": len(y),
        "scores": score(model, inputs, y, predicted, seen),
        "held_out": {"target": y[picked].tolist(), **kept},
        "most_uncertain": [_shown(rows, int(k), predicted, model.target, model.schema) for k in unsure],
    }


def _uncertainty(predicted: Numbers | Classes) -> Array:
    return predicted.entropy if isinstance(predicted, Classes) else predicted.std


def _shown(rows: Table, k: int, predicted: Numbers | Classes, target: Target, schema: Schema) -> dict[str, Any]:
    cells = {column.name: rows.columns[column.name][k][:CELL] for column in schema.columns[:SHOWN]}
    told = {"line": rows.lines[k], "target": rows.columns[target.name][k][:CELL], "cells": cells}
    told["epistemic_share"] = float(predicted.epistemic_share[k])
    if isinstance(predicted, Classes):
        best = int(predicted.probs[k].argmax())
        return told | {"class": target.classes[best], "probability": float(predicted.probs[k, best])}
    return told | {"mean": float(predicted.mean[k]), "std": float(predicted.std[k])}
