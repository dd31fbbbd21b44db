"""UCI data sets: rules on a small set served here, and the real ones where SLANGVI_DATA has them."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
import torch

from helpers.fake_server import files_in
from helpers.real_data import every
from slangvi.errors import DataError
from slangvi_reproduction.data import LIBSVM, UCI, load_uci, standardise
from slangvi_reproduction.data._uci_sets import Dataset
from slangvi_reproduction.data.remote import locate
from slangvi_reproduction.data.uci import find_uci

# Twenty rows of three features, a target, and a column that nobody asks for.
TABLE = np.column_stack([np.arange(20) / 4, np.full(20, 0.998), np.arange(20) ** 2, -np.arange(20), np.full(20, 7)])


def written(values) -> bytes:
    return "".join(f"{value}\n" for value in values).encode()


def splits_of(num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """As the collection's own script draws them."""
    stream, cut = np.random.RandomState(1), round(0.9 * num_rows)
    orders = [stream.choice(range(num_rows), num_rows, replace=False) for _ in range(20)]
    return [(order[:cut], order[cut:]) for order in orders]


def bodies() -> dict[str, bytes]:
    """Every file of the small set."""
    rows = ("\t ".join(map(repr, row)) for row in TABLE.tolist())
    found = {"data": "\n".join(rows).encode() + b" \n\n", "index_features": b"0\n1\n2\n", "index_target": b"3\n"}
    for k, (train, test) in enumerate(splits_of(20)):
        found |= {f"index_train_{k}": written(train), f"index_test_{k}": written(test)}
    return found


@pytest.fixture
def tiny(server, cache, monkeypatch):
    for stem, body in bodies().items():
        server.put(f"/tiny-set/data/{stem}.txt", body)
    sha256 = hashlib.sha256(bodies()["data"]).hexdigest()
    monkeypatch.setitem(UCI, "tiny", Dataset("tiny", "tiny-set", 20, 3, sha256, base=server.base))
    return cache / "uci" / "tiny-set" / "data"


@pytest.fixture
def filled(tiny):
    """The same, with all files in the cache."""
    tiny.mkdir(parents=True)
    for stem, body in bodies().items():
        (tiny / f"{stem}.txt").write_bytes(body)
    return tiny


def test_a_set_has_its_values_and_all_splits(filled):
    data = load_uci("tiny")
    assert data.name == "tiny"
    assert data.x.dtype is data.y.dtype is torch.float64
    np.testing.assert_array_equal(data.x, TABLE[:, :3])
    np.testing.assert_array_equal(data.y, TABLE[:, 3])
    assert len(data.splits) == 20
    for ours, (train, test) in zip(data.splits, splits_of(20), strict=True):
        assert ours.train.dtype is ours.test.dtype is torch.int64
        assert (ours.train.tolist(), ours.test.tolist()) == (train.tolist(), test.tolist())


def test_files_are_fetched_once_with_progress(tiny, server, monkeypatch):
    news = []
    load_uci("tiny-set", progress=lambda *line: news.append(line))
    paths = sorted(f"uci/tiny-set/data/{stem}.txt" for stem in bodies())
    assert len(paths) == 43
    assert sorted({line[0] for line in news}) == files_in(tiny.parents[2]) == paths
    asked = list(server.seen)
    assert len(asked) == 43
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    load_uci("tiny")
    assert server.seen == asked


def test_tensors_can_be_written_to_without_changing_the_next(filled):
    first = load_uci("tiny")
    for part in (first.x, first.y, *(rows for split in first.splits for rows in split)):
        part.fill_(-9)
    again = load_uci("tiny")
    np.testing.assert_array_equal(again.x, TABLE[:, :3])
    np.testing.assert_array_equal(again.y, TABLE[:, 3])
    assert all(int(rows.min()) >= 0 for split in again.splits for rows in split)


def test_offline_says_what_is_missing_and_asks_nobody(tiny, server, monkeypatch):
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    address = re.escape(f"{server.base}/tiny-set/data/index_features.txt")
    with pytest.raises(DataError, match=f"uci/tiny-set/data/index_features.txt is missing.*Fetch {address} elsewhere"):
        load_uci("tiny")
    assert server.seen == []


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, name) for name in UCI),
        *(("bostonHousing", "boston"), ("naval-propulsion-plant", "naval"), ("Power_Plant", "power")),
        ("wine-quality-red", "wine"),
    ],
)
def test_names_of_the_collection_are_understood(name, meant):
    assert find_uci(name) is UCI[meant]


