"""The command line: what it prints, what it refuses, and that it answers without importing torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from slangvi import __version__
from slangvi.cli import _demo_training as demo
from slangvi.cli import app as command_line
from slangvi.cli import main
from slangvi.cli.app import REPRODUCTION, app


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag):
    result = invoke(flag)
    assert result.exit_code == 0
    assert "Honest uncertainty for any PyTorch network." in result.output
    assert "demo" in result.output


@pytest.mark.parametrize("name", REPRODUCTION)
@pytest.mark.parametrize("arguments", [(), ("uci", "--quick"), ("--help",)])
def test_commands_of_the_reproduction_say_in_one_line_how_to_get_them(name, arguments, monkeypatch):
    monkeypatch.setattr(command_line, "entry_points", lambda group: [])
    result = invoke(name, *arguments)
    assert result.exit_code == 1
    assert result.output == (
        f"Error: 'slangvi {name}' is in the package slangvi-reproduction: "
        "pip install ./reproduction, in a clone of slangvi.\n"
    )
    assert f"{name} " in invoke("--help").output


def test_packages_add_commands_by_entry_points(monkeypatch):
    point = EntryPoint("more", "slangvi.cli.tables:report", command_line.ENTRY_POINTS)
    monkeypatch.setattr(command_line, "entry_points", lambda group: [point] * (group == "slangvi.commands"))
    assert "more" in invoke("--help").output
    assert "more [OPTIONS]" in invoke("more", "--help").output
    assert invoke("report", "--help").exit_code == 0


def test_a_package_that_cannot_be_imported_does_not_keep_others_from_working(monkeypatch):
    point = EntryPoint("more", "slangvi_nowhere:command", command_line.ENTRY_POINTS)
    monkeypatch.setattr(command_line, "entry_points", lambda group: [point])
    assert "more" in invoke("--help").output
    result = invoke("more", "--anything")
    assert result.exit_code == 1
    assert result.output == (
        "Error: 'slangvi more' cannot be imported from slangvi_nowhere:command: No module named 'slangvi_nowhere'\n"
    )


def test_help_of_the_demo_names_its_options_and_defaults():
    result = invoke("demo", "--help")
    assert result.exit_code == 0
    for word in ("--out", "demo.png", "--seed", "--quick"):
        assert word in result.output


def test_version_is_the_packages():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"slangvi, version {__version__}"


def test_quick_demo_passes_its_options_on(quick_demo):
    assert quick_demo.cli.exit_code == 0, quick_demo.cli.output
    assert quick_demo.arguments == (3, True)


def test_quick_demo_prints_every_row_and_where_the_picture_is(quick_demo):
    output = quick_demo.cli.output
    for row in quick_demo.result.rows:
        line = next(x for x in output.splitlines() if row.data in x and row.method in x and "training" not in x)
        for cell in (row.score, f"{row.nll:.3f}", f"{row.calibration:.3f}"):
            assert cell in line
    assert "Picture:" in output
    assert "".join(str(quick_demo.picture).split()) in "".join(output.split())


def test_quick_demo_reports_each_training_once_when_not_on_a_terminal(quick_demo):
    for label in dict.fromkeys(label for label, _, _ in quick_demo.progress):
        assert quick_demo.cli.output.count(f"training {label} …") == 1


def test_quick_demo_writes_a_picture(quick_demo):
    assert quick_demo.picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_missing_folder_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(demo, "run", lambda *arguments: trained.append(arguments))
    result = invoke("demo", "--quick", "--out", str(tmp_path / "nowhere" / "demo.png"))
    assert not trained
    assert result.exit_code == 2
    assert "Invalid value for --out" in result.output
    assert "does not exist. Make it first." in " ".join(result.output.split())


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    result = invoke("demo", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "is a directory" in result.output


def broken(error: BaseException):
    def run(*arguments: object) -> None:
        raise error

    return run


def test_ctrl_c_in_the_demo_ends_with_130(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run", broken(KeyboardInterrupt()))
    result = invoke("demo", "--out", str(tmp_path / "demo.png"))
    assert (result.exit_code, result.output) == (130, "Interrupted.\n")


def test_a_picture_that_cannot_be_written_has_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run", broken(OSError("No space left on device")))
    result = invoke("demo", "--out", str(tmp_path / "demo.png"))
    assert (result.exit_code, result.output) == (1, "Error: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--seed", "one"], "Invalid value for '--seed'"),
        (["demo", "--fast"], "No such option"),
        (["train"], "No such command 'train'"),
    ],
)
def test_unknown_words_are_refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    "modules",
    [("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"), ("sklearn", "sklearn.datasets")],
    ids=["matplotlib", "scikit-learn"],
)
def test_a_missing_extra_is_said_in_one_line_before_anything_is_trained(modules, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(demo, "run", lambda *arguments: trained.append(arguments))
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    result = invoke("demo", "--quick", "--out", str(tmp_path / "demo.png"))
    assert not trained
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "pip install 'slangvi[" in result.output


def test_python_dash_m_answers_without_importing_torch():
    result = python("-X", "importtime", "-m", "slangvi", "--help")
    imported = {
        line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert result.returncode == 0
    assert "Honest uncertainty" in result.stdout
    assert "slangvi.cli.app" in imported
    assert not {"torch", "numpy", "matplotlib", "sklearn", "rich"} & imported


def test_importing_the_package_and_its_command_line_leaves_torch_alone():
    code = "import sys, slangvi, slangvi.cli.app; slangvi.__version__; dir(slangvi); sys.exit('torch' in sys.modules)"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


class Missing:
    """An import finder under which one module is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slangvi.cli.app")
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(module), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["slangvi", "--version"])


def test_main_without_click_says_what_to_install(monkeypatch):
    without("click", monkeypatch)
    with pytest.raises(SystemExit, match=r"the command line needs click: pip install 'slangvi\[cli\]'"):
        main()


def test_main_without_rich_still_answers_what_needs_no_table(monkeypatch, capsys):
    without("rich", monkeypatch)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_main_passes_other_import_errors_on(monkeypatch):
    without("slangvi.cli.app", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match=r"slangvi\.cli\.app"):
        main()


def test_main_runs_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slangvi", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out
