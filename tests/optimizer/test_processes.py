"""Several processes: one goes on as without, and more are refused by name, never trained apart in silence."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import CLASSES, assert_identical, model_and_data

dist = pytest.importorskip("torch.distributed")
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
    pytest.mark.filterwarnings("ignore"),
]


@contextmanager
def processes(count):
    """A group of so many processes; in the place of all but this one is nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kind, store = ("gloo", dist.HashStore()) if count == 1 else ("fake", FakeStore())
    dist.init_process_group(kind, store=store, rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(name, model):
    method, options = CLASSES[name]
    return method(model, num_data=40, generator=torch.Generator().manual_seed(1), **options)


def one_step(opt, model, x, y):
    opt.train()
    F.cross_entropy(model(x), y).backward()
    opt.step()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_gradients_averaged_over_processes_are_refused(name, inside):
    model, x, y = model_and_data()
    with processes(2):
        parallel = nn.parallel.DistributedDataParallel(model)
        opt = build(name, model if inside else parallel)
        with pytest.raises(slangvi.UnsupportedModuleError, match="DistributedDataParallel with 2 processes"):
            one_step(opt, parallel, x, y)
        opt.discard_gradients()  # ends the block, in which backward runs in this thread


@pytest.mark.parametrize("inside", [False, True])
def test_one_process_is_as_none(inside):
    model, x, y = model_and_data()
    alone, _, _ = model_and_data()
    with processes(1):
        parallel = nn.parallel.DistributedDataParallel(model)
        opt = build("SLANG", model if inside else parallel)
        one_step(opt, parallel, x, y)
    plain = build("SLANG", alone)
    one_step(plain, alone, x, y)
    assert_identical(plain, opt)


def test_a_group_of_processes_without_a_parallel_model_changes_nothing():
    model, x, y = model_and_data()
    with processes(2):
        opt = build("SLANG", model)
        one_step(opt, model, x, y)
    assert opt.info.step == 1


def test_sharded_parameters_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _, _ = model_and_data()
    with processes(2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(slangvi.UnsupportedModuleError, match=r"'0\.weight' is spread over processes"):
            build("SLANG", model)


@pytest.mark.parametrize("original", [False, True])
def test_fully_sharded_models_are_refused(original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, _, _ = model_and_data()
    with processes(2):
        sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        with pytest.raises(slangvi.UnsupportedModuleError, match="wrapped in FullyShardedDataParallel"):
            build("SLANG", sharded)
