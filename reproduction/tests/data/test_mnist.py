"""Image sets: rules on a small set served here, and the real ones where SLANGVI_DATA has them."""

from __future__ import annotations

import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch

from helpers.real_data import ROOT
from slangvi.errors import DataError
from slangvi_reproduction.data import IMAGES, load_fashion_mnist, load_mnist
from slangvi_reproduction.data._image_sets import Dataset
from slangvi_reproduction.data.remote import locate

STREAM = np.random.RandomState(0)
PIXELS = {"train": STREAM.randint(0, 256, (12, 3, 3)), "test": STREAM.randint(0, 256, (4, 3, 3))}
LABELS = {"train": np.arange(12) % 10, "test": np.array([9, 0, 5, 5])}
LOADERS = {"mnist": load_mnist, "fashion_mnist": load_fashion_mnist}


def idx(values: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + bytes(values.ravel().tolist())
    )


def bodies() -> dict[str, bytes]:
    """Every file of the small set, unpacked, in the table's order."""
    found = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        found[f"{prefix}-images-idx3-ubyte"] = idx(PIXELS[part])
        found[f"{prefix}-labels-idx1-ubyte"] = idx(LABELS[part])
    return found


@pytest.fixture(params=LOADERS)
def load(request, server, cache, monkeypatch):
    """A loader whose set is a small one, on the server and not in the cache."""
    for name, body in bodies().items():
        server.put(f"/set/{name}.gz", gzip.compress(body))
    md5 = tuple(hashlib.md5(body).hexdigest() for body in bodies().values())
    row = Dataset(request.param, "set", (f"{server.base}/set",), md5, (12, 4), side=3)
    monkeypatch.setitem(IMAGES, request.param, row)
    return LOADERS[request.param]


@pytest.fixture
def filled(load, cache):
    """The same, with all files in the cache, packed in another way."""
    (cache / "set").mkdir(parents=True)
    for name, body in bodies().items():
        (cache / "set" / f"{name}.gz").write_bytes(gzip.compress(body, 1))
    return load


ROWS = {"train": slice(0, 12), "tuning": slice(0, 10), "validation": slice(10, 12)}


@pytest.mark.parametrize("part", [*ROWS, "test"])
def test_parts_are_rows_of_the_files_in_their_order(part, filled, server):
    images = filled(part)
    source = "test" if part == "test" else "train"
    rows = ROWS.get(part, slice(None))
    torch.testing.assert_close(images.x, torch.from_numpy(PIXELS[source][rows] / 255.0).float(), rtol=0, atol=1e-7)
    assert images.y.tolist() == LABELS[source][rows].tolist()
    assert (images.x.dtype, images.y.dtype) == (torch.float32, torch.int64)
    assert server.seen == []


def test_only_the_files_of_the_part_are_fetched(load, server, cache):
    assert load("test").y.tolist() == [9, 0, 5, 5]
    assert server.seen == ["/set/t10k-images-idx3-ubyte.gz", "/set/t10k-labels-idx1-ubyte.gz"]
    assert sorted(path.name for path in (cache / "set").iterdir()) == [name[5:] for name in server.seen]


def test_unpacked_files_serve_too(load, cache, server):
    (cache / "set").mkdir(parents=True)
    for name, body in bodies().items():
        (cache / "set" / name).write_bytes(body)
    assert len(load("train").y) == 12
    assert server.seen == []


def test_other_content_of_the_right_size_is_refused_unless_asked_for(filled, cache):
    changed = PIXELS["test"].copy()
    changed[0, 0, 0] ^= 1
    (cache / "set" / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(changed)))
    with pytest.raises(DataError, match=r"has the right size, but what is in it has MD5 .* pass verify=False"):
        filled("test")
    assert round(255 * float(filled("test", verify=False).x[0, 0, 0])) == changed[0, 0, 0]


def test_labels_that_are_no_class_are_refused_even_unverified(filled, cache):
    (cache / "set" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([1, 10, 2, 3]))))
    with pytest.raises(DataError, match=r"has a label 10, and labels are 0 to 9\. Delete .* `slangvi data fetch"):
        filled("test", verify=False)


def test_what_a_server_sends_is_checked(load, server, cache):
    server.put("/set/t10k-images-idx3-ubyte.gz", gzip.compress(idx(PIXELS["train"])))
    with pytest.raises(DataError, match="says it holds 12 × 3 × 3 values, and 4 × 3 × 3 are expected"):
        load("test", verify=False)
    assert list((cache / "set").glob("*.gz")) == []


def test_a_missing_file_is_told_where_the_network_is_forbidden(load, monkeypatch):
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    with pytest.raises(DataError, match=r"set/train-images-idx3-ubyte\.gz is missing, and SLANGVI_OFFLINE forbids"):
        load()


@pytest.mark.parametrize("part", ["valid", "", None, 3])
def test_unknown_parts_are_refused(part):
    with pytest.raises(ValueError, match="part must be one of 'train', 'tuning', 'validation', 'test', got"):
        load_mnist(part)


# ---- the real files ----


def real(name: str, source: str) -> None:
    if not ROOT:
        pytest.skip("SLANGVI_DATA is not set")
    files = [file for (part, _), file in IMAGES[name].file.items() if part == source]
    if missing := [file.path for file in files if locate(file) is None]:
        pytest.skip(f"SLANGVI_DATA has no {missing[0]}")


# Mean pixels are those everybody normalises by.
KNOWN = {
    ("mnist", "train"): (60_000, [5, 0, 4, 1, 9], 0.1307),
    ("mnist", "test"): (10_000, [7, 2, 1, 0, 4], 0.1325),
    ("fashion_mnist", "train"): (60_000, [9, 0, 0, 3, 0], 0.2860),
    ("fashion_mnist", "test"): (10_000, [9, 2, 1, 1, 6], 0.2868),
}


@pytest.mark.data
@pytest.mark.parametrize("key", KNOWN, ids="-".join)
def test_the_real_files_hold_the_known_images(key):
    real(*key)
    images, (size, first, mean) = LOADERS[key[0]](key[1]), KNOWN[key]
    assert images.x.shape == (size, 28, 28)
    assert images.y[:5].tolist() == first
    assert float(images.x.mean()) == pytest.approx(mean, abs=5e-5)
    assert float(images.x.max()) == 1.0
