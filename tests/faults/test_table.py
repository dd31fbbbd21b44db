"""Every fault of the table is held by tests that exist and are collected, or says why not."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from faults.table import FAULTS

TESTS = Path(__file__).parents[1]
REPRODUCTION = TESTS.parent / "reproduction"


@cache
def collected(file: str) -> set[str]:
    """Names pytest collects from a file: functions at its top that are called test_."""
    path = TESTS / file
    if file.startswith("reproduction/"):
        path = REPRODUCTION / "tests" / file.removeprefix("reproduction/")
    assert path.name.startswith("test_"), f"{file} is not collected"
    return {n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("number", FAULTS)
def test_the_fault_is_held(number):
    fault = FAULTS[number]
    assert bool(fault.tests) != bool(fault.absent), "either tests or the reason why there are none"
    for name in fault.tests:
        file, _, function = name.partition("::")
        assert function.startswith("test_")
        assert function in collected(file), f"{name} is gone: name its successor"


def test_the_list_is_whole():
    """Numbers that are missing here were never given."""
    never = {6, 13, 23, 29, 30, 44, 47, 49, 56}
    assert set(FAULTS) == set(range(1, 61)) - never
