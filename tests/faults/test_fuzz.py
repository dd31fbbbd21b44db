"""Any arguments give a result or a documented error, and nothing global is different afterwards."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import slangvi
from faults.world import unchanged
from helpers.optimizer_runs import CLASSES, model_and_data
from slangvi.rows import rules

GENERATE = [Phase.explicit, Phase.generate]  # shrinking takes minutes, and the arguments are small as they are
EXAMPLES = int(os.environ.get("SLANGVI_FUZZ_EXAMPLES", "15"))
DOCUMENTED = (TypeError, ValueError, slangvi.NumericalError)

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**30, -(10**30), 2**63]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=4),
    st.sampled_from(["mean", "ef", "dense", "full", "*", "cpu"]),
    st.complex_numbers(max_magnitude=2),
    st.binary(max_size=3),
    st.lists(st.integers(-1, 2), max_size=2),
    st.dictionaries(st.sampled_from(["0.weight", "*", "w", ""]), st.floats(), max_size=2),
    st.sampled_from([object(), int, len, nn.Linear(2, 2), slangvi.Routes(), torch.Generator()]),
    st.sampled_from([(), (0,), (1,), (3,), (43,), (2, 2), (0, 3)]).flatmap(
        lambda shape: st.sampled_from(
            [
                torch.ones(shape),
                torch.full(shape, math.nan),
                -torch.ones(shape),
                torch.ones(shape, dtype=torch.long),
                torch.ones(shape, dtype=torch.bool),
                torch.ones(shape, dtype=torch.complex64),
            ]
        )
    ),
)


def log_likelihood(params, batch):
    return -0.5 * (batch[1] - batch[0] @ params["w"]) ** 2


def fitted():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, slangvi.LowRankPrecisionNormal(torch.zeros(8), torch.zeros(8, 1), torch.ones(8))


MODEL, POSTERIOR = fitted()
X, LABELS = torch.randn(5, 3), torch.arange(5) % 2
PROBS = torch.full((5, 2), 0.5)


def build_with(build, params=None, **options):
    """A functional method, and its first state: some arguments are looked at only there."""

    def call(**given):
        return build(**given).init(params or {"w": torch.zeros(3)})

    return call, {"log_likelihood": log_likelihood, "num_data": 5, "lr": 0.1, **options}


def optimizer_with(kind, options):
    def call(**given):
        return kind(**given)

    names = {"model": MODEL, "params": None, "num_data": 5, "lr": 0.1, "prior_precision": 1.0, "generator": None}
    return call, names | options


def estimator_with(kind, y, **options):
    """A fit in one step: arguments are looked at only there."""

    def call(**given):
        data = {name: given.pop(name) for name in ("X", "y", "sample_weight")}
        return kind(**given).fit(**data)

    quick = {"hidden_layer_sizes": (2,), "max_iter": 1, "mc_samples": 1, "rank": 1, "predict_samples": 2}
    names = {"activation": "relu", "prior_precision": 1.0, "batch_size": 5, "random_state": 0, "device": "cpu"}
    return call, {"X": X.numpy(), "y": y.numpy(), "sample_weight": None, **quick, **names, **options}


def registered(kind, rule):
    """A rule in the table for as long as the call takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_RULES", dict(rules._RULES))
        return slangvi.register_rule(kind)(rule)


