"""The file itself: what is in it, and that no damage to it goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import slangvi
from helpers.optimizer_runs import make, model_and_data, train
from slangvi.checkpoint import _format
from slangvi.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a checkpoint, and the tensors in it."""
    path = tmp_path_factory.mktemp("saved") / "run"
    state = slangvi.slang.init({"w": torch.linspace(-1, 1, 3), "b": torch.zeros(())}, rank=2)
    slangvi.save(path, state, generator=torch.Generator().manual_seed(0), epoch=3)
    return path.read_bytes(), state


def test_any_safetensors_reader_opens_it(path):
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    slangvi.save(path, opt, epoch=3)
    tensors = load_file(path)
    assert torch.equal(tensors["run.slangvi.tensors.loc"], opt.posterior.loc)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["header"])
    assert metadata["format"] == "slangvi checkpoint"
    assert metadata["version"] == "1"
    assert metadata["sha256"] == hashlib.sha256(metadata["header"].encode()).hexdigest()
    for name, entry in header["tensors"].items():
        assert entry["sha256"] == hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest()
    about = {key: header[key] for key in ("kind", "method", "num_params", "rank", "dtype", "device", "step")}
    assert about == {
        **{"kind": "optimizer", "method": "SLANG", "num_params": 43, "rank": 2},
        **{"dtype": "torch.float64", "device": "cpu", "step": 3},
    }
    assert header["slangvi"] == slangvi.__version__
    assert header["torch"] == torch.__version__
    assert header["parameters"][0] == {"name": "0.weight", "shape": [5, 4], "dtype": "torch.float64"}


def test_describe_tells_without_a_model(path):
    model, _, _ = model_and_data()
    opt = make(model)
    sched = slangvi.inverse_time(opt)
    slangvi.save(path, opt, scheduler=sched, best=float("inf"), history=[1, (2.5, None)])
    about = slangvi.checkpoint.describe(path)
    assert about["format_version"] == 1
    assert about["extras"] == {"scheduler": "LambdaLR"}
    assert about["values"] == {"best": float("inf"), "history": [1, (2.5, None)]}
    assert not {"run", "tensors"} & about.keys()


