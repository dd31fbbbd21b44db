"""Scripts that no package holds, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]


def benchmark(name: str) -> ModuleType:
    """Return a script of reproduction/benchmarks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "reproduction/benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
