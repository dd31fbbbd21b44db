"""The table on the page of curvatures is that of the results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("curvatures", ROOT / "reproduction/benchmarks/curvatures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_results(script):
    record = json.loads(script.PLACE.read_text(encoding="utf-8"))
    page = (ROOT / "docs/curvature.md").read_text(encoding="utf-8")
    assert script.markdown(record["results"]) in page
    assert set(record["results"]) == set(script.TASKS)


def test_a_run_that_diverged_says_so(script):
    table = script.markdown({"toy": {"ef, eig": {}, "ggn, em": {"NLL": [0.123456, 0.01]}}})
    assert table.splitlines()[-1].startswith("| toy: NLL | diverged |")
    assert "0.123 ± 0.01" in table
