"""Records come back from their files as they were, and tables show what there is."""

from __future__ import annotations

import json

import pytest

from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.record import Record, Row, left_out, load, save, table

ROWS = [
    Row("adam", {"L": 8}, milliseconds=1.23456, ratio=1.0, peak_mb=1234.5),
    Row("slang", {"L": 8, "P": 478410}, milliseconds=150.4, share=0.1234, target="✓ ≤ 2 ms", met=True),
    Row("pyro", skipped="pyro is not installed"),
    Row("pyro", skipped="pyro is not installed"),
]


def record(device_type="cuda", device="NVIDIA H200"):
    return Record("step", {"device_type": device_type, "device": device}, Rates(1e12, 1e9), ROWS)


def test_a_record_survives_its_file(tmp_path):
    path = tmp_path / "new" / "step-h200.json"
    save(record(), path)
    assert load(path) == record()


@pytest.mark.parametrize("content", [{"environment": {}, "results": {}}, {"bench": "step", "rows": [{"speed": 1}]}])
def test_files_of_another_make_are_refused_by_name(content, tmp_path):
    path = tmp_path / "step-cpu.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"step-cpu\.json was not written by this version"):
        load(path)


@pytest.mark.parametrize(
    ("device_type", "device", "label"),
    [
        ("cpu", "Processor", "cpu"),
        ("cpu", "AMD EPYC", "epyc"),
        ("cpu", "AMD EPYC 7B13 64-Core Processor", "epyc-7b13"),
        ("cpu", "Intel(R) Xeon(R) Processor", "xeon"),
        ("cpu", "Intel(R) Xeon(R) CPU @ 2.20GHz", "xeon"),
        ("cpu", "Apple M2", "apple-m2"),
        ("cpu", "x86_64", "x86_64"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("cuda", "NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_labels_are_short(device_type, device, label):
    assert record(device_type, device).label == label


def test_tables_leave_out_empty_columns_and_skipped_rows():
    header, lines = table(ROWS)
    assert header == ["contender", "L", "P", "ms", "× Adam", "peak MB", "share of the limit", "target"]
    assert lines == [
        ["adam", "8", "", "1.23", "1", "1234", "", ""],
        ["slang", "8", "478,410", "150", "", "", "12.3 %", "✓ ≤ 2 ms"],
    ]


def test_peak_memory_stands_next_to_its_bound():
    header, lines = table([Row("slang", peak_mb=90.0, bound_mb=100.0, extra_mb=5.0)])
    assert header == ["contender", "peak MB", "bound MB", "extra MB"]
    assert lines == [["slang", "90", "100", "5"]]


def test_a_skipped_row_has_its_settings_if_others_of_the_name_were_measured():
    rows = [
        Row("evon", {"network": "MLP"}, skipped="evon is not installed"),
        Row("evon", {"network": "ResNet-18"}, skipped="evon is not installed"),
        Row("slang", {"network": "MLP"}, milliseconds=1.0),
        Row("slang", {"network": "ResNet-18", "P": 9, "L": 8, "K": 16}, skipped="out of memory"),
    ]
    assert left_out(rows) == [
        "Not measured: evon (evon is not installed).",
        "Not measured: slang L=8 K=16 on ResNet-18 (out of memory).",
    ]


def test_skipped_rows_are_told_once():
    assert left_out(ROWS) == ["Not measured: pyro (pyro is not installed)."]
