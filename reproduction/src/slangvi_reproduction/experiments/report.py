"""The page docs/results.md: written from the results, never by hand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from slangvi_reproduction.experiments import EXPERIMENTS, choosing, module_name
from slangvi_reproduction.experiments.results import read_about

__all__ = ["write"]

HEAD = """\
<!-- Written by `slangvi reproduce report` from the folder reproduction/results. Edit _results_notes.md instead. -->

# Results

The paper's experiments, run again with this library. Every number of ours on this page was computed by `slangvi
reproduce NAME` and is kept, with its settings and environment, in the folder `reproduction/results/` of the repository;
every number of the paper is one it prints.
"""
NOTES = """\
## Notes

```{include} _results_notes.md
```
"""


def write(results: Path, docs: Path, benchmarks: Path = Path("reproduction/benchmarks/results")) -> list[Path]:
    """Write the page and its pictures into a folder of documentation, and return their paths.

    The tables of `which-method.md` are renewed too, if there is such a page.

    Args:
        results: folder that `slangvi reproduce` writes to.
        docs: folder of the documentation.
        benchmarks: folder that `slangvi bench` writes to.
    """
    done = [name for name in EXPERIMENTS if (results / f"{name}.json").is_file()]
    for name in done:  # before anything is drawn
        path = results / f"{name}.json"
        if read_about(path)["settings"]["quick"]:
            raise ValueError(f"{path} comes from a --quick run, which is too short to be compared with the paper.")
    parts, pictures = [HEAD], list[Path]()
    for name in EXPERIMENTS:
        module = import_module(module_name(name))
        parts.append(f"## {module.TITLE}\n")
        if name not in done:
            parts.append(f"Not run yet: `slangvi reproduce {name}`.\n")
            continue
        text, drawn = module.section(results, docs)
        parts.append(text)
        pictures += drawn
    if (docs / "_results_notes.md").is_file():
        parts.append(NOTES)
    page = docs / "results.md"
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    guide = docs / "which-method.md"
    if guide.is_file():
        choosing.fill(guide, choosing.tables(results, benchmarks))
    return [page, *pictures, *([guide] if guide.is_file() else [])]
