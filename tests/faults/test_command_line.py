"""The command line under odd circumstances; tests of `fit`, `predict` and `report` are in a file of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.world import unchanged
from slangvi.cli import _demo_training
from slangvi.cli import app as command_line


def test_a_closed_pipe_is_no_error():
    """As with `slangvi --help | head -0`."""
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.argv = ['slangvi', '--help']\n"
    code += "from slangvi.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1)


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["fit", "--help"]])
def test_narrow_terminals_are_no_error(words):
    result = CliRunner(env={"COLUMNS": "20", "TERM": "dumb"}).invoke(command_line.app, words)
    assert result.exit_code == 0, result.output


WORDS = st.one_of(
    st.sampled_from(["demo", "bench", "data", "reproduce", "list", "fetch", "report", "step", "uci", "all"]),
    st.sampled_from(["--seed", "--out", "--quick", "--json", "--epochs", "--jobs", "--device", "--help", "-h", "--"]),
    st.sampled_from(["-1", "0", "1e3", "nan", "/", "..", "cpu", "cuda", "", " ", "a,b", "--seed=-5", "--no-such"]),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4),
)


@settings(max_examples=60)
@given(words=st.lists(WORDS, max_size=5))
def test_any_arguments_end_with_a_known_code(words, tmp_path_factory):
    def refuse(*arguments, **options):
        raise ValueError("nothing is run here")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("words"))
        patch.setattr(command_line, "entry_points", lambda group: [])
        patch.setattr(_demo_training, "run", refuse)
        with unchanged():
            result = CliRunner().invoke(command_line.app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), words
    assert result.exit_code in (0, 1, 2), words
