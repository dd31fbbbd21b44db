"""The cache: good files arrive whole, and whatever is wrong with it leaves nothing behind but a message."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.fake_files import BODY, refuse, sha256, table_row
from helpers.fake_server import files_in, good, redirect
from slangvi.errors import DataError
from slangvi_reproduction.data import _lock
from slangvi_reproduction.data.libsvm import LIBSVM
from slangvi_reproduction.data.mnist import IMAGES
from slangvi_reproduction.data.remote import cache_root, fetch, is_offline, locate
from slangvi_reproduction.data.uci import UCI

# ---- where the cache is ----


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SLANGVI_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == tmp_path
    monkeypatch.setenv("SLANGVI_DATA", "~/here")
    assert cache_root() == Path("/home/someone/here")
    monkeypatch.setenv("SLANGVI_DATA", "")
    assert cache_root() == Path("/xdg/slangvi")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_root() == Path("/home/someone/.cache/slangvi")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/home/someone/.cache/slangvi")


@pytest.mark.parametrize(
    ("value", "offline"),
    [("1", True), ("true", True), ("yes please", True), ("0", False), ("", False), ("False", False), (None, False)],
)
def test_the_offline_switch(value, offline, monkeypatch):
    monkeypatch.delenv("SLANGVI_OFFLINE", raising=False)
    if value is not None:
        monkeypatch.setenv("SLANGVI_OFFLINE", value)
    assert is_offline() is offline


# ---- what works ----


@pytest.mark.parametrize("length", [-1, None], ids=["announced", "not announced"])
def test_a_file_is_fetched_once_checked_and_kept(server, cache, length):
    calls = []
    file = table_row(
        server.put("/tiny", good(BODY, length)),
        sha256=sha256(BODY),
        check=lambda path, name: calls.append((path.read_bytes(), name)),
    )
    assert locate(file) is None
    progress = []
    path = fetch(file, progress=lambda *news: progress.append(news))
    assert path == locate(file) == cache / "set" / "tiny"
    assert path.read_bytes() == BODY
    assert fetch(file) == path
    assert server.seen == ["/tiny"]
    assert files_in(cache) == ["set/tiny"]
    assert calls[0] == (BODY, "what came")
    assert {news[0] for news in progress} == {"set/tiny"}
    assert [news[1] for news in progress] == sorted(news[1] for news in progress)
    assert progress[-1] == ("set/tiny", len(BODY), len(BODY) if length == -1 else 0)


def test_fetched_files_have_the_permissions_of_ordinary_files(server, cache):
    mask = os.umask(0o027)
    try:
        path = fetch(table_row(server.put("/tiny", BODY)))
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_cached_file_is_checked_once_and_again_when_it_changes(cache):
    names = []
    file = table_row(check=lambda path, name: names.append(name))
    file.target.parent.mkdir(parents=True)
    file.target.write_bytes(b"one")
    assert fetch(file) == fetch(file) == file.target
    assert names == [str(file.target)]
    file.target.write_bytes(b"other")
    fetch(file, verify=False)
    assert len(names) == 1
    fetch(file)
    assert len(names) == 2


def test_an_unpacked_copy_serves_as_well_and_has_no_checksum(cache):
    names = []
    file = table_row(sha256="0" * 64, also=("set/tiny.txt",), check=lambda path, name: names.append(name))
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "tiny.txt").write_bytes(b"unpacked")
    assert fetch(file) == cache / "set" / "tiny.txt"
    assert names == [str(cache / "set" / "tiny.txt")]


def test_force_replaces_a_file_that_is_there(server, cache):
    file = table_row(server.put("/tiny", b"old"))
    fetch(file)
    server.put("/tiny", b"new")
    assert fetch(file).read_bytes() == b"old"
    assert fetch(file, force=True).read_bytes() == b"new"
    assert server.seen == ["/tiny", "/tiny"]


def test_redirects_on_this_machine_are_followed(server, cache):
    server.put("/there", BODY)
    file = table_row(server.put("/tiny", redirect("/there")))
    assert fetch(file).read_bytes() == BODY
    assert server.seen == ["/tiny", "/there"]


# ---- what is wrong with the cache ----


@pytest.mark.parametrize("changes", [{"sha256": sha256(BODY)}, {"check": refuse}], ids=["checksum", "content"])
def test_a_damaged_file_says_how_to_replace_it(server, cache, changes):
    file = table_row(server.put("/tiny", BODY), **changes)
    file.target.parent.mkdir(parents=True)
    file.target.write_bytes(BODY[:-1])
    with pytest.raises(DataError, match=r"Delete .*set/tiny, or run `slangvi data fetch tiny --force` to replace it"):
        fetch(file)
    assert server.seen == []
    assert file.target.read_bytes() == BODY[:-1]


def test_offline_never_asks_and_says_what_to_do_by_hand(server, cache, monkeypatch):
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    file = table_row(server.put("/tiny", BODY))
    with pytest.raises(DataError) as caught:
        fetch(file)
    for words in ("set/tiny is missing", "SLANGVI_OFFLINE", file.urls[0], str(file.target), f"{cache} does not exist"):
        assert words in str(caught.value)
    assert server.seen == []
    assert not cache.exists()
    file.target.parent.mkdir(parents=True)
    file.target.write_bytes(BODY)
    assert fetch(file) == file.target
    with pytest.raises(DataError, match="cannot be fetched again, and SLANGVI_OFFLINE forbids"):
        fetch(file, force=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_said_so(server, cache):
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(DataError, match=r"cannot be written: Permission denied\. Set SLANGVI_DATA"):
        fetch(table_row(server.put("/tiny", BODY)))


def test_a_read_only_cache_serves_what_it_has_and_says_so_for_the_rest(server, cache, monkeypatch):
    there, missing = table_row(), table_row(server.put("/tiny", BODY), path="set/other")
    there.target.parent.mkdir(parents=True)
    there.target.write_bytes(BODY)

    def refuse_to_write(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(_lock.os, "open", refuse_to_write)
    assert fetch(there).read_bytes() == BODY
    with pytest.raises(DataError, match=r"cannot be written: Read-only file system\. Set SLANGVI_DATA"):
        fetch(missing)
    assert server.seen == []
    assert files_in(cache) == ["set/tiny"]


def test_a_file_in_place_of_the_cache_is_said_so(server, cache):
    cache.write_bytes(b"")
    with pytest.raises(DataError, match=r"the cache folder .*set cannot be written: Not a directory"):
        fetch(table_row(server.put("/tiny", BODY)))


def test_a_full_disk_is_said_so_and_leaves_nothing(server, cache, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        fetch(table_row(server.put("/tiny", BODY), server.put("/other", BODY)))
    assert server.seen == ["/tiny"]
    assert files_in(cache) == []


def test_a_file_that_cannot_be_read_is_said_so(cache):
    def unreadable(path, name):
        raise PermissionError(errno.EACCES, "Permission denied")

    file = table_row(check=unreadable)
    file.target.parent.mkdir(parents=True)
    file.target.write_bytes(BODY)
    with pytest.raises(DataError, match=r"cannot be read: Permission denied\. Make it readable\."):
        fetch(file)


# ---- what the tables promise ----


@pytest.mark.parametrize("dataset", [*LIBSVM.values(), *UCI.values(), *IMAGES.values()], ids=lambda row: row.name)
def test_every_file_stays_in_the_cache_and_is_checked(dataset):
    for file in dataset.files:
        for path in (file.path, *file.also):
            parts = Path(path).parts
            assert not Path(path).is_absolute()
            assert ".." not in parts
        assert file.urls
        assert all(url.startswith("https://") for url in file.urls)
        assert 0 < file.max_bytes < 200_000_000
        assert file.sha256 is not None or file.check is not None
