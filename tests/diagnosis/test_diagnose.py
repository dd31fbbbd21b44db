"""Diagnosis of optimizers, states and estimators: numbers against dense oracles, and nothing changed."""

from __future__ import annotations

import builtins
import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import CLASSES, N, assert_identical, backward, make, model_and_data, train
from slangvi.diagnosis import api, diagnose_state
from slangvi.likelihoods import Categorical

GAUSSIAN = [name for name in CLASSES if name != "MCDropout"]


def trained(name="SLANG", dtype=torch.float64, steps=4, **options):
    kind, given = CLASSES[name]
    model, x, y = model_and_data(dtype=dtype)
    settings = {"num_data": N, "lr": 0.05, "prior_precision": {"0.*": 1.0, "*": 2.0}} | given | options
    opt = kind(model, generator=torch.Generator().manual_seed(1), **settings)
    return train(opt, x, y, steps=steps), x, y


def rows_at(model, thetas, x, y, spec):
    """Gradients of each example at each draw by torch.func, (S, M, P)."""

    def loss(flat, xi, yi):
        out = torch.func.functional_call(model, spec.unflatten(flat), (xi[None],))
        return F.cross_entropy(out, yi[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    return torch.stack([each(theta, x, y) for theta in thetas])


# ---- numbers


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_effective_parameters_layers_and_kl_are_those_of_the_dense_covariance(name, dtype):
    opt, _, _ = trained(name, dtype)
    report, q = slangvi.diagnose(opt), opt.posterior
    sigma = q.covariance_matrix.double()
    lam = torch.cat([torch.full((25,), 1.0), torch.full((18,), 2.0)]).double()
    assert report.effective_parameters == pytest.approx(float(len(lam) - (lam.diag() @ sigma).trace()), rel=1e-3)
    assert report.kl == pytest.approx(opt.kl(), rel=1e-6)
    assert (report.method, report.step, report.num_params) == (name, 4, 43)
    assert [layer.name for layer in report.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for layer, part in zip(report.layers, q.param_spec.slices.values(), strict=True):
        sd = sigma.diagonal()[part].sqrt()
        assert layer.size == len(sd)
        assert layer.stddev == pytest.approx(float(sd.median()), rel=1e-4)
        assert (layer.smallest, layer.largest) == pytest.approx((float(sd.min()), float(sd.max())), rel=1e-4)
        assert layer.prior_stddev == pytest.approx(float(lam[part].rsqrt().median()))
        assert layer.ratio == pytest.approx(float((sd * lam[part].sqrt()).median()), rel=1e-4)
        assert layer.signal_to_noise == pytest.approx(float((q.loc[part].abs() / sd).median()), rel=1e-4)
        assert layer.effective == pytest.approx(float((1 - lam[part] * sd.square()).sum()), rel=1e-3, abs=1e-4)
        assert layer.start_ratio == pytest.approx(float(sd.median()), rel=1e-4)


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_numbers_of_a_batch_are_those_of_a_loop_over_its_examples(name, reduction):
    opt, x, y = trained(name, loss_reduction=reduction, temperature=0.5)
    loss = lambda out, y: F.cross_entropy(out, y, reduction=reduction)  # noqa: E731
    report = slangvi.diagnose(opt, (x, y), loss, draws=3, seed=11)
    state = opt._state
    thetas = state.precision.sample((3,), torch.Generator().manual_seed(11), state.loc)
    rows = rows_at(opt.model, thetas, x, y, state.spec)
    flat, lam = rows.flatten(0, 1), opt._hyper.prior().precision
    curvature = (N / 0.5) / len(flat) * flat.T @ flat
    diagonal = lam + curvature.diagonal()
    spectrum = torch.linalg.eigvalsh(curvature / (diagonal[:, None] * diagonal).sqrt()).flip(0)
    rank = {"FullGaussian": 43}.get(name, CLASSES[name][1].get("rank", 0))
    assert report.spectrum[:5] == pytest.approx(spectrum[:5].tolist())
    assert report.captured == pytest.approx(float(spectrum[:rank].sum() / spectrum.sum()))
    within = torch.stack([(r @ r.T).sum() - r.square().sum() for r in rows]).sum() / (3 * 12 * 11)
    across = sum((rows[s].sum(0) @ rows[t].sum(0)) - (rows[s] * rows[t]).sum() for s in range(3) for t in range(s)) / (
        3 * 12 * 11
    )
    by_example = flat.square().sum(1).mean() - within
    expected = float(by_example / across) if across > 0 else math.inf
    assert report.gradient_noise == pytest.approx(expected)
    # The 12 examples took part in two draws of each step.
    by_draw = max(float(within - across), 0.0)
    assert report.step_examples == 24
    assert report.draw_share == pytest.approx(by_draw / (by_draw + float(by_example) / 24))


def test_shrinkage_is_against_the_dense_precision_of_all_data():
    opt, x, y = trained(num_data=12)
    report = slangvi.diagnose(opt, (x, y), F.cross_entropy, draws=2)
    state, lam = opt._state, opt._hyper.prior().precision
    thetas = state.precision.sample((2,), torch.Generator().manual_seed(0), state.loc)
    flat = rows_at(opt.model, thetas, x, y, state.spec).flatten(0, 1)
    curvature = 12 / len(flat) * flat.T @ flat
    reference = torch.linalg.inv(lam.diag() + curvature).diagonal()
    informed = torch.minimum(reference, 1 / (lam + curvature.diagonal())) * lam < 0.9
    expected = (opt.posterior.variance / reference)[informed].sqrt().median()
    assert report.coverage == 1.0
    assert report.shrinkage == pytest.approx(float(expected), rel=1e-6)


def test_a_state_of_the_functional_interface_gives_the_same_numbers():
    opt, x, y = trained(steps=3)
    options = {"num_data": N, "rank": 2, "lr": 0.05, "prior_precision": {"0.*": 1.0, "*": 2.0}}
    likelihood = Categorical().of(opt.model)
    by_state = diagnose_state(opt._state, likelihood, (x, y), info=opt.info, **options)
    by_optimizer = slangvi.diagnose(opt, (x, y), F.cross_entropy)
    one, other = by_state.to_dict(), by_optimizer.to_dict()
    assert (one.pop("method"), other.pop("method")) == ("slang", "SLANG")
    for name in one.keys() - {"findings", "layers"}:
        assert one[name] == pytest.approx(other[name]), name
    assert by_state.layers == by_optimizer.layers
    assert [f.level for f in by_state.findings] == [f.level for f in by_optimizer.findings]


METHODS = {"slang": {"rank": 1}, "online_eig": {"rank": 1}, "mean_field": {}, "full": {}, "bbb": {}}


@pytest.mark.parametrize("name", METHODS)
def test_every_functional_method_can_be_diagnosed(name):
    def log_likelihood(params, batch):
        return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2

    options = {"num_data": 30, "lr": 0.1, **METHODS[name]}
    vi, generator = getattr(slangvi, name).build(log_likelihood, **options), torch.Generator().manual_seed(0)
    state = vi.init({"w": torch.zeros(3)})
    batch = {"x": torch.randn(30, 3, generator=generator), "y": torch.randn(30, generator=generator)}
    for _ in range(3):
        state, info = vi.update(state, batch, generator=generator)
    report = diagnose_state(state, log_likelihood, batch, info=info, **options)
    sigma = vi.posterior(state).covariance_matrix
    assert report.effective_parameters == pytest.approx(float(3 - sigma.trace()), rel=1e-4, abs=1e-4)
    assert report.shrinkage is not None
    assert report.batch_examples == report.step_examples == 30
    left = {"bbb": None}.get(name, 0.25)  # β warms up: 1/2, 1/3, 1/4 average all there was
    assert report.start_share == (left if left is None else pytest.approx(left))


def test_a_share_of_the_start_is_the_product_over_the_schedule():
    vi = slangvi.slang.build(
        lambda params, x: -(params["w"] * x).square().sum(-1),
        num_data=4,
        rank=1,
        lr=lambda step: 0.5 / step,
        precision_warmup=False,
    )
    state = vi.init({"w": torch.ones(2)})
    for _ in range(3):
        state, _ = vi.update(state, torch.ones(4, 2))
    options = {"num_data": 4, "rank": 1, "precision_warmup": False}
    report = diagnose_state(state, lr=lambda step: 0.5 / step, **options)
    assert report.start_share == pytest.approx(0.5 * 0.75 * (1 - 0.5 / 3))


@pytest.mark.parametrize(("warms_up", "expected"), [(False, 0.9**5), (True, 1 / 6)])
def test_a_share_of_the_start_of_an_optimizer(warms_up, expected):
    opt, _, _ = trained(steps=5, precision_lr=0.1, precision_warmup=warms_up)
    assert slangvi.diagnose(opt).start_share == pytest.approx(expected)


def test_a_rate_that_falls_is_averaged_as_recorded_or_over_its_ends():
    model, x, y = model_and_data()
    opt, history = make(model, precision_warmup=False, lr=0.2), slangvi.History()
    slangvi.track(opt, history)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.5, total_iters=4)
    train(opt, x, y, steps=4, sched=schedule)
    assert history["lr"] == pytest.approx([0.2, 0.175, 0.15, 0.125])
    assert slangvi.diagnose(opt, history=history).start_share == pytest.approx((1 - 0.1625) ** 4)
    assert slangvi.diagnose(opt).start_share == pytest.approx((1 - 0.15) ** 4)


def test_the_way_of_the_mean_is_told_where_its_start_is_known():
    model, x, y = model_and_data()
    begun = copy.deepcopy(model.state_dict())
    opt = train(make(model), x, y)
    report = slangvi.diagnose(opt, start=begun)
    before = torch.cat([value.flatten() for value in begun.values()])
    distance = (opt.posterior.loc - before) / opt.posterior.variance.sqrt()
    assert report.moved == pytest.approx(float(distance.square().mean().sqrt()))
    assert report.layers[0].moved == pytest.approx(float(distance[:20].square().mean().sqrt()))
    assert slangvi.diagnose(opt).moved is slangvi.diagnose(opt).layers[0].moved is None


@pytest.mark.parametrize(
    ("examples", "draws", "expected"),
    [(300, 4, (2, 128)), (40, 4, (3, 120)), (10, 4, (4, 40)), (300, 1, (1, 128)), (64, 2, (2, 128))],
)
def test_a_large_batch_gives_up_draws_first_and_then_examples(monkeypatch, examples, draws, expected):
    monkeypatch.setattr(api, "MOST_ROWS", 128)
    seen, real = [], api.BatchCurvature
    monkeypatch.setattr(api, "BatchCurvature", lambda *given: seen.append(real(*given)) or seen[-1])
    model = nn.Linear(3, 2)
    opt = slangvi.SLANG(model, num_data=1000, rank=1)
    x, y = torch.randn(examples, 3), torch.randint(2, (examples,))
    report = slangvi.diagnose(opt, (x, y), F.cross_entropy, draws=draws)
    options = {"num_data": 1000, "rank": 1}
    likelihood = Categorical().of(model)
    by_state = diagnose_state(opt._state, likelihood, (x, y), draws=draws, lr=0.05, **options)
    assert report.batch_examples == by_state.batch_examples == examples
    assert [(curvature.num_draws, curvature.height) for curvature in seen] == [expected, expected]
    # Of large networks fewer rows are taken.
    monkeypatch.setattr(api, "LEAST_ROWS", 16)
    monkeypatch.setattr(api, "ENTRIES", 8 * 20)
    slangvi.diagnose(opt, (x, y), F.cross_entropy, draws=draws)
    assert seen.pop().height <= max(20, 2 * 10)
    # The same examples are taken at every draw.
    for name in ("spectrum", "gradient_noise", "draw_share", "coverage"):
        assert getattr(by_state, name) == pytest.approx(getattr(report, name), rel=1e-4)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Linear(3, 2), nn.Linear(2, 2)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, wide, deep):
        return self.wide(wide) + self.deep(deep) + self.nothing.sum()


def test_inputs_may_be_several_and_parameters_empty():
    torch.manual_seed(0)
    opt = slangvi.SLANG(TwoInputs(), num_data=20, rank=1)
    wide, deep, y = torch.randn(20, 3), torch.randn(20, 2), torch.arange(20) % 2
    by_place = slangvi.diagnose(opt, ((wide, deep), y), F.cross_entropy)
    by_name = slangvi.diagnose(opt, ({"deep": deep, "wide": wide}, y), F.cross_entropy)
    assert by_place.spectrum == by_name.spectrum
    assert sorted(layer.name for layer in by_place.layers) == ["deep.bias", "deep.weight", "wide.bias", "wide.weight"]


# ---- nothing is changed


def everything(opt):
    """All that a step could depend on, apart from the state itself."""
    return {
        "handed out": opt._handed_out,
        "unrecorded": set(opt._recorder.unrecorded),
        "warned": set(opt._warned),
        "gradients": [id(p.grad) for p in opt.model.parameters()],
        "modes": [module.training for module in opt.model.modules()],
        "hooks": [len(m._forward_hooks) for m in opt.model.modules()],
        "parameter hooks": [len(p._post_accumulate_grad_hooks or {}) for p in opt.model.parameters()],
        "rows": len(opt._rows),
        "info": id(opt.info),
        "state": id(opt._state),
    }


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.parametrize("own_generator", [True, False], ids=["generator", "global"])
def test_later_steps_are_the_same_bit_by_bit(name, own_generator):
    kind, given = CLASSES[name]

    def start():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))
        generator = torch.Generator().manual_seed(1) if own_generator else None
        opt = kind(model, num_data=N, lr=0.05, generator=generator, **given)
        opt.model[2].eval()  # a mode of its own
        return opt

    _, x, y = model_and_data(dtype=torch.float32)
    opts = start(), start()
    for opt in opts:
        torch.manual_seed(8)
        for step in range(6):
            train(opt, x, y, steps=1)
            if opt is opts[0] and step in (1, 2, 4):
                state = torch.get_rng_state()
                before = everything(opt)
                slangvi.diagnose(opt, (x, y), F.cross_entropy, history=slangvi.History())
                slangvi.diagnose(opt, closure=lambda opt=opt: F.cross_entropy(opt.model(x), y))
                slangvi.diagnose(opt)
                assert everything(opt) == before
                assert torch.equal(torch.get_rng_state(), state)
    assert_same_tensors(*opts)


