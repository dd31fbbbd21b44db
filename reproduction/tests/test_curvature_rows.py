"""The table of rows of curvature on the page of settings is that of the results."""

from __future__ import annotations

import json
import math

import pytest

from helpers.scripts import ROOT, benchmark


@pytest.fixture
def script():
    return benchmark("curvature_rows")


def test_the_page_shows_the_results(script):
    results = json.loads(script.PLACE.read_text(encoding="utf-8"))["results"]
    assert script.markdown(results) in (ROOT / "docs/settings.md").read_text(encoding="utf-8")


def test_a_run_that_diverged_is_a_dash_and_one_that_is_missing_is_blank(script):
    assert script.summary([{"nll": 1.0}, {"nll": 3.0}]) == {"nll": [2.0, math.sqrt(2)]}
    nothing = script.summary([{"nll": 1.0}, {"nll": math.nan}])
    table = script.markdown({"task": {"4": nothing, "all": {"nll": [2.0, 0.5]}}})
    assert table.splitlines()[-1] == "| task: NLL | – |  |  |  | 2 ± 0.5 |"
