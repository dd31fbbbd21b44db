"""The page is written from the results, says all they hold, and is the one in docs/."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slangvi_reproduction.bench import BENCHES, own, report, step
from slangvi_reproduction.bench.limits import Rates, bytes_of, operations_of
from slangvi_reproduction.bench.record import Record, Row, save

ROOT = Path(__file__).parents[3]


ABOUT = {
    "command": "slangvi bench",
    "device": "Fast Chip",
    "device_type": "cpu",
    "threads": 2,
    "python": "3",
    "torch": "2",
    "slangvi": "0",
    "peers": {"ivon-opt": "1.0"},
    "date": "2018-12-03",
    "seconds": 3.0,
}


def record(name: str, *rows: Row) -> Record:
    return Record(name, ABOUT, Rates(5e13, 4e12), rows)


def point(name: str, sweep: str, P: int, L: int) -> Row:
    labels: dict[str, int | str] = {"sweep": sweep, "P": P, "L": L}
    return Row(name, labels, milliseconds=P * L / 1e4, peak_mb=P / 1e3)


RECORDS = {
    "step": record(
        "step",
        Row("adam", milliseconds=1.0, ratio=1.0, peak_mb=10.0),
        Row(own.FUNCTIONAL, {"L": 8}, milliseconds=2.0, ratio=2.0, share=0.25, target="✗ ≤ 1.5 ms", met=False),
        Row("pyro low-rank", {"L": 8}, skipped="pyro is not installed"),
    ),
    "layers": record("layers", Row("ivon", {"network": "ResNet-20", "P": 270_000}, milliseconds=30.0, peak_mb=5.0)),
    "scale": record(
        "scale",
        *(point(name, "P", P, 8) for P in (1000, 10_000) for name in ("adam", own.FUNCTIONAL)),
        *(point(own.FUNCTIONAL, "L", 1000, L) for L in (1, 8)),
        point(own.FUNCTIONAL, "large", 10**8, 8),
    ),
    "networks": record(
        "networks",
        Row("adam", {"network": "MLP", "P": 1000}, milliseconds=1.0, ratio=1.0, peak_mb=10.0),
        Row(
            "slang",
            {"network": "MLP", "P": 1000, "L": 8, "K": 16},
            milliseconds=3.0,
            ratio=3.0,
            peak_mb=11.0,
            bound_mb=11.5,
            target="✓ ≤ 3.5 × Adam, ✓ peak ≤ bound",
            met=True,
        ),
        Row("BERT-base", {"network": "BERT-base"}, skipped="transformers is not installed"),
    ),
    "replicas": record("replicas", Row("slang lockstep", milliseconds=20.0, peak_mb=10.0)),
}


@pytest.fixture
def results(tmp_path):
    for name, one in RECORDS.items():
        save(one, tmp_path / "results" / f"{name}-fast-chip.json")
    return tmp_path / "results"


def test_there_is_a_record_of_every_benchmark():
    assert list(RECORDS) == list(BENCHES)


def test_page_and_pictures_are_written(results, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    written = report.write(results, docs)
    assert [path.relative_to(docs).as_posix() for path in written] == [
        "performance.md",
        *(f"images/bench-{name}-fast-chip.png" for name in BENCHES),
    ]
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in written[1:])
    text = written[0].read_text(encoding="utf-8")
    for path in written[1:]:
        assert path.relative_to(docs).as_posix() in text
    assert text.endswith("```{include} _performance_notes.md\n```\n")


def test_every_record_is_on_the_page_in_order(results):
    lines = report.page(report.load_all(results)).splitlines()
    expected = [
        "### Step on Fast Chip",
        "| contender | L | ms | × Adam | peak MB | share of the limit | target |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        "| slang functional | 8 | 2 | 2 |  | 25.0 % | ✗ ≤ 1.5 ms |",
        "- 0 of 1 targets are met.",
        "- Not measured: pyro low-rank (pyro is not installed).",
        "### Layers on Fast Chip",
        "| ivon | ResNet-20 | 270,000 | 30 | 5 |",
        "### Scale on Fast Chip",
        "| slang functional | large | 100,000,000 | 8 | 80000 | 100000 |",
        "- slang functional: time grows as P^1.00, peak memory as P^1.00.",
        "### Networks on Fast Chip",
        "| contender | network | P | L | K | ms | × Adam | peak MB | bound MB | target |",
        "| slang | MLP | 1,000 | 8 | 16 | 3 | 3 | 11 | 11.5 | ✓ ≤ 3.5 × Adam, ✓ peak ≤ bound |",
        "- 2 of 2 targets are met.",
        "- Not measured: BERT-base (transformers is not installed).",
        "### Replicas on Fast Chip",
        "| slang lockstep | 20 | 10 |",
        "## The physical limit",
    ]
    assert [line for line in lines if line in expected] == expected
    environment = "`slangvi bench` on 2018-12-03: 3 s, 2 threads, Python 3, torch 2, slangvi 0, ivon-opt 1.0."
    assert lines.count(environment) == len(BENCHES)


def test_benchmarks_without_results_are_named():
    text = report.page([])
    for name in BENCHES:
        assert f"Not measured yet: `slangvi bench {name}`." in text


def test_the_limit_is_shown_with_its_share():
    text = report.page([RECORDS["step"]])
    assert "On Fast Chip a product reached 50 TFLOP/s and a copy 4000 GB/s." in text
    shape = step.FULL.shape(8)
    work, moved = sum(operations_of(shape).values()) / 1e9, sum(bytes_of(shape).values()) / 1e6
    assert f"| slang functional | 8 | {work:.3g} | {moved:.3g} | 0.5 | 2 | 25.0 % |" in text.splitlines()


def test_quick_results_are_refused(tmp_path):
    quick = replace(RECORDS["step"], environment=ABOUT | {"command": "slangvi bench step --quick"})
    save(quick, tmp_path / "step-fast-chip.json")
    with pytest.raises(ValueError, match=r"step-fast-chip\.json comes from a --quick run"):
        report.load_all(tmp_path)


def test_missing_matplotlib_says_what_to_install(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"the pictures need matplotlib: pip install 'slangvi\[plot\]'"):
        report.write(results, tmp_path)


def test_the_page_in_the_documentation_is_up_to_date():
    records = report.load_all(ROOT / "reproduction" / "benchmarks" / "results")
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == report.page(records)
    for record in records:
        assert (ROOT / "docs" / "images" / f"bench-{record.bench}-{record.label}.png").is_file()
