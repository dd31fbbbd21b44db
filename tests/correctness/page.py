"""Measures every oracle and writes the tables of docs/correctness.md: `make correctness`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from correctness.conformance import CHECKS
from correctness.oracles import ORACLES, Oracle

PAGE = Path(__file__).parents[2] / "docs" / "correctness.md"
REMEDY = "run `make correctness`."
MARK = "<!-- {} by make correctness -->"


def cells(oracle: Oracle) -> list[str]:
    """A row of the page without its last cell, the error."""
    return [oracle.name, oracle.what, oracle.reference, oracle.unit, f"{oracle.tolerance:g}"]


def rows(text: str) -> list[list[str]]:
    """The rows of the table of oracles on the page."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in _between(text, "measured").splitlines()[2:]]


def oracles() -> str:
    """The table of oracles, freshly measured."""
    lines = ["| oracle | of slangvi | reference | unit | allowed | measured |", "|---|---|---|---|---|---|"]
    for oracle in ORACLES:
        torch.manual_seed(20181203)  # as the tests do
        lines.append("| " + " | ".join([*cells(oracle), f"{oracle.measure():.1e}"]) + " |")
    return "\n".join(lines)


def checks() -> str:
    """The list of checks of the optimizers."""
    return "\n".join(f"- `{name}`: {check.__doc__}" for name, check in CHECKS.items())


def _between(text: str, name: str) -> str:
    start, stop = MARK.format(name), MARK.format(f"end of {name}")
    return text.partition(start)[2].partition(stop)[0].strip()


def _filled(text: str, name: str, table: str) -> str:
    start, stop = (re.escape(MARK.format(n)) for n in (name, f"end of {name}"))
    return re.sub(f"({start}\n).*?({stop})", lambda m: m[1] + table + "\n" + m[2], text, flags=re.S)


def main() -> None:
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_filled(_filled(text, "measured", oracles()), "checked", checks()), encoding="utf-8")


if __name__ == "__main__":
    main()
