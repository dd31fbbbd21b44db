"""The cache: good files arrive whole, and whatever goes wrong leaves nothing behind but a message."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving import files_in, good, headed, redirect, serving
from slangvi.data import _lock, _remote
from slangvi.data._download import RejectedError, check_url
from slangvi.data._remote import File, cache_root, fetch, is_offline, locate
from slangvi.data.libsvm import LIBSVM
from slangvi.data.mnist import IMAGES
from slangvi.data.uci import UCI
from slangvi.errors import DataError

BODY = b"a,b\n" * 50_000


def table_row(*urls: str, **changes) -> File:
    return File(**{"path": "set/tiny", "dataset": "tiny", "urls": urls, "max_bytes": 1_000_000} | changes)


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


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


# ---- what goes wrong on the way ----


def refuse(path: Path, name: str) -> None:
    raise DataError(f"{name} has the wrong words.")


@pytest.mark.parametrize(
    ("answer", "changes", "reason"),
    [
        (good(BODY), {"sha256": "0" * 64}, rf"what came has SHA-256 {sha256(BODY)}, not 0000"),
        (good(BODY), {"check": refuse}, "what came has the wrong words"),
        (good(BODY, length=2 * len(BODY)), {}, r"the connection ended after 200,000 of 400,000 bytes"),
        (good(BODY), {"max_bytes": 1000}, "200,000 bytes, and 1,000 are allowed"),
        (good(BODY, length=None), {"max_bytes": 1000}, "larger than the 1,000 bytes allowed"),
        (good(BODY, wait=0.4), {}, r"no answer within 0.1 s"),
        (good(BODY, chunk=100_000, pause=0.4), {}, r"no answer within 0.1 s"),
        (lambda handler: handler.send_error(404), {}, "HTTP 404 Not Found"),
        (lambda handler: handler.wfile.write(b"no HTTP at all\r\n\r\n"), {}, "no HTTP at all"),
        (lambda handler: None, {}, "Remote end closed connection"),
        (redirect("http://example.com/tiny"), {}, "redirected to http://example.com/tiny, which is not https: refused"),
        (redirect("ftp://127.0.0.1/tiny"), {}, "redirected to ftp://127.0.0.1/tiny, which is not https"),
        (redirect("file:///etc/passwd"), {}, "Redirection to url .file:///etc/passwd. is not allowed"),
        (redirect("data:text/plain,x"), {}, "Redirection to url .data:text/plain,x. is not allowed"),
        (redirect("//example.com/tiny"), {}, "redirected to http://example.com/tiny, which is not https"),
        (redirect("/tiny"), {}, "HTTP 302 .*infinite loop"),
        (headed(("Content-Length", "9" * 6000)), {"sha256": "0" * 64}, "what came has SHA-256"),
        (headed(("Content-Length", "-5")), {"sha256": "0" * 64}, "what came has SHA-256"),
        (headed(("Content-Length", "1e9")), {"sha256": "0" * 64}, "what came has SHA-256"),
        (headed(("Content-Length", "100"), body=BODY), {"sha256": sha256(BODY)}, "what came has SHA-256"),
        (headed(("Transfer-Encoding", "chunked")), {}, "IncompleteRead|invalid literal"),
        (headed(*((f"X-{k}", "x") for k in range(200))), {}, "got more than 100 headers"),
        (headed(("X", "x" * 100_000)), {}, "got more than 65536 bytes when reading header line"),
    ],
    ids=lambda value: value[:25] if isinstance(value, str) else "",
)
def test_a_failure_says_why_and_leaves_nothing(server, cache, answer, changes, reason):
    file = table_row(server.put("/tiny", answer), **changes)
    with pytest.raises(DataError, match=reason) as caught:
        fetch(file, timeout=0.1 if "no answer" in reason else 10.0)
    message = str(caught.value)
    assert len(message) < 2000
    assert message.startswith("set/tiny could not be fetched, and nothing was kept.\n")
    assert file.urls[0] in message
    assert str(file.target) in message
    assert files_in(cache) == []


def dripping_headers(handler):
    """Byte by byte, each in time."""
    for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "answer", [good(BODY[:100], chunk=1, pause=0.02), good(BODY[:100], None, chunk=1, pause=0.02), dripping_headers]
)
def test_a_server_that_drips_is_given_up_in_the_end(server, cache, monkeypatch, answer):
    monkeypatch.setattr(_remote, "PATIENCE", 0.025)
    file = table_row(server.put("/tiny", answer))
    with pytest.raises(DataError, match=r"only \d+ bytes within 0\.25 s"):
        fetch(file, timeout=10.0)
    assert files_in(cache) == []
    assert threading.active_count() < 20


def test_a_handshake_that_never_ends_is_given_up(cache, monkeypatch):
    """A server that accepts the connection and says nothing of TLS, or ever so slowly."""
    monkeypatch.setattr(_remote, "PATIENCE", 0.025)
    within = pytest.raises(DataError, match=r"only 0 bytes within 0\.25 s")
    with socket.create_server(("127.0.0.1", 0)) as listener, within:
        fetch(table_row(f"https://127.0.0.1:{listener.getsockname()[1]}/tiny"), timeout=10.0)
    assert files_in(cache) == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_nobody_vouches_for_is_refused(cache, tmp_path):
    made = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    command = ["openssl", *words.split(), "-keyout", made[0], "-out", made[1]]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made[1], made[0])
    with serving(context) as server:
        url = server.put("/tiny", BODY).replace("127.0.0.1", "localhost")
        with pytest.raises(DataError, match="certificate verify failed: self-signed certificate"):
            fetch(table_row(url))
    assert server.seen == []
    assert files_in(cache) == []


def test_a_server_that_is_not_there_is_said_so(server, cache):
    with pytest.raises(DataError, match="Connection refused"):
        fetch(table_row("http://127.0.0.1:9/tiny"))


def test_mirrors_are_tried_in_order(server, cache):
    bad = [server.base + "/missing", server.put("/short", good(b"x", length=9)), server.put("/other", b"other")]
    file = table_row(*bad, server.put("/tiny", BODY), server.put("/unused", BODY), sha256=sha256(BODY))
    assert fetch(file).read_bytes() == BODY
    assert server.seen == ["/missing", "/short", "/other", "/tiny"]
    assert files_in(cache) == ["set/tiny"]


def test_when_all_mirrors_fail_each_reason_is_given(server, cache):
    file = table_row(server.base + "/missing", server.put("/short", good(b"x", length=9)))
    with pytest.raises(DataError, match=r"(?s)/missing: HTTP 404.*/short: the connection ended after 1 of 9 bytes"):
        fetch(file)


@pytest.mark.parametrize("url", ["http://example.com/x", "ftp://localhost/x", "file:///etc/passwd", "x", "http://a@b/"])
def test_only_https_is_asked(url, cache):
    with pytest.raises(DataError, match="which is not https: refused"):
        fetch(table_row(url))
    assert files_in(cache) == []


def test_https_does_not_lead_to_plain_http_even_here():
    check_url("https://example.com/x", before="https://example.com/y")
    check_url("http://localhost/x", before="http://localhost/y")
    with pytest.raises(RejectedError, match="redirected to http://localhost/x"):
        check_url("http://localhost/x", before="https://example.com/y")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_fetch_leaves_nothing(server, cache, failure):
    def interrupt(*news):
        raise failure

    file = table_row(server.put("/tiny", BODY))
    with pytest.raises(failure):
        fetch(file, progress=interrupt)
    assert files_in(cache) == []
    assert fetch(file).read_bytes() == BODY


def test_a_failed_force_keeps_the_old_file(server, cache):
    file = table_row(server.put("/tiny", b"good"), sha256=sha256(b"good"))
    fetch(file)
    server.put("/tiny", b"evil")
    with pytest.raises(DataError, match="SHA-256"):
        fetch(file, force=True)
    assert fetch(file).read_bytes() == b"good"
    assert files_in(cache) == ["set/tiny"]


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


# ---- several at once ----


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
data = sys.modules["slangvi.data"] = types.ModuleType("slangvi.data")
data.__path__ = [importlib.util.find_spec("slangvi").submodule_search_locations[0] + "/data"]
from slangvi.data._remote import File, fetch
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
        monkeypatch.setattr(_remote, "PATIENCE", 1)
        with pytest.raises(
            DataError, match=r"another process has been fetching tiny for 0\.1 s and holds .*\.tiny\.lock"
        ):
            fetch(file, timeout=0.1)
        assert server.seen == []
        monkeypatch.setattr(_remote, "PATIENCE", 20)
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
