"""Writes docs/licences.md: every direct dependency with the licence its installed package declares; `make licences`."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences of dependencies

slangvi is under the Apache License 2.0. It contains no code of the packages below; they are installed beside it. This
page is written by `make licences` from what the installed packages declare; a test fails when a direct dependency has
no row.

| package | needed by | licence |
|---|---|---|
"""


def direct() -> dict[str, list[str]]:
    """Return the direct dependencies and who needs them: a package, or an extra by its name."""
    found: dict[str, list[str]] = {}
    for file in ("pyproject.toml", "reproduction/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]
        extras = {f"[{extra}]": needs for extra, needs in project["optional-dependencies"].items()}
        for who, needs in {project["name"]: project["dependencies"], **extras}.items():
            for need in needs:
                name = re.match(r"[A-Za-z0-9._-]+", need)[0].lower()  # type: ignore[index]
                if name != "slangvi":
                    found.setdefault(name, []).append(who)
    return found


def licence(name: str) -> str:
    """As the installed package declares it: an expression, a short text, or classifiers."""
    try:
        told = metadata(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed: run make licences in the full environment.") from None
    classifiers = [c.rpartition(" :: ")[2] for c in told.get_all("Classifier", []) if c.startswith("License ::")]
    text = told.get("License") or ""
    short = text if 0 < len(text) <= 40 and "\n" not in text else ""
    return told.get("License-Expression") or short or ", ".join(classifiers) or "not declared"


def main() -> None:
    """Write the page."""
    rows = [f"| {name} | {', '.join(who)} | {licence(name)} |" for name, who in sorted(direct().items())]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
