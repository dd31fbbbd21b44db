"""The table on the page of settings is that of the results."""

from __future__ import annotations

import json
import sys

import pytest

from helpers.scripts import ROOT, benchmark


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "reproduction" / "benchmarks"))  # it has the tasks of another script
    try:
        return benchmark("defaults")
    finally:
        sys.path.pop(0)


def test_the_page_shows_the_results(script):
    found = json.loads(script.PLACE.read_text(encoding="utf-8"))["results"]
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert script.markdown({name: found[name] for name in script.TASKS if name in found}) in page
    assert set(found) <= set(script.TASKS)


def test_tuned_is_the_best_of_the_search_and_no_other_run(script):
    found = {"defaults": {"KL": [0.1, 0.0]}, "paper": {}, "lr 0.1": {"KL": [2.0, 0.2]}, "lr 0.2": {"KL": [1.0, 0.1]}}
    assert script.best(found, "KL") == [1.0, 0.1]
    assert script.best({**found, "lr 0.2": {}}, "KL") == [2.0, 0.2]
    row = script.markdown({"toy": found}).splitlines()[-1]
    assert row == "| toy: KL | 0.1 ± 0 | diverged | 1 ± 0.1 |"
    elbos = {"lr 0.1": {"ELBO / N": [-3.0, 0.2]}, "lr 0.2": {"ELBO / N": [-1.0, 0.1]}}
    assert script.best(elbos, "ELBO / N") == [-1.0, 0.1]
