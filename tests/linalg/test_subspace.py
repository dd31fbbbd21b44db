"""Warm-started subspace iteration: against eigh, and honest about what it has missed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slangvi.linalg.krylov import leading_eigenpairs
from slangvi.linalg.subspace import (
    OVERSAMPLING,
    Pursued,
    filtered,
    orthonormal,
    projected,
    pursued,
    ritz,
    sharpened,
    starting_block,
)

CPU, DOUBLE = torch.device("cpu"), torch.float64


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=DOUBLE)


def with_spectrum(values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with these eigenvalues, and its eigenvectors as columns."""
    source = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), dtype=DOUBLE, generator=source)).Q
    return (vectors * values) @ vectors.T, vectors


def flaws_of(found: Pursued) -> tuple[float, float]:
    """Residual relative to the largest value, and lack of orthogonality."""
    largest = float(found.small.diagonal().max().clamp_min(1e-300))
    return float(found.left.max()) / largest, float((found.gram - eye(len(found.gram))).abs().max())


def decaying(size: int, base: float = 0.5) -> Tensor:
    return base ** torch.arange(size, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("size", "count", "known", "extra"), [(40, 3, 3, 4), (40, 3, 0, 4), (9, 1, 1, 0), (30, 5, 2, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_starting_block_is_orthonormal_near_what_is_known_and_made_once(
    size, count, known, extra, dtype, global_rng_untouched
):
    block = starting_block(size, count, known, dtype, CPU, extra)
    assert block.shape == (size, count + extra)
    assert block.dtype is dtype
    close = {"rtol": 0, "atol": 10 * torch.finfo(dtype).eps}
    torch.testing.assert_close(block.T @ block, eye(count + extra).to(dtype), **close)
    if known:
        # The known coordinates have nearly all of their length inside the span, and their columns a little outside.
        assert float(block[:known].norm(dim=1).min()) > 0.95
        assert bool((block[known:, :known].norm(dim=0) > 0.05).all())
    assert starting_block(size, count, known, dtype, CPU, extra) is block


def test_by_default_there_are_a_few_columns_more():
    assert starting_block(50, 3, 3, DOUBLE, CPU).shape == (50, 3 + OVERSAMPLING)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("count", [1, 4])
def test_leading_pairs_are_those_of_eigh(count, batch):
    matrices = [with_spectrum(decaying(40), seed)[0] for seed in range(max(1, torch.Size(batch).numel()))]
    K = torch.stack(matrices).reshape(*batch, 40, 40)
    block = sharpened(K.__matmul__, starting_block(40, count, 0, DOUBLE, CPU), 8)
    values, inner, residual, _ = ritz(projected(K.__matmul__, block), count)
    assert values.shape == (*batch, count)
    assert residual.shape == batch
    vectors = block @ inner
    expected, exact = torch.linalg.eigh(K)
    torch.testing.assert_close(values, expected[..., -count:].flip(-1), rtol=0, atol=1e-8)
    torch.testing.assert_close(vectors.mT @ vectors, eye(count).expand(*batch, count, count), rtol=0, atol=1e-9)
    overlap = (exact[..., -count:].flip(-1) * vectors).sum(-2).abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-8)
    left = (K @ vectors - vectors * values.unsqueeze(-2)).norm(dim=-2).amax(-1)
    # The residual comes from a difference of squares, so it is known to half the digits.
    torch.testing.assert_close(residual, left, rtol=0, atol=1e-7)


def test_a_matrix_that_is_symmetric_up_to_rounding_has_a_small_residual():
    """Products of float32 rows with themselves are not quite symmetric on every processor."""
    K, _ = with_spectrum(decaying(50, 0.7))
    spoilt = K + 1e-8 * torch.randn(50, 50, generator=torch.Generator().manual_seed(1), dtype=K.dtype).triu()
    block = sharpened(spoilt.__matmul__, starting_block(50, 3, 3, K.dtype, K.device), 40)
    values, inner, residual, _ = ritz(projected(spoilt.__matmul__, block), 3)
    vectors = block @ inner
    true = (spoilt @ vectors - values * vectors).norm(dim=0).max()
    assert true < 1e-6 * values[0]
    assert residual < 2e-7 * values[0]


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_sharpening_keeps_the_span_of_the_powers(steps):
    K, _ = with_spectrum(torch.linspace(0.5, 1.0, 12, dtype=DOUBLE))
    start = starting_block(12, 2, 0, DOUBLE, CPU, 1)
    found = torch.linalg.qr(sharpened(K.__matmul__, start, steps)).Q
    expected = torch.linalg.qr(torch.linalg.matrix_power(K, steps) @ start).Q
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=1e-10)


def test_a_zero_matrix_has_zero_pairs():
    K = torch.zeros(2, 40, 40, dtype=DOUBLE)
    block = sharpened(K.__matmul__, starting_block(40, 3, 3, DOUBLE, CPU), 3)
    values, inner, residual, _ = ritz(projected(K.__matmul__, block), 3)
    assert not values.any()
    assert not residual.any()
    assert bool((block @ inner).isfinite().all())


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_repeated_columns_do_no_harm(rank):
    """A matrix of low rank makes all columns dependent after one product."""
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(rank, 50, dtype=DOUBLE, generator=source)
    K = rows.T @ rows
    block = sharpened(K.__matmul__, starting_block(50, 4, 4, DOUBLE, CPU), 3)
    values, inner, residual, _ = ritz(projected(K.__matmul__, block), 4)
    expected = torch.linalg.eigvalsh(K).flip(0)[:4].clamp_min(0)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-8 * float(expected[0]))
    assert float(residual) <= 1e-6 * float(values[0])
    vectors = block @ inner
    torch.testing.assert_close((vectors * values) @ vectors.T, best(K, 4), rtol=0, atol=1e-7 * float(expected[0]))
    single = ritz(projected(K.__matmul__, block[:, :1].expand(50, 3).contiguous()), 1)
    assert bool(torch.isfinite(single.values).all())