@pytest.mark.parametrize(("name", "hint"), [("bosten", " Did you mean 'boston'?"), ("cifar", "")])
def test_unknown_names_are_answered_with_the_nearest(name, hint):
    message = f"there is no data set {name!r}.{hint} There are: boston, concrete, energy, kin8nm, naval, power, wine, y"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_uci(name)


def test_what_is_no_name_or_flag_is_refused(cache):
    with pytest.raises(TypeError, match="name of a data set must be a string, got None"):
        load_uci(None)
    with pytest.raises(TypeError, match="verify must be True or False, got 1"):
        load_uci("boston", verify=1)
    assert not cache.exists()


def test_no_name_is_in_two_tables():
    names = [
        {alias.lower().replace("-", "_") for row in table.values() for alias in (row.name, *row.aliases)}
        for table in (LIBSVM, UCI)
    ]
    assert names[0].isdisjoint(names[1])


def change(path, old: bytes, new: bytes) -> None:
    before = path.read_bytes()
    assert before.count(old) >= 1
    path.write_bytes(before.replace(old, new, 1))


ROW = b"0.25\t 0.998\t 1.0\t -1.0\t 7.0\n"


@pytest.mark.parametrize(
    ("stem", "old", "new", "reason"),
    [
        ("data", ROW, b"", "has 19 rows, and 20 are expected."),
        ("data", ROW, b"1 2 3 4\n", ":2: 4 numbers, and the lines before it have 5."),
        ("data", ROW, ROW.replace(b"-1.0", b"nan"), ":2: 'nan' is not a finite number."),
        ("index_features", b"2\n", b"", "has 2 numbers, and 3 are expected."),
        ("index_target", b"3", b"3 4", "has 2 numbers, and 1 are expected."),
        ("index_train_7", b"\n1\n", b"\n1.5\n", "has a number 1.5, which is no row or column."),
        ("index_train_7", b"\n1\n", b"\n1e300\n", "has a number 1e+300, which is no row or column."),
        ("index_test_19", b"\n", b"", "has 1 numbers, and 2 are expected."),
        ("index_test_19", b"\n", b"\n\xff", r"is not a finite number."),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_files_of_another_shape_are_refused_in_any_case(filled, stem, old, new, reason, verify):
    path = filled / f"{stem}.txt"
    change(path, old, new)
    if verify and stem == "data":
        reason = "has SHA-256"
    with pytest.raises(DataError, match=re.escape(f"{path}") + ".*" + re.escape(reason)) as caught:
        load_uci("tiny", verify=verify)
    assert str(caught.value).count(f"Delete {path}, or run `slangvi data fetch tiny --force`") == 1


@pytest.mark.parametrize(
    ("stem", "new", "blamed", "reason"),
    [
        ("index_features", b"0 1 5", "data", "has columns 0 to 4, and .* name [0, 1, 5, 3], which are not different"),
        ("index_features", b"0 1 -1", "data", "has columns 0 to 4, and .* name [0, 1, -1, 3], which are not different"),
        ("index_features", b"0 1 1", "data", "has columns 0 to 4, and .* name [0, 1, 1, 3], which are not different"),
        ("index_target", b"2", "data", "has columns 0 to 4, and .* name [0, 1, 2, 2], which are not different ones"),
        ("index_test_4", b"3 3", "index_test_4", "and index_train_4.txt must name every row from 0 to 19 once, and do"),
        ("index_test_4", b"20 -1", "index_test_4", "and index_train_4.txt must name every row from 0 to 19 once"),
    ],
)
def test_rows_and_columns_that_cannot_be_are_refused_without_verification_too(filled, stem, new, blamed, reason):
    (filled / f"{stem}.txt").write_bytes(new)
    pattern = re.escape(reason).replace(r"\.\*", ".*").replace(r"\ ", " ")
    with pytest.raises(DataError, match=re.escape(f"{filled / blamed}.txt") + " " + pattern):
        load_uci("tiny", verify=False)


@pytest.mark.parametrize(
    ("stem", "old", "new", "reason"),
    [
        ("data", b"0.25\t", b"0.26\t", "has SHA-256 .*: it is damaged or another file"),
        ("index_features", b"0\n1\n", b"1\n0\n", "has 3 numbers, which is right, but others .* or in another order"),
        ("index_target", b"3", b"4", "has 1 numbers, which is right, but others than .* pass verify=False. Delete"),
    ],
)
def test_other_values_are_refused_in_plain_words_unless_asked_for(filled, stem, old, new, reason):
    change(filled / f"{stem}.txt", old, new)
    with pytest.raises(DataError, match=reason):
        load_uci("tiny")
    data = load_uci("tiny", verify=False)
    expected = TABLE.copy()
    expected[1, 0] = 0.26 if stem == "data" else 0.25
    np.testing.assert_array_equal(data.x, expected[:, [1, 0, 2] if stem == "index_features" else [0, 1, 2]])
    np.testing.assert_array_equal(data.y, expected[:, 4 if stem == "index_target" else 3])


def test_other_splits_are_refused_unless_asked_for(filled):
    for part in ("train", "test"):
        (filled / f"index_{part}_0.txt").write_bytes((filled / f"index_{part}_1.txt").read_bytes())
    with pytest.raises(DataError, match=r"index_train_0\.txt has 18 numbers, which is right, but others"):
        load_uci("tiny")
    splits = load_uci("tiny", verify=False).splits
    assert torch.equal(splits[0].train, splits[1].train)
    assert not torch.equal(splits[0].train, splits[2].train)


def test_numbers_may_be_written_in_other_ways(filled):
    path = filled / "index_test_3.txt"
    numbers = path.read_bytes().split()
    path.write_bytes(b" ".join(b"%b.000e+00" % number if len(number) == 1 else number for number in numbers))
    assert load_uci("tiny").splits[3].test.tolist() == splits_of(20)[3][1].tolist()


@pytest.mark.parametrize("stem", ["data", "index_target", "index_test_0"])
def test_what_is_fetched_is_always_checked(tiny, server, stem):
    body = {"data": bodies()["data"].replace(b"7.0", b"8.0", 1), "index_target": b"4", "index_test_0": b"0 1"}[stem]
    server.put(f"/tiny-set/data/{stem}.txt", body)
    with pytest.raises(DataError, match=f"{stem}.txt could not be fetched, and nothing was kept"):
        load_uci("tiny", verify=False)
    assert not (tiny / f"{stem}.txt").exists()


# ---- the real files ----

SHAPES = {"boston": (506, 13), "concrete": (1030, 8), "energy": (768, 8), "kin8nm": (8192, 8), "naval": (11934, 16)}
SHAPES |= {"power": (9568, 4), "wine": (1599, 11), "yacht": (308, 6)}


def test_the_table_has_the_papers_sizes():
    assert {name: (row.num_rows, row.num_features) for name, row in UCI.items()} == SHAPES
    assert {row.num_splits for row in UCI.values()} == {20}
    assert [row.num_train for row in UCI.values()] == [455, 927, 691, 7373, 10741, 8611, 1439, 277]


@every(UCI, *UCI)
def test_real_files_are_read_as_numpy_does(real):
    folder = locate(real.files[0]).parent
    table = np.loadtxt(folder / "data.txt")
    features, target = (np.loadtxt(folder / f"index_{kind}.txt").astype(int) for kind in ("features", "target"))
    data = load_uci(real.name)
    assert data.x.shape == SHAPES[real.name]
    np.testing.assert_array_equal(data.x, table[:, features])
    np.testing.assert_array_equal(data.y, table[:, int(target)])
    for k, (split, drawn) in enumerate(zip(data.splits, splits_of(len(table)), strict=True)):
        for kind, ours, rule in zip(("train", "test"), split, drawn, strict=True):
            np.testing.assert_array_equal(ours, rule)
            if k in (0, 19):
                np.testing.assert_array_equal(ours, np.loadtxt(folder / f"index_{kind}_{k}.txt"))


@every(UCI, *UCI)
def test_real_splits_have_one_scale_but_for_what_is_constant(real):
    data = load_uci(real.name)
    parts = standardise(data, data.splits[7])
    assert all(bool(part.isfinite().all()) for part in parts)
    deviations = parts.x_train.std(0)
    constant = [8, 11] if real.name == "naval" else []
    assert (deviations == 0).nonzero().ravel().tolist() == constant
    assert not parts.x_test[:, constant].any()
    torch.testing.assert_close(deviations[deviations > 0], torch.ones(real.num_features - len(constant)).double())
    torch.testing.assert_close(parts.y_train.std(), torch.ones(()).double())
    torch.testing.assert_close(parts.y_test * parts.y_scale + parts.y_mean, data.y[data.splits[7].test])
