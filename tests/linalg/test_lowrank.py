"""UUᵀ + diag(d) against the P×P matrix in float64, or in 60 digits where float64 itself is not enough.

Errors are measured after scaling by √d, i.e. on K = (I + VVᵀ)⁻¹ with V = d^(−½) U: that takes the units of d out, and
one relative tolerance holds for every d. To first order the rounding error of K is ε(1 + ‖V‖ + L‖V‖²): rounding V costs
ε‖V‖, and the float64 Gram with its jitter costs ε₆₄L‖V‖². With ‖V‖² ≤ 1e4 and L ≤ 16 that is below 1e-10 in float64.
"""

from __future__ import annotations

import math
import pickle

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.linalg import LowRankPrecision, factorize, matmul, products

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-4}  # float32: 20 ε (1 + ‖V‖) at ‖V‖ = 100
DTYPES = list(TOLERANCE)


def random_problem(
    seed: int, size: int, rank: int, batch: tuple[int, ...], kind: str, norm: float, spread: float
) -> tuple[Tensor, Tensor]:
    """U by rows with ‖V‖ = norm for every batch entry, and d over `spread` powers of ten either side of 1."""
    source = torch.Generator().manual_seed(seed)
    V = torch.randn(*batch, rank, size, generator=source, dtype=torch.float64)
    if kind == "repeated" and rank:
        V = V[..., :1, :].expand(V.shape)
    if kind == "some zero" and rank:
        V[..., ::2, :] = 0
    if kind == "zero":
        V = V * 0
    if kind == "graded":
        V = V * torch.logspace(0, -6, max(rank, 1), dtype=torch.float64)[:rank, None]
    size_of = V.flatten(-2).norm(dim=-1)[..., None, None]
    V = V * (norm / torch.where(size_of > 0, size_of, 1.0))
    d = 10 ** ((torch.rand(*batch, size, generator=source, dtype=torch.float64) * 2 - 1) * spread)
    return V * d.sqrt().unsqueeze(-2), d


problems = st.builds(
    lambda seed, size, extra, batch, kind, norm, spread: random_problem(
        seed, size, min(extra, size + 8), batch, kind, norm, spread
    ),
    seed=st.integers(0, 2**20),
    size=st.integers(1, 8),
    extra=st.integers(0, 16),
    batch=st.sampled_from([(), (3,), (2, 1)]),
    kind=st.sampled_from(["random", "repeated", "some zero", "zero", "graded"]),
    norm=st.sampled_from([1e-8, 1e-3, 1.0, 30.0, 100.0]),
    spread=st.sampled_from([0.0, 2.0, 8.0]),
)


def whitened_inverse(factor: Tensor, diag: Tensor) -> Tensor:
    """K = √d (UUᵀ + diag d)⁻¹ √d, dense, float64."""
    V = factor.double() / diag.double().sqrt().unsqueeze(-2)
    return torch.linalg.inv(torch.eye(V.shape[-1], dtype=torch.float64) + V.mT @ V)


def dense(factor: Tensor, diag: Tensor) -> Tensor:
    return factor.double().mT @ factor.double() + torch.diag_embed(diag.double())


def whiten(covariance: Tensor, diag: Tensor) -> Tensor:
    root = diag.double().sqrt()
    return root.unsqueeze(-1) * covariance.double() * root.unsqueeze(-2)


def columns_of(p: LowRankPrecision) -> Tensor:
    """The inverse, by solving against every basis vector: (..., P, P)."""
    size = p.diag.shape[-1]
    eye = torch.eye(size, dtype=p.diag.dtype).reshape(size, *(1,) * (p.diag.ndim - 1), size)
    return p.solve(eye).movedim(0, -1)


def sampler_of(p: LowRankPrecision) -> Tensor:
    """The linear map A of the sampler, column by column: (..., P, P)."""
    size = p.diag.shape[-1]
    eye = torch.eye(size, dtype=p.diag.dtype).reshape(size, *(1,) * (p.diag.ndim - 1), size)
    return p.transform_noise(eye).movedim(0, -1)


