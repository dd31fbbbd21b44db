"""A cache of its own for every test, and a server to fill it from; real data where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fake_server import Server, serving
from helpers.real_data import require
from slangvi_reproduction.data.sets import Row


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLANGVI_DATA", str(tmp_path / "cache"))
    monkeypatch.delenv("SLANGVI_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Row:
    """A data set whose files are in the cache; `helpers.real_data.every` says which."""
    require(request.param)
    return request.param
