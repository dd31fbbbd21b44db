"""Memory is what is alive."""

from __future__ import annotations

import torch

from slangvi_reproduction.bench._live_bytes import LiveBytes

MEGABYTE = 250_000  # floats


def test_live_bytes_follow_what_lives_and_count_views_once():
    outside = torch.zeros(MEGABYTE)
    memory = LiveBytes()
    with memory:
        outside.view(2, -1).add_(1)
        assert memory.live == 0
        kept = outside + 1
        view = kept.view(2, -1)[0]
        assert memory.live == 4 * MEGABYTE
        (kept * 2 + 1).sum()
        assert memory.live == 4 * MEGABYTE
        assert memory.peak == 3 * 4 * MEGABYTE
        del kept
        assert memory.live == 4 * MEGABYTE
        del view
    assert memory.live == 0
