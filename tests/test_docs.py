"""The code in README and docs runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/quickstart.md",
    "docs/prediction.md",
    "docs/estimators.md",
    "docs/memory.md",
    "docs/replicas.md",
    "docs/checkpoints.md",
    "docs/tracking.md",
]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = blocks(page)
    assert found
    namespace: dict[str, object] = {"__name__": "page"}
    for k, code in enumerate(found):
        exec(compile(code, f"{page} block {k}", "exec"), namespace)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(script, capsys):
    exec(compile(script.read_text(encoding="utf-8"), script.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
