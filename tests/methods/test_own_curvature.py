"""Curvature by the likelihood instead of by the loss: "ggn" and "fisher" of all methods, in both interfaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import slangvi
from slangvi import Bernoulli, Categorical, Gaussian, UnsupportedModuleError
from slangvi.likelihoods import Likelihood
from slangvi.methods.gather import likelihood_of
from slangvi.settings import CompiledSettings

N = 12
BUILDS = {"slang": slangvi.slang, "mean_field": slangvi.mean_field, "full": slangvi.full}
BUILDS["online_eig"] = slangvi.online_eig
OPTIMIZERS = {
    "slang": slangvi.SLANG,
    "mean_field": slangvi.VOGN,
    "full": slangvi.FullGaussian,
    "online_eig": slangvi.OnlineEig,
}
RANKED = ("slang", "online_eig")


@pytest.fixture
def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, torch.randn(N, 3, dtype=torch.float64), torch.randint(3, (N,))


def gauss_newton(model: nn.Module, x: Tensor, theta: dict[str, Tensor]) -> Tensor:
    """J^T (diag p − p p^T) J summed over examples, at some parameters."""
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)))(theta)
    J = torch.cat([jacobians[name].flatten(2) for name in theta], -1)
    p = functional_call(model, theta, (x,)).softmax(-1)
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.einsum("ncp,ncd,ndq->pq", J, H, J)


def options(method: str, **more: Any) -> dict[str, Any]:
    """One step from nothing but the curvature, at the mean."""
    found = {"num_data": N, "lr": 1e-9, "precision_lr": 1.0, "momentum": 0.0, "precision_warmup": False}
    return found | ({"rank": 40} if method in RANKED else {}) | more


def precision_of(method: str, state: Any) -> Tensor:
    if method == "full":
        return state.prec_matrix
    whole = torch.diag(state.prec_diag)
    return whole + state.prec_factor.mT @ state.prec_factor if method in RANKED else whole


def expected(method: str, curvature: Tensor) -> Tensor:
    prior = torch.eye(len(curvature), dtype=torch.float64)
    return prior + (torch.diag(curvature.diagonal()) if method == "mean_field" else curvature)


def train_once(opt: Any, model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = F.cross_entropy) -> None:
    with opt.sampled_params(train=True):
        opt.zero_grad()
        loss(model(x), y).backward()
    opt.step()


# ---- what the precision becomes


@pytest.mark.parametrize("method", BUILDS)
def test_a_step_of_the_functions_has_the_gauss_newton_matrix_as_curvature(method, problem):
    model, x, y = problem
    vi = BUILDS[method].build(Categorical().of(model), curvature="ggn", **options(method))
    state = vi.init({name: p.detach() for name, p in model.named_parameters()})
    theta = state.spec.unflatten(state.loc)  # first draws are at the mean
    after, info = vi.update(state, (x, y), torch.Generator().manual_seed(0))
    torch.testing.assert_close(precision_of(method, after), expected(method, gauss_newton(model, x, theta)))
    assert info.num_rows == N


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_a_step_of_an_optimizer_has_it_whatever_the_loss(method, problem):
    model, x, y = problem
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    curvature = expected(method, gauss_newton(model, x, theta))
    losses = {
        "label smoothing": lambda f, y: F.cross_entropy(f, y, label_smoothing=0.2),
        "class weights": lambda f, y: F.cross_entropy(f, y, weight=torch.tensor([1.0, 5.0, 0.5]).double()),
        "coupled": lambda f, y: (f - f.mean(0)).square().sum() / N,
    }
    for loss in losses.values():
        model.load_state_dict(theta)
        opt = OPTIMIZERS[method](model, curvature="ggn", likelihood="categorical", **options(method))
        train_once(opt, model, x, y, lambda f, y, loss=loss: 0.1 * loss(f, y))  # a large one tells of misfit
        torch.testing.assert_close(precision_of(method, opt._state), curvature)


@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
def test_few_examples_estimate_the_curvature_without_bias(curvature, problem):
    model, x, y = problem
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    found, whole = [], expected("full", gauss_newton(model, x, theta))
    own = options("full", curvature=curvature, likelihood="categorical", curvature_rows=4)
    for seed in range(400):
        model.load_state_dict(theta)
        opt = slangvi.FullGaussian(model, generator=torch.Generator().manual_seed(seed), **own)
        train_once(opt, model, x, y)
        found.append(opt._state.prec_matrix)
    each = torch.stack(found)
    assert bool(((each.mean(0) - whole).abs() <= 5 * each.std(0) / 20 + 1e-9).all())


def test_draws_and_micro_batches_are_averaged(problem):
    model, x, y = problem
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang"))
    with opt.sampled_params(train=True):
        opt.zero_grad()
        for part in (slice(0, 4), slice(4, N)):
            F.cross_entropy(model(x[part]), y[part]).backward()
    opt.step()
    torch.testing.assert_close(precision_of("slang", opt._state), expected("slang", gauss_newton(model, x, theta)))


def test_the_mean_moves_by_the_gradient_of_the_loss_alone(problem):
    model, x, y = problem
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = options("full", lr=1e-3, curvature="ggn", likelihood="categorical", prior_precision=50.0)
    opt = slangvi.FullGaussian(model, **own)
    start, spec = opt._state.loc.clone(), opt._state.spec
    train_once(opt, model, x, y)
    flat = {name: p.detach().requires_grad_() for name, p in theta.items()}
    loss = N * F.cross_entropy(functional_call(model, flat, (x,)), y)
    gradient = spec.flatten(dict(zip(flat, torch.autograd.grad(loss, list(flat.values())), strict=True)))
    moved = start - opt._state.loc
    expected_move = 1e-3 * torch.linalg.solve(opt._state.prec_matrix, gradient + 50.0 * start)
    torch.testing.assert_close(moved, expected_move)


# ---- clipping


def one_step(model: nn.Module, x: Tensor, y: Tensor, in_loss: float, by_hand: float, draws: int = 1) -> Tensor:
    """The mean after a step whose gradients were multiplied by a factor in the loss, and by another in p.grad."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang", lr=0.05))
    opt.zero_grad()
    for _ in range(draws):
        with opt.sampled_params(train=True):
            (in_loss * F.cross_entropy(model(x), y)).backward()
    if by_hand != 1.0:
        for p in model.parameters():
            p.grad.mul_(by_hand)
    opt.step()
    found = opt.posterior.loc
    model.load_state_dict(start)
    return found


