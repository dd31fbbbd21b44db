"""Pages whose code runs: their blocks, what these print, and the pictures they write. `make pages` renews both."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
# Pages whose code reads data sets that have to be fetched.
FETCHING = ("docs/data.md",)
# A block of Python, and the block of output that may follow it.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```output\n(?P<shown>.*?)^```\n)?", re.M | re.S)
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
# How far a number on a page may be from the one a machine gets: others round otherwise, and training amplifies that.
RELATIVE, ABSOLUTE = 0.25, 0.06


def pages() -> list[str]:
    """All pages with Python in them, README first; a source archive may not have all."""
    found = [page for page in ("README.md", "CONTRIBUTING.md") if (ROOT / page).is_file()]
    found += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("[!_]*.md"))]
    return [page for page in found if page not in FETCHING and BLOCK.search(text_of(page))]


def text_of(page: str) -> str:
    """The source of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def run(page: str) -> Iterator[tuple[str | None, str]]:
    """Run the blocks of a page in the working folder, one by one: what is shown of each, and what it printed."""
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "page"}
    for k, block in enumerate(BLOCK.finditer(text_of(page))):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], f"{page} block {k}", "exec"), namespace)
        yield block["shown"], printed.getvalue()


def words(text: str) -> list[str]:
    """A text without its numbers and spaces."""
    return NUMBER.sub(" # ", text).split()


def alike(shown: str, printed: str) -> bool:
    """Whether two outputs have the same words, and numbers that differ by no more than machines do."""
    if words(shown) != words(printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(_near(*(float(x.replace(",", "").replace("−", "-")) for x in pair)) for pair in pairs)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= max(ABSOLUTE, RELATIVE * abs(a))


def renew(page: str) -> None:
    """Write what the blocks of a page print, where it is shown, and keep the pictures that the page shows."""
    text, here = text_of(page), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            outputs = iter([printed for _, printed in run(page)])
        finally:
            os.chdir(here)
        for picture in Path(folder).glob("*.png"):
            if f"images/{picture.name}" in text:
                shutil.copy(picture, IMAGES / picture.name)

    def filled(block: re.Match[str]) -> str:
        printed = next(outputs)
        return block[0] if block["shown"] is None else f"```python\n{block['code']}```\n\n```output\n{printed}```\n"

    (ROOT / page).write_text(BLOCK.sub(filled, text), encoding="utf-8")


def main(chosen: list[str]) -> None:
    """Renew the pages named, or all."""
    torch.set_num_threads(1)
    for page in chosen or pages():
        renew(page)


if __name__ == "__main__":
    main(sys.argv[1:])
