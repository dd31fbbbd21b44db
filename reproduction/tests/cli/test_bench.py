"""`slangvi bench`: what it prints and keeps, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from slangvi.cli.app import app
from slangvi_reproduction.bench import BENCHES, _measure, load_bench, run
from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.record import Record, Row, load


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture
def settings_seen(monkeypatch):
    """A benchmark that takes no time, and the settings it was given."""
    seen = []
    about = {"device": "Fast Chip", "device_type": "cpu", "threads": 2, "torch": "2", "seconds": 1.0}

    def fake(name, settings):
        seen.append((name, settings))
        settings.say("adam")
        labels = {"sweep": "large"}
        rows = [Row("adam", labels, milliseconds=1.5, ratio=1.0), Row("pyro", labels, skipped="pyro is not installed")]
        return Record(name, about, Rates(1.0, 1.0), rows)

    monkeypatch.setattr(run, "run", fake)
    return seen


def test_help_lists_the_benchmarks():
    result = invoke("--help")
    assert result.exit_code == 0
    for name in (*BENCHES, "report"):
        assert f"  {name} " in result.output


def test_options_are_passed_on_and_results_kept_by_name(settings_seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("layers", "--repeats", "3")
    assert result.exit_code == 0, result.output
    ((name, settings),) = settings_seen
    assert (name, settings.device, settings.quick, settings.repeats) == ("layers", "cpu", False, 3)
    assert (
        load(tmp_path / "reproduction" / "benchmarks" / "results" / "layers-fast-chip.json").rows[0].milliseconds == 1.5
    )
    assert "adam …" in result.output
    assert "1.5" in next(line for line in result.output.splitlines() if line.startswith("│ adam"))
    assert "Not measured: pyro (pyro is not installed)." in result.output
    assert "Results: reproduction/benchmarks/results/layers-fast-chip.json" in result.output


@pytest.mark.parametrize("name", BENCHES)
def test_repeats_are_the_benchmarks_own_unless_given(name, settings_seen):
    assert invoke(name, "--quick").exit_code == 0
    assert settings_seen[0][1].repeats == load_bench(name).REPEATS


def test_quick_runs_are_kept_only_where_told(settings_seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("step", "--quick").exit_code == 0
    assert list(tmp_path.iterdir()) == []
    assert invoke("step", "--quick", "--out", "here.json").exit_code == 0
    assert [settings.quick for _, settings in settings_seen] == [True, True]
    assert json.loads((tmp_path / "here.json").read_text())["bench"] == "step"


def test_a_quick_run_measures_for_real(monkeypatch):
    monkeypatch.setattr(_measure, "WARMUP", 1)
    result = invoke("step", "--quick", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert any(line.startswith("│ slang functional") for line in result.output.splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_in_one_line(settings_seen):
    result = invoke("step", "--device", "cuda")
    assert not settings_seen
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("Error: --device cuda: torch sees no GPU.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "No such command 'dance'"),
        (["step", "--device", "abacus"], "Invalid value for '--device'"),
        (["step", "--repeats", "0"], "Invalid value for '--repeats'"),
        (["step", "--out", "nowhere/step.json"], "does not exist. Make it first."),
        (["report", "--results", "nowhere"], "Invalid value for '--results'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(arguments, message, settings_seen):
    result = invoke(*arguments)
    assert not settings_seen
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    result = invoke("step", "--quick")
    assert (result.exit_code, result.output) == (130, "Interrupted.\n")


def test_report_names_what_it_wrote(settings_seen, tmp_path):
    result = invoke("report", "--results", str(tmp_path), "--docs", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.strip().endswith("performance.md")
    assert (tmp_path / "performance.md").is_file()


def test_report_refuses_files_of_another_make_without_a_traceback(tmp_path):
    (tmp_path / "step-cpu.json").write_text("{}")
    result = invoke("report", "--results", str(tmp_path), "--docs", str(tmp_path))
    assert result.exit_code == 1
    assert "Error: step-cpu.json was not written by this version" in result.output
