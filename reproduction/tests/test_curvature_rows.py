"""The table of rows of curvature on the page of settings is that of the results."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("curvature_rows", ROOT / "reproduction/benchmarks/curvature_rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_results(script):
    results = json.loads(script.PLACE.read_text(encoding="utf-8"))["results"]
    assert script.markdown(results) in (ROOT / "docs/settings.md").read_text(encoding="utf-8")


def test_a_run_that_diverged_is_a_dash_and_one_that_is_missing_is_blank(script):
    assert script.summary([{"nll": 1.0}, {"nll": 3.0}]) == {"nll": [2.0, math.sqrt(2)]}
    nothing = script.summary([{"nll": 1.0}, {"nll": math.nan}])
    table = script.markdown({"task": {"4": nothing, "all": {"nll": [2.0, 0.5]}}})
    assert table.splitlines()[-1] == "| task: NLL | – |  |  |  | 2 ± 0.5 |"
