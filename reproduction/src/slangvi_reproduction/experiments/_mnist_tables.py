"""From finished cells on MNIST to the files of the experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi.files import put
from slangvi_reproduction.data import load_mnist
from slangvi_reproduction.experiments._about import about_run
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments._earlier import Earlier
from slangvi_reproduction.experiments._image_scores import METRICS
from slangvi_reproduction.experiments._image_tables import all_finished, means_over_seeds, method_of
from slangvi_reproduction.experiments._image_tuning import Tuning
from slangvi_reproduction.experiments._logistic_tables import Finished, Outcome, finished
from slangvi_reproduction.experiments._mnist_recipes import METHODS, NAME, OURS
from slangvi_reproduction.experiments.results import write_about, write_table
from slangvi_reproduction.experiments.settings import Settings

__all__ = ["COLUMNS", "PICTURED", "TRACE_COLUMNS", "TUNING", "TUNING_COLUMNS", "save"]

COLUMNS = ("method", *METRICS, "epochs", "seed")
TUNING = Tuning(("method",), lambda cell: (method_of(cell),))
TUNING_COLUMNS = TUNING.columns
TRACE_COLUMNS = ("method", "seed", "epoch", "test_error_percent", "test_nll")
# Methods whose predictions are kept, for pictures: few, as they take room.
PICTURED = ("slang_8", f"slang_8{OURS}", "bbb", "map", "ensemble_5")
UNCERTAIN = 36
_ORDER = list(METHODS)


def save(
    finals: Sequence[Cell], common: Mapping[str, Any], settings: Settings, start: float, earlier: Earlier
) -> Outcome:
    """Write the files; the JSON, which stands for all of them, last.

    Args:
        finals: all final cells of the experiment, finished or not.
        common: settings that all cells share.
        settings: what was chosen.
        start: of the run, by `perf_counter`.
        earlier: what the files have held so far.
    """
    tested, done = finished(finals, settings.cells), all_finished(finals, settings.cells)
    earlier.forget(cell for cell, _ in done)
    paths = [
        settings.out / f"{NAME}{end}" for end in (".csv", "-tuning.csv", "-trace.csv", "-predictions.npz", ".json")
    ]
    trace = [line for each in tested for line in _trace_lines(*each)]
    label_of_run = partial(_label_of_run, common["seed"])
    probs = _first_probs(tested) | _known_probs(paths[3], earlier)
    for path, columns, label, lines in (
        (paths[0], COLUMNS, label_of_run, [_line(*each) for each in tested]),
        (paths[1], TUNING_COLUMNS, TUNING.labels(finals), TUNING.lines(finals, done, paths[1])),
        (paths[2], TRACE_COLUMNS, label_of_run, trace),
    ):
        both = [*earlier.lines(path, columns, label), *lines]
        write_table(path, columns, sorted(both, key=lambda line: _ORDER.index(line[0])))
    _write_predictions(paths[3], probs)
    write_about(paths[4], about_run(NAME, done, common, settings, start, kept=earlier.cells))
    return Outcome(means_over_seeds(paths[0], COLUMNS, lambda line: NAME), paths)


# ---- lines ----


def _label_of_run(first_seed: int, line: Mapping[str, str]) -> str:
    """The cell behind a line of a trained network."""
    return f"{NAME} {line['method']}-seed{int(line['seed']) - first_seed}"


def _line(cell: Cell, stored: Any) -> tuple[Any, ...]:
    epochs = sum(epochs for _, epochs in cell.settings["stages"])
    values = (float(stored.arrays[name][0]) for name in METRICS)
    return (method_of(cell), *values, epochs, cell.settings["seed"])


def _trace_lines(cell: Cell, stored: Any) -> list[tuple[Any, ...]]:
    columns = (stored.arrays[f"trace_{name}"] for name in ("epochs", "error_percent", "nll"))
    return [
        (method_of(cell), cell.settings["seed"], int(e), float(a), float(b)) for e, a, b in zip(*columns, strict=True)
    ]


# ---- predictions ----


def _first_probs(tested: Sequence[Finished]) -> dict[str, NDArray[Any]]:
    """Predictions of the first seed of the methods they are kept of, in half precision."""
    first = {method_of(cell): stored.arrays["probs"] for cell, stored in reversed(tested)}
    return {method: first[method].astype(np.float16) for method in PICTURED if method in first and len(first[method])}


def _known_probs(path: Path, earlier: Earlier) -> dict[str, NDArray[Any]]:
    """The same, of methods that were trained elsewhere."""
    kept = [method for method in PICTURED if f"{NAME} {method}-seed0" in earlier.cells]
    if not kept:
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {method: file[f"{method}/probs"] for method in kept if f"{method}/probs" in file}


def _write_predictions(path: Path, probs: Mapping[str, NDArray[Any]]) -> None:
    """Predictions, the labels, and the images that the first of the methods is least sure of."""
    shown = [method for method in PICTURED if method in probs]
    arrays: dict[str, NDArray[Any]] = {f"{method}/probs": probs[method] for method in shown}
    if shown:
        test, first = load_mnist("test"), probs[shown[0]].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(first * np.log(first), axis=1)
        index = np.argsort(-entropy, kind="stable")[:UNCERTAIN]
        arrays["labels"] = test.y[: len(first)].numpy().astype(np.uint8)
        arrays["uncertain"] = index
        arrays["images"] = (255 * test.x[index]).round().numpy().astype(np.uint8)
    put(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))
