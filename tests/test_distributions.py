"""LowRankPrecisionNormal and DensePrecisionNormal against torch's MultivariateNormal in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributions import Gamma, Independent, MultivariateNormal, Normal, constraints, kl_divergence

from slangvi import DensePrecisionNormal, LowRankPrecisionNormal
from slangvi.params import ParamSpec

BATCHES = [(), (3,), (2, 3)]
RANKS = [0, 1, 2, 7]  # 7 is beyond P
SIZE = 4
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(batch: tuple[int, ...] = (), rank: int = 2, seed: int = 0, size: int = SIZE) -> LowRankPrecisionNormal:
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, generator=source, dtype=torch.float64)

    return LowRankPrecisionNormal(draw(size), draw(size, rank), draw(size).exp())


def dense(q: LowRankPrecisionNormal) -> MultivariateNormal:
    precision = q.prec_factor @ q.prec_factor.mT + torch.diag_embed(q.prec_diag)
    return MultivariateNormal(q.loc, torch.linalg.inv(precision))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rank", RANKS)
def test_moments_and_entropy_are_the_dense_ones(batch, rank):
    q = make(batch, rank)
    p = dense(q)
    assert (q.batch_shape, q.event_shape) == (p.batch_shape, p.event_shape)
    for name in ("mean", "mode", "variance", "stddev", "covariance_matrix", "precision_matrix"):
        torch.testing.assert_close(getattr(q, name), getattr(p, name), **CLOSE)
    torch.testing.assert_close(q.entropy(), p.entropy(), **CLOSE)
    torch.testing.assert_close(q.precision.logdet(), torch.logdet(p.precision_matrix), **CLOSE)


@pytest.mark.parametrize("shape", [(SIZE,), (5, SIZE), (5, 2, 3, SIZE)])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rank", RANKS)
def test_log_prob_is_the_dense_one(batch, rank, shape, generator):
    q = make(batch, rank)
    full = shape if len(shape) > 2 else (*shape[:-1], *batch, SIZE)
    value = torch.randn(full, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), dense(q).log_prob(value), **CLOSE)


def test_one_value_is_measured_under_every_member_of_a_batch(generator):
    q = make((3,))
    value = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), dense(q).log_prob(value), **CLOSE)


def test_parameters_broadcast_over_the_batch():
    q = LowRankPrecisionNormal(torch.zeros(3, 1, SIZE), torch.ones(SIZE, 2), torch.ones(5, SIZE))
    assert q.batch_shape == (3, 5)
    assert q.prec_factor.shape == (3, 5, SIZE, 2)
    assert q.rsample((2,)).shape == (2, 3, 5, SIZE)
    assert q.covariance_matrix.shape == (3, 5, SIZE, SIZE)


@pytest.mark.parametrize("rank", RANKS)
def test_expand_is_the_same_distribution_without_a_copy(rank, generator):
    spec = ParamSpec.of({"w": torch.zeros(SIZE)})
    source = make((3,), rank)
    q = LowRankPrecisionNormal(source.loc, source.prec_factor, source.prec_diag, param_spec=spec, validate_args=True)
    wide = q.expand((2, 3))
    value = torch.randn(2, 3, SIZE, generator=generator, dtype=torch.float64)
    assert isinstance(wide, LowRankPrecisionNormal)
    assert (wide.batch_shape, wide.event_shape) == ((2, 3), (SIZE,))
    assert wide.param_spec is spec
    assert wide.loc.data_ptr() == q.loc.data_ptr()
    torch.testing.assert_close(wide.log_prob(value), q.log_prob(value), rtol=0, atol=0)
    torch.testing.assert_close(wide.variance, q.variance.expand(2, 3, SIZE), rtol=0, atol=0)
    with pytest.raises(ValueError, match="support"):
        wide.log_prob(value * torch.nan)


@pytest.mark.parametrize("rank", RANKS)
def test_draws_have_the_mean_and_covariance(rank, generator, global_rng_untouched, within_sigmas):
    q = make((2,), rank)
    draws = q.sample((40_000,), generator=generator)
    centred = draws - q.loc
    assert within_sigmas(draws, q.loc)
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), dense(q).covariance_matrix)


def test_draws_have_gradients_only_when_asked():
    q = LowRankPrecisionNormal(torch.zeros(3, requires_grad=True), torch.ones(3, 1), torch.ones(3))
    assert q.has_rsample
    assert not q.sample().requires_grad
    assert q.rsample().requires_grad


@pytest.mark.parametrize("rank", RANKS)
def test_rsample_moves_with_its_parameters_as_the_dense_covariance_does(rank, generator):
    # E[xᵀWx] = tr(W Σ) + μᵀWμ: the gradient through draws is unbiased for the gradient of the right side.
    source = make((), rank)
    inputs = [t.clone().requires_grad_() for t in (source.loc, source.prec_factor, source.prec_diag)]
    weights = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    weights = weights + weights.T
    q = LowRankPrecisionNormal(*inputs)
    rows = []
    for _ in range(400):
        draws = q.rsample((25,), generator=generator)
        value = ((draws @ weights) * draws).sum(-1).mean()
        grads = torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    sigma = torch.linalg.inv(inputs[1] @ inputs[1].mT + torch.diag(inputs[2]))
    exact = torch.autograd.grad((weights * sigma).sum() + inputs[0] @ weights @ inputs[0], inputs)
    sample, expected = torch.stack(rows), torch.cat([g.flatten() for g in exact])
    error = sample.std(0) / len(sample) ** 0.5
    assert bool(((sample.mean(0) - expected).abs() <= 4 * error + 1e-12).all())


def test_gradients_of_every_quantity_pass_gradcheck(generator):
    q = make((2,), 2, size=3)
    inputs = [t.clone().requires_grad_() for t in (q.loc, q.prec_factor, q.prec_diag)]
    value = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def everything(*parameters: Tensor) -> tuple[Tensor, ...]:
        q = LowRankPrecisionNormal(*parameters)
        return q.log_prob(value), q.entropy(), q.variance, q.covariance_matrix

    assert torch.autograd.gradcheck(everything, inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", ["sample", "entropy"])
def test_what_was_asked_without_gradients_first_does_not_cut_the_later_ones(mode, first):
    source = make((), 2)

    def gradients(asked: bool) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (source.prec_factor, source.prec_diag)]
        q = LowRankPrecisionNormal(source.loc, *inputs)
        if asked:
            with mode():
                getattr(q, first)()
        draw = q.rsample(generator=torch.Generator().manual_seed(0))
        return list(torch.autograd.grad(draw.pow(3).sum() + q.entropy() + q.variance.sum(), inputs))

    for after, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(after, plain)


def draw_of(factor: Tensor, diag: Tensor) -> Tensor:
    q = LowRankPrecisionNormal(torch.zeros_like(diag), factor, diag, validate_args=False)
    return q.rsample((2,), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward mode uses it
@pytest.mark.parametrize("rank", RANKS)
def test_torch_func_differentiates_draws_as_autograd_does(rank, generator):
    q = make((), rank)
    inputs = (q.prec_factor, q.prec_diag)
    turn = torch.randn(2, SIZE, generator=generator, dtype=torch.float64)
    tangents = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in inputs)

    def value(*parameters: Tensor) -> Tensor:
        return (turn * draw_of(*parameters)).sum()

    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(value(*leaves), leaves)
    for found, exact in zip(torch.func.grad(value, (0, 1))(*inputs), expected, strict=True):
        torch.testing.assert_close(found, exact)
    slope = sum((a * b).sum() for a, b in zip(tangents, expected, strict=True))
    torch.testing.assert_close(torch.func.jvp(value, inputs, tangents)[1], slope)
    with forward_ad.dual_level():
        dual = value(*(forward_ad.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope)


def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Columns of the Hessian, added up."""
    return torch.func.grad(lambda x: torch.func.grad(function)(x).sum())


