"""A posterior as the prior: every method against dense algebra, data in turn, resuming, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import reference
import slangvi
from slangvi import DensePrecisionNormal, LowRankPrecisionNormal, Routes, bbb, full, mean_field, slang
from slangvi.divergence import step_length
from slangvi.methods._gaussian import kl_to_prior
from slangvi.methods.projection import LEAST_FREE, LEAST_PRIOR
from slangvi.params import ParamSpec
from slangvi.priors import Prior, prior_from
from slangvi.rows import DenseGradients
from slangvi.schedules import Rate

NUM_DATA = 40.0
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}
KINDS = (slangvi.SLANG, slangvi.OnlineEig, slangvi.VOGN, slangvi.FullGaussian, slangvi.BBB)


class Problem:
    """A state in the middle of a run, rows, and a prior with a factor; two parameter tensors with a β each."""

    def __init__(self, P: int, L: int, L0: int, R: int, betas=(0.3, 0.3), dtype=torch.float64, seed=0, step=3) -> None:
        source = torch.Generator().manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)  # noqa: E731
        sizes = (P // 2, P - P // 2)
        self.spec = ParamSpec(("a", "b"), tuple(torch.Size((size,)) for size in sizes))
        self.beta = torch.cat([torch.full((n,), b, dtype=torch.float64) for n, b in zip(sizes, betas, strict=True)])
        self.rate = Rate.of(list(betas), self.spec, torch.empty(0, dtype=dtype))
        self.loc, self.momentum, self.factor = randn(P), randn(P), randn(L, P)
        self.diag, self.step, self.rows = randn(P).exp(), step, randn(R, P)
        self.prior = Prior(randn(P).exp(), randn(P), 2 * randn(L0, P) if L0 else None)

    @property
    def gradients(self) -> DenseGradients:
        return DenseGradients.from_rows(self.rows)

    @property
    def options(self) -> dict:
        return {"num_data": NUM_DATA, "prior": self.prior, "lr": Rate(0.1), "precision_lr": self.rate, "momentum": 0.9}

    @property
    def dense(self) -> dict:
        """What the oracles take."""
        lam, mean, factor = self.prior.precision, self.prior.mean, self.prior.factor
        return {"num_data": NUM_DATA, "lr": 0.1, "precision_lr": self.beta, "momentum": 0.9} | {
            "prior_precision": lam.double(),
            "prior_mean": mean.double(),
            "prior_factor": None if factor is None else factor.double(),
        }

    def low_rank_state(self) -> slang.State:
        return slang.State(self.loc, self.factor, self.diag, self.momentum, self.step, self.spec)


def matrix(factor: Tensor | None, diag: Tensor) -> Tensor:
    made = torch.diag(diag.double())
    return made if factor is None else made + factor.double().mT @ factor.double()


problems = st.builds(
    Problem,
    P=st.integers(2, 9),
    L=st.integers(0, 5),
    L0=st.integers(0, 5),
    R=st.integers(1, 6),
    betas=st.sampled_from([(0.3, 0.3), (0.05, 0.05), (1.0, 1.0), (0.2, 0.6)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 50),
)


@given(problem=problems, in_place=st.booleans())
def test_a_step_of_slang_is_the_dense_one(problem, in_place):
    state, dtype = problem.low_rank_state(), problem.loc.dtype
    low = problem.factor.double().mT @ problem.factor.double()
    before = reference.DenseState(
        state.loc.double(), low, state.prec_diag.double(), state.momentum.double(), state.step
    )
    dense = reference.dense_step(before, problem.rows.double(), len(problem.factor), **problem.dense)
    copied = copy.deepcopy(state)
    after, info = slang.update(copied, problem.gradients, in_place=in_place, **problem.options)
    size = TOLERANCE[dtype] * float(dense.precision.abs().max())
    torch.testing.assert_close(after.prec_factor.double().mT @ after.prec_factor.double(), dense.low, rtol=0, atol=size)
    torch.testing.assert_close(after.prec_diag.double(), dense.diag, rtol=0, atol=size)
    if dtype is torch.float64:
        torch.testing.assert_close(after.loc, dense.loc, rtol=1e-8, atol=1e-8)
    assert info.num_rows == len(problem.rows)


@given(problem=problems)
def test_a_step_of_factor_analysis_is_its_definition(problem):
    if not len(problem.factor):
        return
    problem.step = slang.EIGENVECTOR_STEPS + 100
    keep, gain = torch.diag((1 - problem.beta).sqrt()), torch.diag(problem.beta.sqrt())
    rows = problem.rows.double()
    new = NUM_DATA / len(rows) * rows.mT @ rows + matrix(problem.prior.factor, problem.prior.precision)
    target = keep @ matrix(problem.factor, problem.diag) @ keep + gain @ new @ gain
    given = problem.factor.double(), problem.diag.double(), target, float(problem.beta.max())
    low, diag = reference.factor_analysis(*given, LEAST_FREE)
    least = torch.minimum(problem.diag, LEAST_PRIOR * problem.prior.precision).double()
    after, _ = slang.update(problem.low_rank_state(), problem.gradients, projection="em", **problem.options)
    size = TOLERANCE[problem.loc.dtype] * float(target.abs().max())
    torch.testing.assert_close(after.prec_factor.double().mT @ after.prec_factor.double(), low, rtol=0, atol=size)
    torch.testing.assert_close(after.prec_diag.double(), torch.maximum(diag, least), rtol=0, atol=size)


@given(problem=problems, is_diagonal=st.booleans())
def test_a_step_of_full_and_mean_field_gaussians_is_the_dense_one(problem, is_diagonal):
    """Of the prior's precision a mean-field posterior sees the diagonal; its pull on the mean is whole."""
    start = matrix(None if is_diagonal else problem.factor, problem.diag)
    parts = problem.loc, problem.diag if is_diagonal else start.to(problem.loc), problem.momentum
    module = mean_field if is_diagonal else full
    after, _ = module.update(module.State(*parts, problem.step, problem.spec), problem.gradients, **problem.options)
    before = reference.GaussianState(problem.loc.double(), start, problem.momentum.double(), problem.step)
    dense = reference.gaussian_step(before, problem.rows.double(), diagonal=is_diagonal, **problem.dense)
    found = matrix(None, after.prec_diag) if is_diagonal else after.prec_matrix.double()
    size = TOLERANCE[problem.loc.dtype] * float(dense.precision.abs().max())
    torch.testing.assert_close(found, dense.precision, rtol=0, atol=size)
    if problem.loc.dtype is torch.float64:
        torch.testing.assert_close(after.loc, dense.loc, rtol=1e-8, atol=1e-8)


