"""The commands of this package under odd circumstances."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from slangvi.cli.app import app
from slangvi_reproduction.cli import bench as bench_command
from slangvi_reproduction.experiments import EXPERIMENTS, module_name


def test_a_closed_pipe_is_no_error():
    """As with `slangvi reproduce list | head -0`."""
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.argv = ['slangvi', 'reproduce', 'list']\n"
    code += "from slangvi.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1)


@pytest.mark.parametrize("words", [["data", "list"], ["reproduce", "list"]])
def test_narrow_terminals_are_no_error(words):
    result = CliRunner(env={"COLUMNS": "20", "TERM": "dumb"}).invoke(app, words)
    assert result.exit_code == 0, result.output


WORDS = st.one_of(
    st.sampled_from(["bench", "data", "reproduce", "list", "fetch", "report", "step", "uci", "all", *EXPERIMENTS]),
    st.sampled_from(["--seed", "--out", "--quick", "--json", "--epochs", "--jobs", "--device", "--help", "-h", "--"]),
    st.sampled_from(["-1", "0", "1e3", "nan", "/", "..", "cpu", "cuda", "", " ", "a,b", "--seed=-5", "--no-such"]),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4),
)


@settings(max_examples=60)
@given(command=st.sampled_from(["bench", "data", "reproduce"]), words=st.lists(WORDS, max_size=5))
def test_any_arguments_end_with_a_known_code(command, words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")

    def refuse(*arguments, **options):
        raise ValueError("nothing is run here")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SLANGVI_OFFLINE", "1")
        patch.setenv("SLANGVI_DATA", str(folder))
        patch.setattr(bench_command, "_measure", lambda *arguments: None)
        for name in EXPERIMENTS:
            patch.setattr(import_module(module_name(name)), "run", refuse)
        result = CliRunner().invoke(app, [command, *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), words
    assert result.exit_code in (0, 1, 2), words
