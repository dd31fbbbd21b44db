"""`slangvi fit`, `predict` and `report`: what they print and write, what they refuse, and how they end."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from helpers.csv_tables import EVIL, houses, kinds
from slangvi.cli.app import app
from slangvi.tabular import fitting
from slangvi.tabular.model import load

SHORT = ("--epochs", "2", "--hidden", "4", "--rank", "2")


def invoke(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two tables and a model of each."""
    folder = tmp_path_factory.mktemp("commands")
    houses(folder / "houses.csv")
    kinds(folder / "kinds.csv")
    (folder / "twins.csv").write_text("size,town,mean,=a,'=a\n100,Bern,1,2,3\n", encoding="utf-8")
    for data, target in (("houses", "price"), ("kinds", "=kind")):
        made = invoke("fit", folder / f"{data}.csv", "--target", target, "--out", folder / data, *SHORT, "--quiet")
        assert (made.exit_code, made.output) == (0, "")
    return folder


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_fit_says_what_it_did(place, tmp_path):
    result = invoke("fit", place / "houses.csv", "--target", "price", "--out", tmp_path / "m", *SHORT)
    assert result.exit_code == 0, result.output
    for words in (
        "Task: regression ('price' holds numbers, 60 different ones)",
        "1 numeric and 1 categorical columns",
        "'same' dropped: it is 'x' in every row",
        "'size' kept: 5 missing values are set to the mean",
        "On 12 held-out rows",
        "NLL (nats)",
        "RMSE",
        "calibration error",
        "mean alone",
        "fitted on all rows",
    ):
        assert words in result.output, words


def test_a_lower_temperature_makes_the_posterior_narrower(place, tmp_path):
    spread = {}
    for temperature in ("1", "0.01"):
        out = tmp_path / temperature
        made = invoke(
            "fit", place / "houses.csv", "--target", "price", "--out", out, *SHORT, "--temperature", temperature
        )
        assert made.exit_code == 0, made.output
        model = load(out)
        assert model.record["settings"]["temperature"] == float(temperature)
        spread[temperature] = model.posterior.variance.log().mean()
    assert spread["0.01"] < spread["1"] - 1.0


def test_fit_says_what_it_found_before_it_trains(place, tmp_path):
    said = invoke("fit", place / "houses.csv", "--target", "price", "--out", tmp_path / "m", *SHORT).output
    places = [said.index(words) for words in ("Task: regression", "'same' dropped", "training four fifths", "On 12")]
    assert places == sorted(places)


def test_fit_for_programs(place, tmp_path):
    result = invoke("fit", place / "kinds.csv", "--target", "=kind", "--out", tmp_path / "m", *SHORT, "--json")
    found = json.loads(result.output)
    assert found["task"] == "classification"
    assert found["classes"] == ["-1", EVIL, "=cmd()"]
    assert set(found["scores"]["model"]) == {"nll", "accuracy", "ece"}
    assert found["columns"] == {"a": "numeric", f"b{EVIL}": "categorical"}


def test_numbers_come_with_intervals(place):
    result = invoke("predict", place / "houses", place / "houses.csv", "--out", "-", "--quiet", "--level", "0.5")
    assert result.exit_code == 0, result.output
    rows = rows_of(result.output)
    assert len(rows) == 60
    assert list(rows[0]) == ["mean", "std", "lower", "upper", "epistemic_share"]
    for row in rows:
        mean, std, lower, upper, share = map(float, row.values())
        assert (upper - lower) / (2 * std) == pytest.approx(0.67449, rel=1e-3)
        assert lower < mean < upper
        assert 0 <= share <= 1


def test_classes_come_with_probabilities_and_no_formulas(place, tmp_path):
    out = tmp_path / "pred.csv"
    result = invoke("predict", place / "kinds", place / "kinds.csv", "--out", out, "--json", "--keep", "=kind")
    assert json.loads(result.output) == {"out": str(out), "rows": 60, "task": "classification", "unusual": {}}
    rows = rows_of(out.read_text(encoding="utf-8"))
    probs = ["p_-1", f"p_{EVIL}", "p_=cmd()"]
    assert set(rows[0]) == {"'=kind", "class", *probs, "entropy", "epistemic_share"}
    for row in rows:
        assert sum(float(row[name]) for name in probs) == pytest.approx(1.0, abs=1e-5)
        assert row["class"] in ("-1", EVIL, "'=cmd()")
        assert row["'=kind"] in ("-1", EVIL, "'=cmd()")


