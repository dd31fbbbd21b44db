"""Large memory that is used again: as long as somebody uses some of its size, and by one tensor at a time."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.fx.experimental.proxy_tensor

from slangvi.linalg import room as module
from slangvi.linalg.products import mix
from slangvi.linalg.room import room
from slangvi.live_bytes import LiveBytes


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(module, "_LARGE", 1000)
    monkeypatch.setattr(module, "_shelf", module._Shelf())
    return module._shelf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_gone_is_used_again_while_another_lives(shelf, dtype):
    like = torch.zeros(1, dtype=dtype)
    first, second = room((5, 200), like), room((5, 200), like)
    place = first.data_ptr()
    assert place != second.data_ptr()
    assert first.dtype is dtype
    assert first.is_contiguous()
    del first
    third = room((1000,), like)
    assert third.data_ptr() == place
    assert room((10, 100), like).data_ptr() not in (place, second.data_ptr())
    assert third.fill_(1.0).sum() == 1000.0


def test_a_view_keeps_its_memory(shelf):
    first, other = room((4, 300), torch.zeros(1)), room((4, 300), torch.zeros(1))
    part, place = first.fill_(3.0)[1:2], first.data_ptr()
    del first
    assert room((4, 300), torch.zeros(1)).fill_(0.0).data_ptr() != place
    assert part.eq(3.0).all()
    assert other.data_ptr() != place


def test_one_piece_waits_and_none_when_the_last_tensor_is_gone(shelf):
    held = [room((2000,), torch.zeros(1)) for _ in range(5)]
    del held[1:]
    assert list(shelf.waiting) == [8000]
    assert list(shelf.used.values()) == [8000]
    held.clear()
    assert not shelf.waiting
    assert not shelf.used


def test_a_failure_leaves_no_trace(shelf, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    kept = room((2000,), torch.zeros(1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(MemoryError):
            room((2000,), torch.zeros(1))
    assert list(shelf.used.values()) == [kept.nbytes]
    del kept
    assert not shelf.used


def test_sizes_do_not_mix(shelf):
    small, large = room((300,), torch.zeros(1)), room((600,), torch.zeros(1))
    place = large.data_ptr()
    del large
    assert room((300,), torch.zeros(1)).data_ptr() != place
    assert small.numel() == 300


def test_small_tensors_and_other_devices_are_left_to_torch(shelf):
    assert room((3, 4), torch.zeros(1)).shape == (3, 4)
    assert room((4000,), torch.zeros(1, device="meta")).device.type == "meta"
    assert not shelf.used


def test_a_cycle_gives_back_what_it_held(shelf):
    cycle = [room((500,), torch.zeros(1))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not shelf.used


def test_threads_never_share(shelf):
    def work(number):
        for _ in range(50):
            mine = room((400,), torch.zeros(1)).fill_(float(number))
            if not mine.eq(number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))
    assert not shelf.used


def test_who_counts_or_traces_sees_memory_of_torch(shelf):
    with LiveBytes() as memory:
        before = memory.live
        made = room((500,), torch.zeros(1))
        assert memory.live == before + made.nbytes
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: room((500,), x).fill_(2.0) + x)(torch.zeros(500))
    first = traced(torch.zeros(500))
    traced(torch.ones(500))
    assert first.eq(2.0).all()
    assert not shelf.used


def test_products_go_there_and_are_the_same(shelf):
    weights, rows = torch.randn(3, 4), torch.randn(4, 500)
    found = mix(weights, rows)
    assert list(shelf.used.values()) == [found.nbytes]
    assert torch.equal(found, weights @ rows)
    del found
    assert not shelf.used
    watched = rows.clone().requires_grad_()
    mix(weights, watched).sum().backward()
    torch.testing.assert_close(watched.grad, weights.sum(0).unsqueeze(-1).expand(4, 500))
