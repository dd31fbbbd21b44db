"""The tables of docs/which-method.md say what the results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slangvi_reproduction.experiments import choosing
from slangvi_reproduction.experiments.results import Row, write_rows

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "which-method.md"
NAMES = ("divergences", "likelihoods", "curves", "networks", "images", "costs")


def result(folder, name, *rows, quick=False):
    write_rows(folder / f"{name}.csv", rows)
    (folder / f"{name}.json").write_text(json.dumps({"settings": {"quick": quick}}))


def test_without_results_every_table_says_what_to_run(tmp_path):
    found = choosing.tables(tmp_path, tmp_path)
    assert tuple(found) == NAMES
    assert all("slangvi reproduce" in found[name] for name in NAMES[:-1])
    assert "slangvi bench step" in found["costs"]


def test_results_appear_when_they_are_there_and_quick_runs_do_not(tmp_path):
    row = Row("boston", "test_log_likelihood", "slang_1", -2.5814, 0.0512, -2.5, -3.0, 20)
    error = row._replace(metric="test_rmse", mean=3.2111, standard_error=0.19)
    result(tmp_path, "uci", row, row._replace(dataset="yacht"), error, error._replace(dataset="yacht"))
    result(tmp_path, "toy", row, quick=True)
    found = choosing.tables(tmp_path, tmp_path)
    assert "| data | `slang_1` |" in found["networks"]
    assert "| Boston | -2.581 ± 0.051 |" in found["networks"]
    assert "| Boston | 3.211 ± 0.190 |" in found["networks"]
    assert "Not run yet" in found["curves"]


def test_images_come_from_two_experiments_and_seeds_are_averaged(tmp_path):
    def written(name, header, *lines):
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines, ""]))
        (tmp_path / f"{name.partition('-')[0]}.json").write_text(json.dumps({"settings": {"quick": False}}))

    metrics = "test_error_percent,test_nll,ece,brier"
    written(
        *("mnist", f"method,{metrics},epochs,seed", "slang_8_slow,1.5,0.05,0.006,0.02,100,0"),
        *("slang_8_slow,1.7,0.06,0.008,0.02,100,1", "slang_8,9.9,0.9,0.9,0.9,400,0", "map,1.6,0.061,0.009,0.02,100,0"),
    )
    assert "| MNIST, 400-400 | 1.60 | 1.60 |\n" in choosing.tables(tmp_path, tmp_path)["images"]
    key = "data,network,method,seed"
    written("images", f"{key},{metrics},epochs", "fashion_mnist,lenet,ivon,0,9.07,0.2529,0.0094,0.13,20")
    strange = "strangers,entropy_auroc,entropy_fpr95,information_auroc,information_fpr95"
    written("images-strangers", f"{key},{strange}", "fashion_mnist,lenet,ivon,0,letters,0.81234,0.7,0.9,0.2")
    text = choosing.tables(tmp_path, tmp_path)["images"]
    assert "| MNIST, 400-400 | 0.0550 | 0.0610 |  |\n| Fashion-MNIST, LeNet-5 |  |  | 0.2529 |\n" in text
    assert "| Fashion-MNIST, LeNet-5: letters |  |  | 0.812 |\n" in text


def test_costs_put_machines_side_by_side(tmp_path):
    def bench(device, kind, *rows):
        about = {"device": device, "device_type": kind, "threads": 2}
        lines = [{"name": n, "settings": s, "milliseconds": 1.0, "ratio": r, "extra_mb": 1250.0} for n, s, r in rows]
        lines.append({"name": "ivon", "settings": {}, "milliseconds": None, "ratio": None, "extra_mb": None})
        (tmp_path / f"step-{device}.json").write_text(json.dumps({"environment": about, "rows": lines}))

    bench("A GPU", "cuda", ("adam", {}, 1.0), ("unknown", {}, 1.0))
    bench("B CPU", "cpu", ("adam", {}, 1.0), ("slang functional", {"L": 8}, 8.8))
    bench("C CPU", "cpu", ("adam", {}, 1.0), ("slang functional", {"L": 8}, 9.9))
    table = choosing.tables(tmp_path, tmp_path)["costs"]
    devices = ("B CPU, 2 threads", "C CPU, 2 threads", "A GPU")
    assert table.splitlines()[0] == f"| method | rank | {' | '.join(f'{d}: × Adam | extra MB' for d in devices)} |"
    assert "| SLANG | 8 | 8.8 | 1,250 | 9.9 | 1,250 |  |  |" in table
    assert "IVON" not in table
    assert "unknown" not in table


def test_filling_needs_every_mark_once(tmp_path):
    page = tmp_path / "page.md"
    marks = [choosing.MARK.format(name) for name in ("a", "end of a,")]
    page.write_text("\nold\n".join(marks))
    choosing.fill(page, {"a": "new\n"})
    assert page.read_text().splitlines()[1:4] == ["", "new", ""]
    with pytest.raises(ValueError, match=r"marks of the table 'b' once, has them 0 times"):
        choosing.fill(page, {"b": "new\n"})


@pytest.mark.skipif(not (ROOT / "reproduction" / "results").is_dir(), reason="a source archive has no results")
def test_the_page_is_as_new_as_the_results(tmp_path):
    fresh = tmp_path / PAGE.name
    fresh.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    choosing.fill(
        fresh, choosing.tables(ROOT / "reproduction" / "results", ROOT / "reproduction" / "benchmarks" / "results")
    )
    assert fresh.read_text() == PAGE.read_text(), "run `slangvi reproduce report`."
