"""Standard normal noise: that of torch, from the source that is given."""

from __future__ import annotations

import pytest
import torch

from slangvi.linalg.noise import standard_normal


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_randn(shape, dtype):
    found = standard_normal(shape, torch.zeros((), dtype=dtype), source())
    assert torch.equal(found, torch.randn(shape, dtype=dtype, generator=source()))
    torch.manual_seed(4)
    expected = torch.randn(shape, dtype=dtype)
    torch.manual_seed(4)
    assert torch.equal(standard_normal(shape, torch.zeros((), dtype=dtype)), expected)
