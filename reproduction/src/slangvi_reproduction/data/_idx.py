"""The idx format of MNIST's files: a header of big-endian numbers, then bytes; packed by gzip or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slangvi.errors import DataError

__all__ = ["Bytes", "parse_idx", "unpack"]

Bytes = NDArray[np.uint8]
_UNSIGNED_BYTES, _GZIP = 8, b"\x1f\x8b"


def parse_idx(data: bytes, shape: tuple[int, ...], name: str = "data") -> Bytes:
    r"""Unsigned bytes behind an idx header.

    The header is two zero bytes, the type (8 for unsigned bytes), the number of dimensions, and each of them as four
    bytes, largest first.

    Args:
        data: header and values, unpacked.
        shape: what the header must say.
        name: what messages call it.

    Returns:
        Values of that shape; the array cannot be written to.

    Raises:
        DataError: with name and reason.

    Example:
        >>> parse_idx(b"\0\0\x08\x02" + b"\0\0\0\x01" + b"\0\0\0\x03" + bytes([7, 8, 255]), (1, 3))
        array([[ 7, 8, 255]], dtype=uint8)
    """
    start = 4 + 4 * len(shape)
    kind = bytes((0, 0, _UNSIGNED_BYTES, len(shape)))
    if len(data) < start:
        raise DataError(f"{name} ends after {len(data)} bytes, and an idx header has {start}.")
    if data[:4] != kind:
        raise DataError(
            f"{name} begins with the bytes {data[:4].hex(' ')}, and {kind.hex(' ')} are expected: idx, unsigned bytes, "
            f"{len(shape)} dimensions. It is another kind of file."
        )
    found = struct.unpack(f">{len(shape)}I", data[4:start])
    if found != shape:
        raise DataError(f"{name} says it holds {_by(found)} values, and {_by(shape)} are expected.")
    there, expected = len(data) - start, math.prod(shape)
    if there != expected:
        many = "more" if there > expected else f"only {there:,}"
        raise DataError(f"{name} has {many} values behind its header, and {expected:,} are expected.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def unpack(path: Path, limit: int, name: str) -> bytes:
    """What a file holds, unpacked if gzip packed it; never much more than `limit` bytes, however much there would be.

    Args:
        path: of the file, with any ending: its first bytes tell whether it is packed.
        limit: bytes that are expected. One more is read, so that a longer file can be told.
        name: what messages call it.

    Raises:
        DataError: gzip cannot unpack it.
    """
    with path.open("rb") as handle:
        packed = handle.read(len(_GZIP)) == _GZIP
        handle.seek(0)
        if not packed:
            return handle.read(limit + 1)
        try:
            with gzip.GzipFile(fileobj=handle) as file:
                return file.read(limit + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{name} cannot be unpacked: {error}. It is damaged.") from error


def _by(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)
