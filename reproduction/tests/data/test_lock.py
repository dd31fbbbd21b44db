"""Several at once: a file is fetched by one of them, and a lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.fake_files import BODY, sha256, table_row
from helpers.fake_server import files_in, good
from slangvi.errors import DataError
from slangvi_reproduction.data import _lock, remote
from slangvi_reproduction.data.remote import fetch


@pytest.mark.parametrize("force", [False, True])
def test_threads_fetch_once(server, cache, force):
    file = table_row(server.put("/tiny", b"old"))
    if force:
        fetch(file)
        server.seen.clear()
    server.put("/tiny", good(BODY, wait=0.5))
    barrier = threading.Barrier(6)

    def run(_):
        barrier.wait()
        return fetch(file, force=force).read_bytes()

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(run, range(6))) == {BODY}
    assert server.seen == ["/tiny"]
    assert files_in(cache) == ["set/tiny"]


def test_when_the_first_fails_the_next_tries_for_itself(server, cache):
    answers = iter([good(b"x", length=9, wait=0.2), good(BODY)])

    def one_after_the_other(handler):
        next(answers)(handler)

    file = table_row(server.put("/tiny", one_after_the_other), sha256=sha256(BODY))

    def run(after):
        while len(server.seen) < after:
            time.sleep(0.01)
        try:
            return fetch(file).read_bytes()
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, [0, 1])
    assert "the connection ended" in first
    assert second == BODY
    assert files_in(cache) == ["set/tiny"]


# Importing torch takes seconds, and fetching needs none of it.
PROCESS = """
import importlib.util, sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.OutOfMemoryError = RuntimeError
data = sys.modules["slangvi_reproduction.data"] = types.ModuleType("slangvi_reproduction.data")
data.__path__ = [importlib.util.find_spec("slangvi_reproduction").submodule_search_locations[0] + "/data"]
from slangvi_reproduction.data.remote import File, fetch
print("ready", flush=True)
sys.stdin.readline()
file = File("set/tiny", "tiny", (sys.argv[1],), 1_000_000)
print(len(fetch(file).read_bytes()), flush=True)
"""


def test_processes_fetch_once(server, cache):
    url = server.put("/tiny", good(BODY, wait=0.3))
    command = [sys.executable, "-c", PROCESS, url]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=30)[0] for process in both] == [f"{len(BODY)}\n"] * 2
    assert server.seen == ["/tiny"]
    assert files_in(cache) == ["set/tiny"]


HOLDER = """
import fcntl, sys, time
handle = open(sys.argv[1], "w")
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_waited_for_and_ends_with_its_process(server, cache, monkeypatch):
    file = table_row(server.put("/tiny", BODY))
    lock = cache / "set" / ".tiny.lock"
    lock.parent.mkdir(parents=True)
    orphan = lock.with_name(".tiny.123-abc.part")
    orphan.write_bytes(b"half")
    os.utime(orphan, (0, 0))
    fresh = lock.with_name(".tiny.124-abc.part")
    fresh.write_bytes(b"half")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(remote, "PATIENCE", 1)
        with pytest.raises(
            DataError, match=r"another process has been fetching tiny for 0\.1 s and holds .*\.tiny\.lock"
        ):
            fetch(file, timeout=0.1)
        assert server.seen == []
        monkeypatch.setattr(remote, "PATIENCE", 20)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert lock.exists()
    assert fetch(file).read_bytes() == BODY
    assert files_in(cache) == ["set/.tiny.124-abc.part", "set/tiny"]


def test_without_locks_files_are_fetched_all_the_same(server, cache, monkeypatch):
    def missing(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", missing)
    assert fetch(table_row(server.put("/tiny", BODY))).read_bytes() == BODY
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with _lock.alone(cache / "set" / "tiny", 1.0), _lock.alone(cache / "set" / "tiny", 1.0):
        assert files_in(cache) == ["set/.tiny.lock", "set/tiny"]
    assert files_in(cache) == ["set/tiny"]
