"""The rooms of the library from the ground up, what they import, and docs/architecture.md, which shows both.

`PYTHONPATH=tests python -m house` writes the page from the docstrings of the modules; `make pages` runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LIBRARY, REPRODUCTION = ROOT / "src" / "slangvi", ROOT / "reproduction" / "src" / "slangvi_reproduction"

# Each room imports from the lines above its own, and from itself.
LAYERS = (
    ("errors", "files", "types", "keywords", "environment"),
    ("checks", "out_of_memory"),
    ("params", "linalg", "quadrature"),
    ("distributions", "rows", "likelihoods", "schedules"),
    ("priors",),
    ("divergence", "metrics", "grads"),
    ("settings", "plots"),
    ("optimizer",),
    ("methods",),
    ("replicas", "memory", "checkpoint", "tracking", "data"),
    ("predict",),
    ("diagnosis",),
    ("estimators",),
    ("tabular",),
    ("cli",),
)

HEAD = """\
<!-- Written by `make pages` from docstrings of modules. Edit those, tests/house.py or _architecture_notes.md. -->

# Architecture

For readers of the source: what lies where, who may import whom, and how a step walks through it. The library is
`src/slangvi`; what reproduces the paper and measures peers is a package of its own beside it, `reproduction/`.

"""
IMPORTS = """\
## Imports go one way

A room is a package or a module right below `slangvi`. It imports from the layers above its own row, and from itself. No
package imports a private module (`_name.py`) of another. Tests read the source and fail when that does not hold.

"""


def source_files(folder: Path) -> dict[str, Path]:
    """Return the modules below a package's folder: dotted name → file."""
    return {
        ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
    }


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0].removesuffix(".")


def tree(folder: Path, indent: int = 0) -> Iterator[tuple[str, str]]:
    """Return a line for each module and package below a folder: its name, indented, and what it is."""
    entries = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    for path in sorted(entries, key=lambda path: (path.is_file(), path.name.lstrip("_"))):
        if path.is_dir():
            yield f"{'  ' * indent}{path.name}/", first_line(path / "__init__.py")
            yield from tree(path, indent + 1)
        elif path.name not in ("__init__.py", "__main__.py", "_version.py"):
            yield f"{'  ' * indent}{path.name}", first_line(path)


def block(title: str, folder: Path) -> str:
    """Return the tree of a package as a block of text."""
    lines = list(tree(folder, indent=1))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(["```text", title, *(f"{name:<{width}}{what}".rstrip() for name, what in lines), "```"])


def layers() -> str:
    """Return the table of layers."""
    rows = [f"| {height} | {', '.join(f'`{room}`' for room in layer)} |" for height, layer in enumerate(LAYERS)]
    return "\n".join(["| layer | rooms |", "|---:|---|", *rows])


def page() -> str:
    """Return the whole page."""
    parts = [
        HEAD + "## The library\n\n" + block("src/slangvi/", LIBRARY),
        "## The reproduction\n\n" + block("reproduction/src/slangvi_reproduction/", REPRODUCTION),
        IMPORTS + layers(),
        "```{include} _architecture_notes.md\n```",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
