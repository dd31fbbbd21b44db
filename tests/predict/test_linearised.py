"""The closed form against dense matrices and draws, for any chunk, row order and posterior."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import slangvi
from cases import GPT
from helpers.posteriors import posterior_of, seeded
from slangvi import Categorical, DensePrecisionNormal, Gaussian, LowRankPrecisionNormal
from slangvi.params import ParamSpec
from slangvi.predict import linearised_predictive
from slangvi.predict.linearised import probit_softmax

X = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)


def mlp(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, outputs)).double()


def low_rank(model: nn.Module) -> LowRankPrecisionNormal:
    return posterior_of(model, scale=3.0)


def diagonal(model: nn.Module) -> LowRankPrecisionNormal:
    q = low_rank(model)
    return LowRankPrecisionNormal(q.loc, q.prec_factor[:, :0], q.prec_diag * 2, param_spec=q.param_spec)


def dense(model: nn.Module) -> DensePrecisionNormal:
    q = low_rank(model)
    return DensePrecisionNormal(q.loc, q.precision_matrix, param_spec=q.param_spec)


POSTERIORS = {"low-rank": low_rank, "diagonal": diagonal, "dense": dense}


def by_definition(model: nn.Module, q, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs at the mean, (n, C), and J P⁻¹ Jᵀ with the P×P inverse, row by row and output by output."""
    model = model.eval()
    spec = q.param_spec
    params = {name: value.clone().requires_grad_() for name, value in spec.unflatten(q.loc).items()}
    outputs = torch.func.functional_call(model, params, (x,)).flatten(1)
    rows = []
    for output in outputs.flatten():
        grads = torch.autograd.grad(output, list(params.values()), retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)]
        rows.append(torch.cat([g.flatten() for g in filled]))
    J = torch.stack(rows).unflatten(0, outputs.shape)
    return outputs.detach(), J @ torch.linalg.inv(q.precision_matrix) @ J.mT


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("outputs", [1, 3])
def test_mean_and_covariance_are_those_of_the_definition(kind, outputs, global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model = mlp(outputs)
    q = POSTERIORS[kind](model)
    mean, covariance = by_definition(model, q, X)
    found = linearised_predictive(model, q, X, likelihood=Gaussian(4.0))
    torch.testing.assert_close(found.loc, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-9, atol=1e-12)
    variances = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found.epistemic_variance, variances, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.stddev, (variances + 0.25).sqrt(), rtol=1e-9, atol=1e-12)
    assert found.probs is None


@pytest.mark.parametrize("kind", POSTERIORS)
def test_linear_models_are_predicted_exactly(kind, within_sigmas, generator):
    model = nn.Linear(3, 2).double()
    q = POSTERIORS[kind](model)
    found = linearised_predictive(model, q, X, likelihood="gaussian")
    draws = slangvi.functional_samples(model, q, X, 4000, generator=generator)
    centred = draws - found.loc
    assert within_sigmas(draws, found.loc)
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), found.covariance)


@settings(max_examples=25)
@given(
    limit=st.sampled_from([1, 2_000, 5_000, 20_000, None]),
    seed=st.integers(0, 1000),
    link=st.sampled_from(["probit", "mc"]),
)
def test_results_depend_on_neither_chunks_nor_the_order_of_rows(limit, seed, link):
    model = mlp(3)
    q, order = low_rank(model), torch.randperm(7, generator=seeded(seed))
    options = {"link": link, "n_samples": 3}
    whole = linearised_predictive(model, q, X, generator=seeded(), **options)
    parts = linearised_predictive(model, q, X[order], memory_limit=limit, generator=seeded(), **options)
    for name in ("loc", "covariance", "probs"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name)[order], rtol=1e-10, atol=1e-12)


def test_one_row_alone_is_what_it_is_among_others():
    model = mlp(2)
    q = low_rank(model)
    whole, one = (linearised_predictive(model, q, x) for x in (X, X[3:4]))
    torch.testing.assert_close(one.probs, whole.probs[3:4], rtol=1e-12, atol=1e-14)


@given(
    seed=st.integers(0, 2**20),
    norm=st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rank=st.integers(0, 6),
)
def test_covariances_are_positive_semi_definite(seed, norm, dtype, rank):
    """Also where U dominates: J D⁻¹ Jᵀ minus a correction would lose them."""
    source = seeded(seed)
    model = nn.Linear(3, 2).to(dtype)
    factor = norm * torch.randn(8, rank, generator=source, dtype=dtype)
    q = LowRankPrecisionNormal(torch.zeros(8, dtype=dtype), factor, torch.ones(8, dtype=dtype))
    covariance = linearised_predictive(model, q, X.to(dtype), likelihood="gaussian").covariance.double()
    values = torch.linalg.eigvalsh(covariance)
    assert bool((values >= -4 * torch.finfo(dtype).eps * values[:, -1:]).all())
    assert bool((covariance.diagonal(dim1=1, dim2=2) >= 0).all())


# ---- models ----


