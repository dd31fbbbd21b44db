"""Kernels against the same arithmetic in float64 on the host; skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slangvi.linalg import kernels
from slangvi.methods.projection import FactorAnalysis, LeadingEigenvectors, Part
from slangvi.rows.blocks import Formed, Outer

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [(16, 8, 5000), (5, 1, 777), (40, 10, 9001), (3, 32, 4096), (96, 32, 600)]
PROJECTIONS = [LeadingEigenvectors, FactorAnalysis]


def a_part(height: int, rank: int, size: int, is_flat: bool) -> Part:
    """Return columns in the middle of wider tensors; `is_flat` for one λ for all."""
    generator = torch.Generator().manual_seed(height)
    factor = torch.randn(rank, size + 20, generator=generator)[:, 7 : size + 7]
    rows = torch.randn(height, size, generator=generator)
    diag = torch.rand(size, generator=generator) + 0.5
    prior = torch.full((1,), 2.0).expand(size) if is_flat else torch.rand(size, generator=generator) + 1.0
    return Part(factor, diag, factor, diag, slice(0, size), Formed(rows), prior, 0.05, 0.3)


def moved(part: Part, to: torch.device | torch.dtype) -> Part:
    """Return a copy of a part with memory of its own for what is new."""

    def own(x: Tensor) -> Tensor:
        return x.to(to, copy=True) if x.stride()[-1] else x[:1].to(to).expand(len(x))

    factor, diag, prior = own(part.factor), own(part.diag), own(part.prior_precision)
    rows = Formed(own(part.rows.form()))
    new = torch.empty_like(factor), torch.empty_like(diag)
    return Part(factor, diag, *new, part.columns, rows, prior, part.precision_lr, part.gain)


def projected(kind: type, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Return the small problem and its trace, what was clipped, and write U⁺ and d⁺."""
    projection = kind(part.factor, part.rows.form().shape[0])
    seen = projection.observe(lambda: [part])
    return seen.small.cpu(), seen.trace.cpu(), projection.project(part, projection.decide(seen.small.cpu())).cpu()


@on_gpu
@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_projections_equal_those_in_float64(size, kind, is_flat):
    given = a_part(*size, is_flat)
    part, truth = moved(given, torch.device("cuda")), moved(given, torch.float64)
    assert kernels.serves(part.factor, size[0])
    small, trace, clipped = projected(kind, part)
    true_small, true_trace, true_clipped = projected(kind, truth)
    scale = float(true_small.abs().max())
    torch.testing.assert_close(small, true_small, rtol=0, atol=1e-6 * scale)
    torch.testing.assert_close(trace, true_trace, rtol=1e-6, atol=0)
    # Of U⁺ only its product with itself is determined.
    some, true_some = (x.new_factor[:, :50].cpu().double() for x in (part, truth))
    torch.testing.assert_close(some.mT @ some, true_some.mT @ true_some, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(part.new_diag.cpu().double(), truth.new_diag, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(clipped.double(), true_clipped, rtol=1e-4, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_the_old_state_may_be_written_over(kind):
    fresh = moved(a_part(16, 8, 5000, True), torch.device("cuda"))
    over = moved(fresh, torch.device("cuda"))
    over = over._replace(new_factor=over.factor, new_diag=over.diag)
    for part in (fresh, over):
        projected(kind, part)
    assert torch.equal(fresh.new_factor, over.new_factor)
    assert torch.equal(fresh.new_diag, over.new_diag)


@on_gpu
def test_numbers_that_are_not_finite_are_seen():
    part = moved(a_part(16, 8, 5000, True), torch.device("cuda"))
    part.rows.form()[3, 4000] = torch.nan
    for kind in PROJECTIONS:
        seen = kind(part.factor, 16).observe(lambda: [part])
        assert not torch.isfinite(seen.trace)


@on_gpu
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_outer_products_of_pieces_are_those_of_float32(scale):
    generator = torch.Generator("cuda").manual_seed(0)
    left = scale * torch.randn(16, 1, 130, 520, device="cuda", generator=generator)
    right = torch.randn(16, 1, 130, 1024, device="cuda", generator=generator)
    block, truth = Outer(left, right), left.double()[:, 0].mT @ right.double()[:, 0]
    out = torch.empty(16, 520 * 1024, device="cuda")
    assert kernels.outer_products(left[:, 0].mT, right[:, 0], out.view(16, 520, 1024))
    torch.testing.assert_close(block.form().double(), truth.flatten(1), rtol=1e-5, atol=1e-5 * scale)
    plain = torch.bmm(left[:, 0].mT, right[:, 0]).double()
    assert (out.double() - truth.flatten(1)).norm() <= 1.5 * (plain - truth).norm()


@on_gpu
def test_small_or_odd_products_are_left_to_torch():
    for shape in [(1, 100, 64, 64), (16, 16, 512, 1024), (16, 130, 521, 1024)]:
        count, positions, outputs, inputs = shape
        left = torch.randn(count, outputs, positions, device="cuda")
        right = torch.randn(count, positions, inputs, device="cuda")
        assert not kernels.outer_products(left, right, torch.empty(count, outputs, inputs, device="cuda"))


def test_hosts_are_not_served():
    assert not kernels.serves(torch.zeros(8, 100), 16)
    assert not kernels.outer_products(torch.zeros(16, 512, 128), torch.zeros(16, 128, 1024), torch.zeros(1))