def test_new_tables_may_have_other_columns_orders_and_levels(place, tmp_path):
    new = tmp_path / "new.csv"
    new.write_text("colour;town;size\nred;Genf;100\nblue;Bern;\n", encoding="utf-8")
    result = invoke("predict", place / "houses", new, "--out", tmp_path / "pred.csv")
    assert result.exit_code == 0
    assert "'town': 1 of 2 cells are missing or of no level that the model knows, such as 'Genf'" in result.output
    assert len(rows_of((tmp_path / "pred.csv").read_text(encoding="utf-8"))) == 2


def test_columns_that_cannot_be_read_are_told(place, tmp_path):
    """Although cells were missing at the fit, and count as the mean."""
    new = tmp_path / "new.csv"
    new.write_text('size,town\n"1,5",Bern\n"2,5",Bern\n', encoding="utf-8")
    result = invoke("predict", place / "houses", new, "--out", tmp_path / "pred.csv")
    assert "'size': all 2 cells are no numbers, such as '1,5', and count as the mean" in result.output


def test_rows_without_a_target_are_counted_by_what_stands_there(tmp_path):
    cells = ["none", "mild", "severe", "none"] * 10 + ["", "", "NA"]
    (tmp_path / "pain.csv").write_text("\n".join(["x,y", *(f"{k % 7},{c}" for k, c in enumerate(cells))]) + "\n")
    result = invoke("fit", tmp_path / "pain.csv", "--target", "y", "--out", tmp_path / "m", *SHORT)
    assert "Task: classification, 3 classes" in result.output
    assert "3 rows without a target are left out: 2 empty, 1 'NA'" in result.output


def test_the_report_is_written_into_the_folder_or_where_it_should_go(place, tmp_path):
    result = invoke("report", place / "kinds")
    assert (result.exit_code, result.output) == (0, f"Report: {place / 'kinds' / 'report.html'}\n")
    assert (place / "kinds" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    found = json.loads(invoke("report", place / "houses", "--out", tmp_path / "page.html", "--json").output)
    assert found == {"out": str(tmp_path / "page.html"), "bytes": (tmp_path / "page.html").stat().st_size}


FORMULAS = ["=cmd()", "+1+1", "-x", "@SUM(A1)", "\uff1dcmd()", "\uff0b1", "\uff0dx", "\uff20x"]


def test_no_cell_that_is_copied_is_a_formula(place, tmp_path):
    """Spreadsheets run cells that begin with a sign; a quote before it makes them text."""
    new = tmp_path / "new.csv"
    lines = [f"100,Bern,{word},-1.5" for word in FORMULAS]
    new.write_text("\n".join(["size,town,@note,+n", *lines]) + "\n", encoding="utf-8")
    result = invoke("predict", place / "houses", new, "--out", "-", "--quiet", "--keep", "@note", "--keep", "+n")
    rows = rows_of(result.output)
    assert [row["'@note"] for row in rows] == [f"'{word}" for word in FORMULAS]
    assert [row["'+n"] for row in rows] == ["-1.5"] * len(FORMULAS)  # a number is no formula


def test_intervals_of_large_numbers_are_written_with_the_digits_that_tell_them_apart(tmp_path):
    """Seconds since 1970, say: six digits would be the same in every row."""
    data = tmp_path / "times.csv"
    data.write_text("\n".join(["a,y", *(f"{k % 7},{1_700_000_000 + k}" for k in range(40))]), encoding="utf-8")
    assert invoke("fit", data, "--target", "y", "--out", tmp_path / "m", *SHORT, "--quiet").exit_code == 0
    for row in rows_of(invoke("predict", tmp_path / "m", data, "--out", "-", "--quiet").output):
        mean, std, lower, upper = (float(row[name]) for name in ("mean", "std", "lower", "upper"))
        assert (upper - lower) / (2 * std) == pytest.approx(1.64485, rel=1e-3)
        assert (upper + lower) / 2 == pytest.approx(mean, rel=0, abs=1e-2 * std)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["fit", "{}/houses.csv", "--target", "rent", "--out", "{}/x"], 1, "no column 'rent' for --target"),
        (["fit", "{}/houses.csv", "--out", "{}/x"], 2, "Missing option '--target'"),
        (["fit", "{}/none.csv", "--target", "a", "--out", "{}/x"], 2, "does not exist"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/houses"], 2, "Use --force to replace it"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--hidden", "a"], 2, "should be widths"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--hidden", "4,-4"], 2, "should be widths"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--hidden", "4," * 200 + "4"], 2, "4,…'"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--max-mb", "0.0001"], 1, "Raise --max-mb"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--max-mb", "inf"], 2, "not a finite number"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--prior-precision", "nan"], 2, "not a finite"),
        (["fit", "{}/houses.csv", "--target", "price", "--out", "{}/x", "--temperature", "0"], 2, "--temperature"),
        (["predict", "{}/houses", "{}/houses.csv", "--out", "-", "--level", "nan"], 2, "not a finite number"),
        (["predict", "{}/houses", "{}/kinds.csv", "--out", "-"], 1, "no column 'size', 'town'"),
        (["predict", "{}/houses", "{}/houses.csv", "--out", "{}/houses.csv"], 2, "Use --force to replace it"),
        (["predict", "{}/houses", "{}/houses.csv", "--out", "-", "--json"], 2, "both print to standard output"),
        (["predict", "{}/houses", "{}/houses.csv", "--out", "-", "--level", "1"], 2, "--level"),
        (["predict", "{}/houses", "{}/houses.csv", "--out", "-", "--keep", "id"], 1, "no column 'id' to keep"),
        (["predict", "{}/houses", "{}/twins.csv", "--out", "-", "--keep", "mean"], 1, "two columns named 'mean'"),
        (["predict", "{}/houses", "{}/twins.csv", "--out", "-", "--keep", "=a", "--keep", "'=a"], 1, 'named "\'=a"'),
        (["predict", "{}/houses", "{}/houses.csv", "--out", "{}/houses.csv/x"], 2, "is a file, so that"),
        (["report", "{}/houses", "--out", "{}/houses.csv/x"], 2, "is a file, so that"),
        (["predict", "{}", "{}/houses.csv", "--out", "-"], 1, "is no model: it has no model.json"),
        (["report", "{}"], 1, "is no model"),
        (["report", "{}/houses", "--out", "{}/houses.csv"], 2, "Use --force to replace it"),
    ],
)
def test_refusals_have_a_code_and_one_reason(place, arguments, code, message):
    result = invoke(*(word.replace("{}", str(place)) for word in arguments))
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (place / "x").exists()


