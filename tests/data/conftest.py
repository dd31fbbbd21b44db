"""A cache of its own for every test, and a server to fill it from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Server, serving


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
