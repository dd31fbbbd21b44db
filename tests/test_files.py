"""Files that are there whole or not at all, and the one before them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from slangvi import files
from slangvi.files import put


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(path, content, previous=None):
    put(path, lambda file: file.write(content), previous)


def test_the_file_before_is_kept_under_another_name(tmp_path):
    path, previous = tmp_path / "deep" / "file", tmp_path / "deep" / "file.previous"
    write(path, b"1", previous)
    assert names(path.parent) == ["file"]
    for k in range(2, 5):
        write(path, str(k).encode(), previous)
        assert (path.read_bytes(), previous.read_bytes()) == (str(k).encode(), str(k - 1).encode())
        assert names(path.parent) == ["file", "file.previous"]


def test_without_hard_links_it_is_renamed(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    path, previous = tmp_path / "file", tmp_path / "file.previous"
    for content in (b"1", b"2"):
        if path.exists():
            write(path, content, previous)
        else:
            write(path, content)
    assert (path.read_bytes(), previous.read_bytes()) == (b"2", b"1")


def test_a_process_that_died_between_the_two_names_leaves_nothing_behind(tmp_path):
    """Both names are then one file, between which a rename does nothing."""
    path, previous = tmp_path / "file", tmp_path / "file.previous"
    write(path, b"1")
    os.link(path, previous)
    write(path, b"2", previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"2", b"1")
    assert names(tmp_path) == ["file", "file.previous"]


def test_drafts_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    path = tmp_path / "file[1]"
    draft, young, other = (tmp_path / name for name in (".file[1].1-a.tmp", ".file[1].2-b.tmp", ".file1.1-a.tmp"))
    for entry in (draft, young, other):
        entry.write_bytes(b"half")
    old = time.time() - 100
    os.utime(draft, (old, old))
    os.utime(other, (old, old))
    with draft.open("rb") as held:
        assert files.try_lock(held.fileno())
        write(path, b"whole")
        assert draft.exists()
    write(path, b"whole")
    assert names(tmp_path) == sorted([young.name, other.name, path.name])


def test_a_lock_is_seen_by_other_processes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    code = "import sys; from slangvi.files import try_lock; f = open(sys.argv[1]); print(try_lock(f.fileno()))"
    with path.open("rb") as held:
        assert files.try_lock(held.fileno())
        found = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_whatever_fails_the_old_files_stay(tmp_path, error):
    path, previous = tmp_path / "file", tmp_path / "file.previous"
    write(path, b"1")
    write(path, b"2", previous)

    def broken(file):
        file.write(b"3")
        raise error

    with pytest.raises(type(error)):
        put(path, broken, previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"2", b"1")
    assert names(tmp_path) == ["file", "file.previous"]
