"""Tests on real data: they run where SLANGVI_DATA has the files, as fetching them is not a test's business."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest

from slangvi_reproduction.data.remote import locate
from slangvi_reproduction.data.sets import Row

ROOT = os.environ.get("SLANGVI_DATA", "")


def require(*datasets: Row) -> None:
    """Skip unless all files of these are in the cache."""
    if not ROOT:
        pytest.skip("SLANGVI_DATA is not set")
    missing = [file.path for dataset in datasets for file in dataset.files if locate(file) is None]
    if missing:
        pytest.skip(f"SLANGVI_DATA has no {missing[0]}")


def every(table: Mapping[str, Row], *names: str) -> Callable:
    """Run a test with the fixture `real` once for each of these rows of a table."""
    parameters = pytest.mark.parametrize("real", [table[name] for name in names], ids=names, indirect=True)
    return lambda test: pytest.mark.data(parameters(test))
