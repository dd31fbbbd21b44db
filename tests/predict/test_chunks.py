"""Draws in chunks: what they count, and that they change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.posteriors import posterior_of
from slangvi.predict import functional_samples
from slangvi.predict.samples import drawn_in_chunks, sizes_for_a_row


def test_the_widest_layer_is_found_in_any_module():
    model = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 3))
    model[3].eval()
    assert sizes_for_a_row(model, torch.zeros(1, 16)) == (3, 128)
    assert [part.training for part in model] == [True, True, True, False]
    assert not any(part._forward_hooks for part in model.modules())
    assert sizes_for_a_row(nn.Linear(20, 2), torch.zeros(1, 20)) == (2, 20)


@pytest.mark.parametrize("chunk", [1, 40, 1000])
def test_chunks_are_of_the_same_draws(chunk, monkeypatch, global_rng_untouched):
    monkeypatch.setattr("slangvi.predict.samples._CHUNK", chunk)
    with torch.random.fork_rng(devices=[]):
        model, x = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2)).double(), torch.randn(7, 3).double()
    q = posterior_of(model)
    found = list(drawn_in_chunks(model, q, x, 4, seed=5))
    expected = functional_samples(model, q, x, 4, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(torch.cat(found, 1), expected)
    assert max(draws.numel() for draws in found) <= max(chunk, 8)
