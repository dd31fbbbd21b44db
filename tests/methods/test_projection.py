"""Factor analysis as the way back to the family: its definition, what it lowers, scales of inputs, rounding, runs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
import slangvi
from slangvi import slang
from slangvi.linalg import products
from slangvi.methods import projection
from slangvi.methods.projection import LEAST_FREE, LEAST_PRIOR, ScaledEigenvectors
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.rows import DenseGradients, FactoredGradients
from slangvi.schedules import Rate
from slangvi.types import Routes

NUM_DATA = 60.0
LATE = slang.EIGENVECTOR_STEPS + 100
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


class Problem:
    """A state late enough for factor analysis, rows and a prior; two parameter tensors, which may have their own β."""

    def __init__(self, P=7, L=2, R=4, betas=(0.3, 0.3), dtype=torch.float64, seed=0, size=2.0) -> None:
        torch.manual_seed(seed)
        sizes = (P // 2, P - P // 2)
        self.spec = ParamSpec(("a", "b"), tuple(torch.Size((size,)) for size in sizes))
        self.beta = torch.cat([torch.full((n,), b, dtype=torch.float64) for n, b in zip(sizes, betas, strict=True)])
        self.rate = Rate.of(list(betas), self.spec, torch.empty(0, dtype=dtype))
        factor, diag = size * randn(L, P, dtype=dtype), (torch.rand(P).double() + 0.2).to(dtype)
        self.state = slang.State(randn(P, dtype=dtype), factor, diag, randn(P, dtype=dtype), LATE, self.spec)
        self.rows = randn(R, P, dtype=dtype)
        self.prior = Prior((torch.rand(P).double() + 0.5).to(dtype), randn(P, dtype=dtype))

    def step(self, projection: str = "em", **options) -> tuple[slang.State, slang.Info]:
        given = {"prior": self.prior, "lr": Rate(0.1), "precision_lr": self.rate, "momentum": 0.9, **options}
        gradients = DenseGradients.from_rows(self.rows)
        return slang.update(self.state, gradients, num_data=NUM_DATA, projection=projection, **given)

    def target(self) -> Tensor:
        """Λ, the precision that the step is to come near."""
        keep, gain = torch.diag((1 - self.beta).sqrt()), torch.diag(self.beta.sqrt())
        rows = self.rows.double()
        old = precision_of(self.state)
        new = NUM_DATA / len(rows) * rows.T @ rows + torch.diag(self.prior.precision.double())
        return keep @ old @ keep + gain @ new @ gain


def precision_of(state: slang.State) -> Tensor:
    factor = state.prec_factor.double()
    return factor.mT @ factor + torch.diag_embed(state.prec_diag.double())


def divergence(precision: Tensor, target: Tensor) -> float:
    """KL(q ‖ N(μ, Λ⁻¹)) of Gaussians with one mean."""
    product = target @ torch.linalg.inv(precision)
    return float(0.5 * (product.trace() - torch.linalg.slogdet(product)[1] - len(target)))


@given(
    P=st.integers(2, 12),
    L=st.integers(1, 5),
    R=st.integers(1, 8),
    betas=st.sampled_from([(0.3, 0.3), (0.01, 0.01), (1.0, 1.0), (0.2, 0.6), (0.0, 0.3)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 50),
)
def test_a_step_is_that_of_its_definition(P, L, R, betas, dtype, seed):
    """Rank above P too, where the small matrices are singular."""
    problem = Problem(P, L, R, betas, dtype, seed)
    given = (x.double() for x in (problem.state.prec_factor, problem.state.prec_diag))
    low, diag = reference.factor_analysis(*given, problem.target(), max(betas), LEAST_FREE)
    least = torch.minimum(problem.state.prec_diag, LEAST_PRIOR * problem.prior.precision).double()
    state, info = problem.step()
    scale = float(problem.target().abs().max())
    found = state.prec_factor.double().T @ state.prec_factor.double()
    torch.testing.assert_close(found, low, rtol=0, atol=TOLERANCE[dtype] * scale)
    torch.testing.assert_close(
        state.prec_diag.double(), torch.maximum(diag, least), rtol=0, atol=TOLERANCE[dtype] * scale
    )
    assert bool((state.prec_diag >= 0.999 * least).all())
    assert float(info.clipped) <= TOLERANCE[dtype] * scale


@given(
    P=st.integers(2, 12),
    L=st.integers(1, 5),
    R=st.integers(1, 8),
    beta=st.floats(1e-3, 1.0),
    near=st.sampled_from([0, 1, 3, 20]),
    seed=st.integers(0, 99),
)
def test_a_step_never_goes_away_from_the_new_precision(P, L, R, beta, near, seed):
    """Close to where steps with the same rows come to rest, where eigenvectors do go away from it, too."""
    problem = Problem(P, L, R, (beta, beta), seed=seed)
    for _ in range(near):
        problem.state = problem.step()[0]
    target = problem.target()
    before, after = (divergence(precision_of(state), target) for state in (problem.state, problem.step()[0]))
    assert after <= before + 1e-9 * (1 + before)


def test_steps_with_the_same_rows_come_to_rest_at_the_maximum_likelihood():
    """Factor analysis of Ĝ + λ: its diagonal is met, and ΛQ⁻¹U = U."""
    problem = Problem(P=9, L=2, R=9, betas=(0.2, 0.2))
    factor, diag = randn(9, 2) * 3, torch.rand(9).double() + 2
    target = factor @ factor.T + torch.diag(diag)
    target += 0.2 * randn(9, 9).abs().triu(1)
    target = 0.5 * (target + target.T)
    values, vectors = torch.linalg.eigh(target - torch.diag(problem.prior.precision))
    problem.rows = (vectors * values.sqrt()).T * (9 / NUM_DATA) ** 0.5
    for _ in range(1500):
        problem.state = problem.step()[0]
    precision, factor = precision_of(problem.state), problem.state.prec_factor.T
    torch.testing.assert_close(precision.diagonal(), target.diagonal(), rtol=1e-9, atol=0)
    torch.testing.assert_close(target @ torch.linalg.solve(precision, factor), factor, rtol=0, atol=1e-8)


def test_directions_enter_a_factor_that_is_zero_or_in_part():
    for kept in (0, 1):
        problem = Problem(P=7, L=3, R=2, betas=(0.1, 0.1))
        problem.state.prec_factor[kept:] = 0
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(3, 7, generator=generator, dtype=torch.float64) * 5
        for _ in range(300):
            problem.rows = torch.randn(2, 3, generator=generator, dtype=torch.float64) @ wide
            problem.state, info = problem.step()
        assert info.rank_used == 3
        assert info.spectrum[-1] > 1
        assert info.captured > 0.9


def test_columns_that_are_zero_begin_with_rows_of_their_own():
    problem = Problem(P=7, L=4, R=2)
    problem.state.prec_factor[1:] = 0
    state, _ = problem.step()
    lengths = torch.linalg.vector_norm(state.prec_factor, dim=1)
    assert (lengths[1:3] > 0).all()
    assert lengths[3] == 0  # there are two rows only
    assert lengths[1:3].max() < 0.01 * lengths[0]
    shares = state.prec_factor[1:3] / problem.rows
    torch.testing.assert_close(shares, shares[:, :1].expand(2, 7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_gradients_the_precision_goes_to_the_prior(dtype):
    problem = Problem(betas=(0.2, 0.2), dtype=dtype)
    problem.rows = torch.zeros_like(problem.rows)
    for _ in range(200):
        problem.state = problem.step()[0]
    assert divergence(precision_of(problem.state), torch.diag(problem.prior.precision.double())) < 1e-6


@given(seed=st.integers(0, 50), low=st.floats(1e-3, 1.0), high=st.floats(1.0, 1e3), step=st.sampled_from([0, LATE]))
def test_the_scale_of_parameters_makes_no_difference(seed, low, high, step):
    """Inputs times s are parameters over s: the precision of these is s times it times s, by factor analysis alone."""
    one, other = Problem(seed=seed), Problem(seed=seed)
    one.state = replace(one.state, step=step)
    scale = torch.logspace(0, 1, 7, dtype=torch.float64).log10() * (high - low) + low
    other.rows *= scale
    other.prior = Prior(one.prior.precision * scale**2, one.prior.mean)
    other.state = slang.State(
        one.state.loc, one.state.prec_factor * scale, one.state.prec_diag * scale**2, one.state.momentum, step, one.spec
    )
    expected = precision_of(one.step()[0]) * scale * scale[:, None]
    torch.testing.assert_close(precision_of(other.step()[0]), expected, rtol=1e-7, atol=1e-7 * float(expected.max()))
    by_eigenvectors = precision_of(one.step("eig")[0]) * scale * scale[:, None]
    if high > 30 * low:
        assert not torch.allclose(precision_of(other.step("eig")[0]), by_eigenvectors, rtol=1e-3)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_many_small_steps_in_float32_are_those_in_float64(size):
    """Rounding of a step has the size of β, so that the fixed point has the rounding of one step."""
    runs = []
    for dtype in (torch.float32, torch.float64):
        problem = Problem(8, 2, 3, (1e-3, 1e-3), torch.float64, size=size)
        batches = [randn(3, 8) * size for _ in range(2000)]
        problem.prior = Prior(problem.prior.precision.to(dtype), problem.prior.mean.to(dtype))
        state = problem.state
        problem.state = slang.State(*(getattr(state, n).to(dtype) for n in FIELDS), LATE, problem.spec)
        for rows in batches:
            problem.rows = rows.to(dtype)
            problem.state = problem.step()[0]
        runs.append(problem.state)
    torch.testing.assert_close(runs[0].prec_diag.double(), runs[1].prec_diag, rtol=1e-3, atol=0)
    torch.testing.assert_close(precision_of(runs[0]), precision_of(runs[1]), rtol=1e-3, atol=1e-3 * size**2)


FIELDS = ("loc", "prec_factor", "prec_diag", "momentum")


def test_runs_in_lockstep_are_the_single_runs():
    problems = [Problem(seed=seed) for seed in range(3)]
    whole = Problem()
    whole.state = slang.State(
        *(torch.stack([getattr(p.state, name) for p in problems]) for name in FIELDS), LATE, whole.spec
    )
    whole.rows = torch.stack([p.rows for p in problems])
    whole.prior = Prior(*(torch.stack([getattr(p.prior, n) for p in problems]) for n in ("precision", "mean")))
    betas = torch.tensor([[0.1], [0.3], [0.7]], dtype=torch.float64)
    state, info = whole.step(precision_lr=Rate(betas))
    for k, problem in enumerate(problems):
        alone, told = problem.step(precision_lr=Rate(float(betas[k])))
        torch.testing.assert_close(precision_of(state)[k], precision_of(alone))
        torch.testing.assert_close(state.loc[k], alone.loc)
        torch.testing.assert_close(info.spectrum[k], told.spectrum)


def test_what_is_told_does_not_depend_on_the_scale():
    state, info = Problem().step()
    white = state.prec_factor * state.prec_diag.rsqrt()
    torch.testing.assert_close(info.spectrum, torch.linalg.eigvalsh(white @ white.mT).flip(0))
    assert info.captured == pytest.approx(float(info.spectrum.sum() / (info.spectrum.sum() + 7)))
    assert info.rank_used == 2


def test_the_first_steps_keep_eigenvectors_of_scaled_coordinates():
    problem = Problem(L=3, R=4, betas=(0.2, 0.6))
    problem.state = replace(problem.state, step=slang.EIGENVECTOR_STEPS - 1)
    target = problem.target()
    scale = target.diagonal().sqrt()
    base = torch.lerp(problem.state.prec_diag, problem.prior.precision, problem.beta)
    values, vectors = torch.linalg.eigh((target - torch.diag(base)) / scale / scale[:, None])
    low = (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].T * scale * scale[:, None]
    state, _ = problem.step()
    torch.testing.assert_close(state.prec_factor.T @ state.prec_factor, low)
    torch.testing.assert_close(precision_of(state).diagonal(), target.diagonal())


def test_rank_zero_is_the_diagonal():
    problem = Problem(L=0)
    for step in (0, LATE):
        problem.state = replace(problem.state, step=step)
        assert torch.equal(problem.step()[0].prec_diag, problem.step("eig")[0].prec_diag)


def test_a_parameter_that_varies_much_but_alone_does_not_take_the_factor():
    """It would keep it: moving its square between U and d changes nothing."""
    generator = torch.Generator().manual_seed(0)
    problem = Problem(P=5, L=1, R=50, betas=(0.1, 0.1))
    problem.state = replace(problem.state, step=0)
    problem.state.prec_factor.zero_()
    problem.state.prec_diag.fill_(1)
    for _ in range(200):
        problem.rows = torch.randn(50, 5, generator=generator, dtype=torch.float64)
        problem.rows[:, 1:] += 2 * torch.randn(50, 1, generator=generator, dtype=torch.float64)
        problem.rows[:, 0] *= 100
        problem.state, info = problem.step()
    squares = problem.state.prec_factor[0].square() / precision_of(problem.state).diagonal()
    assert squares[0] < 0.1
    assert (squares[1:] > 0.6).all()
    assert info.captured > 0.4


def test_gradients_that_are_not_finite_leave_the_state():
    problem = Problem()
    problem.rows[1, 2] = torch.nan
    before = copy.deepcopy(problem.state)
    with pytest.raises(slangvi.NumericalError, match="gradient of parameter 'a' is not finite"):
        problem.step(in_place=True)
    assert all(torch.equal(getattr(problem.state, name), getattr(before, name)) for name in FIELDS)


# ---- runs


def regression() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -0.2, 3.0], dtype=torch.float64)


def test_an_optimizer_and_the_functional_interface_learn_with_it():
    """Both go by engines that read the graph; weights are held as factors, biases formed."""
    x, y = regression()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    source = torch.Generator().manual_seed(0)
    routes = slangvi.Routes(layers={"0.weight": "factor", "*": "auto"})
    opt = slangvi.SLANG(
        model, num_data=40, rank=2, lr=0.05, projection="em", routes=routes, generator=source, prior_precision=1e-2
    )
    losses = []
    for _ in range(120):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            loss = 0.5 * F.mse_loss(model(x)[:, 0], y)
            loss.backward()
        opt.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    assert 0 < opt.info.captured < 1

    def log_likelihood(params, batch):
        return -0.5 * (batch[1] - batch[0] @ params["w"]).square()

    exact = torch.linalg.solve(x.T @ x + torch.eye(3, dtype=torch.float64), x.T @ y)
    for engine in ("dense", "factored"):
        vi = slangvi.slang.build(
            log_likelihood, num_data=40, rank=2, lr=slangvi.inverse_time(0.5, 0.51), projection="em", engine=engine
        )
        state = vi.init({"w": torch.zeros(3, dtype=torch.float64)})
        for _ in range(300):
            state, _ = vi.update(state, (x, y), generator=source)
        assert float((state.loc - exact).abs().max()) < 0.2


def test_strips_of_columns_make_no_difference(monkeypatch):
    """Rows that are held with U in one tensor, those of a matrix, and the largest of several β."""

    def run() -> list[Tensor]:
        x, y = regression()
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        opt = slangvi.SLANG(model, num_data=40, rank=2, lr=0.05, projection="em", generator=torch.Generator())
        for _ in range(30):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                (0.5 * F.mse_loss(model(x)[:, 0], y)).backward()
            opt.step()
        alone = Problem(betas=(0.2, 0.6)).step()[0]
        return [precision_of(alone), opt.posterior.covariance_matrix]

    whole = run()
    monkeypatch.setattr(products, "_CACHED", 6)
    for one, other in zip(run(), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("joins", [False, True])
def test_first_steps_form_some_columns_of_the_rows_at_a_time(joins, monkeypatch):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    opt = slangvi.SLANG(model, num_data=40, rank=2)
    with opt.sampled_params(train=True):
        F.cross_entropy(model(torch.randn(12, 3).double()), torch.arange(12) % 2).backward()
    state, formed, real = replace(opt._state, prec_factor=randn(2, 50)), [], ScaledEigenvectors._scaled

    def spied(self, part):
        formed.append(part.rows.form().shape)
        return real(self, part)

    def run() -> Tensor:
        gradients = FactoredGradients(opt._spec, opt._rows, state.loc, Routes(layers="factor"))
        gradients.joins_runs = joins
        options = {"prior": opt._hyper.prior(), "lr": Rate(0.1), "projection": "em"}
        return precision_of(slang.update(state, gradients, num_data=40, **options)[0])

    monkeypatch.setattr(ScaledEigenvectors, "_scaled", spied)
    whole, widths = run(), {shape[1] for shape in formed}
    monkeypatch.setattr(projection.factored, "CPU_ENTRIES", 12 * 6)
    formed.clear()
    torch.testing.assert_close(run(), whole)
    assert max(widths) == 24  # a tensor at a time
    assert {shape[0] for shape in formed} == {12}
    assert max(shape[1] for shape in formed) == 8  # six fit, but the weights of an output stay together


def test_it_is_not_captured_and_has_two_words():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match='compile=True needs projection="eig"'):
        slangvi.SLANG(model, num_data=4, rank=1, lr=0.1, projection="em", compile=True)
    with pytest.raises(ValueError, match="projection"):
        slangvi.SLANG(model, num_data=4, rank=1, lr=0.1, projection="svd")
