"""The demo: one quick run for real (shared with the command line), and its reproducibility on a shorter one."""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import replace

import pytest
import torch

from slangvi.cli import _demo_training as demo

LABELS = [f"{data}: {method}" for data in ("noisy cubic", "breast cancer") for method in ("SLANG", "Adam")]


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk, after the signature."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch of everything and few draws."""
    monkeypatch.setattr(demo, "CUBIC", replace(demo.CUBIC, epochs=20, adam_epochs=20, mc_samples=1))
    monkeypatch.setattr(demo, "PATIENTS", replace(demo.PATIENTS, epochs=20, adam_epochs=20, mc_samples=1, batch=285))
    monkeypatch.setattr(demo, "TEST_DRAWS", 4)


def test_both_methods_are_scored_on_both_data_sets(quick_demo):
    rows = quick_demo.result.rows
    assert [(row.data, row.method) for row in rows] == [tuple(label.split(": ")) for label in LABELS]
    assert all(math.isfinite(row.nll) and 0 <= row.calibration <= 1 for row in rows)
    assert all(row.score.startswith("RMSE ") for row in rows[:2])
    assert all(row.score.endswith(" %") and 50 < float(row.score[:-2]) <= 100 for row in rows[2:])


def test_a_few_epochs_already_classify_most_patients(quick_demo):
    slang = next(row for row in quick_demo.result.rows if row.data == "breast cancer" and row.method == "SLANG")
    assert float(slang.score[:-2]) > 75  # the larger class is 63 %


def test_progress_reaches_its_totals_one_epoch_at_a_time(quick_demo):
    by_label: dict[str, list[tuple[int, int]]] = {}
    for label, done, total in quick_demo.progress:
        by_label.setdefault(label, []).append((done, total))
    assert list(by_label) == LABELS
    for calls in by_label.values():
        total = calls[0][1]
        assert calls == [(done, total) for done in range(1, total + 1)]


def test_quick_is_a_twentieth_of_the_epochs(quick_demo):
    totals = {label: total for label, _, total in quick_demo.progress}
    expected = [demo.CUBIC.epochs, demo.CUBIC.adam_epochs, demo.PATIENTS.epochs, demo.PATIENTS.adam_epochs]
    assert [totals[label] for label in LABELS] == [epochs // 20 for epochs in expected]


def test_what_the_picture_needs_is_there(quick_demo):
    curve, confidence = quick_demo.result.curve, quick_demo.result.confidence
    assert curve.x.shape == curve.y.shape == (30, 1)
    assert curve.draws.shape == (demo.TEST_DRAWS, *curve.grid.shape)
    assert curve.adam.shape == curve.grid.shape
    assert all(bool(t.isfinite().all()) for t in (curve.grid, curve.draws, curve.adam))
    assert list(confidence) == ["SLANG", "Adam"]
    for top, right in confidence.values():
        assert top.shape == right.shape == (284,)
        assert right.dtype is torch.bool
        assert bool(((top >= 0.5) & (top <= 1)).all())


def test_picture_is_a_png_of_its_size(quick_demo, tmp_path):
    path = tmp_path / "again.png"
    demo.plot(quick_demo.result, path)
    data = path.read_bytes()
    assert png_size(data) == (1320, 504)
    assert len(data) > 10_000


@pytest.mark.usefixtures("tiny")
def test_a_seed_fixes_everything_and_the_global_randomness_stays(global_rng_untouched):
    first, again, other = (demo.run(seed, quick=True) for seed in (1, 1, 2))
    assert first.rows == again.rows
    assert torch.equal(first.curve.draws, again.curve.draws)
    assert first.rows != other.rows


@pytest.mark.usefixtures("tiny")
def test_without_quick_every_epoch_is_run():
    calls = []
    demo.run(progress=lambda *call: calls.append(call))
    assert calls == [(label, done, 20) for label in LABELS for done in range(1, 21)]


def test_missing_matplotlib_says_what_to_install(quick_demo, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"the picture needs matplotlib: pip install 'slangvi\[plot\]'"):
        demo.plot(quick_demo.result, tmp_path / "never.png")
    assert not (tmp_path / "never.png").exists()


@pytest.mark.usefixtures("tiny")
def test_missing_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"slangvi\[sklearn\]"):
        demo.run(quick=True)
