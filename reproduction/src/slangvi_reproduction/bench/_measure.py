"""Time and memory of one step: medians of interleaved repeats, and the peak of what a contender holds."""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from slangvi_reproduction.bench._live_bytes import LiveBytes
from slangvi_reproduction.bench.record import Row, Settings

__all__ = ["BASELINE", "FLOOR", "Contender", "Step", "compare", "failure_message", "measure"]

Step = Callable[[], object]
BASELINE = "adam"  # what ratios are relative to
FLOOR = "forward and backward"  # what extra memory is relative to
WARMUP = 5
IGNORED = ("There is a performance drop", "Full backward hook is firing")  # vmap's and BackPACK's ways
SAMPLE_SECONDS = 0.1  # a sample shorter than this is made of several steps


@dataclass(frozen=True)
class Contender:
    """Something that can take a training step.

    Args:
        name: of the row.
        make: builds model, state and inputs, and returns the step.
        settings: of the row.
        peer: somebody else's code, or ours where others are still to be measured: it may fail in any way, and the row
            says how.
        note: what a step is, where that needs saying.
        warmup: steps before the clock starts; more where the first steps are not like the rest.
    """

    name: str
    make: Callable[[], Step]
    settings: Mapping[str, int | str] = field(default_factory=dict)
    peer: bool = False
    note: str = ""
    warmup: int = WARMUP


def measure(contenders: Sequence[Contender], settings: Settings, together: bool = True) -> list[Row]:
    """A row for each contender: peak memory of one after the other, then times with all of them taking turns.

    Args:
        contenders: in the order of the rows.
        settings: of the run.
        together: False where they do not fit into memory side by side: each is then timed on its own.
    """
    if not together:
        return [row for contender in contenders for row in measure([contender], settings)]
    rows, steps = [], {}
    with warnings.catch_warnings():
        for told in IGNORED:
            warnings.filterwarnings("ignore", told)
        for index, contender in enumerate(contenders):
            settings.say(" ".join([contender.name, *(f"{k}={v}" for k, v in contender.settings.items())]))
            row = Row(contender.name, contender.settings, note=contender.note)
            try:
                peak = peak_bytes(contender.make, settings.device)
                steps[index] = _warm(contender.make(), contender.warmup)
                rows.append(replace(row, peak_mb=peak / 1e6))
            except Exception as error:
                if not contender.peer and not isinstance(error, (ModuleNotFoundError, torch.OutOfMemoryError)):
                    raise
                rows.append(replace(row, skipped=failure_message(error)))
        for index, seconds in median_seconds(steps, settings).items():
            rows[index] = replace(rows[index], milliseconds=1e3 * seconds)
    return rows


def compare(rows: Sequence[Row]) -> list[Row]:
    """Times relative to Adam's, and memory beyond a plain backward pass, where these two were measured."""
    by_name = {row.name: row for row in rows}
    time_of = by_name[BASELINE].milliseconds if BASELINE in by_name else None
    floor = by_name[FLOOR].peak_mb if FLOOR in by_name else None
    return [
        replace(
            row,
            ratio=row.milliseconds / time_of if row.milliseconds and time_of else None,
            extra_mb=row.peak_mb - floor if row.peak_mb is not None and floor is not None else None,
        )
        for row in rows
    ]


def failure_message(error: Exception) -> str:
    """Return one line that says why nothing was measured."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed (see reproduction/README.md)"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _warm(step: Step, count: int = WARMUP) -> Step:
    for _ in range(count):
        step()
    return step


# ---- time ----


def median_seconds(steps: Mapping[int, Step], settings: Settings) -> dict[int, float]:
    """Median over repeats of the seconds a step takes; contenders take turns, so that noise hits all alike."""
    seconds = _cuda_seconds if settings.device == "cuda" else _cpu_seconds
    counts = {key: max(1, math.ceil(SAMPLE_SECONDS / seconds(step, 1))) for key, step in steps.items()}
    samples: dict[int, list[float]] = {key: [] for key in steps}
    for _ in range(settings.repeats):
        for key, step in steps.items():
            if counts[key] > 1:
                step()  # not timed: what the others have pushed out of the caches comes back
            samples[key].append(seconds(step, counts[key]) / counts[key])
    return {key: statistics.median(values) for key, values in samples.items()}


def _cpu_seconds(step: Step, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start


def _cuda_seconds(step: Step, count: int) -> float:  # pragma: no cover
    """By events, so that the wait for the host at the end is not counted but the host's delays in between are."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# ---- memory ----


def peak_bytes(make: Callable[[], Step], device: str) -> int:
    """Most bytes held during a warm step by what `make` built and the step itself, not timed."""
    if device == "cuda":  # pragma: no cover
        # The first contender to use a library pays for its workspace, so the smaller of two is the contender's own.
        return min(_cuda_peak(make), _cuda_peak(make))
    memory = LiveBytes()
    with memory:
        step = _warm(make())
        memory.peak = memory.live
        step()
    return memory.peak


def _cuda_peak(make: Callable[[], Step]) -> int:  # pragma: no cover
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = int(torch.cuda.memory_allocated()) + _graph_bytes()
    step = _warm(make())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) + _graph_bytes() - before


def _graph_bytes() -> int:  # pragma: no cover
    """Memory that CUDA graphs keep for what they make inside, which the allocator counts as free."""
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in pools)