@pytest.mark.parametrize("draws", [1, 3])
def test_what_is_done_to_the_gradient_acts_on_the_mean(draws, problem):
    torch.testing.assert_close(one_step(*problem, 0.3, 1.0, draws), one_step(*problem, 1.0, 0.3, draws))
    assert not torch.allclose(one_step(*problem, 1.0, 1.0, draws), one_step(*problem, 1.0, 0.3, draws))


def test_clipping_by_norm_is_what_torch_does(problem):
    model, x, y = problem
    own = options("full", lr=1e-3, curvature="ggn", likelihood="categorical")
    opt = slangvi.FullGaussian(model, **own)
    start = opt._state.loc.clone()
    with opt.sampled_params(train=True):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    gradient = N * torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float(gradient.norm()) == pytest.approx(N * 1e-3, rel=1e-3)
    opt.step()
    moved = start - opt._state.loc
    torch.testing.assert_close(moved, 1e-3 * torch.linalg.solve(opt._state.prec_matrix, gradient + start))


def test_a_gradient_that_holds_the_last_of_several_passes_cannot_be_clipped(problem):
    model, x, y = problem
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang"))
    before = opt.posterior.loc
    for _ in range(2):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(UnsupportedModuleError, match="does not hold the sum of all passes since the last step"):
        opt.step()
    assert torch.equal(opt.posterior.loc, before)


def test_several_draws_with_zero_grad_between_are_fine_without_clipping(problem):
    model, x, y = problem
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang", lr=0.1))
    for _ in range(2):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
    opt.zero_grad()
    opt.step()
    assert opt.info.num_rows == 2 * N


def scaled_loop(
    model: nn.Module, x: Tensor, y: Tensor, unscales: bool, most: float = 0.0, by_train: bool = False
) -> Any:
    """One step with a real GradScaler; the gradient is unscaled and clipped in the loop if that is asked for."""
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang", lr=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.zero_grad()
    if by_train:
        opt.train()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    else:
        with opt.sampled_params(train=True):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscales:
        scaler.unscale_(opt)
    if most:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    scaler.step(opt)
    scaler.update()
    return opt