class Branching(nn.Module):
    """Looks at a value, which vmap cannot follow; `unused` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.detach().sum()) > 0 else self.layer(-x).tanh()


def test_models_that_vmap_cannot_follow_go_row_by_row():
    model = Branching().double()
    q = low_rank(model)
    found = linearised_predictive(model, q, X, likelihood="gaussian")
    for k in range(len(X)):
        mean, covariance = by_definition(model, q, X[k : k + 1])
        torch.testing.assert_close(found.loc[k : k + 1], mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.covariance[k : k + 1], covariance, rtol=1e-9, atol=1e-12)


class Scaled(nn.Module):
    """A layer times a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2).double(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


def test_parameters_without_dimensions_are_no_reason_to_go_row_by_row(monkeypatch):
    model = Scaled()
    q = low_rank(model)
    monkeypatch.delattr("slangvi.predict.linearised._Jacobians._row_by_row")
    found = linearised_predictive(model, q, X)
    torch.testing.assert_close(found.covariance, by_definition(model, q, X)[1])


def test_tied_weights_and_sequences():
    model = GPT().double()
    q, ids = low_rank(model), torch.arange(8).reshape(2, 4) % 7
    found = linearised_predictive(model, q, ids, link="mc", n_samples=2)
    outputs = torch.func.functional_call(model.eval(), q.param_spec.unflatten(q.loc), (ids,))
    size = outputs[0].numel()
    torch.testing.assert_close(found.loc, outputs.detach(), rtol=1e-10, atol=1e-12)
    assert found.covariance.shape == (2, size, size)
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(outputs.shape[:-1], dtype=torch.float64))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, wide: Tensor, deep: Tensor, sign: int = 1) -> Tensor:
        return self.wide(wide) * sign - self.deep(deep)


def test_tuples_are_positional_and_dicts_are_keyword_arguments():
    model = TwoInputs().double()
    q, deep = low_rank(model), X[:, :2]
    by_place = linearised_predictive(model, q, (X, deep))
    by_name = linearised_predictive(model, q, {"deep": deep, "wide": X, "sign": 1})
    assert torch.equal(by_place.covariance, by_name.covariance)
    assert torch.equal(by_place.loc, by_name.loc)


def test_some_parameters_of_a_half_precision_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    spec = ParamSpec.of_module(model, model[1].parameters())
    q = LowRankPrecisionNormal(torch.zeros(10), torch.zeros(10, 1), torch.full((10,), 4.0), param_spec=spec)
    found = linearised_predictive(model, q, X.to(torch.bfloat16), likelihood="gaussian")
    hidden = model[0](X.to(torch.bfloat16)).detach().float()
    expected = (hidden.square().sum(1) + 1) / 4
    assert found.loc.dtype is found.covariance.dtype is torch.float32
    torch.testing.assert_close(found.epistemic_variance, expected.unsqueeze(1).expand(7, 2), rtol=1e-2, atol=0)


def test_the_model_is_left_as_it_was(global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model = mlp().train()
    q = low_rank(model)
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    with torch.inference_mode(False):
        linearised_predictive(model, q, X, link="mc", n_samples=2, generator=seeded())
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# ---- links ----


def softmax_by_draws(mean: Tensor, covariance: Tensor, count: int = 100_000) -> Tensor:
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(len(mean), dtype=torch.float64))
    noise = torch.randn(count, len(mean), generator=seeded(), dtype=torch.float64)
    return (mean + noise @ root.T).softmax(-1)


gaussians = st.builds(
    lambda seed, size, scale: (
        torch.randn(size, generator=seeded(seed), dtype=torch.float64) * 2,
        (lambda a: scale * a @ a.T)(torch.randn(size, size, generator=seeded(seed + 1), dtype=torch.float64)),
    ),
    seed=st.integers(0, 2**20),
    size=st.integers(2, 5),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
)


