"""Noise and prior learnt in the run, against the exact evidence of linear regression."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import slangvi
from slangvi.estimators import SLANGClassifier, SLANGRegressor
from slangvi.methods import learning

N, P = 200, 6
OPTIMIZERS = {
    "slang": (slangvi.SLANG, {"rank": P}),
    "slang, em": (slangvi.SLANG, {"rank": P, "projection": "em"}),
    "full": (slangvi.FullGaussian, {}),
}
LEARN = {"likelihood": "gaussian", "noise_precision": "learn", "prior_precision": "learn"}


def problem():
    """Return inputs of two groups of columns, whose weights differ in size, and targets."""
    source = torch.Generator().manual_seed(3)
    x = torch.randn(N, P, generator=source, dtype=torch.float64)
    w = torch.randn(P, generator=source, dtype=torch.float64) * torch.tensor([2.0, 2, 2, 0.2, 0.2, 0.2]).double()
    return x, (x @ w + 0.4 * torch.randn(N, generator=source, dtype=torch.float64)).unsqueeze(1)


def evidence_optimum(x, y, groups):
    """Return τ and λ of each group where log N(y | 0, τ⁻¹ I + Σ_g λ_g⁻¹ X_g X_gᵀ) is largest, by scipy."""

    def loss(logs):
        tau, *lams = torch.tensor(logs).exp()
        covariance = torch.eye(len(x)).double() / tau
        for part, lam in zip(groups, lams, strict=True):
            covariance = covariance + x[:, part] @ x[:, part].T / lam
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), covariance)
        return -float(normal.log_prob(y[:, 0]))

    found = minimize(loss, [0.0] * (1 + len(groups)), method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-8})
    return [math.exp(value) for value in found.x]


class Parts(nn.Module):
    """A linear model in two parameters."""

    def __init__(self):
        super().__init__()
        self.big, self.small = (nn.Parameter(torch.zeros(3, 1, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        return x[:, :3] @ self.big + x[:, 3:] @ self.small


def train(opt, x, y, steps, draws=1, batch=N, lr=0.1, source=None):
    """Take steps with a rate that falls to nothing."""
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = 0.5 * lr * (1 + math.cos(math.pi * step / steps))
        pick = torch.arange(N) if batch == N else torch.randint(N, (batch,), generator=source)
        for _ in range(draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                (-opt.likelihood.log_prob(opt.model(x[pick]), y[pick]).mean()).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("curvature", ["ggn", "fisher", "ef"])
def test_learnt_numbers_are_those_of_the_evidence(name, curvature):
    kind, options = OPTIMIZERS[name]
    x, y = problem()
    tau, lam = evidence_optimum(x, y, [slice(0, P)])
    source = torch.Generator().manual_seed(0)
    opt = kind(Parts(), num_data=N, curvature=curvature, generator=source, **LEARN, **options)
    train(opt, x, y, 700)
    assert opt.info.noise_precision == pytest.approx(tau, rel=0.04)
    assert opt.info.prior_precision == pytest.approx({"big": lam, "small": lam}, rel=0.02)
    assert opt.likelihood.noise_precision == opt.info.noise_precision
    assert opt.prior_precision == opt.info.prior_precision


def test_mean_field_has_the_optimum_of_its_own_bound():
    x, y = problem()
    hessian, lam, tau = (x**2).sum(0), 1.0, 1.0
    for _ in range(500):
        variance = 1 / (lam + tau * hessian)
        mean = torch.linalg.solve(lam * torch.eye(P).double() + tau * x.T @ x, tau * x.T @ y)[:, 0]
        lam = P / float((variance + mean**2).sum())
        tau = N / float(((y[:, 0] - x @ mean) ** 2).sum() + (variance * hessian).sum())
    opt = slangvi.VOGN(Parts(), num_data=N, curvature="ggn", generator=torch.Generator().manual_seed(0), **LEARN)
    train(opt, x, y, 700)
    assert opt.info.noise_precision == pytest.approx(tau, rel=0.04)
    assert opt.info.prior_precision["big"] == pytest.approx(lam, rel=0.02)


def test_online_eig_learns_too():
    x, y = problem()
    opt = slangvi.OnlineEig(Parts(), num_data=N, rank=2, generator=torch.Generator().manual_seed(0), **LEARN)
    train(opt, x, y, 300)
    assert 4.0 < opt.info.noise_precision < 8.0
    assert opt.info.prior_precision["big"] == opt.info.prior_precision["small"] != 1.0


@pytest.mark.parametrize(
    "given",
    [
        {"prior_precision": "learn-each"},
        {"prior_precision": {"b*": "learn", "*": "learn"}},
        {"params": "groups", "prior_precision": "learn"},
    ],
    ids=["each", "dict", "groups"],
)
def test_groups_learn_numbers_of_their_own(given):
    x, y = problem()
    tau, big, small = evidence_optimum(x, y, [slice(0, 3), slice(3, 6)])
    model, source = Parts(), torch.Generator().manual_seed(0)
    params = [{"params": [model.big]}, {"params": [model.small]}] if given.pop("params", None) else None
    opt = slangvi.SLANG(model, params, num_data=N, rank=P, curvature="ggn", generator=source, **LEARN | given)
    train(opt, x, y, 900)
    assert opt.info.prior_precision == pytest.approx({"big": big, "small": small}, rel=0.03)
    assert opt.info.noise_precision == pytest.approx(tau, rel=0.04)


def test_given_numbers_stay_beside_learnt_ones():
    x, y = problem()
    given = LEARN | {"prior_precision": {"big": 0.3, "small": "learn"}}
    opt = slangvi.SLANG(Parts(), num_data=N, rank=P, curvature="ggn", **given)
    train(opt, x, y, 200)
    assert list(opt.info.prior_precision) == ["small"]
    lam = torch.tensor([0.3] * 3 + [opt.prior_precision["small"]] * 3, dtype=torch.float64)
    prior = torch.distributions.MultivariateNormal(torch.zeros(P).double(), precision_matrix=lam.diag())
    mine = torch.distributions.MultivariateNormal(opt.posterior.loc, opt.posterior.covariance_matrix)
    assert opt.kl() == pytest.approx(float(torch.distributions.kl_divergence(mine, prior)), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"curvature": "ggn"}, {"model": True}, {"engine": "dense"}, {"curvature": "hessian"}],
    ids=["ggn", "ef", "dense", "hessian"],
)
def test_the_functional_interface_learns_the_same(options):
    x, y = problem()
    tau, lam = evidence_optimum(x, y, [slice(0, P)])
    model = Parts()
    if options.pop("model", None):
        options["model"] = model
    vi = slangvi.full.build(
        slangvi.Gaussian(2.0).of(model),
        num_data=N,
        lr=lambda step: 0.05 * (1 + math.cos(math.pi * min(step, 600) / 601)),
        noise_precision="learn",
        prior_precision="learn",
        **options,
    )
    state, source = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
    for _ in range(600):
        before, old = state, state.learnt.clone()
        state, info = vi.update(state, (x, y), generator=source)
        assert torch.equal(before.learnt, old)
    assert info.noise_precision == pytest.approx(tau, rel=0.04)
    assert info.prior_precision["big"] == pytest.approx(lam, rel=0.02)


def test_temperature_tells_of_the_tempered_bound():
    x, y = problem()
    lam, tau, cold = 1.0, 1.0, 0.25
    for _ in range(500):
        covariance = torch.linalg.inv(lam * torch.eye(P).double() + tau / cold * x.T @ x)
        mean = (covariance @ (tau / cold * x.T @ y))[:, 0]
        lam = P / float(covariance.trace() + mean.square().sum())
        tau = N / float(((y[:, 0] - x @ mean) ** 2).sum() + (x @ covariance * x).sum())
    options = LEARN | {"temperature": cold, "curvature": "ggn", "rank": P}
    opt = slangvi.SLANG(Parts(), num_data=N, generator=torch.Generator().manual_seed(0), **options)
    train(opt, x, y, 700, draws=2)
    assert opt.info.noise_precision == pytest.approx(tau, rel=0.04)
    assert opt.info.prior_precision["big"] == pytest.approx(lam, rel=0.02)


def test_residuals_of_all_draws_and_micro_batches_count(monkeypatch):
    x, y = problem()
    seen = []
    follow = learning.Learning.follow

    def spy(self, before, state, info, prior, beta, residuals):
        seen.append(residuals)
        return follow(self, before, state, info, prior, beta, residuals)

    monkeypatch.setattr(learning.Learning, "follow", spy)
    opt = slangvi.SLANG(Parts(), num_data=N, rank=2, curvature="ggn", accumulation_steps=2, **LEARN)
    squares = []
    for _ in range(3):
        with opt.sampled_params(train=True):
            for part in (slice(0, 10), slice(10, 30)):
                outputs = opt.model(x[part])
                squares.append(float((y[part] - outputs).detach().square().sum()))
                (-opt.likelihood.log_prob(outputs, y[part]).mean() / 2).backward()
        with opt.sampled_params(), torch.no_grad():
            opt.likelihood.log_prob(opt.model(x), y)  # does not count
    opt.step()
    assert seen[0].mean == pytest.approx(sum(squares) / 90)
    assert seen[0].share == 90 / N


def test_nothing_moves_at_first_nor_far_at_once():
    x, y = problem()
    opt = slangvi.SLANG(Parts(), num_data=N, rank=2, curvature="ggn", **LEARN)
    train(opt, x, 1e3 * y, learning.WAIT)
    assert opt.info.noise_precision == 1.0
    assert set(opt.prior_precision.values()) == {1.0}
    last = opt._learning.numbers(opt._state)[1:]
    for _ in range(40):
        train(opt, x, 1e3 * y, 1)
        now = opt._learning.numbers(opt._state)[1:]
        assert 1 / learning.MOST_NOISE <= now[0] / last[0] < 1.1
        assert 1 / learning.MOST <= now[1] / last[1] <= learning.MOST
        last = now
    assert last[0] < 1e-2


def test_numbers_stay_in_their_range():
    x, y = problem()
    opt = slangvi.SLANG(Parts(), num_data=N, rank=2, curvature="ggn", **LEARN)
    least = 1 / learning.RANGE
    opt._state = dataclasses.replace(opt._state, step=10_000, learnt=torch.tensor([0.0, least, 1.0]).double())
    train(opt, x, 1e6 * y, 1)
    assert opt.info.noise_precision == least


def make(seed=0, **others):
    model = Parts()
    with torch.no_grad():
        model.big.fill_(0.1)
    options = LEARN | {"rank": 2, "curvature": "ggn"} | others
    return slangvi.SLANG(model, num_data=N, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("way", ["state_dict", "save", "pickle", "deepcopy"])
def test_a_run_goes_on_bit_by_bit(way, tmp_path):
    x, y = problem()
    whole, source = make(), torch.Generator().manual_seed(5)
    train(whole, x, y, 150, batch=50, source=source)
    if way == "state_dict":
        again = make(1)
        again.load_state_dict(copy.deepcopy(whole.state_dict()))
    elif way == "save":
        slangvi.save(tmp_path / "run", whole)
        again = make(1)
        slangvi.load(tmp_path / "run", again)
    else:
        again = copy.deepcopy(whole) if way == "deepcopy" else pickle.loads(pickle.dumps(whole))
    assert again.prior_precision == whole.prior_precision
    assert again.likelihood.noise_precision == whole.likelihood.noise_precision
    other = torch.Generator()
    other.set_state(source.get_state())
    for opt, order in ((whole, source), (again, other)):
        train(opt, x, y, 30, batch=50, source=order)
    assert torch.equal(again._state.learnt, whole._state.learnt)
    assert torch.equal(again._state.loc, whole._state.loc)


def test_a_functional_state_is_saved_whole(tmp_path):
    x, y = problem()
    model, options = Parts(), {"noise_precision": "learn", "prior_precision": "learn-each"}
    vi = slangvi.slang.build(slangvi.Gaussian().of(model), num_data=N, rank=2, lr=0.1, **options)
    state = vi.init(dict(model.named_parameters()))
    for _ in range(120):
        state, _ = vi.update(state, (x, y), generator=torch.Generator().manual_seed(0))
    slangvi.save(tmp_path / "state", state)
    loaded = slangvi.load(tmp_path / "state")
    one, two = (vi.update(each, (x, y), generator=torch.Generator().manual_seed(1))[0] for each in (state, loaded))
    assert torch.equal(one.learnt, two.learnt)
    assert torch.equal(one.loc, two.loc)


def test_a_step_that_fails_or_is_skipped_changes_nothing():
    x, y = problem()
    opt = make(max_bad_batches=1)
    train(opt, x, y, 130)
    learnt, loc = opt._state.learnt, opt._state.loc.clone()
    with opt.sampled_params(train=True):
        (-opt.likelihood.log_prob(opt.model(x * math.inf), y).mean()).backward()
    opt.step()
    assert opt.num_skipped == 1
    assert opt._state.learnt is learnt
    assert torch.equal(opt._state.loc, loc)
    opt.zero_grad()
    with opt.sampled_params(train=True):
        (0.5 * nn.functional.mse_loss(opt.model(x), y)).backward()
    with pytest.raises(RuntimeError, match=r"opt\.likelihood\.log_prob"):
        opt.step()
    assert opt._state.learnt is learnt
    train(opt, x, y, 1)


def test_what_joins_makes_the_numbers_wait():
    x, y = problem()
    model = Parts()
    opt = slangvi.SLANG(model, [model.big], num_data=N, rank=2, curvature="ggn", **LEARN)
    train(opt, x, y, 130)
    before = opt._learning.numbers(opt._state)
    opt.add_param_group({"params": [model.small]})
    assert opt._learning.numbers(opt._state) == [1.0, *before[1:], 1.0]
    train(opt, x, y, 100)
    assert opt.prior_precision["small"] not in (1.0, opt.prior_precision["big"])


def test_settings_of_groups_cannot_begin_to_learn_on_the_way():
    x, y = problem()
    opt = make()
    train(opt, x, y, 3)
    opt.param_groups[0]["prior_precision"] = 3.0
    with pytest.raises(ValueError, match="Set prior_precision back"):
        opt.kl()
    opt.param_groups[0]["prior_precision"] = "learn"
    train(opt, x, y, 3)


def test_a_file_of_another_run_is_refused():
    for ours, theirs, said in (
        ({}, {"noise_precision": None}, "learns no noise precision and 1 prior precisions"),
        ({"noise_precision": None, "prior_precision": 1.0}, {}, "this optimizer learns neither noise nor prior"),
        ({"prior_precision": "learn-each"}, {}, "learns the noise precision and 2 prior precisions"),
    ):
        opt = make(**ours)
        before = opt._state.loc.clone()
        with pytest.raises(ValueError, match=said):
            opt.load_state_dict(make(**theirs).state_dict())
        assert torch.equal(opt._state.loc, before)


def linear():
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: slangvi.SLANG(linear(), num_data=3, noise_precision="learn"), "needs Gaussian targets, got None"),
        (
            lambda: slangvi.VOGN(linear(), num_data=3, noise_precision="learn", likelihood="categorical"),
            "needs Gaussian targets, got Categorical",
        ),
        (lambda: slangvi.SLANG(linear(), num_data=3, noise_precision=2.0, likelihood="gaussian"), "'learn', got 2.0"),
        (
            lambda: slangvi.slang.build(lambda p, b: p, num_data=3, rank=1, lr=0.1, noise_precision="learn"),
            r"Gaussian\(\).of\(model\) to build",
        ),
        (lambda: slangvi.SLANG(linear(), num_data=3, prior_precision={"no": "learn"}), "matches no parameter"),
        (lambda: slangvi.SLANG(linear(), num_data=3, prior_precision="learnt"), "must be a number, got 'learnt'"),
        (lambda: slangvi.SLANG(linear(), num_data=3, init_precision="learn"), "init_precision must be a number here"),
        (
            lambda: slangvi.SLANG(linear(), num_data=3, prior_precision="learn", compile=True),
            "needs a prior_precision that",
        ),
        (
            lambda: slangvi.SLANG(
                linear(), num_data=3, noise_precision="learn", likelihood="gaussian", compile=True, on_divergence="warn"
            ),
            "Drop noise_precision",
        ),
        (lambda: slangvi.BBB(linear(), num_data=3, prior_precision="learn"), "SLANG, VOGN, FullGaussian and OnlineEig"),
        (
            lambda: slangvi.MCDropout(
                nn.Sequential(nn.Dropout(), linear()), num_data=3, prior_precision={"*": "learn"}
            ),
            "SLANG, VOGN, FullGaussian and OnlineEig",
        ),
        (
            lambda: slangvi.replicas.build(
                lambda p, b, c: p, num_replicas=2, num_data=3, rank=1, lr=0.1, prior_precision="learn"
            ).init({"w": torch.zeros(2)}),
            "SLANG, VOGN, FullGaussian and OnlineEig",
        ),
    ],
)
def test_bad_input_is_refused(build, said):
    with pytest.raises((ValueError, TypeError), match=said):
        build()


def test_states_of_other_builds_are_refused_or_begin_to_learn():
    x, y = problem()
    model, common = Parts(), {"num_data": N, "rank": 1, "lr": 0.1}
    source = slangvi.Gaussian().of(model)
    plain = slangvi.slang.build(source, **common)
    one, each = (slangvi.slang.build(source, prior_precision=f"learn{end}", **common) for end in ("", "-each"))
    state, _ = plain.update(plain.init(dict(model.named_parameters())), (x, y))
    state, info = one.update(state, (x, y))
    assert info.prior_precision == {"big": 1.0, "small": 1.0}
    with pytest.raises(ValueError, match="a run that learns no noise precision and 1 prior precisions"):
        each.update(state, (x, y))


def test_estimators_learn_the_prior():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=source)
    y = x[:, 0] + 0.1 * torch.randn(120, generator=source)
    options = {"hidden_layer_sizes": (5,), "max_iter": 30, "random_state": 0, "mc_samples": 1}
    fitted = SLANGRegressor(prior_precision={"*bias": 0.5, "*": "learn"}, **options).fit(x.numpy(), y.numpy())
    assert fitted.prior_precision_["0.bias"] == 0.5
    assert fitted.prior_precision_["0.weight"] == pytest.approx(fitted.prior_precision_["2.weight"], rel=1e-5) != 1.0
    fitted.warm_start = True
    before = fitted.prior_precision_["0.weight"]
    assert fitted.fit(x.numpy(), y.numpy()).prior_precision_["0.weight"] not in (1.0, before)
    classes = SLANGClassifier(prior_precision="learn-each", **options).fit(x.numpy(), (y > 0).numpy())
    assert len(set(classes.prior_precision_.values())) == 4


def test_diagnosis_sees_what_was_learnt():
    x, y = problem()
    opt = train(make(), x, y, 150)
    options = {"num_data": N, "rank": 2, "lr": 0.1, "noise_precision": "learn", "prior_precision": "learn"}
    found = slangvi.diagnosis.diagnose_state(
        opt._state, slangvi.Gaussian().of(opt.model), (x, y), curvature="ggn", **options
    )
    assert 0 < found.effective_parameters <= P


# ---- numbers that are of the parameters they were learnt for


def test_the_order_of_a_dict_does_not_matter():
    x, y = problem()
    one = make(prior_precision={"big": "learn", "*": "learn"})
    train(one, x, y, 130)
    other = make(1, prior_precision={"*": "learn", "big": "learn"})
    other.load_state_dict(one.state_dict())
    assert other.prior_precision == one.prior_precision
    assert torch.equal(other._prior().precision, one._prior().precision)


def test_numbers_of_other_parameters_are_refused():
    x, y = problem()
    names = [name for name, _ in Parts().named_parameters()]
    one = make(prior_precision={names[0]: "learn", "*": 1.0})
    train(one, x, y, 110)
    other = make(prior_precision={names[1]: "learn", "*": 1.0})
    before = other._state
    with pytest.raises(ValueError, match="learns prior precisions of other parameters"):
        other.load_state_dict(one.state_dict())
    assert other._state is before
    one.param_groups[0]["prior_precision"] = {names[1]: "learn", "*": 1.0}
    with pytest.raises(ValueError, match="of other parameters than the 1 that the run began with"):
        train(one, x, y, 1)


def test_residuals_without_a_backward_pass_do_not_count():
    x, y = problem()
    runs = [make(), make(), make()]
    for k, opt in enumerate(runs):
        train(opt, x, y, 120)
        with opt.sampled_params(train=True):
            opt.zero_grad()
            if k == 1:  # a pass that is given up
                (-opt.likelihood.log_prob(opt.model(x), y + 30).mean()).backward()
                opt.discard_gradients()
                opt.zero_grad()
            if k == 2:  # a number to be logged
                opt.likelihood.log_prob(opt.model(x), y + 30).mean().detach()
            (-opt.likelihood.log_prob(opt.model(x), y).mean()).backward()
        opt.step()
    taus = [opt.info.noise_precision for opt in runs]
    assert taus[1:] == pytest.approx([taus[0]] * 2, rel=1e-6)


def test_a_kept_likelihood_has_the_noise_of_a_run_that_is_loaded():
    x, y = problem()
    one, other = make(), make(1)
    train(one, x, y, 130)
    kept = other.likelihood
    other.load_state_dict(one.state_dict())
    assert kept.noise_precision == one.likelihood.noise_precision != 1.0


def test_a_class_made_from_gaussian_is_not_replaced():
    class Masked(slangvi.Gaussian):
        def log_prob(self, outputs, targets):
            return super().log_prob(outputs[:, :1], targets[:, :1])

    with pytest.raises(ValueError, match="not even a class made from it"):
        make(likelihood=Masked())
    with pytest.raises(ValueError, match="not even a class made from it"):
        slangvi.slang.build(Masked().of(Parts()), num_data=N, rank=1, lr=0.1, noise_precision="learn")


def test_functions_that_learn_nothing_refuse_a_state_that_did():
    x, y = problem()
    model = Parts()
    likelihood, own = slangvi.Gaussian().of(model), {"num_data": N, "rank": 1, "lr": 0.1}
    learning_run = slangvi.slang.build(likelihood, noise_precision="learn", **own)
    state, _ = learning_run.update(learning_run.init(dict(model.named_parameters())), (x, y))
    with pytest.raises(ValueError, match="these settings learn neither noise nor prior"):
        slangvi.slang.build(likelihood, **own).update(state, (x, y))


def test_other_ways_than_those_saved_are_told():
    x, y = problem()
    one, other = make(), make(projection="eig")
    train(one, x, y, 2)
    with pytest.warns(UserWarning, match="saved with projection=em, and this optimizer has projection=eig"):
        other.load_state_dict(one.state_dict())
