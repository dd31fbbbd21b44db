"""Settings of the methods: every field is documented and shown by all that take it, and checked where it is made."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import slangvi
from slangvi import settings
from slangvi.keywords import field_docs, keywords_of
from slangvi.replicas import ReplicaSettings
from slangvi.settings import CompiledSettings, CurvatureOptimizerSettings, LowRankSettings

BUILDS = {name: getattr(slangvi, name).build for name in ("slang", "online_eig", "mean_field", "full", "bbb")}
BUILDS |= {"mc_dropout": slangvi.mc_dropout.build, "replicas": slangvi.replicas.build}
CLASSES = (slangvi.SLANG, slangvi.OnlineEig, slangvi.VOGN, slangvi.FullGaussian, slangvi.BBB, slangvi.MCDropout)
ESTIMATORS = (slangvi.SLANGClassifier, slangvi.SLANGRegressor)
TAKERS = {**BUILDS, **{kind.__name__: kind for kind in (*CLASSES, *ESTIMATORS)}}


def settings_of(taker):
    return getattr(taker.__init__ if inspect.isclass(taker) else taker, "settings_class")  # noqa: B009


@pytest.mark.parametrize("name", TAKERS)
def test_every_field_is_documented_and_in_signature_and_docstring(name):
    kind, shown, text = settings_of(TAKERS[name]), inspect.signature(TAKERS[name]).parameters, TAKERS[name].__doc__
    names = {item.name for item in fields(kind)}
    assert names == set(field_docs(kind))
    assert names <= set(shown)
    for item in names:
        assert f"        {item}: {field_docs(kind)[item].splitlines()[0]}\n" in text
    assert "options:" not in text


# Keywords and defaults of version 0.1, which users rely on: name → keyword → its default as text, None if required.
KEYWORDS = json.loads((Path(__file__).parent / "golden" / "keywords-0.1.json").read_text(encoding="utf-8"))
# Taken away since: it only raised.
GONE = {("VOGN", "compile"), ("FullGaussian", "compile"), ("OnlineEig", "compile")}
# Taken away since: runs in lockstep form their gradients.
GONE |= {("replicas", "model"), ("replicas", "engine"), ("replicas", "compile")}


# Changed since: a likelihood that is given decides where curvature comes from.
CHANGED = {"curvature": {"'ef'": "'auto'"}}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_and_defaults_are_those_of_the_first_version(name):
    shown = {
        key: None if parameter.default is parameter.empty else repr(parameter.default)
        for key, parameter in inspect.signature(TAKERS[name]).parameters.items()
    }
    assert {key: shown.get(key, "gone") for key in KEYWORDS[name] if (name, key) not in GONE} == {
        key: CHANGED.get(key, {}).get(default, default)
        for key, default in KEYWORDS[name].items()
        if (name, key) not in GONE
    }


def test_settings_that_replicas_share_with_single_runs_have_the_same_defaults():
    single = {item.name: item.default for item in fields(settings_of(slangvi.slang.build))}
    for item in fields(settings_of(slangvi.replicas.build)):
        assert item.name not in single or item.default == single[item.name], item.name


@pytest.mark.parametrize("name", [name for name in TAKERS if name not in ("SLANGClassifier", "SLANGRegressor")])
def test_calls_that_do_not_fit_are_refused_in_the_name_of_what_was_called(name):
    called = name if inspect.isclass(TAKERS[name]) else "build"
    keywords = inspect.signature(TAKERS[name]).parameters
    required = {key: 1 for key in ("num_data", "num_replicas", "rank", "lr") if key in keywords}
    with pytest.raises(TypeError, match=rf"^{called}\(\) missing a required argument"):
        TAKERS[name](nn.Linear(2, 1))
    with pytest.raises(TypeError, match=rf"^{called}\(\) got an unexpected keyword argument 'ranks'"):
        TAKERS[name](nn.Linear(2, 1), **required, ranks=3)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimators_refuse_parameters_they_do_not_have(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected keyword argument 'ranks'"):
        kind(ranks=3)


def test_a_new_setting_is_written_once():
    """A field in a family is a keyword of everything that takes the family; nothing else has to be told."""

    @dataclass(frozen=True, kw_only=True)
    class Extended(LowRankSettings):
        """Extended.

        Args:
            damping: added to the diagonal.
        """

        damping: float = 0.5

    @keywords_of(Extended)
    def build(log_likelihood, **options):
        """Build.

        Args:
            log_likelihood: of each example.
            options: settings.
        """
        return Extended(**options)

    assert "damping: added to the diagonal." in build.__doc__
    assert inspect.signature(build).parameters["damping"].default == 0.5
    assert build(None, rank=1, num_data=3, lr=0.1, damping=2.0).damping == 2.0


# Functions whose arguments have the names of settings and are not: numbers of one step, and what a plan is for.
OWN_ARGUMENTS = ("update", "advanced", "estimate_memory")


def test_no_signature_of_the_library_lists_six_settings_again():
    """A list of hyper-parameters stands in a settings class, and nowhere else."""
    known = {item.name for taker in TAKERS.values() for item in fields(settings_of(taker))}
    for path in sorted(Path(slangvi.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
                assert len(names & known) < 6 or node.name in OWN_ARGUMENTS, f"{path.name}: {node.name}"


def test_numbers_become_plain_ones():
    found = LowRankSettings(num_data=np.int64(5), rank=np.int32(2), lr=0.1, momentum=torch.tensor(0.5))
    assert (type(found.num_data), type(found.rank), type(found.momentum)) == (int, int, float)
    many = ReplicaSettings(num_replicas=np.int8(2), num_data=3, rank=np.int8(1), lr=0.1, memory_limit=np.uint8(200))
    assert {type(value) for value in (many.num_replicas, many.rank, many.memory_limit)} == {int}


def test_settings_do_not_change():
    found = CompiledSettings(num_data=5, rank=1, lr=0.1)
    with pytest.raises(FrozenInstanceError):
        found.rank = 2
    with pytest.raises(ValueError, match="rank must be ≥ 0, got -1"):
        replace(found, rank=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "dense", "curvature_rows": 3}, 'curvature_rows needs engine="factored", got "dense"'),
        ({"engine": "sparse"}, "engine must be one of 'factored', 'dense', got 'sparse'"),
        ({"lr": 1.5}, r"lr must be finite and in \(0, 1\], got 1\.5"),
        ({"precision_lr": 1.5, "lr": 2.0}, r"precision_lr must be finite and in \(0, 1\], got 1\.5"),
        ({"memory_limit": 0}, "memory_limit must be ≥ 1, got 0. It is a number of bytes."),
        ({"on_divergence": "shout"}, "on_divergence must be one of 'warn', 'raise', 'ignore', got 'shout'"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LowRankSettings(**{"num_data": 5, "rank": 1, "lr": 0.1, **options})


def test_settings_can_be_keys_whatever_they_hold():
    found = CompiledSettings(num_data=5, rank=1, lr=0.1, prior_precision={"*": torch.ones(2)})
    assert {found: 1}[found] == 1
    assert found != replace(found)


def test_groups_start_with_the_settings_that_groups_may_set():
    model = nn.Linear(2, 1)
    found = CurvatureOptimizerSettings(num_data=5, lr=0.3, prior_precision=2.0).group_defaults()
    assert found == {
        "lr": 0.3,
        "prior_precision": 2.0,
        "prior_mean": 0.0,
        "init_precision": 1.0,
        "precision_lr": None,
        "momentum": 0.0,
    }
    opt = slangvi.VOGN(model, num_data=5, lr=0.3, prior_precision=2.0)
    assert opt.defaults == found
    assert opt.settings.params is None, "groups hold the parameters"


def test_families_are_listed():
    kinds = {name for name, kind in vars(settings).items() if name.endswith("Settings") and inspect.isclass(kind)}
    assert kinds <= set(settings.__all__)
