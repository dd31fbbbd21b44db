"""`slangvi reproduce`: what it prints and keeps, what it refuses, and how it stops."""

from __future__ import annotations

import json
import sys
from time import sleep

import pytest
import torch
from click.testing import CliRunner

from helpers import fake_experiments
from slangvi.cli.app import app
from slangvi_reproduction.cli import reproduce as command
from slangvi_reproduction.experiments import EXPERIMENTS, logreg
from slangvi_reproduction.experiments.results import read_rows
from slangvi_reproduction.experiments.runner import CellsFailed, Interrupted, Status

SMALL = (
    "--datasets",
    "breast_cancer",
    "--methods",
    "mf_exact,slang_1",
    "--epochs",
    "3",
    "--splits",
    "2",
    "--jobs",
    "1",
)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, and tiny data."""
    monkeypatch.chdir(tmp_path)
    fake_experiments.inject(monkeypatch)
    return tmp_path


def test_help_and_list_name_the_experiments():
    result, listed = invoke("--help"), invoke("list")
    assert (result.exit_code, listed.exit_code) == (0, 0)
    for name, about in EXPERIMENTS.items():
        assert f"  {name} " in result.output
        assert f"{name} " in listed.output
        assert about in listed.output


def test_a_run_prints_its_table_and_names_its_files(here):
    result = invoke("logreg", *SMALL, "--seed", "3")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert sum("finished in" in line and "cells" in line for line in lines) == 3  # full_exact is needed too
    assert any(line.startswith("│ breast_cancer │ slang_1") and "±" in line for line in lines)
    assert "Results: reproduction/results/quick/logreg.csv" in lines
    about = json.loads((here / "reproduction/results/quick/logreg.json").read_text())
    assert about["command"] == " ".join(["slangvi reproduce logreg", *SMALL, "--seed 3"])
    rows = read_rows(here / "reproduction/results/quick/logreg.csv")
    assert {row.method for row in rows} == {
        "mf_exact",
        "slang_1",
        "full_exact",
    }
    again = invoke("logreg", *SMALL, "--seed", "3")
    assert again.output.count("finished before") == 3


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ((), "reproduction/results"),
        (("--quick",), "reproduction/results/quick"),
        (("--splits", "2"), "reproduction/results/quick"),
        (("--out", "x"), "x"),
    ],
)
def test_runs_that_are_not_full_are_kept_apart(arguments, out, monkeypatch, tmp_path):
    seen = []

    def run(settings, progress):
        seen.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(logreg, "run", run)
    monkeypatch.chdir(tmp_path)
    assert invoke("logreg", *arguments).exit_code == 1
    assert str(seen[0].out) == out
    assert (seen[0].quick, seen[0].splits) == ("--quick" in arguments, 2 if "--splits" in arguments else None)
    assert seen[0].jobs >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logrg"], "No such command 'logrg'. Did you mean 'logreg'?"),
        (["zzz"], "No such command 'zzz'."),
        (["logreg", "--datasets", "usps"], "unknown dataset 'usps'. Did you mean 'usps_3vs5'?"),
        (["logreg", "--methods", "mf_ef,slang1"], "unknown method 'slang1'. Did you mean 'slang_1'?"),
        (["logreg-online-eig", "--methods", "slang_1"], "unknown method 'slang_1'."),
        (["logreg", "--epochs", "0"], "Invalid value for '--epochs'"),
        (["logreg", "--extend"], "No such option '--extend'"),
        (["mnist", "--extend", "--force"], "tables of the experiment's own settings. Leave out --force."),
        (["mnist", "--extend", "--seed", "5"], "Leave out --seed."),
        (["logreg", "--jobs", "none"], "Invalid value for '--jobs'"),
        (["logreg", "--data", "nowhere"], "Invalid value for '--data'"),
        (["report", "--results", "nowhere"], "Invalid value for '--results'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(arguments, message, here):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert message in words
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"1 1:0.5 oh\n"])
def test_missing_or_damaged_data_end_with_one_line_and_no_file(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    folder = tmp_path / "data" / "libsvm"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "australian_scale").write_bytes(content)
    result = invoke("logreg", "--data", str(tmp_path / "data"), "--quick")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("Error: ")
    assert "australian_scale" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_folder_of_data_is_set_for_the_run_only(monkeypatch, tmp_path):
    monkeypatch.setenv("SLANGVI_DATA", "before")
    with command._data_from(tmp_path):
        assert command.os.environ["SLANGVI_DATA"] == str(tmp_path)
    assert command.os.environ["SLANGVI_DATA"] == "before"
    monkeypatch.delenv("SLANGVI_DATA")
    with command._data_from(tmp_path), command._data_from(None):
        assert command.os.environ["SLANGVI_DATA"] == str(tmp_path)
    assert "SLANGVI_DATA" not in command.os.environ


def test_ctrl_c_says_what_is_kept_and_ends_with_130(monkeypatch, tmp_path):
    def run(settings, progress):
        raise Interrupted("3 of 44 cells are finished and kept.")

    monkeypatch.setattr(logreg, "run", run)
    monkeypatch.chdir(tmp_path)
    result = invoke("logreg")
    assert result.exit_code == 130
    assert result.output.splitlines() == ["Interrupted. 3 of 44 cells are finished and kept."]


@pytest.mark.parametrize("error", [CellsFailed("a1a slang_1: NumericalError: no"), OSError("disk full")])
def test_failures_are_told_without_a_traceback(error, monkeypatch, tmp_path):
    def run(settings, progress):
        raise error

    monkeypatch.setattr(logreg, "run", run)
    monkeypatch.chdir(tmp_path)
    result = invoke("logreg")
    assert (result.exit_code, result.output) == (1, f"Error: {error}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_in_one_line(here):
    result = invoke("logreg", "--device", "cuda")
    assert result.exit_code == 1
    assert result.output.startswith("Error: --device cuda: torch sees no GPU.")


def test_the_report_names_what_it_wrote_and_refuses_quick_runs(here):
    (here / "reproduction" / "results").mkdir(parents=True)
    (here / "docs").mkdir()
    result = invoke("report")
    assert result.exit_code == 0, result.output
    assert result.output == "docs/results.md\n"
    assert "Not run yet" in (here / "docs/results.md").read_text()
    invoke("logreg", *SMALL, "--quick")
    refused = invoke("report", "--results", "reproduction/results/quick")
    assert refused.exit_code == 1
    assert "comes from a --quick run" in refused.output


def test_missing_matplotlib_says_what_to_install(here, monkeypatch):
    invoke("logreg", *SMALL, "--out", "reproduction/results")
    (here / "docs").mkdir()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("report")
    assert result.exit_code == 1
    assert "pip install 'slangvi[plot]'" in result.output


def test_bars_on_a_terminal_show_cells_and_time_left():
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with command._progress(console) as show:
        show(Status("kept", "a1a mf_ef", 0, 0, 0.0, 1, 3, 0.2, None))
        show(Status("started", "a1a slang_1", 0, 0, 0.0, 1, 3, 0.2, None))
        show(Status("advanced", "a1a slang_1", 50, 100, 0.0, 1, 3, 0.5, 75.0))
        sleep(0.3)  # it is drawn ten times a second
        show(Status("finished", "a1a slang_1", 0, 0, 3.0, 2, 3, 0.7, 60.0))
    shown = text.getvalue()
    assert "a1a slang_1" in shown
    assert "1 of 3 cells, 1 min 15 s left" in shown
    assert "50 %" in shown


def test_lines_elsewhere_tell_failures_too():
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    with command._progress(Console(file=text, width=100)) as show:
        show(Status("started", "a1a slang_1", 0, 0, 0.0, 1, 3, 0.2, None))
        show(Status("failed", "a1a slang_1", 0, 0, 0.0, 1, 3, 0.2, None))
        show(Status("finished", "a1a slang_2", 0, 0, 5000.0, 2, 3, 0.7, 60.0))
    assert text.getvalue().splitlines() == [
        "a1a slang_1: failed (1 of 3 cells)",
        "a1a slang_2: finished in 1 h 23 min (2 of 3 cells, about 1 min 0 s left)",
    ]