@given(gaussians, st.floats(-100, 100), st.floats(0, 100))
def test_the_probit_link_looks_at_differences_of_logits_only(gaussian, shift, common):
    mean, covariance = gaussian
    probs = probit_softmax(mean, covariance)
    torch.testing.assert_close(probs.sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(probit_softmax(mean + shift, covariance + common), probs, rtol=1e-8, atol=1e-10)


@given(gaussians)
def test_the_probit_link_is_softmax_without_and_mackays_with_two_classes(gaussian):
    mean, covariance = gaussian
    torch.testing.assert_close(probit_softmax(mean, torch.zeros_like(covariance)), mean.softmax(-1))
    spread = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    binary = ((mean[0] - mean[1]) / (1 + math.pi / 8 * spread).sqrt()).sigmoid()
    torch.testing.assert_close(probit_softmax(mean[:2], covariance[:2, :2])[0], binary)


def test_the_probit_link_is_nearer_the_expectation_than_a_scale_for_every_logit():
    source, gaps = seeded(), []
    for size in (2, 3, 4, 5) * 15:
        mean = 2 * torch.randn(size, generator=source, dtype=torch.float64)
        root = torch.randn(size, size, generator=source, dtype=torch.float64)
        covariance = root @ root.T
        expected = softmax_by_draws(mean, covariance, 10_000).mean(0)
        by_logit = (mean / (1 + math.pi / 8 * covariance.diagonal()).sqrt()).softmax(-1)
        gaps.append([float((p - expected).abs().max()) for p in (probit_softmax(mean, covariance), by_logit)])
    ours, usual = torch.tensor(gaps).mean(0).tolist()
    assert ours < usual
    assert ours < 0.05


@pytest.mark.parametrize("likelihood", ["categorical", Categorical()])
def test_the_mc_link_averages_over_the_gaussian(likelihood, within_sigmas):
    model = mlp(3)
    q = low_rank(model)
    found = linearised_predictive(
        model, q, X[:2], likelihood=likelihood, link="mc", n_samples=4000, generator=seeded(5)
    )
    for k in range(2):
        reference = softmax_by_draws(found.loc[k], found.covariance[k])
        error = 5 * reference.std(0) / 4000**0.5
        assert bool(((found.probs[k] - reference.mean(0)).abs() < error).all())


def test_covariances_without_full_rank_can_be_drawn_from():
    model = nn.Linear(3, 3, bias=False).double()
    tied = torch.eye(3, dtype=torch.float64).repeat(3, 1) * 1e4  # a factor that leaves few directions uncertain
    q = LowRankPrecisionNormal(torch.zeros(9, dtype=torch.float64), tied, torch.full((9,), 1e-3, dtype=torch.float64))
    found = linearised_predictive(model, q, X, link="mc", n_samples=10, generator=seeded())
    assert bool(torch.isfinite(found.probs).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_posteriors_can_be_drawn_from(dtype):
    model, n_samples = nn.Linear(3, 2).to(dtype), 600
    q = low_rank(nn.Linear(3, 2))
    half = LowRankPrecisionNormal(q.loc.to(dtype), q.prec_factor.to(dtype), q.prec_diag.to(dtype))
    found = linearised_predictive(model, half, X.to(dtype), link="mc", n_samples=n_samples, generator=seeded(0))
    noise = [torch.randn(2, generator=source) for source in [seeded(0)] for _ in range(n_samples)]
    root = torch.linalg.cholesky(found.covariance.double())
    draws = [(found.loc.double() + root @ one.double()).softmax(-1) for one in noise]
    torch.testing.assert_close(found.probs, torch.stack(draws).mean(0).to(dtype))


def test_one_logit_is_integrated_by_quadrature():
    model = mlp(1)
    q = low_rank(model)
    found = linearised_predictive(model, q, X, likelihood="bernoulli")
    noise = torch.randn(400_000, 1, generator=seeded(), dtype=torch.float64)
    draws = (found.loc[:, 0] + found.stddev[:, 0] * noise).sigmoid()
    assert bool(((found.probs[:, 0] - draws.mean(0)).abs() < 5 * draws.std(0) / 400_000**0.5).all())
    assert found.probs.shape == (7, 1)


# ---- what is refused ----

BAD_CALLS = [
    ({"link": "softmax"}, ValueError, "link must be one of 'probit', 'mc', got 'softmax'"),
    ({"n_samples": 0}, ValueError, "n_samples must be ≥ 1"),
    ({"memory_limit": 0}, ValueError, "memory_limit must be ≥ 1"),
    ({"likelihood": "poisson"}, ValueError, "likelihood must be one of"),
    ({"x": X[:0]}, ValueError, "first dimension M ≥ 1"),
    ({"x": X.double() * torch.nan}, slangvi.NumericalError, "not finite for 7 of 7 rows, the first is row 0"),
    ({"x": X.double()[:, :2]}, RuntimeError, "shapes cannot be multiplied"),
    ({"model": nn.Linear(4, 2).double()}, ValueError, "expects parameter 'weight'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_calls_that_cannot_be_meant_are_refused(change, error, message):
    model = nn.Linear(3, 2).double()
    with pytest.raises(error, match=message):
        linearised_predictive(**({"model": model, "posterior": low_rank(model), "x": X} | change))


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_one_output_is_no_set_of_classes(link):
    """Its softmax is 1 whatever it is."""
    model = nn.Linear(3, 1).double()
    with pytest.raises(ValueError, match=r"at least two outputs, got shape \(7, 1\).*'bernoulli'"):
        linearised_predictive(model, low_rank(model), X.double(), link=link)


def test_posteriors_without_a_precision_are_refused():
    model = nn.Linear(3, 2).double()
    vi = slangvi.mc_dropout.build(Categorical().of(model), num_data=7)
    q = vi.posterior(vi.init(dict(model.named_parameters())))
    with pytest.raises(TypeError, match=r"must be a Gaussian .* got DroppedWeights\. Use predictive_samples"):
        linearised_predictive(model, q, X)


def test_probit_for_many_sets_of_logits_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))).double()
    with pytest.raises(ValueError, match=r"one set of class logits per row.*got outputs \(7, 2, 2\).*Use link='mc'"):
        linearised_predictive(model, low_rank(model), X)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(0)


def test_models_without_a_row_per_row_are_refused():
    model = Mixing().double()
    with pytest.raises(ValueError, match=r"one row per input row, \(1, \.\.\.\), got \(2,\)"):
        linearised_predictive(model, low_rank(model), X)
