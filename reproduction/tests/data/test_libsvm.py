"""LIBSVM data sets: conventions on small files served here, and the real ones where SLANGVI_DATA has them."""

from __future__ import annotations

import bz2
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.fake_server import files_in
from helpers.real_data import every, require
from slangvi.data import Split
from slangvi.errors import DataError
from slangvi_reproduction.data import LIBSVM, UCI, libsvm_splits, load_libsvm
from slangvi_reproduction.data._libsvm_sets import Content, Dataset
from slangvi_reproduction.data._svmlight import digest, parse
from slangvi_reproduction.data.libsvm import find_libsvm
from slangvi_reproduction.data.remote import File, locate

# Two files with labels 3, 4 and 5, of which 4 is left out; the first column tells the rows apart.
FIRST = b"".join(b"%d 1:%d 2:0.5\n" % (3 + k % 3, k) for k in range(1, 13))
SECOND = b"".join(b"%d 1:%d\n" % (3 + k % 3, k) for k in range(13, 22))
CONTENTS = (
    Content(3, {3: 4, 4: 4, 5: 4}, digest(parse(FIRST, 3))),
    Content(3, {3: 3, 4: 3, 5: 3}, digest(parse(SECOND, 3))),
)


@pytest.fixture
def tiny(server, cache, monkeypatch):
    """A data set like USPS, and one like a1a made of the same files."""

    def row(name, **changes):
        urls = [server.put("/first.bz2", bz2.compress(FIRST)), server.put("/second", SECOND)]
        paths = [("libsvm/first.bz2", ("libsvm/first",)), ("libsvm/second", ())]
        files = tuple(
            File(path, name, (url,), 10_000, check=content.check, also=also)
            for url, (path, also), content in zip(urls, paths, CONTENTS, strict=True)
        )
        monkeypatch.setitem(LIBSVM, name, Dataset(name, files, CONTENTS, {3: 0, 5: 1}, **changes))

    row("tiny")
    row("tiny_given", num_splits=1)
    return cache


