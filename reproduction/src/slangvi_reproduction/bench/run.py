"""One run of one benchmark: the rates of the machine, the rows, and what one must know to repeat it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from slangvi.environment import environment
from slangvi_reproduction.bench import load_bench
from slangvi_reproduction.bench._measure import Step, median_seconds
from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.record import Record, Settings

__all__ = ["environment_of", "measure_rates", "run"]

PEERS = ("ivon-opt", "evon", "pyro-ppl", "laplace-torch", "torchvision", "transformers")


def run(name: str, settings: Settings) -> Record:
    """Measure a benchmark of the table."""
    start = time.perf_counter()
    settings.say("rates of the machine")
    rates = measure_rates(settings)
    rows = load_bench(name).rows(settings, rates)
    return Record(name, environment_of(name, settings, time.perf_counter() - start), rates, rows)


def environment_of(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """What one must know to repeat a run."""
    quick = " --quick" if settings.quick else ""
    command = f"slangvi bench {name} --device {settings.device} --repeats {settings.repeats}{quick}"
    return environment(command, settings.device, seconds) | {"peers": versions(PEERS)}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Name → version of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def measure_rates(settings: Settings) -> Rates:
    """Operations per second of a large float32 product, and bytes per second, read and written, of a large copy."""
    large = settings.device == "cuda"
    side = 256 if settings.quick else 8192 if large else 2048
    length = 1 << (20 if settings.quick else 28 if large else 26)
    # Random numbers, because products of ones heat a chip less and so run faster than real ones.
    generator = torch.Generator(settings.device).manual_seed(0)
    a, b, product = (torch.rand(side, side, device=settings.device, generator=generator) for _ in range(3))
    source, sink = (torch.zeros(length, device=settings.device) for _ in range(2))
    steps: dict[int, Step] = {0: lambda: torch.mm(a, b, out=product), 1: lambda: sink.copy_(source)}
    for step in steps.values():
        step()
    seconds = median_seconds(steps, settings)
    return Rates(2 * side**3 / seconds[0], 2 * source.nbytes / seconds[1])