@given(problem=problems)
def test_kl_is_that_of_dense_normals(problem):
    exact = matrix(problem.prior.factor, problem.prior.precision)
    prior = MultivariateNormal(problem.prior.mean.double(), precision_matrix=exact)
    rest = problem.momentum, problem.step, problem.spec
    states = [
        (problem.low_rank_state(), matrix(problem.factor, problem.diag)),
        (mean_field.State(problem.loc, problem.diag, *rest), matrix(None, problem.diag)),
        (
            full.State(problem.loc, matrix(problem.factor, problem.diag).to(problem.loc), *rest),
            matrix(problem.factor, problem.diag),
        ),
    ]
    for state, precision in states:
        wanted = kl_divergence(MultivariateNormal(problem.loc.double(), precision_matrix=precision), prior)
        tolerance = 1e-9 if problem.loc.dtype is torch.float64 else 1e-3
        torch.testing.assert_close(kl_to_prior(state, problem.prior).double(), wanted, rtol=tolerance, atol=tolerance)


def test_bbb_follows_the_gradient_of_the_exact_divergence():
    problem = Problem(6, 2, 3, 1)
    state = bbb.init({"a": problem.loc[:3], "b": problem.loc[3:]}, 4.0)
    loc, rho = (x.clone().requires_grad_() for x in (state.loc, state.rho))
    prior = MultivariateNormal(
        problem.prior.mean, precision_matrix=matrix(problem.prior.factor, problem.prior.precision)
    )
    kl_divergence(MultivariateNormal(loc, torch.diag(F.softplus(rho).square())), prior).backward()
    none = torch.zeros(1, 6, dtype=torch.float64)
    after, _ = bbb.update(state, none, none, num_rows=1, num_data=9.0, prior=problem.prior, lr=0.1)
    torch.testing.assert_close(10 * after.loc_momentum, loc.grad)
    torch.testing.assert_close(10 * after.rho_momentum, rho.grad)


