"""What goes wrong on the way: whatever servers do, nothing is left behind but a message."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

from helpers.fake_files import BODY, refuse, sha256, table_row
from helpers.fake_server import files_in, good, headed, redirect, serving
from slangvi.errors import DataError
from slangvi_reproduction.data import remote
from slangvi_reproduction.data._download import RejectedError, check_url
from slangvi_reproduction.data.remote import fetch


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
    monkeypatch.setattr(remote, "PATIENCE", 0.025)
    file = table_row(server.put("/tiny", answer))
    with pytest.raises(DataError, match=r"only \d+ bytes within 0\.25 s"):
        fetch(file, timeout=10.0)
    assert files_in(cache) == []
    assert threading.active_count() < 20


def test_a_handshake_that_never_ends_is_given_up(cache, monkeypatch):
    """A server that accepts the connection and says nothing of TLS, or ever so slowly."""
    monkeypatch.setattr(remote, "PATIENCE", 0.025)
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
