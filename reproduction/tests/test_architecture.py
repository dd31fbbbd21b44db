"""Who may import whom, read from the source: the library's private modules are its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import slangvi_reproduction

ROOT = Path(slangvi_reproduction.__file__).parent
FILES = {
    ".".join(("slangvi_reproduction", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imported(name: str) -> set[str]:
    """Modules and names that a module imports anywhere, with the path to each."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("name", FILES)
def test_no_package_imports_what_is_private_in_another(name):
    for path in imported(name):
        parts = path.split(".")
        if parts[0] in ("slangvi", "slangvi_reproduction") and path != "slangvi.__version__":
            private = [k for k, part in enumerate(parts) if part.startswith("_")]
            assert not private or is_within(name, ".".join(parts[: private[0]])), path


@pytest.mark.parametrize("name", FILES)
def test_rooms_import_one_way(name):
    """Data know nobody; experiments and benchmarks do not know each other; only commands know the command line."""
    forbidden = {
        "data": ("experiments", "bench", "cli"),
        "experiments": ("bench", "cli"),
        "bench": ("experiments", "cli"),
        "cli": (),
    }
    room = name.split(".")[1] if "." in name else ""
    for other in forbidden.get(room, ()):
        assert not any(is_within(path, f"slangvi_reproduction.{other}") for path in imported(name))


@pytest.mark.parametrize("name", FILES)
def test_modules_explain_themselves(name):
    assert ast.get_docstring(ast.parse(FILES[name].read_text(encoding="utf-8")))