@pytest.mark.parametrize("by_train", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_that_a_scaler_has_unscaled_are_followed(unscales, by_train, problem):
    model, x, y = problem
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected_loc = one_step(model, x, y, 1.0, 1.0)
    model.load_state_dict(start)
    torch.testing.assert_close(scaled_loop(model, x, y, unscales, by_train=by_train).posterior.loc, expected_loc)


@pytest.mark.parametrize("by_train", [False, True])
def test_clipping_acts_between_a_scaler_and_the_step(by_train, problem):
    opt = scaled_loop(*problem, unscales=True, most=1e-3, by_train=by_train)
    assert float(opt._state.momentum.norm()) == pytest.approx(N * 1e-3, rel=1e-2)


@pytest.mark.parametrize("way", ["after the block", "in the block", "train and step", "closure"])
def test_clipping_acts_wherever_it_is_done(way, problem):
    model, x, y = problem
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang"))

    def go_back() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    if way == "closure":

        def closure() -> Tensor:
            loss = go_back()
            clip()
            return loss

        opt.step(closure)
    elif way == "train and step":
        opt.train()
        go_back()
        clip()
        opt.step()
    else:
        with opt.sampled_params(train=True):
            go_back()
            if way == "in the block":
                clip()
        if way == "after the block":
            clip()
        opt.step()
    assert float(opt._state.momentum.norm()) == pytest.approx(N * 1e-3, rel=1e-2)


@pytest.mark.parametrize("to_none", [True, False])
def test_loops_that_clip_go_on_after_bad_passes(to_none, problem):
    model, x, y = problem
    own = options("slang", curvature="ggn", likelihood="categorical", max_bad_batches=2)
    opt, bad = slangvi.SLANG(model, **own), x.clone()
    bad[3] = torch.nan
    for k, inputs in enumerate((x, bad, x, x, bad, x)):
        if k == 3:  # a pass that fails half way
            with pytest.raises(KeyError), opt.sampled_params(train=True):
                raise KeyError("no such file")
        opt.zero_grad(set_to_none=to_none)
        with opt.sampled_params(train=True):
            F.cross_entropy(model(inputs), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()
    assert (opt.info.step, opt.num_skipped) == (4, 2)


@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
def test_bad_batches_are_refused_as_others_and_change_nothing(curvature, problem):
    model, x, y = problem
    opt = slangvi.SLANG(model, curvature=curvature, likelihood="categorical", **options("slang"))
    before, bad = opt.posterior.loc, x.clone()
    bad[0] = torch.inf
    with pytest.raises(slangvi.NumericalError, match="is not finite"):
        train_once(opt, model, bad, y)
    assert torch.equal(opt.posterior.loc, before)
    vi = slangvi.slang.build(Categorical().of(model), curvature=curvature, **options("slang"))
    state = vi.init(dict(model.named_parameters()))
    with pytest.raises(slangvi.NumericalError, match="not finite"):
        vi.update(state, (bad, y), torch.Generator())


def test_a_probe_before_backward_is_no_misfit(problem):
    model, x, y = problem
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang"))
    found = []
    for probes in (0, 5):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            for _ in range(probes):
                torch.autograd.grad(loss, model[0].weight, retain_graph=True)
            loss.backward()
        found.append(opt._rows[-1].misfit)
        opt.discard_gradients()
    assert found[1] == pytest.approx(found[0])


def test_clipping_leaves_the_misfit_as_it_was(problem):
    model, x, _ = problem
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([12.0, 0.0, 0.0]))
    traces, start = [], {name: p.detach().clone() for name, p in model.named_parameters()}
    for most in (1e9, 0.1):
        model.load_state_dict(start)
        opt = slangvi.FullGaussian(model, curvature="ggn", likelihood="categorical", **options("full"))
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(model(x), torch.ones(N, dtype=torch.long)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        opt.step()
        traces.append(float(opt._state.prec_matrix.trace()))
    assert traces[1] == pytest.approx(traces[0])


def test_the_pass_of_our_own_is_under_the_autocast_of_the_call():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(N, 3).bfloat16()
    opt = slangvi.SLANG(model, num_data=N, curvature="ggn", likelihood="categorical")
    with opt.sampled_params(train=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
        F.cross_entropy(outputs.float(), torch.zeros(N, dtype=torch.long)).backward()
    opt.step()
    assert opt.info.step == 1


def test_draws_of_first_steps_are_whole_where_nothing_is_learnt(problem):
    model, _, _ = problem
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang"))
    with opt.sampled_params():
        assert not torch.allclose(torch.cat([p.flatten() for p in model.parameters()]), opt._state.loc)
    with opt.sampled_params(train=True):
        assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), opt._state.loc)


# ---- a posterior that is known


def regression() -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """Return a linear model, inputs, targets of noise ½, and the exact posterior's means and standard deviations."""
    torch.manual_seed(0)
    x = torch.randn(60, 4, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.3, 1.0], dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + 0.5 * torch.randn(60, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    exact = 4.0 * x.mT @ x + torch.eye(4, dtype=torch.float64)
    mean, sd = torch.linalg.solve(exact, 4.0 * x.mT @ y), exact.inverse().diagonal().sqrt()
    return model, x, y.unsqueeze(1), mean, sd


def slow_end(step: int) -> float:
    return 0.3 if step < 500 else 0.3 * 5 / (step - 495)


@pytest.mark.parametrize("interface", ["functions", "optimizer"])
def test_linear_regression_has_its_exact_posterior(interface):
    (model, x, y, mean, sd), likelihood = regression(), Gaussian(4.0)
    if interface == "functions":
        own = {"num_data": 60, "rank": 4, "lr": slow_end, "precision_lr": 0.05, "mc_samples": 4}
        vi = slangvi.slang.build(likelihood.of(model), curvature="ggn", **own)
        state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
        for _ in range(1000):
            state, _ = vi.update(state, (x, y), generator)
        q = vi.posterior(state)
    else:
        own = {"num_data": 60, "rank": 4, "lr": 1.0, "precision_lr": 0.05}
        opt = slangvi.SLANG(model, curvature="ggn", likelihood=likelihood, **own)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, slow_end)
        for _ in range(1000):
            train_once(opt, model, x, y, lambda f, y: 2.0 * (f - y).square().mean())
            schedule.step()
        q = opt.posterior
    assert float((q.variance.sqrt() / sd - 1).abs().max()) < 1e-3
    assert float(((q.loc - mean) / sd).abs().max()) < 0.15  # five times 1/√1000, the noise of draws


@pytest.mark.slow
def test_linear_regression_has_its_exact_mean_after_many_draws():
    model, x, y, mean, sd = regression()
    own = {"num_data": 60, "rank": 4, "lr": slow_end, "precision_lr": 0.05, "mc_samples": 4}
    vi = slangvi.slang.build(Gaussian(4.0).of(model), **own)  # curvature and projection are the default
    state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
    for _ in range(6000):
        state, _ = vi.update(state, (x, y), generator)
    q = vi.posterior(state)
    assert float((q.variance.sqrt() / sd - 1).abs().max()) < 1e-3
    assert float(((q.loc - mean) / sd).abs().max()) < 0.02


# ---- what a likelihood decides


@pytest.mark.parametrize(("likelihood", "outputs", "curvature"), [
    ("bernoulli", 1, "ggn"),
    ("categorical", 4, "ggn"),
    ("categorical", 5, "fisher"),
    ("gaussian", 5, "fisher"),
])  # fmt: skip
def test_few_outputs_are_all_taken_and_of_many_one_target_is_drawn(likelihood, outputs, curvature):
    torch.manual_seed(0)
    model, x = nn.Linear(3, outputs), torch.randn(8, 3)
    opt = slangvi.SLANG(model, num_data=8, rank=2, likelihood=likelihood)
    told = slangvi.SLANG(model, num_data=8, rank=2, likelihood=likelihood, curvature=curvature)
    assert (opt.settings.projection, told.settings.projection) == ("em", "em")
    heights = []
    for one in (opt, told):
        with one.sampled_params(train=True):
            one.zero_grad()
            model(x).square().mean().backward()
        heights.append(one._rows[0].height)
        one.discard_gradients()
    assert heights[0] == heights[1]
    assert (heights[0] == 8) == (curvature == "fisher" or outputs <= 2)


@pytest.mark.parametrize("options", [{}, {"likelihood": "categorical", "engine": "dense"},
                                     {"likelihood": "categorical", "compile": True}])  # fmt: skip
def test_the_loss_decides_where_no_likelihood_can(options):
    opt = slangvi.SLANG(nn.Linear(3, 2), num_data=8, **options)
    assert (opt.settings.curvature, opt.settings.projection) == ("ef", "eig")


def test_a_likelihood_without_curvature_leaves_it_to_the_loss():
    class Laplace(Likelihood):
        def log_prob(self, outputs, targets):
            return -(outputs - targets).abs().sum(-1)

        def predictive(self, outputs):
            return outputs

    assert slangvi.SLANG(nn.Linear(3, 2), num_data=8, likelihood=Laplace()).settings.curvature == "ef"

    class Sampled(Laplace):
        def sample(self, outputs, generator=None):
            return outputs + torch.empty_like(outputs).exponential_(generator=generator)

    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    opt = slangvi.SLANG(model, num_data=8, likelihood=Sampled())
    with opt.sampled_params(train=True):
        model(x).square().mean().backward()
    opt.step()
    assert opt.settings.curvature == "auto"


def test_functions_of_outputs_decide_as_well():
    model = nn.Linear(3, 1)
    for function, projection in ((Gaussian().of(model), "em"), (lambda params, batch: -batch @ params["w"], "eig")):
        settings = CompiledSettings(num_data=8, rank=1, lr=0.1).for_likelihood(likelihood_of(function))
        assert settings.projection == projection


# ---- a safe start


@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
@pytest.mark.parametrize("rank", [1, 8])
def test_networks_learn_from_their_first_steps_with_default_rates(curvature, rank):
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    generator = torch.Generator().manual_seed(0)
    own = {"curvature": curvature, "likelihood": "categorical", "curvature_rows": 16, "rank": rank}
    opt = slangvi.SLANG(model, num_data=len(x), generator=generator, on_divergence="ignore", **own)
    for _ in range(250):
        rows = torch.randint(len(x), (100,), generator=generator)
        train_once(opt, model, x[rows], y[rows])
    with torch.no_grad():
        loss = float(F.cross_entropy(model(x), y))
    assert loss < 1.0, f"{loss} nats, where a constant has 2.3"


@pytest.mark.parametrize("width", [4, 50])
@pytest.mark.parametrize("rates", [(1.0, 1.0), (1.0, 1e-6)])
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_no_step_of_the_mean_is_longer_than_allowed(method, rates, width, problem):
    """As √(ΔᵀΛΔ/P), where a large P counts as a hundred."""
    _, x, y = problem
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)).double()
    own = options(method, lr=1.0, curvature="ggn", likelihood="categorical")
    groups = [{"params": list(model[k].parameters()), "lr": rate} for k, rate in zip((0, 2), rates, strict=True)]
    opt = OPTIMIZERS[method](model, groups, **own)
    before = opt._state.loc.clone()
    train_once(opt, model, x, y, lambda f, y: 1e3 * F.cross_entropy(f, y))
    moved = opt._state.loc - before
    length = (moved @ precision_of(method, opt._state) @ moved / min(len(moved), 100)).sqrt()
    assert float(length) == pytest.approx(0.1, rel=1e-6)


