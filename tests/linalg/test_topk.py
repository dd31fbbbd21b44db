"""Leading eigenpairs: both ways give those of the dense decomposition, and say how far off they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.linalg import topk
from slangvi.linalg.topk import (
    advance,
    decompose,
    iterate,
    iteration_pays,
    leading_eigenpairs,
    orthonormalize,
    ritz,
    starting_block,
)

F64 = torch.float64


def matrix_with(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A symmetric matrix with these eigenvalues."""
    source = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=source, dtype=F64)).Q
    return (turn * values) @ turn.T


SPECTRA = {
    "geometric": lambda n: 0.8 ** torch.arange(n, dtype=F64),
    "few directions": lambda n: torch.cat([torch.full((5,), 3.0, dtype=F64), torch.zeros(n - 5, dtype=F64)]),
    "a step of a run": lambda n: torch.cat([1e6 * torch.rand(8, dtype=F64) + 1e5, torch.rand(n - 8, dtype=F64)]),
    "alike": lambda n: torch.ones(n, dtype=F64),
    "huge": lambda n: 1e30 * 0.5 ** torch.arange(n, dtype=F64),
    "zero": lambda n: torch.zeros(n, dtype=F64),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("size", [40, 200])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6, 1e-11])
def test_pairs_are_those_of_the_dense_decomposition(name, size, tolerance):
    torch.manual_seed(0)
    matrix, count = matrix_with(SPECTRA[name](size)), 4
    found = leading_eigenpairs(matrix, count, tolerance)
    truth = torch.linalg.eigvalsh(matrix).flip(0)[:count].clamp_min(0)
    scale = max(float(truth[0]), 1e-300)
    slack = max(tolerance, 1e-13)
    torch.testing.assert_close(found.values / scale, truth / scale, rtol=0, atol=10 * slack)
    left = torch.linalg.vector_norm(matrix @ found.vectors - found.vectors * found.values, dim=0).max() / scale
    assert float(left) <= 10 * slack
    assert float(found.residual) <= max(tolerance, 1e-300)
    if name != "zero":
        eye = torch.eye(count, dtype=F64)
        torch.testing.assert_close(found.vectors.T @ found.vectors, eye, rtol=0, atol=1e-9)


def test_the_residual_says_how_far_off_the_pairs_are(monkeypatch):
    monkeypatch.setattr(topk, "MOST_LOOKS", 1)
    matrix = matrix_with(1.0 - 0.001 * torch.arange(100, dtype=F64))
    found, done = iterate(matrix, advance(matrix, starting_block(matrix, 3)), 3, 1e-11)
    assert not bool(done)
    left = torch.linalg.vector_norm(matrix @ found.vectors - found.vectors * found.values, dim=0).max()
    torch.testing.assert_close(found.residual, left / found.values[0], rtol=1e-6, atol=0)


def test_a_slow_iteration_gives_way_to_the_decomposition(monkeypatch):
    monkeypatch.setattr(topk, "MOST_LOOKS", 1)
    matrix = matrix_with(1.0 - 0.001 * torch.arange(100, dtype=F64))
    found = leading_eigenpairs(matrix, 3, 1e-11)
    torch.testing.assert_close(found.values, decompose(matrix, 3).values)
    assert float(found.residual) == 0.0


def test_the_previous_factor_saves_products():
    matrix = matrix_with(torch.cat([torch.linspace(2, 1, 4, dtype=F64), torch.full((196,), 0.9, dtype=F64)]))
    starts = [starting_block(matrix, 4, start) for start in (None, decompose(matrix, 4).vectors)]
    first, second = (advance(matrix, block) for block in starts)
    assert float(ritz(second, 4).residual) < float(ritz(first, 4).residual)


def test_the_residual_from_what_was_fetched_is_right_to_half_of_the_digits():
    matrix = matrix_with(0.9 ** torch.arange(100, dtype=F64))
    space = advance(matrix, starting_block(matrix, 3))
    exact, fetched = ritz(space, 3), ritz(space, 3, space.small)
    torch.testing.assert_close(fetched.residual, exact.residual, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(fetched.values, exact.values)


def test_batches_are_what_single_matrices_are():
    torch.manual_seed(0)
    many = torch.stack([matrix_with(SPECTRA[name](120)) for name in ("geometric", "a step of a run", "alike")])
    found = leading_eigenpairs(many, 3, 1e-11)
    for k, matrix in enumerate(many):
        one = leading_eigenpairs(matrix, 3, 1e-11)
        torch.testing.assert_close(found.values[k], one.values, rtol=1e-9, atol=0)
        spans = [pairs @ pairs.T for pairs in (found.vectors[k], one.vectors)]
        if k < 2:  # of equal eigenvalues any vectors will do
            torch.testing.assert_close(*spans, rtol=0, atol=1e-5)


@given(st.integers(2, 30), st.integers(1, 6), st.floats(-100, 100), st.integers(0, 99))
def test_columns_become_orthonormal_whatever_their_size(size, count, exponent, seed):
    source = torch.Generator().manual_seed(seed)
    columns = torch.randn(size, min(size, count), generator=source, dtype=F64) * 10.0**exponent
    found = orthonormalize(columns)
    torch.testing.assert_close(found.T @ found, torch.eye(found.shape[1], dtype=F64), rtol=0, atol=1e-6)
    back = found @ (found.T @ columns)
    torch.testing.assert_close(back / 10.0**exponent, columns / 10.0**exponent, rtol=0, atol=1e-5)


def test_nothing_is_found_where_nothing_is_asked_for():
    found = leading_eigenpairs(torch.eye(3, dtype=F64), 0)
    assert found.values.shape == (0,)
    assert found.vectors.shape == (3, 0)
    assert not iteration_pays(1000, 0)
