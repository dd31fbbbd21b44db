"""From finished cells on MNIST to the files of the experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slangvi._files import put
from slangvi.data import load_mnist
from slangvi.experiments._about import about_run
from slangvi.experiments._cells import Cell
from slangvi.experiments._image_scores import METRICS
from slangvi.experiments._image_tables import all_finished, method_of
from slangvi.experiments._logistic_tables import Finished, Outcome, finished
from slangvi.experiments._mnist_recipes import NAME
from slangvi.experiments._results import Row, aggregate, write_about, write_table
from slangvi.experiments._settings import Settings

__all__ = ["COLUMNS", "PICTURED", "TRACE_COLUMNS", "TUNING_COLUMNS", "save"]

COLUMNS = ("method", *METRICS, "epochs", "seed")
_SETTINGS = ("neg_log_sigma", "rate", "temperature")
TUNING_COLUMNS = ("method", *_SETTINGS, "validation_error_percent", "validation_nll", "chosen")
TRACE_COLUMNS = ("method", "seed", "epoch", "test_error_percent", "test_nll")
# Methods whose predictions are kept, for pictures: few, as they take room.
PICTURED = ("slang_8", "slang_8_cold", "bbb", "map", "ensemble_5")
UNCERTAIN = 36


def save(finals: Sequence[Cell], common: Mapping[str, Any], settings: Settings, start: float) -> Outcome:
    """Write the files; the JSON, which stands for all of them, last.

    Args:
        finals: all final cells of the experiment, finished or not.
        common: settings that all cells share.
        settings: what was chosen.
        start: of the run, by `perf_counter`.
    """
    tested, done = finished(finals, settings.cells), all_finished(finals, settings.cells)
    paths = [
        settings.out / f"{NAME}{end}" for end in (".csv", "-tuning.csv", "-trace.csv", "-predictions.npz", ".json")
    ]
    write_table(paths[0], COLUMNS, [_line(*each) for each in tested])
    write_table(paths[1], TUNING_COLUMNS, _tuning_lines(finals, done))
    write_table(paths[2], TRACE_COLUMNS, [line for each in tested for line in _trace_lines(*each)])
    _write_predictions(paths[3], tested)
    write_about(paths[4], about_run(NAME, done, common, settings, start))
    return Outcome(_rows(tested), paths)


def _line(cell: Cell, stored: Any) -> tuple[Any, ...]:
    epochs = sum(epochs for _, epochs in cell.settings["stages"])
    values = (float(stored.arrays[name][0]) for name in METRICS)
    return (method_of(cell), *values, epochs, cell.settings["seed"])


def _rows(tested: Sequence[Finished]) -> list[Row]:
    """Means over seeds, for the table that is shown."""
    methods = dict.fromkeys(method_of(cell) for cell, _ in tested)
    return [
        aggregate(NAME, name, method, [float(s.arrays[name][0]) for cell, s in tested if method_of(cell) == method])
        for name in METRICS
        for method in methods
    ]


def _tuning_lines(finals: Sequence[Cell], done: Sequence[Finished]) -> list[tuple[Any, ...]]:
    """Every setting that was tried, and whether it was chosen."""
    results = {cell.label: stored for cell, stored in done}
    lines, seen = [], set()
    for final in finals:
        ended = results.get(final.label)
        for number, (cell, setting) in enumerate(zip(final.needs, final.settings["grid"], strict=False)):
            if cell.label in seen or (stored := results.get(cell.label)) is None:
                continue
            seen.add(cell.label)
            values = (*setting.values(), 1.0)[: len(_SETTINGS)]  # not cooled unless it says so
            measured = [float(stored.arrays[name][0]) for name in METRICS[:2]]
            picked = "" if ended is None else int(int(ended.arrays["choice"]) == number)
            lines.append((method_of(cell), *values, *measured, picked))
    return lines


def _trace_lines(cell: Cell, stored: Any) -> list[tuple[Any, ...]]:
    columns = (stored.arrays[f"trace_{name}"] for name in ("epochs", "error_percent", "nll"))
    return [
        (method_of(cell), cell.settings["seed"], int(e), float(a), float(b)) for e, a, b in zip(*columns, strict=True)
    ]


def _write_predictions(path: Path, tested: Sequence[Finished]) -> None:
    """Predictions of the first seed in half precision, the labels, and the images some method is least sure of."""
    first = {method_of(cell): stored.arrays["probs"] for cell, stored in reversed(tested)}
    probs = {method: first[method] for method in PICTURED if method in first and len(first[method])}
    arrays: dict[str, NDArray[Any]] = {f"{method}/probs": p.astype(np.float16) for method, p in probs.items()}
    if probs:
        test = load_mnist("test")
        shown = next(iter(probs.values()))
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(shown * np.log(shown), axis=1)
        index = np.argsort(-entropy, kind="stable")[:UNCERTAIN]
        arrays["labels"] = test.y[: len(shown)].numpy().astype(np.uint8)
        arrays["uncertain"] = index
        arrays["images"] = (255 * test.x[index]).round().numpy().astype(np.uint8)
    put(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))
