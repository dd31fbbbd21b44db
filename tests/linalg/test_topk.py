"""The best rank-L factor of a·UUᵀ + b·GᵀG against eigh of the P×P matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slangvi.grads.dense import DenseGradients
from slangvi.linalg import TopFactor, top_factor

SIZE = 6
# Eigenvectors of nearly equal eigenvalues turn freely, so U⁺U⁺ᵀ is compared through what is unique: its spectrum, and
# its distance from A (the least that a matrix of rank L can have). Where there is a gap, U⁺U⁺ᵀ itself is compared.
FLOAT64, FLOAT32 = 1e-11, 1e-5


def dense(factor: Tensor, rows: Tensor, keep: float | Tensor, gain: float | Tensor) -> Tensor:
    """A = √a UUᵀ √a + √b GᵀG √b, with a and b numbers or one per column."""
    keep, gain = (torch.as_tensor(value, dtype=torch.float64).expand(factor.shape[-1]).sqrt() for value in (keep, gain))
    U, G = factor.double() * keep, rows.double() * gain
    return U.mT @ U + G.mT @ G


def leading(A: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Spectrum padded with zeros to length `rank`, and the best approximation of that rank."""
    values, vectors = torch.linalg.eigh(A)
    values, vectors = values.flip(-1).clamp_min(0), vectors.flip(-1)
    top = min(rank, A.shape[-1])
    best = (vectors[..., :top] * values[..., None, :top]) @ vectors[..., :top].mT
    padding = values.new_zeros(*values.shape[:-1], rank - top)
    return torch.cat([values[..., :top], padding], dim=-1), best


def assert_is_best(top: TopFactor, A: Tensor, rank: int, tolerance: float) -> None:
    spectrum, best = leading(A, rank)
    scale = float(A.diagonal(dim1=-2, dim2=-1).sum(-1).max()) + 1e-300
    new = top.factor.double()
    assert new.shape == (*A.shape[:-2], rank, A.shape[-1])
    close = {"rtol": 0, "atol": tolerance * scale}
    torch.testing.assert_close(top.spectrum.double(), spectrum, **close)
    torch.testing.assert_close(top.total.double(), A.diagonal(dim1=-2, dim2=-1).sum(-1), **close)
    torch.testing.assert_close(
        (A - new.mT @ new).square().sum((-2, -1)).sqrt(), (A - best).square().sum((-2, -1)).sqrt(), **close
    )
    torch.testing.assert_close(new @ new.mT, torch.diag_embed(spectrum), **close)


def make(
    seed: int, rank: int, num_rows: int, batch: tuple[int, ...] = (), kind: str = "random", size: int = SIZE
) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    factor = torch.randn(*batch, rank, size, generator=source, dtype=torch.float64)
    rows = torch.randn(*batch, num_rows, size, generator=source, dtype=torch.float64)
    if kind == "repeated rows":
        rows = rows[..., :1, :].expand(rows.shape).contiguous()
    if kind == "zero rows":
        rows[..., ::2, :] = 0
    if kind == "all zero":
        factor, rows = factor * 0, rows * 0
    if kind == "rows in the factor":
        rows = factor[..., :1, :].expand(rows.shape).contiguous() if rank else rows
    return factor, rows