def assert_same_tensors(a, b):
    assert_identical(a, b)
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    if a.generator is not None:
        assert torch.equal(a.generator.get_state(), b.generator.get_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GAUSSIAN)
def test_later_steps_on_a_gpu_are_the_same_bit_by_bit(name):
    kind, given = CLASSES[name]
    runs = []
    for diagnosed in (True, False):
        model, x, y = model_and_data(dtype=torch.float32)
        model, x, y = model.cuda(), x.cuda(), y.cuda()
        opt = kind(model, num_data=12, lr=0.05, generator=torch.Generator("cuda").manual_seed(1), **given)
        for _ in range(3):
            train(opt, x, y, steps=1)
            if diagnosed:
                state = torch.cuda.get_rng_state()
                report = slangvi.diagnose(opt, (x, y), F.cross_entropy)
                assert report.shrinkage is not None
                assert torch.equal(torch.cuda.get_rng_state(), state)
        runs.append(opt)
    assert_same_tensors(*runs)


def test_gradients_collected_for_the_next_step_stay():
    runs = []
    for diagnosed in (True, False):
        model, x, y = model_and_data()
        opt = make(model)
        with opt.sampled_params(train=True):
            backward(F.cross_entropy(model(x), y))
        if diagnosed:
            slangvi.diagnose(opt, (x, y), F.cross_entropy)
            assert opt.has_gradients
        opt.step()
        runs.append(opt)
    assert_identical(*runs)


