"""Products that all blocks share, against their definition."""

from __future__ import annotations

import pytest
import torch

from helpers.fake_gpu_tensor import on_gpu, plain
from slangvi.rows.base import own_products


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (257, 40), (1, 300, 40), (2, 300, 4), (0, 5), (256, 0)])
def test_rows_are_multiplied_with_each_other(shape, turned, generator):
    rows = torch.randn(*shape, dtype=torch.float64, generator=generator)
    rows = rows.mT.contiguous().mT if turned else rows
    expected = torch.einsum("...in,...jn->...ij", rows, rows)
    for found in (
        own_products(rows),
        own_products(rows.clone().requires_grad_()).detach(),
        torch.func.vmap(own_products)(rows.unsqueeze(0)).squeeze(0),
        plain(own_products(on_gpu(rows))),
    ):
        torch.testing.assert_close(found, expected)