def test_draws_go_through_vmap():
    q = make((3,), 2)
    noise = torch.func.vmap(draw_of, randomness="same")(q.prec_factor, q.prec_diag)
    alone = torch.stack([draw_of(factor, diag) for factor, diag in zip(q.prec_factor, q.prec_diag, strict=True)])
    torch.testing.assert_close(noise, alone)


def test_second_derivatives_through_draws_are_refused_and_not_wrong():
    q = make((), 2)
    factor = q.prec_factor.clone().requires_grad_()
    (grad,) = torch.autograd.grad(draw_of(factor, q.prec_diag).square().sum(), factor, create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once, not twice"):
        torch.autograd.grad(grad.sum(), factor)
    with pytest.raises(NotImplementedError, match="can be differentiated once, not twice"):
        twice(lambda factor: draw_of(factor, q.prec_diag).square().sum())(q.prec_factor)


def test_second_derivatives_through_draws_of_rank_zero_are_those_of_a_diagonal():
    diag, none = make((), 0).prec_diag, torch.zeros(SIZE, 0, dtype=torch.float64)
    noise = draw_of(none, torch.ones_like(diag))
    found = twice(lambda diag: draw_of(none, diag).sum())(diag)
    torch.testing.assert_close(found, 0.75 * diag**-2.5 * noise.sum(0))


def test_draws_are_float32_for_float32_parameters():
    q = LowRankPrecisionNormal(torch.zeros(3), torch.ones(3, 2), torch.ones(3))
    quantities = (q.sample(), q.variance, q.covariance_matrix, q.entropy(), q.log_prob(torch.zeros(3)))
    assert {x.dtype for x in quantities} == {torch.float32}


BAD_SHAPES = [
    ((), (3, 1), (3,), r"loc must be at least one-dimensional"),
    ((3,), (3,), (3,), r"prec_factor must have shape \(\.\.\., P, L\) with P = 3 as in loc, got \(3,\)"),
    ((3,), (1, 3), (3,), r"prec_factor must have shape .* got \(1, 3\)"),
    ((3,), (3, 1), (4,), r"prec_diag must have shape \(\.\.\., 3\) as loc, got \(4,\)"),
    ((3,), (3, 1), (), r"prec_diag must have shape \(\.\.\., 3\) as loc, got \(\)"),
]


@pytest.mark.parametrize(("loc", "factor", "diag", "message"), BAD_SHAPES)
def test_shapes_that_do_not_fit_are_refused(loc, factor, diag, message):
    with pytest.raises(ValueError, match=message):
        LowRankPrecisionNormal(torch.zeros(loc), torch.zeros(factor), torch.ones(diag))


BAD_VALUES = [("loc", torch.nan), ("prec_factor", torch.nan), ("prec_diag", 0.0), ("prec_diag", -1.0)]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_values_outside_the_constraints_are_refused_when_validating(name, value):
    arguments = {"loc": torch.zeros(2), "prec_factor": torch.zeros(2, 1), "prec_diag": torch.ones(2)}
    arguments[name] = torch.full_like(arguments[name], value)
    with pytest.raises(ValueError, match=f"Expected parameter {name}"):
        LowRankPrecisionNormal(**arguments, validate_args=True)
    assert LowRankPrecisionNormal(**arguments, validate_args=False).event_shape == (2,)


def test_values_of_the_wrong_size_or_outside_the_support_are_refused_when_validating():
    q = LowRankPrecisionNormal(torch.zeros(2), torch.zeros(2, 1), torch.ones(2), validate_args=True)
    with pytest.raises(ValueError, match="shape"):
        q.log_prob(torch.zeros(3))
    with pytest.raises(ValueError, match="support"):
        q.log_prob(torch.tensor([0.0, torch.nan]))


def test_constraints_name_every_parameter():
    q = make((2,))
    assert set(q.arg_constraints) == {"loc", "prec_factor", "prec_diag"}
    for name, constraint in q.arg_constraints.items():
        assert bool(constraint.check(getattr(q, name)).all())
    assert q.support is constraints.real_vector


# ---- KL ----


def steep(size: int, rank: int, grown: float = 1.0) -> LowRankPrecisionNormal:
    """Float32, with a factor whose squares are 1e6 times the diagonal."""
    factor = torch.randn(size, rank, generator=torch.Generator().manual_seed(3)) * (1e6 / size) ** 0.5
    return LowRankPrecisionNormal(torch.zeros(size), factor * grown, torch.ones(size) * grown)


def doubled(q: LowRankPrecisionNormal) -> LowRankPrecisionNormal:
    return LowRankPrecisionNormal(q.loc.double(), q.prec_factor.double(), q.prec_diag.double())


def test_sums_over_many_parameters_in_float32_are_exact_to_its_last_digit():
    source, size = torch.Generator().manual_seed(0), 300_000
    factor, diag = torch.randn(size, 2, generator=source), 10 * torch.rand(size, generator=source) + 0.1
    loc, moved = torch.randn(size, generator=source), 1e-3 * torch.randn(size, generator=source)
    q, p = LowRankPrecisionNormal(loc, factor, diag), LowRankPrecisionNormal(loc + moved, factor, diag * (1 + moved))
    exact, other = doubled(q), doubled(p)
    assert float(kl_divergence(q, p)) == pytest.approx(
        float(kl_divergence(exact, other)), rel=1e-3
    )  # of half a million
    assert abs(float(kl_divergence(q, q))) < 1e-4
    assert float(q.entropy()) == pytest.approx(float(exact.entropy()), rel=1e-7)
    assert float(q.log_prob(p.loc)) == pytest.approx(float(exact.log_prob(other.loc)), rel=1e-7)
    assert {x.dtype for x in (q.entropy(), q.log_prob(p.loc), kl_divergence(q, p))} == {torch.float32}


def test_kl_in_float32_keeps_its_digits_under_a_large_factor():
    """tr(U_pᵀ Σ_q U_p) is a few units, made of terms of 1e6."""
    q, p = steep(200, 4), steep(200, 4, grown=1.1)
    assert abs(float(kl_divergence(q, q))) < 1e-3
    exact = kl_divergence(doubled(q), doubled(p))
    torch.testing.assert_close(kl_divergence(q, p).double(), exact, rtol=1e-4, atol=0)


def test_covariances_in_float32_keep_their_digits_under_a_large_factor():
    q = steep(40, 4)
    spanned = q.prec_factor.double()
    found, exact = (spanned.mT @ c.double() @ spanned for c in (q.covariance_matrix, doubled(q).covariance_matrix))
    # Rounding the result to float32 is all that is lost: ε times ‖U‖² = 4e6.
    torch.testing.assert_close(found, exact, rtol=0, atol=0.2)
    narrow = steep(6, 6)
    torch.testing.assert_close(
        narrow.covariance_matrix.double(), doubled(narrow).covariance_matrix, rtol=1e-5, atol=1e-12
    )


DENSE = {
    "lowrank": (lambda: make((3,), 2, seed=1), dense),
    "lowrank rank 0": (lambda: make((3,), 0, seed=1), dense),
    "lowrank rank 7": (lambda: make((3,), 7, seed=1), dense),
    "multivariate": (lambda: dense(make((3,), 2, seed=1)), lambda p: p),
    "normal": (lambda: Normal(*_diagonal()), lambda p: MultivariateNormal(p.loc, torch.diag_embed(p.variance))),
    "independent": (
        lambda: Independent(Normal(*_diagonal()), 1),
        lambda p: MultivariateNormal(p.mean, torch.diag_embed(p.variance)),
    ),
}


def _diagonal() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(4)
    loc, log_scale = torch.randn(2, 3, SIZE, generator=source, dtype=torch.float64)
    return loc, log_scale.exp()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("other", DENSE)
def test_kl_is_the_dense_one_both_ways(other, rank):
    build, as_dense = DENSE[other]
    q, p = make((3,), rank), build()
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(dense(q), as_dense(p)), **CLOSE)
    torch.testing.assert_close(kl_divergence(p, q), kl_divergence(as_dense(p), dense(q)), **CLOSE)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("batch", BATCHES)