def test_the_length_of_a_step_is_measured_with_the_whole_prior():
    problem = Problem(6, 2, 3, 4)
    state = problem.low_rank_state()
    after, _ = slang.update(state, problem.gradients, **{**problem.options, "momentum": 0.0})
    change = after.loc - state.loc
    wanted = (change @ after.precision.matmul(change) / 6).sqrt()
    torch.testing.assert_close(step_length(state, after, problem.prior, 0.1, 0.0), wanted)


# ---- optimizers and functions


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def posterior_of(model: nn.Module, rank: int = 3, params: list | None = None) -> LowRankPrecisionNormal:
    """Some posterior of the parameters of a model."""
    source, dtype = torch.Generator().manual_seed(7), next(model.parameters()).dtype
    spec = ParamSpec.of_module(model, params)
    draw = lambda *shape: torch.randn(*shape, generator=source, dtype=dtype)  # noqa: E731
    size = spec.num_params
    return LowRankPrecisionNormal(draw(size), 2 * draw(rank, size).mT, draw(size).exp(), param_spec=spec)


def train(opt: slangvi.VariationalOptimizer, steps: int = 3, seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    dtype = next(opt.model.parameters()).dtype
    for _ in range(steps):
        x, y = (torch.randn(6, n, generator=source, dtype=dtype) for n in (3, 2))
        with opt.sampled_params(train=True):
            opt.zero_grad()
            (opt.model(x) - y).square().sum(1).mean().backward()
        opt.step()


@pytest.mark.parametrize("projection", ["eig", "em"])
@pytest.mark.parametrize("rank", [0, 2, 5])
def test_rows_may_be_held_in_any_way(projection, rank):
    found = []
    for engine, layers in (("dense", "auto"), ("factored", "form"), ("factored", "factor")):
        model = network()
        opt = slangvi.SLANG(
            model,
            num_data=50,
            rank=rank,
            lr=0.1,
            prior=posterior_of(model),
            engine=engine,
            routes=Routes(layers=layers),
            projection=projection,
            generator=torch.Generator().manual_seed(0),
        )
        train(opt, 25)
        found.append((opt.posterior.loc, opt.posterior.precision_matrix, opt.kl()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_of_an_optimizer_is_that_of_the_distributions(kind):
    model = network()
    prior = posterior_of(model)
    opt = kind(model, num_data=50, lr=0.01, prior=prior)
    train(opt)
    assert opt.kl() == pytest.approx(float(kl_divergence(opt.posterior, prior)))
    assert opt.info.kl == pytest.approx(opt.kl())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_with_the_precision_of_its_prior(kind):
    model = network()
    prior, diagonal = posterior_of(model), lambda q: q.precision_matrix.diagonal()
    opt = kind(model, num_data=50, lr=0.01, prior=prior)
    torch.testing.assert_close(diagonal(opt.posterior), diagonal(prior))
    explicit = kind(model, num_data=50, lr=0.01, prior=prior, init_precision=3.0)
    torch.testing.assert_close(diagonal(explicit.posterior), torch.full((26,), 3.0, dtype=torch.float64))


def test_posteriors_of_every_method_may_be_priors():
    for kind in KINDS:
        first = kind(network(), num_data=50, lr=0.01)
        train(first)
        prior = first.posterior
        for other in (slangvi.SLANG, slangvi.FullGaussian):
            opt = other(network(), num_data=50, lr=0.01, prior=prior)
            train(opt)
            assert opt.kl() == pytest.approx(float(kl_divergence(opt.posterior, prior)), rel=1e-6)


def test_the_factor_is_held_and_never_written_to():
    model = network()
    first = slangvi.SLANG(model, num_data=50, rank=2)
    train(first)
    held = first.posterior
    before = [x.clone() for x in (held.loc, held.prec_factor, held.prec_diag)]
    second = slangvi.SLANG(model, num_data=50, rank=2, prior=held)
    train(second)
    train(first)
    assert second._hyper.prior().factor.data_ptr() == held.prec_factor.data_ptr()
    assert all(map(torch.equal, (held.loc, held.prec_factor, held.prec_diag), before))


def test_the_prior_is_of_the_chosen_parameters():
    model = network()
    chosen = list(model[2].parameters())
    groups = [{"params": chosen[:1], "lr": 0.1}, {"params": chosen[1:], "lr": 0.02}]
    opt = slangvi.SLANG(model, num_data=50, params=groups, prior=posterior_of(model, params=chosen))
    train(opt)
    assert opt.posterior.event_shape == (10,)


def test_the_likelihood_is_tempered_and_the_prior_is_not():
    model = network()
    prior = posterior_of(model)
    opt = slangvi.FullGaussian(model, num_data=50, lr=1.0, precision_lr=1.0, prior=prior, temperature=1e12)
    train(opt, 1)
    torch.testing.assert_close(opt.posterior.precision_matrix, prior.precision_matrix, rtol=1e-6, atol=1e-6)


# ---- data in turn


def learnt(method, prior, x, y, noise, source, steps=400, draws=8):
    """The posterior of a linear regression after steps from draws, whose mean gradient is the only estimate."""
    size, weights = x.shape[1], {"w": torch.zeros(x.shape[1]).double() if prior is None else prior.loc}
    likelihood = slangvi.Gaussian(noise).on(lambda params, batch: batch @ params["w"])
    if method == "full":
        rate = {"lr": lambda t: 1 / t, "precision_lr": lambda t: 1 / t, "precision_warmup": False}
        options = {"num_data": len(x), "curvature": "hessian", "mc_samples": draws, "prior": prior, **rate}
        vi = full.build(likelihood, **options)
        state = vi.init(weights)
        for _ in range(steps):
            state, _ = vi.update(state, (x, y), generator=source)
        return vi.posterior(state)
    module = getattr(slangvi, method)
    state, plain = module.init(weights, size), Prior(torch.ones(size).double(), torch.zeros(size).double())
    known = plain if prior is None else prior_from(prior, state.spec, state.loc)
    for t in range(1, 1 + steps):
        thetas = state.precision.sample((draws,), source, state.loc)
        gradients, slope = DenseGradients.from_rows(noise**0.5 * x), noise * (thetas.mean(0) @ x.mT - y) @ x
        gradients.sum = slope.clone  # the gradients themselves would give the empirical Fisher
        options = {"num_data": len(x), "prior": known, "lr": Rate(1 / t), "momentum": 0.0}
        state, _ = module.update(state, gradients, **options)
    return module.posterior(state)


@pytest.mark.parametrize("method", ["slang", "full", "online_eig"])
def test_data_in_five_parts_give_the_posterior_of_all_data(method):
    """Bayesian linear regression: precisions are equal, and means within the error of so many draws."""
    source, size, noise, prior = torch.Generator().manual_seed(0), 4, 2.0, None
    x = torch.randn(100, size, generator=source, dtype=torch.float64)
    y = x @ torch.arange(1.0, 1 + size).double() + noise**-0.5 * torch.randn(100, generator=source).double()
    precision = torch.eye(size).double() + noise * x.mT @ x
    exact = torch.linalg.solve(precision, noise * x.mT @ y)
    for part in range(5):
        pick = slice(20 * part, 20 * (part + 1))
        prior = learnt(method, prior, x[pick], y[pick], noise, source)
    torch.testing.assert_close(prior.precision_matrix, precision, rtol=1e-8, atol=1e-8)
    # Each part adds the error of its draws' mean, in posterior standard deviations at most.
    error = (5 / (400 * 8)) ** 0.5
    assert float(((prior.loc - exact) / prior.stddev).abs().max()) < 5 * error


# ---- resuming


def test_a_run_resumes_exactly_with_its_prior(tmp_path):
    def made():
        model = network()
        source = torch.Generator().manual_seed(3)
        return slangvi.SLANG(model, num_data=50, rank=2, prior=saved, generator=source)

    slangvi.save(tmp_path / "prior.safetensors", posterior_of(network()))
    saved = slangvi.load(tmp_path / "prior.safetensors")
    opt = made()
    train(opt)
    slangvi.save(tmp_path / "run.safetensors", opt)
    others = [slangvi.load(tmp_path / "run.safetensors", made()), copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    train(opt, seed=1)
    for other in others:
        train(other, seed=1)
        assert torch.equal(other.posterior.loc, opt.posterior.loc)
        assert torch.equal(other.posterior.prec_factor, opt.posterior.prec_factor)
        assert other.kl() == opt.kl()


def test_another_prior_is_refused_and_nothing_changes():
    model = network()
    opt = slangvi.SLANG(model, num_data=50, rank=2, prior=posterior_of(model))
    train(opt)
    saved = opt.state_dict()
    for prior in (None, posterior_of(model, rank=2)):
        other = slangvi.SLANG(network(), num_data=50, rank=2, prior=prior)
        before = copy.deepcopy(other.posterior)
        with pytest.raises(ValueError, match="build the optimizer with the same prior="):
            other.load_state_dict(saved)
        assert torch.equal(other.posterior.loc, before.loc)
    plain = slangvi.SLANG(network(), num_data=50, rank=2)
    with pytest.raises(ValueError, match="no posterior as its prior, and this optimizer has posterior"):
        opt.load_state_dict(plain.state_dict())


# ---- what is refused


def test_bad_priors_are_refused_by_name():
    model = network()
    prior = posterior_of(model)
    build = lambda **options: slangvi.SLANG(model, num_data=50, **options)  # noqa: E731
    with pytest.raises(TypeError, match=r"prior must be a Gaussian posterior, got SLANG. Pass opt.posterior"):
        build(prior=build())
    with pytest.raises(ValueError, match=r"prior must be one posterior, got a batch of shape \(2,\)"):
        build(prior=prior.expand((2,)))
    other = posterior_of(nn.Linear(3, 2).double())
    with pytest.raises(ValueError, match=r"prior is of other parameters: expected parameter '0\.weight' of shape"):
        build(prior=other)
    bare = LowRankPrecisionNormal(torch.zeros(5), torch.zeros(5, 1), torch.ones(5))
    with pytest.raises(ValueError, match="prior is of other parameters: it has P = 5, and P = 26 is expected"):
        build(prior=bare)
    for name, own in (("prior_precision", 2.0), ("prior_mean", {"*": 0.0})):
        with pytest.raises(ValueError, match=f"{name} and prior are both given"):
            build(prior=prior, **{name: own})
    spoilt = LowRankPrecisionNormal(prior.loc * torch.nan, prior.prec_factor, prior.prec_diag, validate_args=False)
    with pytest.raises(ValueError, match="prior must be finite, with a positive diagonal"):
        build(prior=spoilt)
    groups = [{"params": list(model.parameters()), "prior": prior}]
    with pytest.raises(ValueError, match="prior is one posterior of all parameters"):
        build(params=groups)
    for taker, own in ((slangvi.MCDropout, {}), (slangvi.replicas.build, {"num_replicas": 2, "rank": 1})):
        with pytest.raises(TypeError, match="unexpected keyword argument 'prior'"):
            taker(model, num_data=50, lr=0.1, prior=prior, **own)
    vi = slang.build(lambda params, batch: -params["w"].sum() * batch, num_data=5, rank=1, lr=0.1, prior=bare)
    with pytest.raises(ValueError, match="it has P = 5, and P = 2 is expected"):
        vi.init({"w": torch.zeros(2)})


def test_groups_that_contradict_the_prior_are_refused_and_nothing_changes():
    model = network()
    chosen = list(model[2].parameters())
    opt = slangvi.SLANG(model, num_data=50, params=chosen, prior=posterior_of(model, params=chosen))
    train(opt)
    before = opt.posterior
    with pytest.raises(ValueError, match="prior is of other parameters: it has 2 parameters, and 4 are expected"):
        opt.add_param_group({"params": list(model[0].parameters())})
    opt.param_groups[0]["prior_precision"] = 3.0
    with pytest.raises(ValueError, match="prior_precision and prior are both given"):
        train(opt)
    opt.param_groups[0]["prior_precision"] = 1.0
    assert len(opt.param_groups) == 1
    assert torch.equal(opt.posterior.loc, before.loc)
    train(opt)


def test_a_prior_that_throws_the_mean_out_of_range_leaves_the_state():
    model = network(torch.float32)
    prior = posterior_of(model)
    far = LowRankPrecisionNormal(prior.loc * 1e30, prior.prec_factor * 1e10, prior.prec_diag)
    opt = slangvi.SLANG(model, num_data=50, prior=far)
    before = [x.clone() for x in (opt.posterior.loc, opt.posterior.prec_factor, opt.posterior.prec_diag)]
    with pytest.raises(slangvi.NumericalError):
        train(opt)
    assert all(map(torch.equal, (opt.posterior.loc, opt.posterior.prec_factor, opt.posterior.prec_diag), before))


def test_dense_posteriors_become_a_factor_and_a_diagonal():
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 4, generator=source, dtype=torch.float64)
    dense = DensePrecisionNormal(torch.zeros(4).double(), rows.mT @ rows + torch.eye(4).double())
    found = prior_from(dense, ParamSpec(("w",), (torch.Size((4,)),)), dense.loc)
    torch.testing.assert_close(matrix(found.factor, found.precision), dense.precision_matrix)