def broken(error: BaseException):
    def fit(*arguments: object) -> None:
        raise error

    return fit


def test_ctrl_c_ends_with_130(place, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "fit", broken(KeyboardInterrupt()))
    result = invoke("fit", place / "houses.csv", "--target", "price", "--out", tmp_path / "m")
    assert result.exit_code == 130
    assert result.output == "Interrupted.\n"
    assert not (tmp_path / "m").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_not_replaced_by_a_file(place, tmp_path):
    """Nor is a device such as /dev/null, which other programs need."""
    os.mkfifo(tmp_path / "pipe")
    result = invoke("predict", place / "houses", place / "houses.csv", "--out", tmp_path / "pipe", "--force")
    assert result.exit_code == 2
    assert "is no file" in " ".join(result.output.split())
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("below", [True, False])
def test_fit_does_not_train_what_it_could_not_write(place, tmp_path, monkeypatch, below):
    monkeypatch.setattr(fitting, "fit", broken(AssertionError("trained")))
    monkeypatch.setattr("slangvi.cli.common.os.access", lambda path, mode: not mode & os.W_OK)
    out, why = (place / "houses.csv" / "m", "is a file, so that") if below else (tmp_path / "m", "cannot be written to")
    result = invoke("fit", place / "houses.csv", "--target", "price", "--out", out)
    assert result.exit_code == 2, result.output
    assert why in " ".join(result.output.split())


def test_surprises_have_no_traceback_unless_asked_for(place, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "fit", broken(ZeroDivisionError("oh")))
    words = ("fit", place / "houses.csv", "--target", "price", "--out", tmp_path / "m")
    result = invoke(*words)
    assert (result.exit_code, result.output) == (
        1,
        "Error: ZeroDivisionError: oh (--debug shows where it comes from)\n",
    )
    assert isinstance(invoke(*words, "--debug").exception, ZeroDivisionError)


def test_force_replaces_a_model(place, tmp_path):
    words = ("fit", place / "houses.csv", "--target", "price", "--out", tmp_path / "m", *SHORT, "--quiet")
    assert invoke(*words).exit_code == 0
    before = (tmp_path / "m" / "model.json").read_bytes()
    assert invoke(*words, "--force", "--seed", "1").exit_code == 0
    assert (tmp_path / "m" / "model.json").read_bytes() != before
    assert invoke("predict", tmp_path / "m", place / "houses.csv", "--out", "-").exit_code == 0


@pytest.mark.parametrize("command", ["fit", "predict", "report"])
def test_help_needs_neither_torch_nor_numpy(command):
    code = f"""
import sys
sys.argv = ["slangvi", "{command}", "--help"]
from slangvi.cli import main
try:
    main()
finally:
    assert not {{"torch", "numpy", "rich", "matplotlib"}} & set(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--json" in result.stdout
