"""Memory of graphs: what a rehearsal counts, and what is reserved."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from slangvi.live_bytes import LiveBytes
from slangvi.methods.graph_capture import beside, joined, rehearsing, reserved

CPU, MB = torch.device("cpu"), 1 << 20
MINE, OTHER = (0, 7), (0, 8)


def floats(megabytes: float) -> torch.Tensor:
    return torch.zeros(int(megabytes * MB) // 4)


def test_a_rehearsal_counts_what_is_not_small_and_not_in_the_branch(cuda):
    with rehearsing(CPU) as taken:
        kept = floats(3)
        floats(5)
        floats(0.5)
        with beside(CPU):
            floats(9)
        joined(CPU)
        torch.zeros(64 * MB, device="meta")  # of another device, such as the host
    assert taken.live == kept.nbytes
    assert taken.peak == 8 * MB
    assert taken.needed == (8 + 5) * MB


def test_of_a_huge_tensor_no_more_than_a_piece_is_asked_for_twice(cuda):
    with rehearsing(CPU) as taken:
        floats(64)
    assert taken.needed == (64 + 20) * MB


def segment(total: int, allocated: int, pool: tuple[int, int] = MINE) -> dict[str, object]:
    return {"total_size": total * MB, "allocated_size": allocated * MB, "segment_pool_id": pool}


@pytest.mark.parametrize(
    ("segments", "taken"),
    [
        ([], 50),
        ([segment(20, 8)], 38),
        ([segment(20, 8), segment(30, 27)], 35),
        ([segment(20, 8), segment(20, 0, OTHER)], 38),
        ([segment(2, 0)], 50),
        ([segment(60, 19)], 0),
        ([segment(60, 0)], 0),
    ],
    ids=["new", "some is free", "in two pieces", "another pool", "small pieces", "little is missing", "enough"],
)
def test_memory_is_reserved_in_one_piece_less_what_is_free(cuda, monkeypatch, segments, taken):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: nullcontext())
    with LiveBytes() as memory:
        room = reserved(50 * MB, MINE, CPU)
    assert (room is None) == (taken == 0)
    assert memory.peak == taken * MB


@pytest.mark.choreography
def test_nothing_is_reserved_where_another_allocator_has_no_pieces(cuda, monkeypatch):
    def refuses():
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuses)
    assert reserved(50 * MB, MINE, CPU) is None