def test_it_works_where_gradients_are_off_and_under_autocast():
    opt, x, y = trained(dtype=torch.float32)
    expected = slangvi.diagnose(opt, (x, y), F.cross_entropy)
    with torch.no_grad():
        assert slangvi.diagnose(opt, (x, y), F.cross_entropy).spectrum == expected.spectrum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert slangvi.diagnose(opt, (x, y), F.cross_entropy).layers == expected.layers


def test_a_loss_with_parameters_of_its_own_leaves_their_gradients_alone():
    opt, x, y = trained()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    slangvi.diagnose(opt, closure=lambda: scale * F.cross_entropy(opt.model(x), y))
    assert scale.grad is None


def test_weights_come_back_when_the_closure_fails():
    opt, x, y = trained()
    before = [p.detach().clone() for p in opt.model.parameters()]
    with pytest.raises(ZeroDivisionError):
        slangvi.diagnose(opt, closure=lambda: 1 / 0)
    assert all(torch.equal(p, q) for p, q in zip(opt.model.parameters(), before, strict=True))
    assert opt.model.training
    slangvi.diagnose(opt, (x, y), F.cross_entropy)  # and nothing stands in the way of the next


# ---- what it gives


@pytest.fixture
def report():
    opt, x, y = trained(mc_samples=2)
    history = slangvi.History()
    slangvi.track(opt, history)
    for _ in range(15):
        opt.step(lambda: backward(F.cross_entropy(opt.model(x), y)))
    return slangvi.diagnose(opt, (x, y), F.cross_entropy, history=history)


