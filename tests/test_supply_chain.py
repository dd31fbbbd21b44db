"""What is promised about what is installed: licences are listed, and a wheel is built the same twice."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_direct_dependency_has_a_licence_on_the_page():
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w.-]+) \| .*? \| (.+) \|$", page, re.M))
    rows.pop("package")
    direct = runpy.run_path(str(ROOT / "tools" / "licences.py"))["direct"]()
    assert set(rows) == set(direct), "run make licences"
    assert not [name for name, licence in rows.items() if licence == "not declared"]


def test_the_core_needs_three_packages():
    direct = runpy.run_path(str(ROOT / "tools" / "licences.py"))["direct"]()
    assert {name for name, who in direct.items() if "slangvi" in who} == {"torch", "numpy", "safetensors"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_wheel_is_built_the_same_twice():
    result = subprocess.run(["make", "wheel"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same twice" in result.stdout
