"""One file over https, with limits on size and time."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slangvi_reproduction.data._deadline import Deadline

__all__ = ["Progress", "RejectedError", "download"]

CHUNK = 1 << 16
LOCAL = ("localhost", "127.0.0.1", "::1")
Progress = Callable[[str, int, int], None]


class RejectedError(Exception):
    """What a server answered cannot be used; another server may do better."""


def download(
    url: str, part: Path, name: str, max_bytes: int, progress: Progress | None, timeout: float, patience: float
) -> None:
    """Write what a URL holds to a new file, and see it on the disk.

    Args:
        url: https; plain http for this machine only.
        part: a file that must not exist yet. The caller removes it, whatever happens.
        name: handed to `progress`.
        max_bytes: more is refused.
        progress: see `slangvi_reproduction.data.remote.fetch`.
        timeout: seconds a server may be silent.
        patience: seconds for all of it.

    Raises:
        RejectedError: by the network or by one of the limits, in words.
        OSError: the file cannot be written.
    """
    check_url(url)
    with part.open("xb") as handle, Deadline(patience) as deadline:
        done = 0

        def network(call: Callable[[], Any]) -> Any:
            try:
                return _network(call, timeout)
            except RejectedError as error:
                raise (_too_slow(done, patience) if deadline.over else error) from error

        with network(lambda: _open(url, timeout, deadline)) as response:
            total = _announced(response, max_bytes)
            while chunk := network(lambda: response.read1(CHUNK)):
                done += len(chunk)
                if done > max_bytes:
                    raise RejectedError(f"larger than the {max_bytes:,} bytes allowed.")
                handle.write(chunk)
                if progress is not None:
                    progress(name, done, total)
        if deadline.over:
            raise _too_slow(done, patience)
        if done < total:
            raise RejectedError(f"the connection ended after {done:,} of {total:,} bytes.")
        handle.flush()
        os.fsync(handle.fileno())


def _too_slow(done: int, patience: float) -> RejectedError:
    return RejectedError(f"only {done:,} bytes within {patience:g} s.")


def check_url(url: str, before: str = "") -> None:
    """Refuse all but https; http is for this machine, and not where an https address redirects to."""
    parsed = urllib.parse.urlsplit(url)
    local = parsed.scheme == "http" and parsed.hostname in LOCAL and not before.startswith("https:")
    if parsed.scheme != "https" and not local:
        raise RejectedError(f"{'redirected to ' if before else ''}{url}, which is not https: refused.")


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        try:
            check_url(newurl, before=req.full_url)
        except RejectedError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, timeout: float, deadline: Deadline) -> Any:
    """Send the request; proxies are those of the environment as it is now."""
    request = urllib.request.Request(url, headers={"User-Agent": "slangvi"})
    return urllib.request.build_opener(_Redirects, *deadline.handlers()).open(request, timeout=timeout)


def _announced(response: Any, max_bytes: int) -> int:
    """Bytes the server says it sends; 0 where it does not say, or says nonsense."""
    text = response.headers.get("Content-Length") or "0"
    # Python refuses to read numbers of thousands of digits, and no file is that long.
    total = int(text) if text.isdecimal() and len(text) < 20 else 0
    if total > max_bytes:
        raise RejectedError(f"{total:,} bytes, and {max_bytes:,} are allowed.")
    return total


def _network(call: Callable[[], Any], timeout: float) -> Any:
    """Call, and put what the network does wrong into words."""
    try:
        return call()
    except urllib.error.HTTPError as error:
        error.close()
        raise RejectedError(f"HTTP {error.code} {error.reason}.") from error
    except (OSError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            raise RejectedError(f"no answer within {timeout:g} s.") from error
        words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise RejectedError(f"{words}.") from error
