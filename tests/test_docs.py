"""The code in README and docs runs as it stands, block after block, and prints what the pages show."""

from __future__ import annotations

import os
import re

import pytest

import pages

ROOT = pages.ROOT


@pytest.mark.parametrize("page", pages.pages())
def test_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for shown, printed in pages.run(page):
        assert shown is None or pages.alike(shown, printed), f"{page}: renew it with `make pages`.\n{printed}"
    shown = set(re.findall(r"images/(tutorial-[\w-]+\.png)", pages.text_of(page)))
    assert shown == {path.name for path in tmp_path.glob("tutorial-*.png")}
    assert all((pages.IMAGES / name).is_file() for name in shown)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("NLL 0.50 nats", "NLL 0.55 nats", True),
        ("NLL 0.50 nats", "NLL 0.90 nats", False),
        ("NLL 0.50 nats", "NLL 0.50 bits", False),
        ("1,000 steps", "1000 steps", True),
        ("−3.0", "3.0", False),
        ("1 2", "1", False),
    ],
)
def test_outputs_are_alike_when_words_are_the_same_and_numbers_near(shown, printed, same):
    assert pages.alike(shown, printed) is same


@pytest.mark.data
@pytest.mark.skipif("SLANGVI_DATA" not in os.environ, reason="needs the data sets")
@pytest.mark.parametrize("page", pages.FETCHING)
def test_python_blocks_that_read_data_sets_run(page):
    assert len(list(pages.run(page))) > 1


def test_every_page_is_in_the_sidebar_once():
    text = pages.text_of("docs/index.md")
    listed = [line for tree in re.findall(r"```\{toctree\}\n(.*?)```", text, re.S) for line in tree.split("\n")]
    names = [line.rpartition("<")[2].strip("> ") for line in listed if line and not line.startswith(":")]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "docs").glob("[!_]*.md") if path.stem != "index")


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(script, capsys):
    exec(compile(script.read_text(encoding="utf-8"), script.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
