"""A setting that several blocks share is there until the last of them ends."""

from __future__ import annotations

import pytest
import torch

from slangvi.rows.overlapping import Overlapping


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_blocks_may_end_in_any_order(order):
    shared = Overlapping(torch.no_grad)
    blocks = [shared.block() for _ in range(3)]
    for block in blocks:
        block.__enter__()
    for ended in order:
        assert not torch.is_grad_enabled()
        blocks[ended].__exit__(None, None, None)
    assert torch.is_grad_enabled()


def test_an_error_in_a_block_sets_it_back():
    shared = Overlapping(torch.no_grad)
    with pytest.raises(KeyError), shared.block():
        raise KeyError
    assert torch.is_grad_enabled()
    with shared.block():
        assert not torch.is_grad_enabled()


def test_a_setting_that_cannot_be_had_leaves_nothing_open():
    tries = [RuntimeError("no"), torch.no_grad()]

    def setting():
        found = tries.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    shared = Overlapping(setting)
    with pytest.raises(RuntimeError, match="no"), shared.block():
        pass
    with shared.block():
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
