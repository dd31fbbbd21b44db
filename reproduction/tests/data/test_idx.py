"""The idx format: what is read, what is refused, and that a small file cannot become a large one in memory."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slangvi.errors import DataError
from slangvi_reproduction.data._idx import parse_idx, unpack


def packed(values: np.ndarray) -> bytes:
    """An idx file, from the format's description."""
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_reads_back_what_the_format_says(shape, seed):
    values = np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)
    np.testing.assert_array_equal(parse_idx(packed(values), tuple(shape)), values)


ONE = packed(np.array([[1, 2, 3]], np.uint8))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"file ends after 0 bytes, and an idx header has 12"),
        (ONE[:11], r"file ends after 11 bytes"),
        (b"\0\0\x0d\x02" + ONE[4:], r"begins with the bytes 00 00 0d 02, and 00 00 08 02 are expected"),
        (b"\0\0\x08\x03" + ONE[4:], r"begins with the bytes 00 00 08 03"),
        (b"<htm" + ONE[4:], r"another kind of file"),
        (packed(np.zeros((3, 1), np.uint8)), r"says it holds 3 × 1 values, and 1 × 3 are expected"),
        (ONE[:-1], r"has only 2 values behind its header, and 3 are expected"),
        (ONE + b"\0", r"has more values behind its header, and 3 are expected"),
    ],
)
def test_refuses_what_is_not_the_file_that_is_expected(data, message):
    with pytest.raises(DataError, match=message):
        parse_idx(data, (1, 3), "file")


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused_by_name(data):
    try:
        assert parse_idx(data, (2, 2), "some file").shape == (2, 2)
    except DataError as error:
        assert str(error).startswith("some file ")  # noqa: PT017  # either outcome is right


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])])
def test_unpacks_whatever_the_packing(pack, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(pack(ONE))
    assert unpack(path, len(ONE), "file") == ONE


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(200_000_000), 1))
    tracemalloc.start()
    try:
        assert len(unpack(path, 1000, "bomb")) == 1001
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(DataError, match="bomb has more values behind its header"):
        parse_idx(bytes([0, 0, 8, 1]) + struct.pack(">I", 992) + unpack(path, 1000, "bomb"), (992,), "bomb")


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: data[:12] + b"\xff\xff" + data[14:]])
def test_damaged_packing_is_told(spoil, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(spoil(gzip.compress(ONE)))
    with pytest.raises(DataError, match=r"file cannot be unpacked: .* It is damaged"):
        unpack(path, len(ONE), "file")