KINDS = ["random", "repeated rows", "zero rows", "all zero", "rows in the factor"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
@given(
    seed=st.integers(0, 2**20),
    size=st.integers(1, 8),
    rank=st.integers(0, 12),
    num_rows=st.integers(1, 14),
    batch=st.sampled_from([(), (3,), (2, 1)]),
    kind=st.sampled_from(KINDS),
    keep=st.sampled_from([0.0, 0.5, 0.99]),
    gain=st.sampled_from([0.01, 1.0, 300.0]),
)
def test_factor_is_the_best_of_its_rank(dtype, tolerance, seed, size, rank, num_rows, batch, kind, keep, gain):
    factor, rows = (t.to(dtype) for t in make(seed, rank, num_rows, batch, kind, size))
    top = top_factor(factor, DenseGradients.from_rows(rows), keep, gain)
    assert {part.dtype for part in top} == {dtype}
    assert_is_best(top, dense(factor, rows, keep, gain), rank, tolerance)


@pytest.mark.parametrize(
    ("rank", "num_rows"), [(1, 1), (1, 9), (5, 2), (2, 5), (SIZE, 3), (SIZE + 4, 2), (SIZE + 4, 20), (3, 20)]
)
def test_factor_is_the_eigenvector_projection_where_a_gap_makes_it_unique(rank, num_rows):
    factor, rows = make(1, rank, num_rows)
    A = dense(factor, rows, 0.9, 2.0)
    values = torch.linalg.eigvalsh(A).flip(0)
    assert rank >= SIZE or float(values[rank - 1] - values[rank]) > 1e-3 * float(values[0])
    new = top_factor(factor, DenseGradients.from_rows(rows), 0.9, 2.0).factor
    torch.testing.assert_close(new.mT @ new, leading(A, rank)[1], rtol=0, atol=1e-11 * float(values[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [SIZE, SIZE + 5])
def test_nothing_is_lost_when_the_rank_suffices(kind, rank):
    factor, rows = make(2, rank, 4, (2,), kind)
    A = dense(factor, rows, 0.9, 2.0)
    new = top_factor(factor, DenseGradients.from_rows(rows), 0.9, 2.0).factor
    torch.testing.assert_close(new.mT @ new, A, rtol=0, atol=1e-12 * (1 + float(A.abs().max())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", range(SIZE + 3))
def test_what_is_left_out_has_a_nonnegative_diagonal(kind, rank):
    factor, rows = make(3, rank, 9, (), kind)
    A = dense(factor, rows, 0.8, 3.0)
    new = top_factor(factor, DenseGradients.from_rows(rows), 0.8, 3.0).factor
    left = A.diagonal() - new.square().sum(0)
    assert float(left.min()) >= -1e-12 * (1 + float(A.diagonal().max()))


def test_spectrum_falls_and_never_is_negative():
    factor, rows = make(4, 9, 5, (4,))
    spectrum = top_factor(factor, DenseGradients.from_rows(rows), 0.5, 1.0).spectrum
    assert bool((spectrum >= 0).all())
    assert bool((spectrum[..., :-1] >= spectrum[..., 1:]).all())


def test_rank_zero_gives_an_empty_factor_and_the_trace():
    factor, rows = make(5, 0, 4)
    top = top_factor(factor, DenseGradients.from_rows(rows), 0.5, 2.0)
    assert top.factor.shape == (0, SIZE)
    assert top.spectrum.shape == (0,)
    assert float(top.total) == pytest.approx(2.0 * float(rows.square().sum()), rel=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3, SIZE, SIZE + 3])
@pytest.mark.parametrize("num_rows", [1, 2, SIZE, 3 * SIZE])
def test_gains_per_tensor_equal_dense_diagonal_scaling(rank, num_rows):
    factor, rows = make(6, rank, num_rows)
    numels = (1, 3, 0, 2)
    beta = torch.tensor([0.02, 0.5, 0.7, 0.1], dtype=torch.float64)
    per_column = beta.repeat_interleave(torch.tensor(numels))
    gradients = DenseGradients.from_rows(rows, numels)
    top = top_factor(factor, gradients, 1 - per_column, 4.0 * per_column, 4.0 * beta)
    assert_is_best(top, dense(factor, rows, 1 - per_column, 4.0 * per_column), rank, FLOAT64)


@pytest.mark.parametrize("rank", [1, 4])
def test_equal_gains_per_tensor_equal_one_number(rank):
    factor, rows = make(7, rank, 5)
    gradients = DenseGradients.from_rows(rows, (2, 4))
    ones = torch.ones(SIZE, dtype=torch.float64)
    one = top_factor(factor, gradients, 0.9, 3.0)
    many = top_factor(factor, gradients, 0.9 * ones, 3.0 * ones, 3.0 * torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(many.factor.mT @ many.factor, one.factor.mT @ one.factor, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(many.spectrum, one.spectrum, rtol=1e-12, atol=0)


def test_inputs_are_left_as_they_were():
    factor, rows = make(8, 3, 4)
    copies = factor.clone(), rows.clone()
    top_factor(factor, DenseGradients.from_rows(rows), 0.5, 2.0)
    assert torch.equal(factor, copies[0])
    assert torch.equal(rows, copies[1])