def test_kl_with_itself_is_zero(batch, rank):
    q = make(batch, rank)
    torch.testing.assert_close(kl_divergence(q, q), torch.zeros(batch, dtype=torch.float64), rtol=0, atol=1e-12)


MIXED_BATCHES = [((), (3,)), ((3,), ()), ((2,), ()), ((2, 1), (3,)), ((3,), (2, 1)), ((1,), (3,)), ((3,), (2, 3))]


@pytest.mark.parametrize(("batch_q", "batch_p"), MIXED_BATCHES)
@pytest.mark.parametrize("rank", RANKS)
def test_kl_broadcasts_over_batches(batch_q, batch_p, rank):
    q, p = make(batch_q, rank), make(batch_p, rank, seed=1)
    exact = kl_divergence(dense(q), dense(p))
    torch.testing.assert_close(kl_divergence(q, p), exact, **CLOSE)
    torch.testing.assert_close(kl_divergence(q, dense(p)), exact, **CLOSE)
    torch.testing.assert_close(kl_divergence(dense(q), p), exact, **CLOSE)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_kl_with_one_normal_for_all_coordinates_counts_each_coordinate(shape):
    q = make()
    loc, scale = torch.full(shape, 0.3, dtype=torch.float64), torch.full(shape, 2.0, dtype=torch.float64)
    wide = MultivariateNormal(loc.expand(SIZE), torch.diag(scale.square().expand(SIZE)))
    torch.testing.assert_close(kl_divergence(q, Normal(loc, scale)), kl_divergence(dense(q), wide), **CLOSE)
    torch.testing.assert_close(kl_divergence(Normal(loc, scale), q), kl_divergence(wide, dense(q)), **CLOSE)


