"""An out-of-memory error says what took the memory and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from slangvi.errors import MemoryExceededError
from slangvi.out_of_memory import human, out_of_memory_advice, storage_bytes, tensors_in

STATE = slangvi.slang.init({"w": torch.zeros(1000)}, rank=4)
CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(CPU),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError("Unable to allocate 8 GiB"),
    ],
)
def test_shortages_of_every_kind_are_explained(error):
    with (
        pytest.raises(MemoryExceededError, match=r"memory ran out in the update, with P = 1,000 .*L = 4") as caught,
        out_of_memory_advice("in the update", STATE),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, torch.OutOfMemoryError)
    text = str(caught.value)
    assert str(error) in text
    for knob in ("rank", "batch size", "mc_samples", "memory_limit", "float64", "slangvi.estimate_memory"):
        assert knob in text


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, out_of_memory_advice("in the update", STATE):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("method", "told", "advice"),
    [("full", "The matrix takes 3.8 MiB", "slangvi.SLANG"), ("mean_field", "The mean takes", "batch size")],
)
def test_precisions_without_a_factor_are_spoken_of_as_what_they_are(method, told, advice):
    state = getattr(slangvi, method).init({"w": torch.zeros(1000)})
    with (
        pytest.raises(MemoryExceededError, match="with P = 1,000 parameters\\. " + told) as caught,
        out_of_memory_advice("in the update", state),
    ):
        raise torch.OutOfMemoryError("no more")
    assert advice in str(caught.value)
    assert "rank L" not in str(caught.value)


def test_advice_is_given_once():
    with (
        pytest.raises(MemoryExceededError, match=r"^memory ran out inside\b") as caught,
        out_of_memory_advice("outside", STATE),
        out_of_memory_advice("inside", STATE),
    ):
        raise torch.OutOfMemoryError("no more")
    assert "outside" not in str(caught.value)


def test_errors_of_the_caller_of_a_block_are_explained():
    """As in sampled_params, whose block is the user's own forward and backward."""

    @contextmanager
    def block() -> Iterator[None]:
        with out_of_memory_advice("in the block", STATE):
            yield

    with pytest.raises(MemoryExceededError, match="ran out in the block"), block():
        raise torch.OutOfMemoryError("no more")


def rows_of(examples: int, rank: int) -> slangvi.SLANG:
    model = nn.Linear(200, 3)
    opt = slangvi.SLANG(model, num_data=10_000, rank=rank)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(torch.randn(examples, 200)), torch.arange(examples) % 3).backward()
    return opt


@pytest.mark.parametrize(("examples", "rank", "first"), [(500, 1, "lower the batch size"), (2, 64, "lower rank")])
def test_the_largest_quantity_comes_first(examples, rank, first):
    opt = rows_of(examples, rank)
    with (
        pytest.raises(MemoryExceededError, match=f"R = {examples} gradient rows of 1 .*largest first: {first}"),
        out_of_memory_advice("in the update", opt._state, opt._rows),
    ):
        raise torch.OutOfMemoryError("no more")


def test_at_rank_0_the_rank_is_not_mentioned():
    with pytest.raises(MemoryExceededError) as caught, out_of_memory_advice("x", slangvi.slang.init({"w": X}, 0)):
        raise torch.OutOfMemoryError("no more")
    assert "lower rank" not in str(caught.value)


X = torch.zeros(10)


def test_memory_that_is_shared_counts_once():
    nested = {"a": [X, (X[2:], {"b": torch.zeros(3)})], "state": STATE, "no": "tensor"}
    assert storage_bytes(tensors_in(nested)) == 40 + 12 + 4 * (4 * 1000 + 3 * 1000)


def test_bytes_are_readable():
    assert [human(x) for x in (0, 1023, 1024, 1.5 * 2**20, 2**40)] == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "1.0 TiB"]