@pytest.mark.parametrize("spectrum", [(1.0, 0.01), (1.0, 0.01, 1e-3), (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)])
def test_fewer_directions_than_columns_do_not_hide_the_small_ones(spectrum):
    """Rounding makes Ritz values of its own out of dependent columns; they must not take the place of real ones."""
    for seed in range(10):
        full = torch.zeros(64, dtype=DOUBLE)
        full[: len(spectrum)] = torch.tensor(spectrum, dtype=DOUBLE)
        K, _ = with_spectrum(full, seed)
        found = leading_eigenpairs(K, 4, 1e-6, start=4)
        torch.testing.assert_close(found.values, full[:4], rtol=0, atol=1e-6)
        torch.testing.assert_close((found.vectors * found.values) @ found.vectors.T, best(K, 4), rtol=0, atol=1e-6)


def best(K: Tensor, rank: int) -> Tensor:
    values, vectors = torch.linalg.eigh(K)
    return (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T


def start_at(vectors: Tensor, error: float) -> Tensor:
    """Columns near given ones."""
    source = torch.Generator().manual_seed(3)
    noise = torch.randn(vectors.shape, dtype=DOUBLE, generator=source) / len(vectors) ** 0.5
    return torch.linalg.qr(vectors + error * noise).Q


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_good_start_is_pursued_to_the_leading_space(count, rounds):
    spectrum = torch.cat([torch.linspace(2.0, 1.0, count, dtype=DOUBLE), 0.02 * decaying(40 - count, 0.9)])
    K, vectors = with_spectrum(spectrum)
    pairs = pursued(K.__matmul__, start_at(vectors[:, :count], 0.01), rounds)
    found, small = pairs.vectors, pairs.small
    torch.testing.assert_close(found @ found.T, vectors[:, :count] @ vectors[:, :count].T, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.linalg.eigvalsh(small).flip(0), spectrum[:count], rtol=0, atol=1e-7)
    largest, image = float(small.diagonal().max()), K @ found
    residual, tilt = flaws_of(pairs)
    assert residual == pytest.approx(float((image - found @ small).norm(dim=0).max()) / largest, rel=1e-6)
    assert residual < 1e-4
    assert tilt == pytest.approx(float((found.T @ found - eye(count)).abs().max()), abs=1e-15)
    assert tilt < 1e-10


def test_a_start_that_hides_a_leading_direction_is_told_by_its_residual():
    spectrum = torch.cat([torch.tensor([4.0, 2.0, 1.0], dtype=DOUBLE), 0.1 * decaying(37)])
    K, vectors = with_spectrum(spectrum)
    found = pursued(K.__matmul__, start_at(vectors[:, 1:3], 1e-3), 1)
    assert float((vectors[:, 0] @ found.vectors).norm()) < 0.1
    assert flaws_of(found)[0] > 1e-3


def test_a_start_of_exact_eigenvectors_stays_where_it_is():
    """The one thing the flaws cannot tell, and why `starting_block` mixes in a little chance."""
    K, vectors = with_spectrum(torch.cat([torch.tensor([4.0, 2.0], dtype=DOUBLE), 0.1 * decaying(38)]))
    found = pursued(K.__matmul__, vectors[:, 1:2], 1)
    assert float(found.small) == pytest.approx(2.0, abs=1e-6)
    assert flaws_of(found)[0] < 1e-6
    assert flaws_of(pursued(K.__matmul__, start_at(vectors[:, 1:2], 0.1), 1))[0] > 1e-3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_dependent_columns_are_told_by_their_tilt(rank):
    """Three vectors of a matrix that has fewer: no three columns can be orthonormal and in its range."""
    K, _ = with_spectrum(torch.cat([torch.ones(rank, dtype=DOUBLE), torch.zeros(30 - rank, dtype=DOUBLE)]))
    found = pursued(K.__matmul__, starting_block(30, 3, 0, DOUBLE, CPU, 0), 2)
    assert all(bool(x.isfinite().all()) for x in found)
    assert flaws_of(found)[1] > 1e-3


def test_the_starting_block_does_not_depend_on_the_default_device():
    sizes = (23, 3, 2, torch.float64, CPU)
    with torch.device("meta"):
        block = starting_block.__wrapped__(*sizes)
    assert torch.equal(block, starting_block(*sizes))


# ---- the filter ----


def test_the_filter_is_a_polynomial_of_the_matrix():
    """Times the eigenvectors, it is T₃ of their eigenvalues, with 0 going to 0 and the edge to 1."""
    spectrum = torch.cat([decaying(12, 0.7), torch.zeros(8, dtype=DOUBLE)])
    K, vectors = with_spectrum(spectrum)
    edge, zero = spectrum[5], 3**0.5 / 2
    start = orthonormal(torch.randn(20, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)))
    x = (1 + zero) * spectrum / edge - zero
    gain = 4 * x**3 - 3 * x
    torch.testing.assert_close(gain[12:], torch.zeros(8, dtype=DOUBLE), rtol=0, atol=1e-14)
    assert float(gain[5]) == pytest.approx(1.0)
    assert float(gain[5:].abs().max()) <= 1.0 + 1e-12
    found = filtered(K.__matmul__, start, edge, times=1)
    torch.testing.assert_close(found, vectors @ (gain[:, None] * (vectors.T @ start)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_filter_tells_close_eigenvalues_apart_sooner_than_powers_do(batch):
    """A spectrum that falls by two per cent from one to the next: as many products, a fifth of the residual or less."""
    matrices = [with_spectrum(decaying(300, 0.98), seed)[0] for seed in range(max(1, torch.Size(batch).numel()))]
    K = torch.stack(matrices).reshape(*batch, 300, 300)
    block = sharpened(K.__matmul__, starting_block(300, 16, 0, DOUBLE, CPU), 3)
    powers = ritz(projected(K.__matmul__, sharpened(K.__matmul__, block, 12)), 16).residual
    for _ in range(2):
        block = filtered(K.__matmul__, block, ritz(projected(K.__matmul__, block), 16).edge)
    found = ritz(projected(K.__matmul__, block), 16)
    assert bool((found.residual < 0.2 * powers).all())


@pytest.mark.parametrize("below", [0.0, 1e-8, 3e-5])
@pytest.mark.parametrize("rank", [0, 2, 5])
def test_a_filter_is_not_asked_for_where_it_would_lose_what_is_small(rank, below):
    """Beside eigenvalues that are far larger than the edge the others would be rounded away."""
    K = with_spectrum(torch.cat([decaying(rank), torch.full((60 - rank,), below, dtype=DOUBLE)]))[0]
    found = ritz(projected(K.__matmul__, sharpened(K.__matmul__, starting_block(60, 4, 0, DOUBLE, CPU), 3)), 4)
    assert float(found.edge) == (pytest.approx(below) if rank == 0 else 0.0)
    flat = ritz(projected(eye(60).__matmul__, starting_block(60, 4, 0, DOUBLE, CPU)), 4)
    assert float(flat.edge) == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-300, 1e-165, 1e-150, 1.0, 1e150])
def test_a_single_column_becomes_one_of_length_one_or_less(scale):
    """In front of a product that it must not make overflow; too small to be squared it stays small."""
    column = torch.full((4, 1), scale, dtype=torch.float64, requires_grad=True)
    found = orthonormal(column)
    length = float(found.detach().norm())
    assert length <= 1.0 + 1e-12
    assert scale < 1e-150 or length == pytest.approx(1.0, rel=1e-12)
    assert torch.autograd.grad(found.sum(), column)[0].isfinite().all()
