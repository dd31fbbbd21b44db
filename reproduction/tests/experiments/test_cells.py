"""Cells: fingerprints, files that are whole or not there, checkpoints."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from helpers import fake_experiments
from slangvi.files import put
from slangvi_reproduction.experiments._cells import Attempt, Stopped, compute, forget, read, read_cell, write


def silent(done: int, steps: int) -> bool:
    return False


def test_every_setting_changes_the_fingerprint_and_nothing_else_does(tmp_path):
    one = fake_experiments.cell("a", epochs=1)
    assert replace(one, cost=5.0).fingerprint == one.fingerprint
    others = [
        fake_experiments.cell("a", epochs=2),
        fake_experiments.cell("b", epochs=1),
        fake_experiments.cell("a", "fail"),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert one.path(tmp_path) == tmp_path / "toy" / f"data-a-{one.fingerprint}.npz"


def test_a_result_may_come_from_any_device_but_a_checkpoint_not(tmp_path):
    here, there, beside = (fake_experiments.cell("a", device=device) for device in ("cpu", "cuda", "cuda:1"))
    assert here.path(tmp_path) == there.path(tmp_path) == beside.path(tmp_path)
    assert here.partial_path(tmp_path) != there.partial_path(tmp_path) == beside.partial_path(tmp_path)
    assert here.partial_path(tmp_path).name.endswith(f"{here.fingerprint}.partial.npz")


def test_files_hold_arrays_and_a_story(tmp_path):
    path = tmp_path / "deep" / "file.npz"
    write(path, {"x": np.arange(3), "empty": np.zeros((0, 2))}, {"seconds": 1.5})
    stored = read(path)
    assert stored.about == {"seconds": 1.5}
    assert stored.arrays.keys() == {"x", "empty"}
    assert stored.arrays["empty"].shape == (0, 2)
    assert [p.name for p in path.parent.iterdir()] == ["file.npz"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "file"
    put(path, lambda file: file.write(b"old"))

    def broken(file):
        file.write(b"new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        put(path, broken)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut"])
def test_damaged_files_are_named_and_count_as_unfinished(tmp_path, content):
    cell = fake_experiments.cell("a")
    path = cell.path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged or not a result of ours"):
        read(path)
    assert read_cell(cell, tmp_path) is None


def test_files_of_others_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.arange(3))
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.arange(3))
    for name in ("other.npz", "array.npz"):
        with pytest.raises(ValueError, match="is damaged or not a result of ours"):
            read(tmp_path / name)


def test_any_byte_may_be_damaged(tmp_path):
    path = tmp_path / "file.npz"
    write(path, {"x": np.arange(3)}, {"seconds": 1.5})
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        with suppress(ValueError):  # and nothing else
            assert read(path).arrays["x"].tolist() == [0, 1, 2]


def test_a_cell_is_computed_kept_and_its_checkpoint_removed(tmp_path):
    cell = fake_experiments.cell("a")
    seconds = compute(cell, tmp_path, silent, keep_every=0.0)
    stored = read_cell(cell, tmp_path)
    assert int(stored.arrays["total"]) == 21
    assert stored.about["seconds"] == pytest.approx(seconds, abs=0.1)
    assert (stored.about["method"], stored.about["settings"]) == ("a", {})
    assert not cell.partial_path(tmp_path).exists()
    forget(cell, tmp_path)
    assert read_cell(cell, tmp_path) is None


def test_a_stopped_cell_keeps_where_it_was_and_goes_on_from_there(tmp_path):
    log = tmp_path / "log"
    cell = fake_experiments.cell("a", log=str(log))
    with pytest.raises(Stopped):
        compute(cell, tmp_path, lambda done, steps: done == 2)
    assert read(cell.partial_path(tmp_path)).about["done"] == 2
    compute(cell, tmp_path, silent)
    assert log.read_text().split() == [word for k in range(1, 7) for word in ("a", str(k))]
    assert int(read_cell(cell, tmp_path).arrays["total"]) == 21


def test_seconds_of_all_attempts_are_added(tmp_path):
    cell = fake_experiments.cell("a")
    write(cell.partial_path(tmp_path), {"done": np.array(5), "total": np.array(15)}, {"seconds": 100.0})
    assert compute(cell, tmp_path, silent) > 100.0


def test_checkpoints_are_kept_when_due_only(tmp_path):
    captured = []

    def capture():
        captured.append(1)
        return {"x": np.zeros(1)}

    attempt = Attempt(fake_experiments.cell("a"), tmp_path, silent, keep_every=1000.0)
    attempt.tick(1, 2, capture)
    assert not captured
    attempt.keep_every = 0.0
    attempt.tick(2, 2, capture)
    assert captured
    assert attempt.restored()["x"].shape == (1,)


def test_a_checkpoint_that_cannot_be_read_is_done_without(tmp_path):
    cell = fake_experiments.cell("a")
    path = cell.partial_path(tmp_path)
    path.parent.mkdir()
    write(path, {"done": np.array(5)}, {})
    assert Attempt(cell, tmp_path, silent).restored() is None
    path.write_bytes(b"cut")
    assert Attempt(cell, tmp_path, silent).restored() is None
    compute(cell, tmp_path, silent)
    assert read_cell(cell, tmp_path) is not None
