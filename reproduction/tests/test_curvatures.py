"""The table on the page of curvatures is that of the results."""

from __future__ import annotations

import json

import pytest

from helpers.scripts import ROOT, benchmark


@pytest.fixture(scope="module")
def script():
    return benchmark("curvatures")


def test_the_page_shows_the_results(script):
    record = json.loads(script.PLACE.read_text(encoding="utf-8"))
    page = (ROOT / "docs/curvature.md").read_text(encoding="utf-8")
    assert script.markdown(record["results"]) in page
    assert set(record["results"]) == set(script.TASKS)


def test_a_run_that_diverged_says_so(script):
    table = script.markdown({"toy": {"ef, eig": {}, "ggn, em": {"NLL": [0.123456, 0.01]}}})
    assert table.splitlines()[-1].startswith("| toy: NLL | diverged |")
    assert "0.123 ± 0.01" in table
