"""What does not fit is refused by the name of the first thing that differs, and nothing is changed by it."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import slangvi
from helpers.optimizer_runs import N, assert_identical, flat, make, model_and_data, train
from slangvi.checkpoint import api
from slangvi.checkpoint._plain import RECORDS, decode, encode
from slangvi.errors import CheckpointError
from test_architecture import IMPORTS, TREES


def state_of(rank=2, size=3, dtype=torch.float32):
    return slangvi.slang.init({"w": torch.zeros(size, dtype=dtype), "b": torch.zeros((), dtype=dtype)}, rank=rank)


# ---- optimizers


def other_model(model):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


OTHERS = {
    "another method": (lambda m: slangvi.VOGN(m, num_data=N), "of method 'SLANG', and this is of method 'VOGN'"),
    "another rank": (lambda m: make(m, rank=3), "of rank L = 2, and this is of rank L = 3"),
    "another model": (
        lambda m: make(other_model(m)),
        r"'0.weight' of shape \(5, 4\) and torch.float64 is saved where this has '0.weight' of shape \(6, 4\)",
    ),
    "fewer parameters": (lambda m: make(m, params=m[0].parameters()), "P = 43 in 4 .* this has P = 25 in 2"),
    "another dtype": (
        lambda m: make(m.float()),
        "torch.float64 is saved where this has '0.weight' .* torch.float32",
    ),
    "other groups": (
        lambda m: make(m, params=[{"params": m[0].parameters()}, {"params": m[2].parameters()}]),
        "different number of parameter groups",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_optimizer_is_refused_and_left_alone(case, path):
    build, match = OTHERS[case]
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    sched = slangvi.inverse_time(opt)
    slangvi.save(path, opt, scheduler=sched)
    other = build(model_and_data(9)[0])
    theirs = slangvi.inverse_time(other, decay=0.9)
    before, schedule = copy.deepcopy(other.state_dict()), copy.deepcopy(theirs.state_dict())
    weights = flat(other.model)
    with pytest.raises(CheckpointError, match=rf"run.safetensors does not fit: .*{match}"):
        slangvi.load(path, other, scheduler=theirs)
    assert torch.equal(flat(other.model), weights)
    assert theirs.state_dict() == schedule
    assert other.state_dict()["param_groups"] == before["param_groups"]
    if before["slangvi"]["generator"] is not None:
        assert torch.equal(other.state_dict()["slangvi"]["generator"], before["slangvi"]["generator"])


def test_an_optimizer_needs_an_optimizer(path):
    slangvi.save(path, make(model_and_data()[0]))
    with pytest.raises(CheckpointError, match=r"it is of an optimizer. Build one on the model"):
        slangvi.load(path)
    with pytest.raises(CheckpointError, match="of kind 'optimizer', and this is of kind 'state'"):
        slangvi.load(path, state_of())
    with pytest.raises(TypeError, match=r"into must be an optimizer of slangvi, .*got Linear"):
        slangvi.load(path, nn.Linear(2, 1))


def test_another_device_is_refused_unless_asked_for(path, monkeypatch):
    """There is one device here: the header is made to tell of another."""
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    real = api._describe
    with monkeypatch.context() as patch:
        patch.setattr(api, "_describe", lambda *args: real(*args) | {"device": "cuda"})
        slangvi.save(path, opt)
    other = make(model_and_data(9)[0], seed=5)
    random = other.generator.get_state()
    with pytest.raises(CheckpointError, match=r"saved on 'cuda', and this is on 'cpu'.*across_devices=True"):
        slangvi.load(path, other)
    slangvi.load(path, other, across_devices=True)
    assert_identical(other, opt)
    assert torch.equal(other.generator.get_state(), random)


def test_a_run_that_is_being_sampled_is_not_saved(path):
    opt = make(model_and_data()[0])
    with opt.sampled_params(), pytest.raises(RuntimeError, match="Leave sampled_params first"):
        slangvi.save(path, opt)
    assert not path.exists()


def test_a_missing_generator_is_noticed(path):
    slangvi.save(path, make(model_and_data()[0]))
    with pytest.warns(UserWarning, match="its draws will be others.*generator=torch.Generator") as caught:
        slangvi.load(path, make(model_and_data()[0], generator=None))
    assert caught[0].filename == __file__


def test_a_broken_generator_state_changes_nothing():
    model, x, y = model_and_data()
    opt = train(make(model), x, y)
    saved = copy.deepcopy(opt.state_dict())
    saved["slangvi"]["generator"] = torch.zeros(7, dtype=torch.uint8)
    saved["param_groups"][0]["lr"] = 0.77
    with pytest.raises(ValueError, match="is no state of a generator on cpu"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.1


def test_failed_groups_leave_the_generator_alone():
    opt = make(model_and_data()[0])
    saved = copy.deepcopy(opt.state_dict())
    opt.generator.manual_seed(77)
    before = opt.generator.get_state()
    saved["param_groups"] = []
    with pytest.raises(ValueError, match="parameter groups"):
        opt.load_state_dict(saved)
    assert torch.equal(opt.generator.get_state(), before)


# ---- states and posteriors


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: state_of(rank=3), "of rank L = 2, and this is of rank L = 3"),
        (lambda: state_of(size=4), r"parameter 'w' of shape \(3,\) and torch.float32 is saved where .* \(4,\)"),
        (lambda: state_of(dtype=torch.float64), "torch.float32 is saved where this has 'w' .* torch.float64"),
        (
            lambda: slangvi.mean_field.init({"w": torch.zeros(3)}),
            "'low-rank', and this is of method 'mean_field'",
        ),
        (lambda: slangvi.slang.init({"v": torch.zeros(3), "b": torch.zeros(())}, 2), "'w' .* where this has 'v'"),
        (lambda: slangvi.slang.init({"w": torch.zeros(3)}, 2), "P = 4 in 2 parameter tensors, and this has P = 3 in 1"),
        (lambda: slangvi.slang.posterior(state_of()), "of kind 'state', and this is of kind 'posterior'"),
        (lambda: slangvi.replicas.init({"w": torch.zeros(3)}, 2, 2), "'low-rank', and this is of method 'replicas'"),
    ],
)
def test_another_state_is_refused(other, match, path):
    slangvi.save(path, state_of())
    with pytest.raises(CheckpointError, match=rf"run.safetensors does not fit: .*{match}"):
        slangvi.load(path, other())


def test_words_and_batches_of_states_are_compared(path):
    params = {"w": torch.zeros(1, 3)}
    slangvi.save(path, slangvi.bbb.init(params, scale="log"))
    with pytest.raises(CheckpointError, match="made with scale='log', and this has scale='softplus'"):
        slangvi.load(path, slangvi.bbb.init(params))
    slangvi.save(path, slangvi.replicas.init(params, 2, 1))
    with pytest.raises(CheckpointError, match=r"loc is \(2, 3\) torch.float32, and this has \(4, 3\)"):
        slangvi.load(path, slangvi.replicas.init(params, 4, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_saved(value, path):
    slangvi.save(path, state_of())
    before = path.read_bytes()
    bad = state_of()
    bad.prec_factor[1, 2] = value
    with pytest.raises(CheckpointError, match=r"'prec_factor' holds NaN, Inf .* the file that is there stays"):
        slangvi.save(path, bad)
    assert path.read_bytes() == before


def test_a_precision_out_of_its_range_is_not_saved(path):
    bad = state_of()
    bad.prec_diag[0] = -1.0
    with pytest.raises(CheckpointError, match="'prec_diag' holds NaN, Inf or values out of its range"):
        slangvi.save(path, bad)
    assert not path.exists()


@pytest.mark.parametrize("thing", [nn.Linear(2, 1), {"w": torch.zeros(2)}, None, 3, state_of().spec])
def test_other_things_cannot_be_saved(thing, path):
    with pytest.raises(CheckpointError, match=rf"a {type(thing).__name__} cannot be saved. Give an optimizer"):
        slangvi.save(path, thing)


# ---- beside the run


def test_what_was_saved_beside_must_be_asked_for_or_left_out_by_name(path):
    opt = make(model_and_data()[0])
    slangvi.save(path, opt, scheduler=slangvi.inverse_time(opt), epoch=3)
    with pytest.raises(CheckpointError, match=r"also holds 'scheduler' \(LambdaLR\).*scheduler=None to leave it out"):
        slangvi.load(path, opt)
    slangvi.load(path, opt, scheduler=None)
    with pytest.raises(CheckpointError, match=r"holds no 'sched'; .* it holds \['epoch', 'scheduler'\]"):
        slangvi.load(path, opt, sched=None)
    with pytest.raises(CheckpointError, match=r"'epoch' is a plain value; .*describe\(path\)\['values'\]"):
        slangvi.load(path, opt, scheduler=None, epoch=0)


def test_other_schedulers_and_generators_are_refused(path):
    opt = make(model_and_data()[0])
    streams = slangvi.replicas.streams([1, 2])
    slangvi.save(path, opt, scheduler=slangvi.inverse_time(opt), streams=streams)
    with pytest.raises(CheckpointError, match=r"'scheduler' is 'LambdaLR' \(state_dict\), and this is 'ConstantLR'"):
        slangvi.load(path, opt, scheduler=lr_scheduler.ConstantLR(opt), streams=None)
    with pytest.raises(CheckpointError, match=r"'2 generators' \(generators\), and this is '3 generators'"):
        slangvi.load(path, opt, scheduler=None, streams=slangvi.replicas.streams([1, 2, 3]))
    with pytest.raises(CheckpointError, match=r"'2 generators' \(generators\), and this is 'cpu' \(generator\)"):
        slangvi.load(path, opt, scheduler=None, streams=torch.Generator())


def test_when_one_thing_cannot_be_put_back_nothing_is(path):
    first, second = nn.Linear(2, 2), nn.Linear(3, 1)
    slangvi.save(path, state_of(), first=first, generator=torch.Generator().manual_seed(1), second=second)
    mine, source = nn.Linear(2, 2), torch.Generator().manual_seed(5)
    weight, random = mine.weight.detach().clone(), source.get_state()
    with pytest.raises(CheckpointError, match=r"(?s)'second' could not be put back: .*size mismatch"):
        slangvi.load(path, state_of(), first=mine, generator=source, second=nn.Linear(4, 1))
    assert torch.equal(mine.weight, weight)
    assert torch.equal(source.get_state(), random)


def test_names_of_arguments_are_taken(path):
    with pytest.raises(CheckpointError, match="'fallback' is an argument of"):
        slangvi.save(path, state_of(), fallback=1)
    with pytest.raises(TypeError, match="fallback must be True or False, got 1"):
        slangvi.load(path, fallback=1)


@pytest.mark.parametrize(
    "value", [lambda: 1, object(), {1, 2}, [1, {"deep": print}], torch.float32, 1j, torch.zeros(2).to_sparse(), b"x"]
)
def test_what_json_and_tensors_cannot_hold_is_refused(value, path):
    with pytest.raises(CheckpointError, match=r"^thing.* is a .*cannot hold"):
        slangvi.save(path, state_of(), thing=value)
    assert not path.exists()


def test_a_schedule_by_a_plain_function_is_saved_without_it(path):
    """As torch does: functions are not saved, and the new scheduler has its own."""
    model, x, y = model_and_data()
    opt = make(model)
    sched = lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    train(opt, x, y, steps=1, sched=sched)
    slangvi.save(path, opt, scheduler=sched)
    other = lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    slangvi.load(path, opt, scheduler=other)
    assert other.last_epoch == 1


# ---- plain values

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    tensors = {}
    text = json.dumps(encode(value, tensors, "x"), allow_nan=False)
    found = decode(json.loads(text), tensors)
    assert repr(found) == repr(value)


def test_values_that_are_nearly_plain(path):
    tensors = {}
    value = {"n": np.int64(3), "x": np.float32(0.5), "c": Counter([1, 1, 2]), "o": OrderedDict(a=1), "nan": math.nan}
    found = decode(encode(value, tensors, "x"), tensors)
    assert repr(found) == "{'n': 3, 'x': 0.5, 'c': Counter({1: 2, 2: 1}), 'o': {'a': 1}, 'nan': nan}"
    assert isinstance(found["c"], Counter)


def test_names_with_dots_do_not_collide():
    tensors = {}
    value = {"a.b": {"c": torch.zeros(1)}, "a": {"b.c": torch.ones(1), "b": {"c": torch.full((1,), 2.0)}}}
    found = decode(encode(value, tensors, "x"), tensors)
    assert len(tensors) == 3
    assert [found["a.b"]["c"].item(), found["a"]["b.c"].item(), found["a"]["b"]["c"].item()] == [0, 1, 2]


@pytest.mark.parametrize("name", RECORDS)
def test_the_table_of_records_has_every_field(name):
    """A field that a state gets later must not be forgotten here."""
    record = RECORDS[name]
    kind = record.kind
    if dataclasses.is_dataclass(kind):
        assert set(record.fields) == {field.name for field in dataclasses.fields(kind) if field.init}
    elif hasattr(kind, "_fields"):
        assert record.fields == kind._fields


def test_nothing_in_the_library_unpacks_archives():
    """So that no member of one can be written outside its folder; gzip and the like hold one file without a name."""
    for name, tree in TREES.items():
        assert not {"tarfile", "zipimport"} & IMPORTS[name], name
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not {"ZipFile", "PyZipFile", "extractall", "unpack_archive"} & used, name


def test_nothing_in_the_library_unpickles():
    for name, tree in TREES.items():
        assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & IMPORTS[name], name
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            words = {word.arg: ast.unparse(word.value) for word in call.keywords}
            if ast.unparse(call.func) == "torch.load":
                assert words.get("weights_only") == "True", name
            if ast.unparse(call.func) in ("np.load", "numpy.load"):
                assert words.get("allow_pickle") == "False", name