@pytest.mark.parametrize("other", DENSE)
def test_kl_is_the_mean_log_ratio_of_draws(other, generator):
    build, _ = DENSE[other]
    q, p = make((3,), 2), build()
    draws = q.sample((20_000,), generator=generator)
    log_p = p.log_prob(draws)
    ratio = q.log_prob(draws) - (log_p.sum(-1) if isinstance(p, Normal) else log_p)
    error = ratio.std(0) / len(ratio) ** 0.5
    assert bool(((ratio.mean(0) - kl_divergence(q, p)).abs() <= 4 * error).all())


def test_kl_with_independent_of_something_else_is_refused():
    q = make()
    gammas = Independent(Gamma(torch.ones(SIZE), torch.ones(SIZE)), 1)
    images = Independent(Normal(torch.zeros(2, SIZE), torch.ones(2, SIZE)), 2)
    for other, name in ((gammas, "Gamma"), (images, r"event shape \(2, 4\)")):
        with pytest.raises(NotImplementedError, match=rf"Independent\(Normal, 1\) only, got .*{name}"):
            kl_divergence(q, other)
        with pytest.raises(NotImplementedError, match=rf"Independent\(Normal, 1\) only, got .*{name}"):
            kl_divergence(other, q)


@pytest.mark.parametrize(("size_q", "size_p"), [(3, 4), (4, 3), (1, 4), (4, 1)])
def test_kl_between_different_numbers_of_parameters_is_refused(size_q, size_p):
    q, p = make(size=size_q), make(size=size_p)
    for a, b in ((q, p), (q, dense(p)), (dense(q), p)):
        with pytest.raises(ValueError, match="event shape"):
            kl_divergence(a, b)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_kl_with_a_normal_over_another_number_of_parameters_is_refused(size):
    normal = Normal(torch.zeros(size), torch.ones(size))
    for other in (normal, Independent(normal, 1)):
        for pair in ((make(), other), (other, make())):
            first, second = (q.event_shape[0] if q.event_shape else size for q in pair)
            with pytest.raises(ValueError, match=rf"event shape, got \({first},\) and \({second},\)"):
                kl_divergence(*pair)