@pytest.mark.parametrize("dtype", list(_format.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_all_dtypes_and_shapes_come_back(path, dtype, shape):
    value = (torch.arange(6) % 2)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    q = slangvi.LowRankPrecisionNormal(torch.zeros(1), torch.zeros(1, 0), torch.ones(1))
    slangvi.save(path, q, value=value)
    found = slangvi.checkpoint.describe(path)["values"]["value"]
    assert found.dtype is dtype
    assert torch.equal(found, value)


def test_layouts_in_memory_come_back(path):
    value = torch.arange(6.0).reshape(2, 3).T
    q = slangvi.LowRankPrecisionNormal(torch.zeros(1), torch.zeros(1, 0), torch.ones(1))
    slangvi.save(path, q, turned=value, sliced=torch.arange(10.0)[::2])
    found = slangvi.checkpoint.describe(path)["values"]
    assert found["turned"].stride() == value.stride()
    assert torch.equal(found["turned"], value)
    assert found["sliced"].tolist() == [0, 2, 4, 6, 8]


# ---- damage


def assert_whole_or_refused(path, content, state):
    """Every file either is refused by a `CheckpointError` that names it, or holds the very same bits."""
    path.write_bytes(content)
    source, message = torch.Generator(), ""
    try:
        found = slangvi.load(path, state, generator=source)
    except CheckpointError as error:
        message = str(error)
    if message:
        assert str(path) in message
        return True
    for name in ("loc", "prec_factor", "prec_diag", "momentum"):
        assert torch.equal(getattr(found, name), getattr(state, name))
    assert found.step == state.step
    assert torch.equal(source.get_state(), torch.Generator().manual_seed(0).get_state())
    return False


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(saved, tmp_path_factory, place, bit):
    content, state = bytearray(saved[0]), saved[1]
    content[int(place * len(content))] ^= 1 << bit
    assert_whole_or_refused(tmp_path_factory.getbasetemp() / "flipped", bytes(content), state)


def test_a_flip_in_every_byte_of_table_and_header_is_noticed(saved, tmp_path):
    content, state = saved
    size = 8 + struct.unpack("<Q", content[:8])[0]
    refused = 0
    for place in range(0, size, 7):
        spoilt = bytearray(content)
        spoilt[place] ^= 1
        refused += assert_whole_or_refused(tmp_path / "flipped", bytes(spoilt), state)
    assert refused >= (size - 8) // 7  # all but the filling behind the table


@given(st.data())
def test_any_truncation_and_any_tail_are_noticed(saved, tmp_path_factory, data):
    content, state = saved
    length = data.draw(st.integers(0, len(content) - 1))
    tail = data.draw(st.binary(min_size=1, max_size=9))
    path = tmp_path_factory.getbasetemp() / "cut"
    assert assert_whole_or_refused(path, content[:length], state)
    assert assert_whole_or_refused(path, content + tail, state)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(saved, tmp_path_factory, content):
    assert assert_whole_or_refused(tmp_path_factory.getbasetemp() / "random", content, saved[1])


class Bomb:
    """A pickle that would leave a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_a_malicious_pickle_is_refused_and_not_run(kind, path, tmp_path):
    bomb = Bomb(str(tmp_path / "trace"))
    if kind == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"x": bomb}, path)
    with pytest.raises(CheckpointError, match=r"run.safetensors looks like a pickle.*never opened.*weights_only=True"):
        slangvi.load(path)
    assert not (tmp_path / "trace").exists()


def table(**entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (struct.pack("<Q", 1 << 62) + b"{}", "is damaged, or is no checkpoint"),
        (struct.pack("<Q", 90 << 20) + b"{}", "is damaged, or is no checkpoint"),
        (struct.pack("<Q", 4) + b"\xff\xfe\x80\x80", "is damaged, or is no checkpoint"),
        (struct.pack("<Q", 2) + b"[]", "is damaged, or is no checkpoint"),
        (table(), "no checkpoint of slangvi"),
        (table(__metadata__={"format": "pt"}), "no checkpoint of slangvi"),
        (table(__metadata__={"format": "slangvi checkpoint", "version": "2"}), "newer slangvi: upgrade"),
        (table(__metadata__={"format": "slangvi checkpoint", "version": "0"}), "'0'.*It is damaged"),
        (table(__metadata__={"format": "slangvi checkpoint", "version": "1"}), "its header does not have the checksum"),
        (
            table(
                __metadata__={
                    **{"format": "slangvi checkpoint", "version": "1"},
                    **{"header": "[]", "sha256": hashlib.sha256(b"[]").hexdigest()},
                }
            ),
            "is damaged",
        ),
    ],
)
def test_what_is_no_checkpoint_is_told_apart(path, content, match):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"run.safetensors.*{match}"):
        slangvi.load(path)


def test_other_safetensors_files_are_refused(path):
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="is a safetensors file, but no checkpoint of slangvi"):
        slangvi.checkpoint.describe(path)


def test_a_header_of_other_tensors_is_refused(path):
    """The table of safetensors and the header must tell the same; here a whole tensor was taken out."""
    state = slangvi.slang.init({"w": torch.zeros(3)}, rank=1)
    slangvi.save(path, state)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    kept = {name: value for name, value in load_file(path).items() if name != "run.loc"}
    save_file(kept, path, metadata)
    with pytest.raises(CheckpointError, match=r"should hold \['F32', \[3\]\] as tensor 'run.loc', and holds none"):
        slangvi.load(path)


# ---- files and folders


def test_no_such_file(path):
    with pytest.raises(CheckpointError, match=r"there is no file .*run.safetensors"):
        slangvi.load(path)


def test_a_folder_is_no_file(tmp_path):
    state = slangvi.slang.init({"w": torch.zeros(3)}, rank=1)
    with pytest.raises(CheckpointError, match="is not a file"):
        slangvi.load(tmp_path)
    with pytest.raises(CheckpointError, match="is not a file and cannot be replaced"):
        slangvi.save(tmp_path, state)


def test_a_disk_that_refuses_leaves_the_old_file(path, monkeypatch):
    state = slangvi.slang.init({"w": torch.zeros(3)}, rank=1)
    slangvi.save(path, state)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"could not be written: No space left on device. .*unchanged"):
        slangvi.save(path, slangvi.slang.init({"w": torch.ones(3)}, rank=1))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_that_may_not_be_read(path, monkeypatch):
    """Pretended, since the tests may run as one who may do everything."""
    slangvi.save(path, at(1))

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_format, "safe_open", refuse)
    with pytest.raises(CheckpointError, match="may not be read: Permission denied"):
        slangvi.load(path, fallback=True)


def test_names_links_and_folders(tmp_path):
    state = slangvi.slang.init({"w": torch.zeros(3)}, rank=1)
    odd = tmp_path / "a folder" / "Lauf Nr. 1 – größer [x].ckpt"
    slangvi.save(str(odd), state)
    assert slangvi.load(str(odd)).step == 0
    link = tmp_path / "link"
    link.symlink_to(odd)
    slangvi.save(link, slangvi.slang.init({"w": torch.ones(3)}, rank=1))
    assert link.is_symlink()
    assert slangvi.load(odd).loc.tolist() == [1, 1, 1]
    assert slangvi.load(slangvi.checkpoint.previous_path(odd)).loc.tolist() == [0, 0, 0]


# ---- the file before


def at(value):
    return slangvi.slang.init({"w": torch.full((3,), float(value))}, rank=1)


def test_the_file_before_is_offered_and_taken(path):
    slangvi.save(path, at(1))
    slangvi.save(path, at(2))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"run.safetensors.previous, is whole \(step 0\): pass fallback=True"):
        slangvi.load(path)
    with pytest.warns(UserWarning, match=r"Going on from the one saved before it, .*previous, at step 0") as caught:
        assert slangvi.load(path, fallback=True).loc.tolist() == [1, 1, 1]
    assert caught[0].filename == __file__
    path.unlink()
    with pytest.warns(UserWarning, match="there is no file"):
        assert slangvi.load(path, fallback=True).loc.tolist() == [1, 1, 1]


def test_with_both_damaged_both_are_named(path):
    slangvi.save(path, at(1))
    slangvi.save(path, at(2))
    for place in (path, slangvi.checkpoint.previous_path(path)):
        place.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"run.safetensors is empty.*cannot be read either: .*previous is empty"):
        slangvi.load(path, fallback=True)


def test_a_damaged_file_does_not_push_out_the_good_one_before_it(path):
    slangvi.save(path, at(1))
    slangvi.save(path, at(2))
    path.write_bytes(path.read_bytes()[:100])
    slangvi.save(path, at(3))
    assert slangvi.load(path).loc.tolist() == [3, 3, 3]
    assert slangvi.load(slangvi.checkpoint.previous_path(path)).loc.tolist() == [1, 1, 1]


@pytest.mark.parametrize("content", ["safetensors", "anything"])
def test_a_file_of_somebody_else_is_kept_beside(path, content):
    if content == "safetensors":
        safetensors.torch.save_file({"weight": torch.ones(2)}, path)
    else:
        path.write_bytes(b"weights of another program")
    before = path.read_bytes()
    slangvi.save(path, at(1))
    assert slangvi.load(path).loc.tolist() == [1, 1, 1]
    assert slangvi.checkpoint.previous_path(path).read_bytes() == before


def test_another_run_is_no_reason_to_fall_back(path):
    slangvi.save(path, at(1))
    slangvi.save(path, at(2))
    with pytest.raises(CheckpointError, match="rank"):
        slangvi.load(path, slangvi.slang.init({"w": torch.zeros(3)}, rank=2), fallback=True)


# ---- headers that were written by somebody else, checksums and all


def forged(path, change):
    """A checkpoint whose header was changed, with the right checksum."""
    slangvi.save(path, at(1))
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["header"])
    change(header)
    text = json.dumps(header)
    save_file(tensors, path, metadata | {"header": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("run"),
        lambda h: h.pop("extras"),
        lambda h: h.update(run={"$unknown": 1}),
        lambda h: h.update(run={"$record": ["os.system", {"command": "true"}]}),
        lambda h: h.update(run={"$record": ["low-rank", {"loc": 1}]}),
        lambda h: h.update(run={"$tensor": "elsewhere"}),
        lambda h: h.update(run={"$tuple": 3}),
        lambda h: h.update(tensors=[]),
        lambda h: h.update(tensors={}),
        lambda h: h.update(run=json.loads("[" * 800 + "]" * 800)),
        lambda h: h["run"]["$record"][1].update(loc=3),
        lambda h: h["run"]["$record"][1]["spec"]["$record"][1].update(names={"$tuple": ["v"]}),
    ],
)
def test_forged_headers_are_refused(path, change):
    forged(path, change)
    with pytest.raises(CheckpointError, match=r"run.safetensors"):
        slangvi.load(path, at(0))


def test_states_in_files_of_ones_own(tmp_path):
    state, path = slangvi.replicas.init({"w": torch.arange(3.0)}, 2, 1), tmp_path / "run.pt"
    torch.save({"mine": slangvi.checkpoint.state_dict(state)}, path)
    saved = torch.load(path, weights_only=True)["mine"]
    found = slangvi.checkpoint.from_state_dict(saved, state)
    assert torch.equal(found.loc, state.loc)
    assert found.spec == state.spec
    with pytest.raises(CheckpointError, match=r"loc is \(2, 3\) .* this has \(3, 3\)"):
        slangvi.checkpoint.from_state_dict(saved, slangvi.replicas.init({"w": torch.arange(3.0)}, 3, 1))
    with pytest.raises(CheckpointError, match=r"was not made by slangvi.checkpoint.state_dict"):
        slangvi.checkpoint.from_state_dict({"loc": 1})
    state.loc.fill_(9.0)
    assert saved["tensors"]["run.loc"].max() == 2.0


def test_a_header_too_deep_to_read_is_refused(path):
    forged(path, lambda h: None)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    text = "[" * 100_000 + "]" * 100_000
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(load_file(path), path, metadata | {"header": text, "sha256": digest})
    with pytest.raises(CheckpointError, match=r"run.safetensors is damaged"):
        slangvi.load(path)