def relative(value: Tensor, expected: Tensor, dims: tuple[int, ...] = (-2, -1)) -> float:
    """Largest relative error in norm over the batch."""
    gap = (value.double() - expected).square().sum(dims).sqrt()
    return float((gap / expected.square().sum(dims).sqrt()).max())


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems)
def test_solve_is_the_dense_inverse(problem, dtype):
    factor, diag = (t.to(dtype) for t in problem)
    inverse = columns_of(factorize(factor, diag))
    assert inverse.dtype is dtype
    assert relative(whiten(inverse, diag), whitened_inverse(factor, diag)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems)
def test_sampler_times_its_transpose_is_the_dense_inverse(problem, dtype):
    factor, diag = (t.to(dtype) for t in problem)
    A = sampler_of(factorize(factor, diag)).double()
    assert relative(whiten(A @ A.mT, diag), whitened_inverse(factor, diag)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems)
def test_whitening_is_the_transpose_of_the_sampler(problem, dtype):
    factor, diag = (t.to(dtype) for t in problem)
    p = factorize(factor, diag)
    size = diag.shape[-1]
    eye = torch.eye(size, dtype=dtype).reshape(size, *(1,) * (diag.ndim - 1), size)
    A = p.whiten(eye).movedim(0, -2).double()  # row k is Aᵀ eₖ
    assert relative(whiten(A @ A.mT, diag), whitened_inverse(factor, diag)) <= TOLERANCE[dtype]
    expected, scale = sampler_of(p).double(), diag.double().sqrt().unsqueeze(-1)
    assert relative(scale * A, scale * expected) <= TOLERANCE[dtype]


@given(problem=problems)
def test_inverse_diagonal_is_the_dense_one_entry_by_entry(problem):
    factor, diag = problem
    expected = whitened_inverse(factor, diag).diagonal(dim1=-2, dim2=-1)
    value = factorize(factor, diag).inv_diag() * diag
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)


@given(problem=problems)
def test_inverse_diagonal_in_float32_stays_between_its_bounds(problem):
    factor, diag = (t.float() for t in problem)
    value = factorize(factor, diag).inv_diag().double()
    lower = 1 / dense(factor, diag).diagonal(dim1=-2, dim2=-1)
    upper = 1 / diag.double()
    assert bool(((value >= lower * (1 - 1e-5)) & (value <= upper * (1 + 1e-6))).all())
    expected = whitened_inverse(factor, diag).diagonal(dim1=-2, dim2=-1)
    # 1 − Σ half² is computed in float32 with a float32 triangular solve: ε κ(chol) = ε √(1 + ‖V‖²), absolute.
    torch.testing.assert_close(value * diag.double(), expected, rtol=0, atol=TOLERANCE[torch.float32])


@given(problem=problems)
def test_logdet_is_the_dense_one(problem):
    factor, diag = problem
    V = factor / diag.sqrt().unsqueeze(-2)
    small = torch.linalg.slogdet(torch.eye(V.shape[-1], dtype=torch.float64) + V.mT @ V).logabsdet
    expected = small + diag.log().sum(-1)
    # Relative to the terms that are added: log d of either sign can cancel in the sum.
    scale = float((small + diag.log().abs().sum(-1)).max()) + 1.0
    torch.testing.assert_close(factorize(factor, diag).logdet(), expected, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems)
