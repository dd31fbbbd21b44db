"""An end to connections that go on for too long, whatever they are doing.

A timeout of a socket is for one answer of the network. A server that sends a byte now and then is always in time: in
the handshake, in the headers, or in the body. So the whole has an end, at which the connection is cut.
"""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

__all__ = ["Deadline"]


class Deadline:
    """Within the block, connections opened by its handlers live for so many seconds.

    Args:
        seconds: from the beginning of the block.

    Attributes:
        over: whether the time is up.
    """

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._guard = threading.Lock()
        self._connected: list[socket.socket] = []
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._end)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._guard:
            for connection in self._connected:
                connection.close()
            self._connected = []

    def handlers(self) -> list[urllib.request.BaseHandler]:
        """What opens http and https for urllib."""
        return [_Http(self._made(http.client.HTTPConnection)), _Https(self._made(http.client.HTTPSConnection))]

    def _made(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        def connection(host: str, **options: Any) -> Any:
            made = kind(host, **options)
            made._create_connection = self._connect
            return made

        return connection

    def _connect(self, *arguments: Any, **options: Any) -> socket.socket:
        made = socket.create_connection(*arguments, **options)
        with self._guard:
            # A second handle: TLS takes the first one over, and hides it during the handshake.
            self._connected.append(made.dup())
        if self.over:
            self._end()
        return made

    def _end(self) -> None:
        self.over = True
        with self._guard:
            for connection in self._connected:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, connection: Callable[..., Any]) -> None:
        super().__init__()
        self._connection = connection

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open an http address."""
        return self.do_open(self._connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, connection: Callable[..., Any]) -> None:
        super().__init__()
        self._connection = connection

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open an https address; certificates and names are checked as always."""
        return self.do_open(self._connection, req)