def test_the_text_has_a_table_and_all_findings(report):
    text = str(report)
    assert text.startswith("SLANG after 19 steps: 43 parameters, rank 2, N = 40.\nEffective parameters ")
    lines = text.split("\n")
    assert lines[3].split() == [
        *("layer", "size", "sd", "smallest", "largest", "prior", "sd", "ratio", "|mean|/sd", "effective", "moved")
    ]
    assert [line.split()[0] for line in lines[4:8]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len({len(line) for line in lines[3:8]}) == 1
    assert [line.split()[0] for line in lines[9:] if line[0] != " "] == [each.level for each in report.findings]
    assert max(map(len, lines)) <= 110
    joined = " ".join(text.split())
    assert all(f"{each.level} {each.name}: {each.sentence}" in joined for each in report.findings)
    assert report["rank"] is next(f for f in report.findings if f.name == "rank")
    with pytest.raises(KeyError, match="'colour' was not looked at; there are rank, "):
        report["colour"]


def test_the_dict_goes_through_json(report):
    again = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert again["effective_parameters"] == report.effective_parameters
    assert again["curves"]["step"] == list(range(5, 20))
    assert again["layers"][0]["name"] == "0.weight"
    assert again["findings"][0]["sentence"] == report.findings[0].sentence


def test_the_picture_has_a_panel_for_all_that_is_known(report, tmp_path):
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure = report.plot(tmp_path / "diagnosis.png")
    layers, spectrum, curves = figure.axes
    assert [label.get_text() for label in layers.get_yticklabels()] == [layer.name for layer in report.layers]
    assert layers.lines[len(report.layers)].get_xdata() == pytest.approx([layer.ratio for layer in report.layers])
    assert spectrum.lines[0].get_ydata() == pytest.approx(report.spectrum)
    assert [line.get_label() for line in curves.lines] == ["loss", "kl"]
    assert (tmp_path / "diagnosis.png").stat().st_size > 1000
    opt, _, _ = trained("BBB")
    assert len(slangvi.diagnose(opt).plot().axes) == 1
    plt.close("all")


def test_without_matplotlib_the_extra_is_named(report, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pictures need matplotlib: pip install 'slangvi\[plot\]'"):
        report.plot()


def estimator(kind, **options):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(2)).numpy()
    given = {"hidden_layer_sizes": (4,), "rank": 2, "max_iter": 3, "prior_precision": 2.0, "random_state": 0} | options
    y = x[:, 0] if kind == "SLANGRegressor" else (x[:, 0] > 0).astype(int)
    return getattr(slangvi, kind)(**given).fit(x, y), x, y


@pytest.mark.parametrize("kind", ["SLANGClassifier", "SLANGRegressor"])
def test_a_fitted_estimator_is_looked_at(kind):
    fitted, x, y = estimator(kind)
    report = slangvi.diagnose(fitted)
    assert (report.method, report.num_data, report.rank) == (kind, 40, 2)
    variances = fitted.posterior_.variance.double()
    assert report.effective_parameters == pytest.approx(float((1 - 2.0 * variances).sum()), abs=1e-4)
    assert report.layers[0].start_ratio is None  # "auto" chose it
    with pytest.raises(TypeError, match=r"loss and closure need an optimizer, got SLANG.*diagnose\(estimator"):
        slangvi.diagnose(fitted, (x, y), F.mse_loss)
    with pytest.raises(TypeError, match="batch must be a pair of inputs and targets, got ndarray"):
        slangvi.diagnose(fitted, x)


@pytest.mark.parametrize("kind", ["SLANGClassifier", "SLANGRegressor"])
def test_rows_of_an_estimator_have_the_curvature_of_its_scaled_rows(kind):
    fitted, x, y = estimator(kind)
    report = slangvi.diagnose(fitted, (x, y), draws=2)
    scaled = torch.from_numpy((x - x.mean(0)) / x.std(0)).float()
    goal = torch.from_numpy(y) if kind == "SLANGClassifier" else torch.from_numpy((y - y.mean()) / y.std())[:, None]
    likelihood = Categorical()
    if kind == "SLANGRegressor":
        likelihood = slangvi.Gaussian(float((y.std() / fitted.noise_std_) ** 2))
    options = {"num_data": 40, "rank": 2, "lr": 0.1, "prior_precision": 2.0}
    expected = diagnose_state(fitted.state_, likelihood.of(fitted.module_), (scaled, goal), draws=2, **options)
    assert report.batch_examples == 40
    for name in ("spectrum", "shrinkage", "gradient_noise"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-5), name


# ---- what it refuses


def test_what_has_no_gaussian_is_refused():
    opt, _, _ = trained("MCDropout")
    with pytest.raises(TypeError, match="MCDropout has no Gaussian posterior"):
        slangvi.diagnose(opt)
    with pytest.raises(TypeError, match=r"opt must be one of slangvi's optimizers.*got Adam"):
        slangvi.diagnose(torch.optim.Adam(opt.model.parameters()))
    with pytest.raises(TypeError, match="state must be that of a Gaussian method, got MCDropout"):
        diagnose_state(opt, num_data=3, lr=0.1)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"batch": (1, 2)}, TypeError, "give a batch together with its loss"),
        ({"loss": F.cross_entropy}, TypeError, "give a batch together with its loss"),
        ({"batch": (1, 2), "loss": F.cross_entropy, "closure": print}, TypeError, "or a closure"),
        ({"batch": torch.ones(3), "loss": F.cross_entropy}, TypeError, "batch must be a pair of inputs and targets"),
        ({"closure": lambda: None}, RuntimeError, "must return the loss as a tensor"),
        ({"closure": lambda: torch.ones(())}, RuntimeError, "must return the loss as a tensor"),
        ({"draws": 0}, ValueError, "draws must be ≥ 1"),
        ({"seed": -1}, ValueError, "seed must be ≥ 0"),
        ({"history": []}, TypeError, "history must be a slangvi.History, got list"),
        ({"start": {}}, ValueError, r"start lacks '0.weight', '0.bias', '2.weight', '2.bias'"),
    ],
)
def test_impossible_arguments_are_named(options, kind, words):
    opt, _, _ = trained(steps=1)
    with pytest.raises(kind, match=words):
        slangvi.diagnose(opt, **options)


