"""Columns in parts: the same numbers as all at once, for functions, solves and draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.fake_gpu_tensor import on_gpu
from slangvi.linalg import columns, factorize, lowrank
from slangvi.linalg.columns import by_columns, in_parts, sliced


@pytest.fixture
def short(monkeypatch):
    """Parts of seven columns, from ten on."""
    monkeypatch.setattr(columns, "_PART", 7)
    monkeypatch.setattr(columns, "_MANY", 10)


@given(size=st.integers(1, 60), part=st.integers(1, 20), most=st.integers(1, 20))
def test_parts_cover_all_columns_once(size, part, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_PART", part)
        patch.setattr(columns, "_MOST_PARTS", most)
        patch.setattr(columns, "_MANY", 1)
        vector = torch.arange(float(size))
        pieces = [piece for (piece,) in sliced(in_parts(vector), vector)]
    assert torch.equal(torch.cat(pieces), vector)
    assert len(pieces) <= most
    assert all(len(piece) <= max(part, -(-size // most)) for piece in pieces)


@pytest.mark.parametrize("size", [9, 10, 14, 15])
def test_results_are_those_of_all_columns(short, size, generator):
    vector, rows = torch.rand(size, generator=generator), torch.rand(3, size, generator=generator)

    lengths = []

    def work(vector, rows, weight, offset):
        lengths.append(len(vector))
        return vector * rows.sum(0) + offset, (weight * vector).sum(), rows.square().sum(0).to(torch.float64)

    found = by_columns(work, vector, rows, 0.5, torch.ones(1))
    assert lengths == {9: [9], 10: [7, 3], 14: [7, 7], 15: [7, 7, 1]}[size]
    expected = work(vector, rows, 0.5, torch.ones(1))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    assert found[2].dtype is torch.float64
    torch.testing.assert_close(found[1].sum(), expected[1])


def test_what_is_watched_batched_or_elsewhere_is_not_split(short):
    vector = torch.ones(20)
    assert len(in_parts(vector, torch.ones(2, 20))) == 3
    assert in_parts(vector.clone().requires_grad_()) == []
    assert in_parts(vector, torch.ones(2, 20, requires_grad=True)) == []
    assert in_parts(torch.ones(2, 20)) == []
    assert in_parts(on_gpu(vector)) == []
    assert in_parts(torch.ones(())) == []
    seen = []
    torch.func.vmap(lambda x: seen.append(in_parts(x)) or x)(torch.ones(2, 20))
    assert seen == [[]]


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("members", [(), (1,), (2,)])
@pytest.mark.parametrize("count", [(), (3,), (2, 4)])
def test_draws_are_those_of_transformed_noise(count, members, rank):
    source = torch.Generator().manual_seed(3)
    factor = torch.randn(*members, rank, 30, generator=source, dtype=torch.float64)
    diag = torch.rand(*members, 30, generator=source, dtype=torch.float64) + 0.1
    loc, p = torch.randn(*members, 30, generator=source, dtype=torch.float64), factorize(factor, diag)
    found = p.sample(count, torch.Generator().manual_seed(5), loc)
    noise = torch.randn(*count, *members, 30, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    torch.testing.assert_close(found, loc + p.transform_noise(noise))


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solves_and_draws_are_those_of_all_columns(monkeypatch, rank, dtype):
    source = torch.Generator().manual_seed(1)
    factor = torch.randn(rank, 40, generator=source, dtype=torch.float64).mul_(3).to(dtype)
    diag = (torch.rand(40, generator=source, dtype=torch.float64) + 0.1).to(dtype)
    rhs, loc = (torch.randn(40, generator=source, dtype=torch.float64).to(dtype) for _ in range(2))

    def results():
        p, noise = factorize(factor, diag), torch.Generator().manual_seed(2)
        return p.solve(rhs), p.sample((3,), noise), p.sample((2,), noise, loc)

    whole = results()
    monkeypatch.setattr(columns, "_PART", 7)
    monkeypatch.setattr(columns, "_MANY", 10)
    widths, real = [], lowrank.less
    spy = lambda vector, *given: widths.append(len(vector)) or real(vector, *given)  # noqa: E731
    monkeypatch.setattr(lowrank, "less", spy)
    precision = factor.double().mT @ factor.double() + torch.diag(diag.double())
    for found, expected in zip(results(), whole, strict=True):
        near = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
        torch.testing.assert_close(found, expected, **near)
    assert widths == [7, 7, 7, 7, 7, 5]
    exact = torch.linalg.solve(precision, rhs.double())
    torch.testing.assert_close(results()[0].double(), exact, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("count", [(3,), (2, 3)])
def test_one_precision_solves_many_vectors_as_before(short, count):
    factor, diag = torch.randn(3, 40, dtype=torch.float64), torch.rand(40, dtype=torch.float64) + 0.1
    rhs, p = torch.randn(*count, 40, dtype=torch.float64), factorize(factor, diag)
    dense = factor.mT @ factor + torch.diag(diag)
    torch.testing.assert_close(p.solve(rhs), rhs @ torch.linalg.inv(dense))


def test_a_batch_of_precisions_solves_one_vector_as_before(short):
    factor, diag = torch.randn(2, 3, 40, dtype=torch.float64), torch.rand(2, 40, dtype=torch.float64) + 0.1
    rhs, p = torch.randn(40, dtype=torch.float64), factorize(factor, diag)
    dense = factor.mT @ factor + torch.diag_embed(diag)
    torch.testing.assert_close(p.solve(rhs), torch.linalg.solve(dense, rhs.expand(2, 40)))


@pytest.mark.parametrize("rank", [1, 4])
def test_real_parts_of_long_vectors_solve_as_well_as_the_whole(monkeypatch, rank):
    source, size = torch.Generator().manual_seed(4), 300_000
    factor, diag = torch.randn(rank, size, generator=source), torch.rand(size, generator=source) + 0.1
    rhs = torch.randn(size, generator=source)
    exact = factorize(factor.double(), diag.double()).solve(rhs.double())
    whole = factorize(factor, diag).solve(rhs)
    monkeypatch.setattr(columns, "_MANY", 256_000)
    assert len(in_parts(rhs)) == 3
    found = factorize(factor, diag).solve(rhs)
    error, allowed = ((x.double() - exact).abs().max() for x in (found, whole))
    assert float(error) <= 2 * float(allowed) + 1e-7