# ---- dense precisions


def dense_normal(batch: tuple[int, ...] = (), seed: int = 1) -> DensePrecisionNormal:
    source = torch.Generator().manual_seed(seed)
    root = torch.randn(*batch, SIZE, SIZE, generator=source, dtype=torch.float64)
    loc = torch.randn(*batch, SIZE, generator=source, dtype=torch.float64)
    return DensePrecisionNormal(loc, root @ root.mT + torch.eye(SIZE).double())


@pytest.mark.parametrize("batch", BATCHES)
def test_a_dense_precision_is_torchs_normal_of_its_inverse(batch, generator):
    q = dense_normal(batch)
    p = MultivariateNormal(q.loc, torch.linalg.inv(q.precision_matrix))
    value = torch.randn(5, *batch, SIZE, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), p.log_prob(value), **CLOSE)
    torch.testing.assert_close(q.variance, p.variance, **CLOSE)
    torch.testing.assert_close(q.covariance_matrix, p.covariance_matrix, **CLOSE)
    torch.testing.assert_close(q.entropy(), p.entropy(), **CLOSE)


def test_dense_draws_have_the_mean_and_covariance(generator, global_rng_untouched, within_sigmas):
    q = dense_normal((2,))
    draws = q.sample((10000,), generator=generator)
    assert within_sigmas(draws, q.mean)
    centred = draws - q.mean
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), q.covariance_matrix)
    assert not draws.requires_grad