def test_rows_grow_where_the_model_is_sure_and_wrong(problem):
    model, x, _ = problem
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([12.0, 0.0, 0.0]))
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    curvature, found = gauss_newton(model, x, theta), []
    for label in (0, 1):
        model.load_state_dict(theta)
        opt = slangvi.FullGaussian(model, curvature="ggn", likelihood="categorical", **options("full"))
        train_once(opt, model, x, torch.full((N,), label))
        found.append(precision_of("full", opt._state) - torch.eye(len(curvature)).double())
    torch.testing.assert_close(found[0], curvature)
    p = functional_call(model, theta, (x,)).softmax(-1)
    wrong = (p - F.one_hot(torch.ones(N, dtype=torch.long), 3)).square().sum(1).mean()
    misfit = float(wrong / (1 - p.square().sum(1)).mean())
    torch.testing.assert_close(found[1], misfit / 1.5 * curvature)


# ---- saving


def test_a_run_goes_on_bit_by_bit(problem, tmp_path):
    model, x, y = problem
    own = options("slang", lr=0.1, precision_lr=0.1, curvature="fisher", likelihood="categorical", curvature_rows=5)
    opt = slangvi.SLANG(model, generator=torch.Generator().manual_seed(3), **own)
    for _ in range(3):
        train_once(opt, model, x, y)
    slangvi.save(tmp_path / "run.safetensors", opt)
    for _ in range(3):
        train_once(opt, model, x, y)
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    again = slangvi.SLANG(other, generator=torch.Generator(), **own)
    slangvi.load(tmp_path / "run.safetensors", again)
    for _ in range(3):
        train_once(again, other, x, y)
    assert torch.equal(opt.posterior.loc, again.posterior.loc)
    assert torch.equal(opt.posterior.prec_factor, again.posterior.prec_factor)