def test_matmul_and_trace_are_the_dense_ones(problem, dtype):
    factor, diag = (t.to(dtype) for t in problem)
    precision, p = dense(factor, diag), factorize(factor, diag)
    rhs = torch.randn(diag.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = (precision @ rhs.double().unsqueeze(-1)).squeeze(-1)
    scale = (precision.abs() @ rhs.double().abs().unsqueeze(-1)).squeeze(-1)
    ulps = 50 * torch.finfo(dtype).eps
    assert bool(((p.matmul(rhs).double() - expected).abs() <= ulps * scale).all())
    assert torch.equal(p.matmul(rhs), matmul(factor, diag, rhs))
    trace = precision.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(p.trace().double(), trace, rtol=ulps, atol=0)


@given(problem=problems)
def test_solve_undoes_matmul(problem):
    factor, diag = problem
    p = factorize(factor, diag)
    rhs = torch.randn(4, *diag.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / diag.sqrt()
    gap = (p.solve(p.matmul(rhs)) - rhs) * diag.sqrt()
    # Looser than 1e-10: two roundings meet, matmul's (ε‖V‖²) and solve's (4εL‖V‖² by its jitter), on entries up to 4.
    assert float(gap.abs().max()) <= 1e-9


def in_sixty_digits(factor: Tensor, diag: Tensor) -> tuple[Tensor, float]:
    """Inverse and logdet, where P×P matrices in float64 would be singular to working precision."""
    with mpmath.workdps(60):
        U = mpmath.matrix(factor.tolist())
        precision = U.T * U + mpmath.diag(diag.tolist())
        inverse = [[float(x) for x in row] for row in (precision**-1).tolist()]
        return torch.tensor(inverse, dtype=torch.float64), float(mpmath.log(mpmath.det(precision)))


@pytest.mark.parametrize("kind", ["independent", "repeated", "more columns than rows"])
@pytest.mark.parametrize("diag_scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("factor_scale", [1e-8, 1.0, 1e8])
def test_extreme_scales_agree_with_sixty_digits(factor_scale, diag_scale, kind, generator):
    # ‖V‖² reaches 1e24. K then has entries of order 1 (off the span of V) and of order 1e-24 (in it): float64 can hold
    # only the former to 1e-10, since x − V(…)Vᵀx subtracts numbers of order 1. Hence absolute, not relative.
    rank = 7 if kind == "more columns than rows" else 3
    factor = torch.randn(rank, 5, generator=generator, dtype=torch.float64) * factor_scale
    if kind == "repeated":
        factor = factor[[0, 0, 1]]
    diag = (torch.rand(5, generator=generator, dtype=torch.float64) + 0.5) * diag_scale
    p = factorize(factor, diag)
    inverse, logdet = in_sixty_digits(factor, diag)
    expected, A = whiten(inverse, diag), sampler_of(p)
    torch.testing.assert_close(whiten(columns_of(p), diag), expected, rtol=0, atol=1e-10)
    # A direction in which dependent columns cancel is known to ε‖V‖, and enters the product of two draws squared.
    blurred = (torch.finfo(torch.float64).eps * rank) ** 2 * float((factor / diag.sqrt()).square().sum())
    torch.testing.assert_close(whiten(A @ A.mT, diag), expected, rtol=0, atol=max(1e-10, blurred))
    torch.testing.assert_close(p.inv_diag() * diag, expected.diagonal(), rtol=0, atol=1e-10)
    # Dependent columns leave directions in which I + VᵀV is 1 beside entries of ‖V‖², rounded to 4εL‖V‖² at best.
    lost = math.log1p(8 * torch.finfo(torch.float64).eps * rank * float((factor / diag.sqrt()).square().sum()))
    assert float(p.logdet()) == pytest.approx(logdet, rel=1e-10, abs=0 if kind == "independent" else rank * lost)


@given(problem=problems, seed=st.integers(0, 100))
def test_draws_depend_on_the_factor_through_its_product_alone(problem, seed):
    factor, diag = problem
    source = torch.Generator().manual_seed(seed)
    rank = factor.shape[-2]
    rotation = torch.linalg.qr(torch.randn(rank, rank, generator=source, dtype=torch.float64)).Q
    noise = torch.randn(diag.shape, generator=source, dtype=torch.float64)
    draw, turned = (factorize(f, diag).transform_noise(noise) * diag.sqrt() for f in (factor, rotation @ factor))
    torch.testing.assert_close(turned, draw, rtol=0, atol=1e-10)


def test_draws_have_the_mean_and_covariance(generator, global_rng_untouched, within_sigmas):
    factor, diag = random_problem(3, 4, 2, (2,), "random", 3.0, 0.5)
    draws = factorize(factor, diag).sample((40_000,), generator)
    products = draws.unsqueeze(-1) * draws.unsqueeze(-2)
    assert draws.shape == (40_000, 2, 4)
    assert within_sigmas(draws, torch.zeros(2, 4))
    assert within_sigmas(products, torch.linalg.inv(dense(factor, diag)))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
def test_draws_and_solutions_keep_leading_dimensions(shape, batch, generator):
    p = factorize(*random_problem(0, 4, 2, batch, "random", 1.0, 0.0))
    draws = p.sample(shape, generator)
    assert draws.shape == (*shape, *batch, 4)
    assert p.solve(draws).shape == p.matmul(draws).shape == draws.shape
    assert p.logdet().shape == p.trace().shape == batch


def test_draws_depend_on_the_generator_alone():
    p = factorize(*random_problem(0, 4, 2, (), "random", 1.0, 0.0))
    first = p.sample((3,), torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    again = p.sample((3,), torch.Generator().manual_seed(5))
    other = p.sample((3,), torch.Generator().manual_seed(6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_draws_follow_the_global_seed_without_a_generator():
    p = factorize(*random_problem(0, 4, 2, (), "random", 1.0, 0.0))
    torch.manual_seed(5)
    first = p.sample()
    second = p.sample()
    torch.manual_seed(5)
    assert torch.equal(p.sample(), first)
    assert not torch.equal(second, first)


def test_zero_factor_and_no_factor_are_the_diagonal(generator):
    diag = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    for rank in (0, 1, 9):
        p = factorize(torch.zeros(rank, 5, dtype=torch.float64), diag)
        assert torch.equal(p.inv_diag(), 1 / diag)
        assert torch.equal(p.logdet(), diag.log().sum())
        assert torch.equal(p.trace(), diag.sum())
        torch.testing.assert_close(p.solve(diag), torch.ones_like(diag), rtol=1e-15, atol=0)


def test_long_rows_keep_their_gradient_and_go_through_vmap(monkeypatch):
    """Blocks are written in place, which neither autograd nor vmap can follow: these take another way."""
    factor, diag = (t.float() for t in random_problem(4, 7, 3, (2,), "random", 1.0, 0.3))
    short = [factorize(f, d).logdet() for f, d in zip(factor, diag, strict=True)]
    monkeypatch.setattr(products, "LONG", 1)
    torch.testing.assert_close(torch.func.vmap(lambda f, d: factorize(f, d).logdet())(factor, diag), torch.stack(short))
    for watched in ((factor[0].clone().requires_grad_(), diag[0]), (factor[0], diag[0].clone().requires_grad_())):
        value = factorize(*watched).logdet()
        value.backward()
        torch.testing.assert_close(value.detach(), short[0])
        assert any(x.grad is not None and bool(x.grad.any()) for x in watched)


@pytest.mark.parametrize("rank", [0, 1, 3, 9])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_draws_are_transformed_noise_around_the_mean(shape, batch, rank):
    """Written in place or not: the same noise gives the same draw, and neither factor nor mean is touched."""
    factor, diag = random_problem(2, 6, rank, batch, "random", 2.0, 0.5)
    p, loc = factorize(factor, diag), torch.randn(*batch, 6, dtype=torch.float64)
    kept = [x.clone() for x in (factor, diag, loc)]
    noise = torch.randn(*shape, *batch, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for centre in (None, loc):
        drawn = p.sample(shape, torch.Generator().manual_seed(3), centre)
        expected = p.transform_noise(noise) + (0 if centre is None else centre)
        torch.testing.assert_close(drawn, expected, rtol=1e-14, atol=1e-14)
    assert all(torch.equal(x, y) for x, y in zip((factor, diag, loc), kept, strict=True))


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_factors_that_are_not_finite_give_nan_and_no_exception(bad, rank):
    """Callers look at the result; a distribution looks for NaN when it is built, if asked to, as torch's do."""
    factor, diag = torch.ones(rank, 5), torch.ones(5)
    factor[0, 2] = bad
    p = factorize(factor, diag)
    assert bool(p.cholesky.isnan().any() | p.cholesky.isinf().any())
    assert not bool(p.solve(diag).isfinite().all())
    assert not bool(p.logdet().isfinite())
    batch = factorize(torch.stack([factor, torch.ones(rank, 5)]), torch.ones(2, 5))
    assert batch.logdet().isfinite().tolist() == [False, True]
    with pytest.raises(ValueError, match="prec_factor"):
        LowRankPrecisionNormal(torch.zeros(5), factor.mT * math.nan, diag, validate_args=True)
    unchecked = LowRankPrecisionNormal(torch.zeros(5), factor.mT, diag, validate_args=False)
    assert not bool(unchecked.log_prob(torch.ones(5)).isfinite())


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("size", "rank"), [(6, 6), (6, 9), (20, 20), (20, 19)])
def test_float32_keeps_its_digits_where_a_large_factor_spans_all_or_nearly_all(size, rank, batch, generator):
    """1/d is 1e9 times what U leaves of it; taken away in float32 nothing but rounding would be left."""
    factor, diag = torch.randn(*batch, rank, size, generator=generator) * 30, torch.full((*batch, size), 1e-5)
    p, inverse = factorize(factor, diag), torch.linalg.inv(dense(factor, diag))
    assert relative(columns_of(p), inverse) <= 1e-6
    A = sampler_of(p).double()
    assert relative(A @ A.mT, inverse) <= 1e-6
    spanned = torch.randn(3, *batch, rank, generator=generator).unsqueeze(-2) @ factor
    x = spanned.squeeze(-2)
    expected = (inverse @ x.double().unsqueeze(-1)).squeeze(-1)
    assert relative(p.solve(x), expected, (-1,)) <= 1e-5
    assert p.solve(x).dtype is p.whiten(x).dtype is p.sample((2,), generator).dtype is torch.float32
    squares = (x.double() * expected).sum(-1)
    torch.testing.assert_close(p.whiten(x).double().square().sum(-1), squares, rtol=1e-5, atol=0)


def test_narrow_draws_use_eigenvectors_that_were_put_there(generator):
    factor, diag = torch.randn(4, 5, generator=generator), torch.ones(5)
    p, noise = factorize(factor, diag), torch.randn(2, 5, generator=generator)
    other = LowRankPrecision(factor, diag, torch.full((4, 4), math.nan), torch.full((4, 4), math.nan))
    other.__dict__["spectrum"] = p.spectrum
    assert torch.equal(other.transform_noise(noise), p.transform_noise(noise))


@pytest.mark.parametrize("size", [40, (1 << 16) + 3])
def test_quadratic_forms_of_the_inverse_keep_their_digits_under_a_large_factor(size, generator):
    factor = torch.randn(3, size, generator=generator) * (1e6 / size) ** 0.5
    factor, diag = factor * torch.tensor([[1.0], [0.1], [0.01]]), torch.rand(size, generator=generator) + 0.5
    rows = torch.cat([factor, torch.randn(2, size, generator=generator)])
    exact = factorize(factor.double(), diag.double())
    expected = (rows.double() * exact.solve(rows.double())).sum(-1)
    torch.testing.assert_close(factorize(factor, diag).inv_quadratic(rows).double(), expected, rtol=1e-6, atol=0)
    batch = factorize(factor.expand(2, -1, -1), diag.expand(2, -1)).inv_quadratic(rows.unsqueeze(1))
    torch.testing.assert_close(batch.double(), expected.unsqueeze(1).expand(-1, 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e4, 1e8, 1e12, 1e16])
def test_variances_in_float32_are_right_for_equal_columns_of_any_size(size):
    row = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    unit = (row / row.norm()).squeeze(0)
    found = factorize(row.expand(4, 6) * size, torch.ones(6)).inv_diag()
    torch.testing.assert_close(found, 1 - unit.square(), rtol=1e-4, atol=1e-4)


GRADIENT_POINTS = [("zero", 0.0), ("random", 2.0), ("repeated", 2.0), ("some zero", 1.0)]


@pytest.mark.parametrize(("kind", "norm"), GRADIENT_POINTS)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_gradients_pass_gradcheck(kind, norm, batch, rank):
    factor, diag = (t.requires_grad_() for t in random_problem(6, 3, rank, batch, kind, norm, 0.3))
    noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def everything(factor: Tensor, diag: Tensor) -> tuple[Tensor, ...]:
        p = factorize(factor, diag)
        return p.transform_noise(noise), p.solve(noise), p.inv_diag(), p.inv_quadratic(noise), p.logdet(), p.trace()

    assert torch.autograd.gradcheck(everything, (factor, diag))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_draws_are_finite_where_training_starts(dtype, generator):
    factor = torch.zeros(3, 5, dtype=dtype, requires_grad=True)
    diag = torch.ones(5, dtype=dtype, requires_grad=True)
    draws = factorize(factor, diag).sample((4,), generator)
    by_factor, by_diag = torch.autograd.grad(draws.square().sum(), (factor, diag))
    assert torch.equal(by_factor, torch.zeros_like(factor))  # draws depend on UUᵀ, which is flat at U = 0
    assert bool(by_diag.isfinite().all())
    assert bool((by_diag < 0).all())


def test_long_rows_that_are_nearly_parallel_are_factorised():
    source = torch.Generator().manual_seed(0)
    row = torch.randn(1, 1 << 16, generator=source) * 40.0
    factor = torch.cat([row, row * (1 + 1e-4 * torch.randn(row.shape, generator=source))])
    x = torch.randn(1 << 16, generator=source)
    found = factorize(factor, torch.ones(1 << 16)).solve(x)
    exact = factorize(factor.double(), torch.ones(1 << 16, dtype=torch.float64)).solve(x.double())
    # The condition number is 2e8, beyond float32: the factorisation must live, and lose no more than some digits.
    assert float((found - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("size", [100, 5000, 70_000])
@pytest.mark.parametrize("dominance", [1e2, 1e5, 1e8])
def test_solutions_in_float32_are_right_along_a_factor_that_dominates(size, dominance):
    """Uᵀ P⁻¹ U 1 = S (I + S)⁻¹ 1 with S = VᵀV, which is nearly 1."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(4, size, generator=generator) * (dominance / size) ** 0.5
    rhs = factor.sum(0)
    found = factor.double() @ factorize(factor, torch.ones(size)).solve(rhs).double()
    gram = factor.double() @ factor.double().T
    expected = torch.linalg.solve(torch.eye(4).double() + gram, gram.sum(1))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("size", [500, 50_000])
@pytest.mark.parametrize("dominance", [1e4, 1e10])
def test_draws_in_float32_are_right_along_a_factor_that_dominates(size, dominance):
    """Uᵀ of a draw has variance 1, whatever U: what is taken away from the noise leaves a part in √dominance of it."""
    source = torch.Generator().manual_seed(0)
    diag, directions = torch.rand(size, generator=source) + 0.5, torch.randn(4, size, generator=source)
    factor = directions / directions.norm(dim=1, keepdim=True) * (dominance * diag).sqrt()
    noise = torch.randn(16, size, generator=source)
    p, exact = factorize(factor, diag), factorize(factor.double(), diag.double())
    for found, expected in (
        (p.transform_noise(noise), exact.transform_noise(noise.double())),
        (p.whiten(noise * factor[0]), exact.whiten((noise * factor[0]).double())),
    ):
        off = (found.double() - expected) @ factor.double().T
        assert float(off.square().mean().sqrt()) < 0.1 * float((expected @ factor.double().T).square().mean().sqrt())


@pytest.mark.parametrize("rank", [1, 3])
def test_a_precision_that_was_differentiated_through_can_be_stored(rank, generator):
    """What is kept for later must not belong to a transformation that is over."""
    factor, diag = torch.randn(rank, 5, generator=generator).double(), torch.full((5,), 2.0).double()
    precision = factorize(factor, diag)
    rhs = torch.randn(5, generator=generator).double()
    slope = torch.func.grad(lambda x: precision.solve(x).sum())(rhs)
    torch.testing.assert_close(slope, precision.solve(torch.ones(5).double()))
    torch.testing.assert_close(pickle.loads(pickle.dumps(precision)).solve(rhs), precision.solve(rhs))
