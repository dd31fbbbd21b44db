"""Sphinx settings. The build reads this repository only; nothing is fetched."""

import re
from typing import Any

from slangvi import __version__

project = "slangvi"
author = "The slangvi authors"
copyright = "The slangvi authors, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas are shown without a network too
]
exclude_patterns = ["_build", "_architecture_notes.md", "_performance_notes.md", "_results_notes.md"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
math_eqref_format = "({number})"

html_theme = "furo"
html_title = f"slangvi {version}"
html_static_path = ["_static"]
html_css_files = ["slangvi.css"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 100
python_use_unqualified_type_names = True


# Docstrings are written to be read in an editor: `names` in single backticks, maths between dollars. Sphinx wants
# reStructuredText, so both are translated, outside doctests, before napoleon reads the sections.


def _display(match: re.Match[str]) -> str:
    indent, formula = match[1], " ".join(match[2].split())
    return f"\n{indent}.. math:: {formula}\n"


def to_rst(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Translate one docstring in place."""
    text = re.sub(r"^( *)\$\$(.+?)\$\$$", _display, "\n".join(lines), flags=re.M | re.S)
    lines[:] = [line if line.lstrip().startswith((">>>", "...")) else _inline(line) for line in text.split("\n")]


def _inline(line: str) -> str:
    line = re.sub(r"(?<![`:])`([^`]+)`(?![`_])", r"``\1``\\ ", line)
    line = re.sub(r"\$([^$]+)\$", r":math:`\1`", line)
    line = re.sub(r"(^\s*|: )([A-Z]\.)$", r"\1\\\2", line)  # "N." is no list item
    return re.sub(r"\*(?=\w+[,)])|(?<!\S)\|(?=\w)", r"\\\g<0>", line)  # (*shape, P) and |x| are just characters


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples, which their class describes under Args."""
    return True if "Alias for field number" in (getattr(obj, "__doc__", None) or "") else None


def setup(app: Any) -> None:
    """Translate before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", to_rst, priority=400)
    app.connect("autodoc-skip-member", skip)