def test_a_resumed_run_calls_the_model_as_often_as_one_that_went_on():
    """Dropout draws from torch's own source, which a loop may restore."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)), torch.randn(N, 3), torch.randint(3, (N,))
    own = {"num_data": N, "curvature": "ggn", "likelihood": "categorical", "curvature_rows": 4}
    opt = slangvi.SLANG(model, generator=torch.Generator().manual_seed(1), **own)
    train_once(opt, model, x, y)
    saved, random, weights = opt.state_dict(), torch.get_rng_state(), copy.deepcopy(model.state_dict())
    train_once(opt, model, x, y)
    after = torch.get_rng_state()
    model.load_state_dict(weights)
    again = slangvi.SLANG(model, generator=torch.Generator(), **own)
    again.load_state_dict(saved)
    torch.set_rng_state(random)
    train_once(again, model, x, y)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(again.posterior.loc, opt.posterior.loc)


# ---- what is refused


def test_a_curvature_of_the_likelihood_needs_one(problem):
    model, _, _ = problem
    with pytest.raises(ValueError, match="curvature='ggn' needs a likelihood, got None"):
        slangvi.SLANG(model, num_data=N, curvature="ggn")
    with pytest.raises(ValueError, match="curvature='fisher' needs a log-likelihood that knows its outputs"):
        slangvi.slang.build(lambda params, batch: batch, num_data=N, rank=1, lr=0.1, curvature="fisher")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"curvature": "gnn", "likelihood": "categorical"}, "curvature must be"),
        ({"curvature": "ggn", "likelihood": "poisson"}, "likelihood must be"),
        ({"curvature": "ggn", "likelihood": "categorical", "engine": "dense"}, 'needs engine="factored"'),
        ({"curvature": "ggn", "likelihood": "categorical", "compile": True}, 'compile=True needs curvature="ef"'),
        ({"curvature": "hessian", "likelihood": "categorical"}, 'curvature must be "ef"'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(bad, message, problem):
    with pytest.raises(ValueError, match=message):
        slangvi.SLANG(problem[0], num_data=N, **bad)


def test_the_functions_refuse_what_the_optimizers_do(problem):
    source = Categorical().of(problem[0])
    for bad, message in (({"engine": "dense"}, "needs engine"), ({"compile": True}, "compile=True needs curvature")):
        with pytest.raises(ValueError, match=message):
            slangvi.slang.build(source, num_data=N, rank=1, lr=0.1, curvature="ggn", **bad)


def test_a_batch_that_is_no_pair_is_refused(problem):
    model, x, y = problem
    vi = slangvi.slang.build(Categorical().of(model), curvature="ggn", **options("slang"))
    state = vi.init(dict(model.named_parameters()))
    for batch in ({"x": x, "y": y}, (x, y, y)):
        with pytest.raises(TypeError, match=r"batch must be a pair \(x, y\)"):
            vi.update(state, batch)


def test_the_functions_know_the_module_of_a_likelihood():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    vi = slangvi.slang.build(Categorical().of(model), num_data=N, rank=1, lr=0.1, curvature="ggn")
    state = vi.init(dict(model.named_parameters()))
    with pytest.raises(UnsupportedModuleError, match="normalises with statistics of the batch"):
        vi.update(state, (torch.randn(N, 3), torch.zeros(N).long()))


def test_outputs_that_do_not_fit_the_likelihood_change_nothing(problem):
    _, x, y = problem
    model = nn.Linear(3, 1).double()
    opt = slangvi.SLANG(model, curvature="ggn", likelihood="categorical", **options("slang"))
    before = opt.posterior.loc
    with pytest.raises(ValueError, match="class probabilities need at least two outputs"):
        train_once(opt, model, x, y, lambda f, y: f.square().mean())
    assert torch.equal(opt.posterior.loc, before)


def test_statistics_of_the_batch_are_refused_as_for_gradients_of_the_loss():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    opt = slangvi.SLANG(model, num_data=N, curvature="ggn", likelihood="categorical")
    x, y = torch.randn(N, 3), torch.zeros(N).long()
    with pytest.raises(UnsupportedModuleError, match="normalises with statistics of the batch"):
        train_once(opt, model, x, y)


def test_binary_outputs_work_in_a_closure_and_report_the_loss():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(N, 3)
    y = (x[:, :1] > 0).float()
    opt = slangvi.SLANG(model, num_data=N, rank=1, curvature="ggn", likelihood=Bernoulli(), mc_samples=2)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        return loss

    losses = [float(opt.step(closure)) for _ in range(60)]
    assert losses[-1] < losses[0]
    assert opt.info.expected_log_likelihood == pytest.approx(-N * losses[-1], rel=1e-5)
