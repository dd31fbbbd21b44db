"""A web server on this machine that can misbehave, for tests of what fetches files."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers by path; unknown paths are 404. `seen` holds every path asked for."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.answers: dict[str, Answer] = {}
        self.seen: list[str] = []

    def put(self, path: str, answer: Answer | bytes) -> str:
        """Serve something; returns its address."""
        self.answers[path] = good(answer) if isinstance(answer, bytes) else answer
        return self.base + path


@contextmanager
def serving(secure: ssl.SSLContext | None = None) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.seen.append(self.path)
            with suppress(BrokenPipeError, ConnectionResetError):
                server.answers.get(self.path, lambda handler: handler.send_error(404))(self)

        def log_message(self, *arguments: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(listener.server_port)
    if secure is not None:
        listener.socket = secure.wrap_socket(listener.socket, server_side=True)
        listener.handle_error = lambda *arguments: None  # handshakes that fail are what is tested
        server.base = server.base.replace("http:", "https:")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def good(body: bytes, length: int | None = -1, wait: float = 0.0, chunk: int = 1 << 20, pause: float = 0.0) -> Answer:
    """All of the body; `length` is what the header claims (None: no header); pauses before it and between chunks."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(wait)
        handler.send_response(200)
        if length is not None:
            handler.send_header("Content-Length", str(len(body) if length == -1 else length))
        handler.end_headers()
        for start in range(0, len(body), chunk):
            handler.wfile.write(body[start : start + chunk])
            time.sleep(pause)

    return answer


def headed(*headers: tuple[str, str], body: bytes = b"some bytes") -> Answer:
    """An answer with these headers, whether they make sense or not."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(address: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", address)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def files_in(folder: Path) -> list[str]:
    """Every file below a folder, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
