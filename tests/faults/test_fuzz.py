"""Any arguments give a result or a documented error, and nothing global is different afterwards."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import slangvi
from faults.world import unchanged
from optimizing import CLASSES, model_and_data

GENERATE = [Phase.explicit, Phase.generate]  # shrinking takes minutes, and the arguments are small as they are
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


def build_with(build, **options):
    """A functional method, and its first state: some arguments are looked at only there."""

    def call(**given):
        return build(**given).init({"w": torch.zeros(3)})

    return call, {"log_likelihood": log_likelihood, "num_data": 5, "lr": 0.1, **options}


def optimizer_with(kind, options):
    def call(**given):
        return kind(**given)

    names = {"model": MODEL, "params": None, "num_data": 5, "lr": 0.1, "prior_precision": 1.0, "generator": None}
    return call, names | options


# Public callables, with arguments that are possible; each example replaces one or two of them.
PUBLIC = {
    **{name: optimizer_with(*row) for name, row in CLASSES.items()},
    "slang.build": build_with(slangvi.slang.build, rank=1, prior_precision=1.0, momentum=0.9, init_precision=1.0),
    "mean_field.build": build_with(slangvi.mean_field.build, curvature="ef", temperature=1.0, mc_samples=1),
    "full.build": build_with(slangvi.full.build, curvature="ef", prior_mean=0.0, precision_lr=None),
    "online_eig.build": build_with(slangvi.online_eig.build, rank=1, precision_warmup=True, engine=None),
    "bbb.build": build_with(slangvi.bbb.build, prior_precision=1.0),
    "exact.fit": (slangvi.exact.fit, {"x": X, "y": LABELS, "prior_precision": 1.0, "family": "full", "max_steps": 3}),
    "inverse_time": (slangvi.inverse_time, [0.1, 0.5]),
    "Routes": (slangvi.Routes, {"layers": "auto", "spectrum": "auto"}),
    "Gaussian": (slangvi.Gaussian, {}),
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
    "data.load_uci": (slangvi.data.load_uci, ["no such set"]),
    "data.load_libsvm": (slangvi.data.load_libsvm, ["no such set"]),
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
@settings(max_examples=15, phases=GENERATE, report_multiple_bugs=False)
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


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("load", "save") and "data" not in name])
def test_the_arguments_that_are_replaced_are_possible(name):
    """Otherwise every example would be refused for the same reason."""
    call, possible = PUBLIC[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three steps of exact.fit are few
        assert (call(*possible) if isinstance(possible, list) else call(**possible)) is not None


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
