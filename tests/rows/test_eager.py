"""Compiled models run as they were written until the last of several blocks ends."""

from __future__ import annotations

import pytest
import torch

from slangvi.rows.eager import run_eagerly


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_blocks_may_end_in_any_order(order):

    before, blocks = stance(), [run_eagerly() for _ in range(3)]
    for block in blocks:
        block.__enter__()
    for ended in order:
        assert stance() == "force_eager"
        blocks[ended].__exit__(None, None, None)
    assert stance() == before


def test_an_error_in_a_block_sets_it_back():

    before = stance()
    with pytest.raises(KeyError), run_eagerly():
        raise KeyError
    assert stance() == before
    with run_eagerly():
        assert stance() == "force_eager"
    assert stance() == before


def test_a_stance_that_cannot_be_had_leaves_nothing_open(monkeypatch):
    import torch._dynamo

    def refuse(name):
        raise RuntimeError("not here")

    before = stance()
    with monkeypatch.context() as patch:
        patch.setattr("slangvi.rows.eager._open", [])  # a block that another test left open would do
        patch.setattr(torch.compiler, "set_stance", refuse)
        with pytest.raises(RuntimeError, match="Compile the model alone"), run_eagerly():
            pass
    with run_eagerly():
        assert stance() == "force_eager"
    assert stance() == before