def test_a_batch_of_no_normals_has_no_draws():
    q = dense_normal().expand((0,))
    assert q.sample((2,)).shape == (2, 0, SIZE)
    assert q.log_prob(torch.zeros(SIZE, dtype=torch.float64)).shape == (0,)


def test_dense_draws_move_with_their_parameters():
    loc = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    matrix = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)).requires_grad_()
    q = DensePrecisionNormal(loc, matrix)
    assert not q.sample().requires_grad
    q.rsample(generator=torch.Generator().manual_seed(0)).sum().backward()
    assert loc.grad.tolist() == [1.0, 1.0]
    assert matrix.grad.abs().sum() > 0


def test_a_dense_normal_expands_and_keeps_its_layout():
    spec = ParamSpec.of({"w": torch.zeros(SIZE)})
    q = dense_normal()
    q = DensePrecisionNormal(q.loc, q.precision_matrix, param_spec=spec)
    wide = q.expand((3,))
    assert isinstance(wide, DensePrecisionNormal)
    assert wide.param_spec is spec
    assert wide.batch_shape == (3,)
    torch.testing.assert_close(wide.log_prob(q.loc), q.log_prob(q.loc).expand(3))
    assert wide.rsample((2,)).shape == (2, 3, SIZE)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_kl_of_a_dense_precision_with_every_normal_is_the_dense_one(batch):
    q, exact = dense_normal(batch), MultivariateNormal(dense_normal(batch).loc, dense_normal(batch).covariance_matrix)
    low = make(rank=2)
    loc, scale = torch.randn(SIZE).double(), torch.rand(SIZE).double() + 0.5
    diagonal = MultivariateNormal(loc, torch.diag(scale.square()))
    twin = dense_normal(seed=5)
    others = [
        (low, dense(low)),
        (Normal(loc, scale), diagonal),
        (Independent(Normal(loc, scale), 1), diagonal),
        (twin, MultivariateNormal(twin.loc, twin.covariance_matrix)),
    ]
    for other, theirs in others:
        expected = kl_divergence(exact, theirs), kl_divergence(theirs.expand(batch), exact)
        torch.testing.assert_close(kl_divergence(q, other), expected[0])
        torch.testing.assert_close(kl_divergence(other, q), expected[1])


def test_dense_precisions_that_are_not_positive_are_refused_when_validating():
    with pytest.raises(ValueError, match="precision_matrix"):
        DensePrecisionNormal(torch.zeros(2), torch.diag(torch.tensor([1.0, -1.0])), validate_args=True)
