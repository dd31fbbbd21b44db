"""Golden runs: the results of twenty steps are those that are stored, whatever the core is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from golden.runs import FILE, Run, all_runs

RUNS = list(all_runs())


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    with np.load(FILE) as file:
        return dict(file)


def test_the_file_is_small_and_holds_nothing_else(stored):
    assert FILE.stat().st_size < 300_000
    assert {name.split("|")[0] for name in stored} == {run.key for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_a_run_ends_where_it_ended(run: Run, stored):
    expected = {name.split("|")[1]: value for name, value in stored.items() if name.split("|")[0] == run.key}
    found = run.compute()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9 * np.nanmax(np.abs(value)), err_msg=name)
