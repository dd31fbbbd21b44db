"""One quick run of each benchmark, with as few steps as there can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from slangvi_reproduction.bench import _measure
from slangvi_reproduction.bench.record import Record, Settings
from slangvi_reproduction.bench.run import run


@pytest.fixture(scope="session")
def quick_run() -> Callable[[str], Record]:
    @cache
    def once(name: str) -> Record:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_measure, "WARMUP", 1)
            patch.setattr(_measure, "SAMPLE_SECONDS", 0.0)
            return run(name, Settings(quick=True, repeats=1))

    return once
