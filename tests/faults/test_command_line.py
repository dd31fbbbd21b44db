"""The command line under odd circumstances."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.world import unchanged
from slangvi.cli import bench as bench_command
from slangvi.cli.app import app
from slangvi.experiments import EXPERIMENTS, demo


def test_a_closed_pipe_is_no_error():
    """As with `slangvi data list | head -0`."""
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.argv = ['slangvi', 'reproduce', 'list']\n"
    code += "from slangvi.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1)


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["data", "list"], ["reproduce", "list"]])
def test_narrow_terminals_are_no_error(words, monkeypatch):
    result = CliRunner(env={"COLUMNS": "20", "TERM": "dumb"}).invoke(app, words)
    assert result.exit_code == 0, result.output


WORDS = st.one_of(
    st.sampled_from(
        ["demo", "bench", "data", "reproduce", "list", "fetch", "report", "step", "uci", "all", *EXPERIMENTS]
    ),
    st.sampled_from(["--seed", "--out", "--quick", "--json", "--epochs", "--jobs", "--device", "--help", "-h", "--"]),
    st.sampled_from(["-1", "0", "1e3", "nan", "/", "..", "cpu", "cuda", "", " ", "a,b", "--seed=-5", "--no-such"]),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4),
)


@settings(max_examples=60)
@given(words=st.lists(WORDS, max_size=5))
def test_any_arguments_end_with_a_known_code(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")

    def refuse(*arguments, **options):
        raise ValueError("nothing is run here")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SLANGVI_OFFLINE", "1")
        patch.setenv("SLANGVI_DATA", str(folder))
        patch.setattr(bench_command, "_measure", lambda *arguments: None)
        patch.setattr(demo, "run", refuse)
        for name in EXPERIMENTS:
            module = __import__(f"slangvi.experiments.{name.replace('-', '_')}", fromlist=["run"])
            patch.setattr(module, "run", refuse)
        with unchanged():
            result = CliRunner().invoke(app, words)
    ours = isinstance(result.exception, ValueError) and words[:1] == ["demo"]  # the stand-in for training
    assert result.exception is None or isinstance(result.exception, SystemExit) or ours, words
    assert result.exit_code in (0, 1, 2), words
