"""Writes docs/loops.md from the scripts in examples/loops; `make loops-page`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "loops.md"
HEAD = """# Your training loop, with the lines that change

Each section is a script in `examples/loops` that trains the same network with Adam and with SLANG, on data it makes
itself, and prints the negative log-likelihood of held-out data for both. Lines with `-` are Adam's, lines with `+` are
SLANG's. This page is written from the scripts by `make loops-page`, and a test fails when the two differ.

Three ways lead to a draw of the weights and back to the mean. They do the same; take the one that fits your loop.

| way | where |
|---|---|
| `with opt.sampled_params(train=True):` around forward and backward | loops of your own |
| `opt.train()` before forward; `opt.step()` or `opt.eval()` ends the block | loops that somebody else wrote |
| `opt.step(closure)` | closures, as Lightning's |

Each block has one draw. Several before one `step()` are several Monte-Carlo samples, or micro-batches that are
accumulated. A `backward()` outside a block is not used by the step, and a warning says so. A `with` puts the mean back
when something raises; after `opt.train()` call `opt.eval()` yourself then (Ctrl-C in a notebook), or the model that you
go on with, or save, has the weights of a draw. Where the numbers of each step can go is on [Tracking](tracking.md).

Adam runs without weight decay or early stopping. The four loops with `temperature=0.1` got their settings on data sets
of other seeds. On further ones, used for nothing else, the mean held-out NLL of Adam and of SLANG was 0.290 and 0.281
(BERT, six data sets, in a plain loop with Trainer's falling rate), 0.426 and 0.388 (LoRA, six), 0.213 and 0.212 (the
last layer, eight), 0.221 and 0.225 (some parameters, eight). The one data set that a script prints may say otherwise:
there SLANG is behind with LoRA and with some parameters.

`pip install '.[loops]'` installs what the scripts need; `make loops` runs them all.
"""


def section(loop: Any) -> str:
    """One loop: heading, what it needs, the changed lines, and a note."""
    needs = f" Needs {' and '.join(f'`{name}`' for name in loop.needs)}." if loop.needs else ""
    lines = "\n".join(line[:1] + line[2:] if line[2:] else line[:1].rstrip() for line in loop.diff())
    note = f"\n{loop.note}\n" if loop.note else ""
    return f"\n## {loop.title}\n\n`examples/loops/{loop.file}`.{needs}\n\n```diff\n{lines}\n```\n{note}"


def page() -> str:
    """The whole page."""
    loops = runpy.run_path(str(ROOT / "examples" / "loops" / "table.py"))["LOOPS"]
    return HEAD + "".join(section(loop) for loop in loops.values())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