def expected(split: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows of the two classes in the order of a split, written out."""
    kept = [k for k in range(1, 22) if 3 + k % 3 != 4]
    x = np.array([[1.0, k, 0.5 if k < 13 else 0.0, 0.0] for k in kept])
    y = np.array([{3: 0.0, 5: 1.0}[3 + k % 3] for k in kept])
    order = np.random.RandomState(split).rand(len(kept)).argsort(kind="stable")
    return x[order], y[order]


@pytest.mark.parametrize("split", [1, 2, 20])
def test_a_split_halves_all_rows_in_the_order_of_its_seed(tiny, split):
    data = load_libsvm("tiny", split)
    assert isinstance(data, Split)
    x, y = expected(split)
    assert [tuple(part.shape) for part in data] == [(7, 4), (7,), (7, 4), (7,)]
    assert {part.dtype for part in data} == {torch.float64}
    np.testing.assert_array_equal(torch.cat([data.x_train, data.x_test]), x)
    np.testing.assert_array_equal(torch.cat([data.y_train, data.y_test]), y)


def test_given_parts_are_left_as_they_are(tiny):
    data = load_libsvm("tiny_given")
    assert data.x_train[:, 1].tolist() == [2, 3, 5, 6, 8, 9, 11, 12]
    assert data.x_test[:, 1].tolist() == [14, 15, 17, 18, 20, 21]
    assert data.y_train.tolist() == [1.0, 0.0] * 4
    assert data.y_test.tolist() == [1.0, 0.0] * 3
    assert bool((data.x_train[:, 0] == 1).all())


def test_sizes_in_the_table_are_those_of_the_tensors(tiny):
    for name in ("tiny", "tiny_given"):
        dataset, data = LIBSVM[name], load_libsvm(name)
        assert data.x_train.shape == (dataset.num_train, 1 + dataset.num_features)
        assert len(data.x_train) + len(data.x_test) == dataset.num_rows


def test_stacked_splits_are_the_single_ones(tiny):
    stacked = libsvm_splits("tiny", iter([5, 2, 5]))
    for k, split in enumerate([5, 2, 5]):
        assert all(torch.equal(a[k], b) for a, b in zip(stacked, load_libsvm("tiny", split), strict=True))
    assert len(libsvm_splits("tiny").x_train) == 20
    assert libsvm_splits("tiny_given").x_test.shape == (1, 6, 4)


def test_tensors_can_be_written_to_without_changing_the_next(tiny):
    for name in ("tiny", "tiny_given"):
        first = load_libsvm(name)
        for part in first:
            part.fill_(9.0)
        assert float(load_libsvm(name).x_train.max()) > 9.0


def test_files_are_fetched_once_with_progress(tiny, server, monkeypatch):
    news = []
    load_libsvm("tiny", progress=lambda *line: news.append(line))
    assert [line[0] for line in news] == ["libsvm/first.bz2", "libsvm/second"]
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    libsvm_splits("tiny")
    assert server.seen == ["/first.bz2", "/second"]
    assert files_in(tiny) == ["libsvm/first.bz2", "libsvm/second"]


def test_unpacked_files_are_found_by_their_plain_names(tiny, server, monkeypatch):
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    (tiny / "libsvm").mkdir(parents=True)
    (tiny / "libsvm" / "first").write_bytes(FIRST)
    (tiny / "libsvm" / "second").write_bytes(SECOND)
    assert load_libsvm("tiny").x_train.shape == (7, 4)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, name) for name in LIBSVM),
        ("australian_scale", "australian"),
        ("breast-cancer", "breast_cancer"),
        ("breast-cancer_scale", "breast_cancer"),
        ("A1A", "a1a"),
        ("a1a.t", "a1a"),
        ("usps", "usps_3vs5"),
        ("usps.t.bz2", "usps_3vs5"),
    ],
)
def test_names_of_files_are_understood(name, meant):
    assert find_libsvm(name) is LIBSVM[meant]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("austrlian", " Did you mean 'australian'?"),
        ("brest_cancer", " Did you mean 'breast_cancer'?"),
        ("a1b", " Did you mean 'a1a'?"),
        ("usps_3v5", " Did you mean 'usps_3vs5'?"),
        ("imagenet", ""),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name, hint):
    message = f"there is no data set {name!r}.{hint} There are: australian, breast_cancer, a1a, usps_3vs5."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_libsvm(name)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        libsvm_splits(name)


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match="name of a data set must be a string, got 3"):
        load_libsvm(3)


@pytest.mark.parametrize(
    ("name", "split", "error", "message"),
    [
        ("australian", 0, ValueError, "split must be ≥ 1, got 0"),
        ("australian", 21, ValueError, "australian has no split 21. Here split must be 1 to 20."),
        ("a1a", 2, ValueError, "a1a has no split 2. It comes with its own training and test parts, so split must be 1"),
        ("australian", 1.0, TypeError, "split must be a whole number"),
        ("australian", True, TypeError, "split must be a whole number"),
    ],
)
def test_splits_that_do_not_exist_are_refused_before_anything_is_read(name, split, error, message, cache):
    with pytest.raises(error, match=message):
        load_libsvm(name, split)
    with pytest.raises(error, match=message):
        libsvm_splits(name, [1, split])
    assert not cache.exists()


def test_no_splits_and_no_flag_are_refused():
    with pytest.raises(ValueError, match="splits must name at least one split, got none"):
        libsvm_splits("australian", [])
    with pytest.raises(TypeError, match="verify must be True or False, got 'no'"):
        load_libsvm("australian", verify="no")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"5 1:14\n", b"6 1:14\n", "has a label 6, which is not understood: labels are 3, 4 and 5."),
        (b"5 1:14\n", b"5.5 1:14\n", "has a label 5.5, which is not understood"),
        (b"5 1:14\n", b"", "has 8 rows, and 9 are expected."),
        (b"5 1:14\n", b"3 1:14\n", "has label 3 4 times, and 3 are expected."),
        (b"5 1:14\n", b"5 1:14 4:1\n", ":2: '4:1': indices go from 1 to 3."),
        (b"5 1:14\n", b"5 1:14 oops\n", ":2: expected index:value, got 'oops'."),
        (SECOND, b"", "has 0 rows, and 9 are expected."),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_files_of_another_shape_are_refused_in_any_case(tiny, old, new, reason, verify):
    load_libsvm("tiny")
    path = tiny / "libsvm" / "second"
    assert old in SECOND
    path.write_bytes(SECOND.replace(old, new))
    with pytest.raises(DataError, match=re.escape(f"{path}") + ".*" + re.escape(reason)) as caught:
        load_libsvm("tiny", verify=verify)
    assert str(caught.value).count(f"Delete {path}, or run `slangvi data fetch tiny") == 1


def test_other_values_are_refused_in_plain_words_unless_asked_for(tiny):
    load_libsvm("tiny")
    (tiny / "libsvm" / "second").write_bytes(SECOND.replace(b"1:14", b"1:14.25"))
    message = "right 9 rows, 3 features and labels, but values, or their order, differ by more than rounding"
    with pytest.raises(DataError, match=message) as caught:
        load_libsvm("tiny")
    assert "verify=False. Delete" in str(caught.value)
    data = load_libsvm("tiny", verify=False)
    assert 14.25 in torch.cat([data.x_train, data.x_test])[:, 1]


def test_values_written_with_other_digits_are_the_same(tiny):
    load_libsvm("tiny")
    (tiny / "libsvm" / "second").write_bytes(SECOND.replace(b"1:14", b"01:14.0000004"))
    assert load_libsvm("tiny").x_train.shape == (7, 4)


def test_what_is_fetched_is_always_checked(tiny, server):
    server.put("/second", SECOND.replace(b"1:14", b"1:15"))
    with pytest.raises(DataError, match="what came has the right 9 rows"):
        load_libsvm("tiny", verify=False)
    assert files_in(tiny) == ["libsvm/first.bz2"]


# ---- the real files ----

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
SHAPES = {"usps_3vs5": (1540, 256, 770), "a1a": (32561, 123, 1605), "australian": (690, 14, 345)}
SHAPES["breast_cancer"] = (683, 10, 341)
# Ones among the labels of split 1, training and test.
ONES = {"australian": (157, 150), "breast_cancer": (122, 117), "a1a": (395, 7446), "usps_3vs5": (344, 372)}


def sklearn_reads(dataset: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.datasets import load_svmlight_file

    parts = []
    for path in map(locate, dataset.files):
        x, y = load_svmlight_file(str(path), n_features=dataset.num_features)
        keep = np.isin(y, [4, 6]) if dataset.name == "usps_3vs5" else np.ones(len(y), dtype=bool)
        x, y = x.toarray()[keep], y[keep]
        parts.append((np.hstack([np.ones((len(x), 1)), x]), (y == y.max()).astype(float)))
    return parts


def test_the_table_has_the_papers_sizes():
    assert {name: (d.num_rows, d.num_features, d.num_train) for name, d in LIBSVM.items()} == SHAPES


@every(LIBSVM, *LIBSVM)
def test_real_files_are_read_as_scikit_learn_does_and_split_as_the_paper_did(real):
    parts = sklearn_reads(real)
    if real.name == "a1a":
        (x_train, y_train), (x_test, y_test) = parts
        pairs = [(load_libsvm("a1a"), (x_train, y_train, x_test, y_test))]
    else:
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        pairs = []
        for split in (1, 7, 20):
            order = np.argsort(np.random.RandomState(split).rand(len(x)), kind="stable")
            n = len(x) // 2
            pairs.append((load_libsvm(real.name, split), (x[order[:n]], y[order[:n]], x[order[n:]], y[order[n:]])))
    assert tuple(int(y.sum()) for y in (pairs[0][0].y_train, pairs[0][0].y_test)) == ONES[real.name]
    for ours, other in pairs:
        assert ours.x_train.shape == (SHAPES[real.name][2], SHAPES[real.name][1] + 1)
        for mine, theirs in zip(ours, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@every(LIBSVM, "australian", "breast_cancer", "usps_3vs5")
def test_all_splits_are_halves_of_the_same_rows(real):
    data = libsvm_splits(real.name)
    rows, features, train = SHAPES[real.name]
    assert data.x_train.shape == (20, train, features + 1)
    assert data.x_test.shape == (20, rows - train, features + 1)
    weights = torch.arange(1.0, features + 2, dtype=torch.float64).sqrt()
    together = (torch.cat([data.x_train, data.x_test], 1) @ weights).sort(1).values
    torch.testing.assert_close(together, together[:1].expand_as(together), rtol=0, atol=1e-9)
    assert len({tuple(labels) for labels in data.y_train.tolist()}) == 20


@every(LIBSVM, "australian", "breast_cancer", "usps_3vs5")
def test_no_real_value_is_near_where_the_digest_rounds(real):
    from slangvi_reproduction.data._svmlight import STEPS, read

    for path, content in zip(map(locate, real.files), real.contents, strict=True):
        place = np.unique(read(Path(path), content.num_features).x) * STEPS + 0.5
        assert np.abs(place - np.rint(place)).min() / STEPS > 2.6e-6


@pytest.mark.data
def test_the_code_of_the_page_runs():
    require(LIBSVM["australian"], UCI["boston"])
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(code, PAGE.name, "exec"), names)
    assert names["data"].x_train.shape == (345, 15)
    assert names["stacked"].x_train.shape == (20, 345, 15)
    assert names["parts"].x_train.shape == (455, 13)
    assert [len(fold.x_test) for fold in names["inner"]] == [91] * 5
