"""Products of long rows: by blocks or as a whole, on a CPU or where a GPU would take another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.fake_gpu_tensor import on_gpu, plain
from slangvi.linalg import products


@pytest.mark.parametrize("block", [1, 3, 7, 100])
@pytest.mark.parametrize("weighed", [False, True])
def test_blocked_gram_equals_the_whole(monkeypatch, block, weighed):
    source = torch.Generator().manual_seed(4)
    factor, diag = torch.randn(3, 7, generator=source), 10 ** (4 * torch.rand(7, generator=source) - 2)
    given = diag if weighed else None
    whole = products.gram_float64(factor, given)
    monkeypatch.setattr(products, "LONG", 1)
    monkeypatch.setattr(products, "_BLOCK", block)
    assert gap_of_grams(products.gram_float64(factor, given), whole) <= 1e-6
    batched = torch.stack([factor, 2 * factor])
    torch.testing.assert_close(products.gram_float64(batched, given), torch.stack([whole, 4 * whole]))


def gap_of_grams(found: Tensor, expected: Tensor) -> float:
    """Largest error relative to √(g_ii g_jj)."""
    lengths = expected.diagonal().sqrt()
    assert found.dtype is torch.float64
    return float(((found - expected).abs() / (lengths[:, None] * lengths)).max())


@pytest.mark.parametrize("pretend", [lambda x: x, on_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 4321, 1 << 20])
@pytest.mark.parametrize("rank", [1, 8, 32])
@pytest.mark.parametrize("weighed", [False, True])
def test_gram_of_long_float32_rows_is_that_of_float64(weighed, rank, size, pretend, generator):
    rows = torch.randn(rank, size, generator=generator)
    rows[::2] += 1.0  # sums whose terms do not cancel are the harder ones
    diag = 10 ** (4 * torch.rand(size, generator=generator) - 2) if weighed else None
    double = rows.double() if diag is None else rows.double() / diag.double().sqrt()
    found = products.gram_float64(pretend(rows), None if diag is None else pretend(diag))
    # Weights over four decades leave fewer columns that count, and so fewer roundings that average out.
    assert gap_of_grams(found.as_subclass(Tensor), double @ double.mT) <= (2e-7 if weighed else 1e-7)


def test_gram_of_float32_rows_is_accumulated_in_float64():
    rows = torch.tensor([[4096.0, 1.0]])
    assert products.gram_float64(rows).item() == 4096.0**2 + 1.0  # 2²⁴ + 1 is not a float32


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (2, 3, 5), (0, 5)])
def test_column_squares_are_the_diagonal(shape):
    rows = torch.randn(*shape, dtype=torch.float64)
    expected = (rows.mT @ rows).diagonal(dim1=-2, dim2=-1)
    for found in (
        products.column_squares(rows),
        products.column_squares(rows.clone().requires_grad_()).detach(),
        torch.func.vmap(products.column_squares)(rows.unsqueeze(0)).squeeze(0),
        plain(products.column_squares(on_gpu(rows))),
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [5, 2 << 10, 6 * 1110, 5119])  # blocks of a GPU leave nothing over, or do
def test_rows_dot_is_the_product_with_the_transpose(size):
    rows, others = torch.randn(3, size), torch.randn(2, size)
    expected = rows.double() @ others.double().T
    for pretend in (lambda x: x, on_gpu):
        for dtype in (None, torch.float64):
            found = products.rows_dot(pretend(rows), pretend(others), dtype).as_subclass(Tensor)
            assert found.dtype is (dtype or torch.float32)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pretend", [lambda x: x, on_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("rows", [(3, 5000), (1, 5000), (2, 3, 6)])
@pytest.mark.parametrize("samples", [(), (4,)])
def test_products_of_rows_with_vectors(rows, samples, pretend, generator):
    """One vector, or samples of it, for every member of a batch; in another dtype if asked for."""
    factor = torch.randn(*rows, generator=generator)
    vector = torch.randn(*samples, *rows[:-2], rows[-1], generator=generator)
    expected = torch.einsum("...lp,...p->...l", factor.double(), vector.double())
    for dtype in (None, torch.float64):
        found = products.rows_dot_vector(pretend(factor), pretend(vector), dtype).as_subclass(Tensor)
        assert found.dtype is (dtype or torch.float32)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    lifted = torch.einsum("...lp,...l->...p", factor.double(), expected)
    found = products.combine_rows(pretend(expected.float()), pretend(factor)).as_subclass(Tensor)
    torch.testing.assert_close(found.double(), lifted, rtol=1e-3, atol=1e-2)