# Public callables, with arguments that are possible; each example replaces one or two of them.
PUBLIC = {
    **{name: optimizer_with(*row) for name, row in CLASSES.items()},
    "slang.build": build_with(slangvi.slang.build, rank=1, prior_precision=1.0, momentum=0.9, init_precision=1.0),
    "online_eig.build, prior": build_with(slangvi.online_eig.build, rank=1, prior=None, prior_mean=0.0),
    "merge_posteriors": (slangvi.merge_posteriors, {"posteriors": [POSTERIOR, POSTERIOR], "prior": 0.5, "rank": 1}),
    "mean_field.build": build_with(slangvi.mean_field.build, curvature="ef", temperature=1.0, mc_samples=1),
    "full.build": build_with(slangvi.full.build, curvature="ef", prior_mean=0.0, precision_lr=None),
    "online_eig.build": build_with(slangvi.online_eig.build, rank=1, precision_warmup=True, engine=None),
    "bbb.build": build_with(slangvi.bbb.build, prior_precision=1.0),
    "mc_dropout.build": build_with(
        slangvi.mc_dropout.build, {"w": torch.zeros(2, 3)}, rates=0.1, prior_precision=1.0, masks="example", decay="gal"
    ),
    "replicas.build": build_with(
        slangvi.replicas.build, num_replicas=2, rank=1, prior_precision=1.0, momentum=0.9, method="slang"
    ),
    "exact.fit": (slangvi.exact.fit, {"x": X, "y": LABELS, "prior_precision": 1.0, "family": "full", "max_steps": 3}),
    "exact.build": (slangvi.exact.build, {"x": X, "y": LABELS, "prior_precision": 1.0, "family": "full"}),
    "inverse_time": (slangvi.inverse_time, [0.1, 0.5]),
    "slow_precision": (slangvi.slow_precision, [100.0, 10]),
    "Routes": (slangvi.Routes, {"layers": "auto", "spectrum": "auto"}),
    "Gaussian": (slangvi.Gaussian, {}),
    "History": (slangvi.History, {"capacity": 8}),
    "diagnose": (
        slangvi.diagnose,
        {"opt": slangvi.SLANG(MODEL, num_data=5), "batch": (X, LABELS), "loss": F.cross_entropy, "draws": 2, "seed": 0},
    ),
    "LowRankPrecisionNormal": (
        slangvi.LowRankPrecisionNormal,
        {"loc": torch.zeros(3), "prec_factor": torch.zeros(3, 1), "prec_diag": torch.ones(3)},
    ),
    "DensePrecisionNormal": (
        slangvi.DensePrecisionNormal,
        {"loc": torch.zeros(3), "precision_matrix": torch.eye(3)},
    ),
    "Categorical.log_prob": (slangvi.Categorical().log_prob, [PROBS, LABELS]),
    "Bernoulli.log_prob": (slangvi.Bernoulli().log_prob, [PROBS[:, 0], LABELS]),
    "metrics.nll": (slangvi.metrics.nll, [PROBS, LABELS]),
    "metrics.accuracy": (slangvi.metrics.accuracy, [PROBS, LABELS]),
    "metrics.brier": (slangvi.metrics.brier, [PROBS, LABELS]),
    "metrics.ece": (slangvi.metrics.ece, [PROBS, LABELS]),
    "metrics.rmse": (slangvi.metrics.rmse, [X[:, 0], X[:, 1]]),
    "functional_samples": (partial(slangvi.functional_samples, generator=torch.Generator()), [MODEL, POSTERIOR, X, 2]),
    "predictive_samples": (
        partial(slangvi.predictive_samples, generator=torch.Generator()),
        {"model": MODEL, "posterior": POSTERIOR, "x": X, "n_samples": 2, "likelihood": "categorical", "batch_size": 2},
    ),
    "linearised_predictive": (
        slangvi.linearised_predictive,
        {"model": MODEL, "posterior": POSTERIOR, "x": X, "likelihood": "categorical", "link": "probit"},
    ),
    "decompose_uncertainty": (
        slangvi.decompose_uncertainty,
        {"samples": PROBS.expand(3, 5, 2), "likelihood": "categorical", "noise_variance": None},
    ),
    "estimate_memory": (
        slangvi.estimate_memory,
        {"model": MODEL, "batch": X, "rank": 1, "mc_samples": 2, "interface": "optimizer", "memory_limit": None},
    ),
    "estimate_prediction_memory": (
        slangvi.estimate_prediction_memory,
        {"predict": slangvi.predictive_samples, "model": MODEL, "posterior": POSTERIOR, "x": X, "n_samples": 2},
    ),
    "register_rule": (registered, {"kind": "TrilinearBackward0", "rule": lambda meeting: None}),
    "track": (
        slangvi.track,
        {
            "optimizer": slangvi.SLANG(nn.Linear(2, 2), num_data=5),
            "to": lambda numbers, step: None,
            "prefix": "a/",
            "every": 2,
        },
    ),
    "replicas.streams": (slangvi.replicas.streams, [[1, 2]]),
    "metrics.auroc": (slangvi.metrics.auroc, [X[:, 0], X[:, 1]]),
    "metrics.fpr95": (slangvi.metrics.fpr95, [X[:, 0], X[:, 1], 0.95]),
    "metrics.coverage": (slangvi.metrics.coverage, [X.T, X[:, 1], 0.9]),
    "metrics.interval_error": (slangvi.metrics.interval_error, [X.T, X[:, 1]]),
    "metrics.mixture_nll": (slangvi.metrics.mixture_nll, [X.T, 1.0, X[:, 1]]),
    "metrics.mutual_information": (slangvi.metrics.mutual_information, [PROBS.expand(3, 5, 2)]),
    "metrics.predictive_entropy": (slangvi.metrics.predictive_entropy, [PROBS]),
    "metrics.reliability": (slangvi.metrics.reliability, [PROBS, LABELS, 3]),
    "metrics.risk_coverage": (slangvi.metrics.risk_coverage, [PROBS, LABELS, X[:, 0]]),
    "SLANGClassifier": estimator_with(slangvi.SLANGClassifier, LABELS),
    "SLANGRegressor": estimator_with(slangvi.SLANGRegressor, X[:, 0], noise="learn"),
    "checkpoint.describe": (slangvi.checkpoint.describe, ["/nowhere/at all"]),
    "checkpoint.state_dict": (slangvi.checkpoint.state_dict, [POSTERIOR]),
    "checkpoint.from_state_dict": (slangvi.checkpoint.from_state_dict, [slangvi.checkpoint.state_dict(POSTERIOR)]),
    "load": (slangvi.load, ["/nowhere/at all"]),
    "save": (slangvi.save, ["/nowhere/at all", POSTERIOR]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where files go whose names are made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("made up"))
        yield


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", PUBLIC)
@settings(max_examples=EXAMPLES, phases=GENERATE, report_multiple_bugs=False)
@given(data=st.data())
def test_any_arguments_give_a_result_or_a_documented_error(name, data):
    call, possible = PUBLIC[name]
    arguments = dict(enumerate(possible)) if isinstance(possible, list) else dict(possible)
    for key in data.draw(st.lists(st.sampled_from([*arguments] or ["std"]), min_size=1, max_size=2, unique=True)):
        arguments[key] = data.draw(JUNK, label=str(key))
    documented = (*DOCUMENTED, slangvi.CheckpointError, slangvi.DataError)
    messages: list[str] = []
    with unchanged(MODEL), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(*arguments.values()) if isinstance(possible, list) else call(**arguments)
        except documented as error:
            messages.append(str(error))
    assert all(messages), "an error without a message"


# These need a file, and are given none that is there.
ELSEWHERE = ("load", "save", "checkpoint.describe")


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ELSEWHERE])
def test_the_arguments_that_are_replaced_are_possible(name):
    """Otherwise every example would be refused for the same reason."""
    call, possible = PUBLIC[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three steps of exact.fit are few
        assert (call(*possible) if isinstance(possible, list) else call(**possible)) is not None


# Public callables that are not in the table, and why.
EXEMPT = {
    "ELBO": "holds two numbers",
    "Bernoulli": "takes no arguments",
    "Categorical": "takes no arguments",
    "Diagnosis": "is what diagnose returns",
    "VariationalOptimizer": "is abstract; its methods' optimizers are in the table",
}


def public_callables():
    """Of the package itself, and what a method's or a tool's module offers to be called first."""
    for name in slangvi.__all__:
        thing = getattr(slangvi, name)
        if inspect.ismodule(thing):
            entries = {"build", "fit"} if name in ("exact", "replicas") else {"build"}
            entries = set(thing.__all__) if name in ("metrics",) else entries & set(thing.__all__)
            yield from (f"{name}.{entry}" for entry in entries if inspect.isfunction(getattr(thing, entry)))
        elif callable(thing) and not (inspect.isclass(thing) and issubclass(thing, BaseException)):
            yield name


def test_every_public_callable_is_in_the_table():
    missing = sorted(set(public_callables()) - set(PUBLIC) - set(EXEMPT))
    assert missing == []


@pytest.mark.parametrize("kind", CLASSES)
@given(scale=st.sampled_from([0.0, 1.0, 1e3, 1e30, math.nan, math.inf]), mode=st.booleans(), grad=st.booleans())
@settings(max_examples=8)
def test_training_leaves_the_world_as_it_was(kind, scale, mode, grad):
    """Whatever the data, and whatever mode the caller is in."""
    model, x, y = model_and_data(dtype=torch.float32)
    model[0].train(mode)
    build, options = CLASSES[kind]
    generator = torch.Generator().manual_seed(0)
    opt = build(model, num_data=12, generator=generator, **options)

    def closure():
        loss = nn.functional.cross_entropy(model(x * scale), y)
        loss.backward()
        return loss

    with unchanged(model), torch.set_grad_enabled(grad):
        try:
            opt.step(closure)
        except slangvi.NumericalError:
            assert opt._state.step == 0
        slangvi.predictive_samples(model, opt.posterior, x, 2, generator=generator)
        opt.state_dict()
        opt.kl()


def test_the_fixture_notices():
    with pytest.raises(AssertionError, match="random state"), unchanged():
        torch.rand(1)
    threads = torch.get_num_threads()
    with pytest.raises(AssertionError, match="threads"), unchanged():
        torch.set_num_threads(threads + 1)
    torch.set_num_threads(threads)
    model, _x, _y = model_and_data()
    with pytest.raises(AssertionError, match="training flags"), unchanged(model):
        model.eval()