def test_a_closure_that_calls_backward_is_named():
    opt, x, y = trained(steps=1)
    with pytest.raises(RuntimeError, match=r"without calling backward\(\)"):
        slangvi.diagnose(opt, closure=lambda: backward(F.cross_entropy(opt.model(x), y)))


def test_a_draw_is_refused():
    opt, _, _ = trained(steps=1)
    with opt.sampled_params(), pytest.raises(RuntimeError, match="the weights are a sample"):
        slangvi.diagnose(opt)


def test_start_of_other_shapes_is_refused():
    opt, _, _ = trained(steps=1)
    begun = {name: torch.zeros(2) for name in opt._state.spec.names}
    with pytest.raises(ValueError, match=r"start\['0.weight'\] must have shape \(5, 4\), got \(2,\)"):
        slangvi.diagnose(opt, start=begun)


def test_states_are_of_one_run_with_a_likelihood_for_a_batch():
    vi = slangvi.slang.build(lambda params, x: -params["w"].sum() * x, num_data=3, rank=1, lr=0.1)
    state = vi.init({"w": torch.ones(2)})
    options = {"num_data": 3, "rank": 1, "lr": 0.1}
    with pytest.raises(TypeError, match="give log_likelihood and batch together"):
        diagnose_state(state, batch=torch.ones(3), **options)
    with pytest.raises(TypeError, match=r"diagnose_state\(\) .*colour"):
        diagnose_state(state, colour="red", **options)
    with pytest.raises(ValueError, match=r"state must be of one run, got leading dimensions \(2,\)"):
        diagnose_state(slangvi.slang.State(*(t.expand(2, *t.shape) for t in state.tensors), 0, state.spec), **options)


def test_the_public_names_are_those_of_the_room():
    assert slangvi.diagnose is slangvi.diagnosis.diagnose
    assert slangvi.Diagnosis is slangvi.diagnosis.Diagnosis
    assert slangvi.History is slangvi.diagnosis.History
