"""What the tests of loops in examples/loops share: how a script is loaded, and draws that are held still."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import slangvi

FOLDER = Path(__file__).parents[2] / "examples" / "loops"


def load(name: str):
    """A script of the folder as a module; what it needs besides torch may be missing."""
    sys.path.insert(0, str(FOLDER))
    try:
        table = importlib.import_module("table")
        for package in table.LOOPS[name].needs if name in table.LOOPS else ():
            pytest.importorskip(package, reason=f"{package} is not installed: make loops installs it")
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


LOOPS = load("table").LOOPS


class Still(slangvi.SLANG):
    """SLANG whose draws are all the same distance from the mean, so that micro-batches share their draw."""

    def _draw(self, state, generator):
        return state.loc + 0.01


def assert_same_step(a, b):
    """The same posterior up to the rounding of float32, relative to the size of each part."""
    pairs = [(getattr(a._state, name), getattr(b._state, name)) for name in ("loc", "prec_diag", "momentum")]
    U, V = a._state.prec_factor, b._state.prec_factor
    for x, y in [*pairs, (U.T @ U, V.T @ V)]:
        assert float((x - y).norm()) <= 1e-5 * float(x.norm())
