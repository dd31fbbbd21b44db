"""Routes: what may be asked for."""

from __future__ import annotations

import copy
import pickle

import pytest

from slangvi.types import Routes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "formed"}, r"layers must say 'auto', 'form' or 'factor', got 'formed'"),
        ({"layers": {"a": "form", "*": "both"}}, r"layers must say 'auto', 'form' or 'factor', got 'both'"),
        ({"spectrum": "exact"}, r"spectrum must be 'auto', 'gram' or 'randomized', got 'exact'"),
        ({"form_bytes": -1}, r"form_bytes must be a number of bytes ≥ 0, got -1"),
        ({"chunk_bytes": -5}, r"chunk_bytes must be a number of bytes ≥ 0, got -5"),
    ],
)
def test_impossible_routes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Routes(**options)


@pytest.mark.parametrize("layers", ["auto", "form", "factor", {}, {"a.*": "auto", "b": "form", "c": "factor"}])
@pytest.mark.parametrize("spectrum", ["auto", "gram", "randomized"])
def test_possible_routes_are_accepted_and_copied(layers, spectrum):
    routes = Routes(layers, spectrum, 0, 0)
    assert routes == copy.deepcopy(routes) == pickle.loads(pickle.dumps(routes))


def test_nothing_is_larger_than_the_memory_limit():
    routes = Routes("form", "gram", form_bytes=100, chunk_bytes=10)
    assert routes.within(None) is routes
    assert routes.within(1000) == routes
    assert routes.within(50) == Routes("form", "gram", 50, 10)
    assert routes.within(5) == Routes("form", "gram", 5, 5)


def test_the_first_name_or_glob_that_fits_counts():
    routes = Routes({"head.weight": "form", "*.weight": "factor", "head.*": "form", "[ab].bias": "factor"})
    found = {
        name: routes.layer(name) for name in ("head.weight", "a.weight", "head.bias", "a.bias", "c.bias", "HEAD.bias")
    }
    assert found == {
        "head.weight": "form",
        "a.weight": "factor",
        "head.bias": "form",
        "a.bias": "factor",
        "c.bias": "auto",
        "HEAD.bias": "auto",
    }
    assert {Routes(word).layer("anything") for word in ("form", "factor", "auto")} == {"form", "factor", "auto"}
