"""Honest uncertainty for any PyTorch network.

SLANG (Mishkin et al. 2018): natural-gradient variational inference with a Gaussian whose precision is low-rank plus
diagonal, learnt from per-example gradients in one training run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slangvi._version import __version__ as __version__

if TYPE_CHECKING:
    from slangvi import checkpoint as checkpoint
    from slangvi import data as data
    from slangvi import diagnosis as diagnosis
    from slangvi import metrics as metrics
    from slangvi import plots as plots
    from slangvi import replicas as replicas
    from slangvi import tracking as tracking
    from slangvi.checkpoint import load as load
    from slangvi.checkpoint import save as save
    from slangvi.diagnosis import Diagnosis as Diagnosis
    from slangvi.diagnosis import History as History
    from slangvi.diagnosis import diagnose as diagnose
    from slangvi.distributions import DensePrecisionNormal as DensePrecisionNormal
    from slangvi.distributions import LowRankPrecisionNormal as LowRankPrecisionNormal
    from slangvi.errors import CheckpointError as CheckpointError
    from slangvi.errors import DataError as DataError
    from slangvi.errors import DivergenceError as DivergenceError
    from slangvi.errors import DivergenceWarning as DivergenceWarning
    from slangvi.errors import MemoryExceededError as MemoryExceededError
    from slangvi.errors import NumericalError as NumericalError
    from slangvi.errors import UnsupportedModuleError as UnsupportedModuleError
    from slangvi.errors import UnverifiedGradientsWarning as UnverifiedGradientsWarning
    from slangvi.estimators import SLANGClassifier as SLANGClassifier
    from slangvi.estimators import SLANGRegressor as SLANGRegressor
    from slangvi.likelihoods import Bernoulli as Bernoulli
    from slangvi.likelihoods import Categorical as Categorical
    from slangvi.likelihoods import Gaussian as Gaussian
    from slangvi.memory import estimate_memory as estimate_memory
    from slangvi.methods import bbb as bbb
    from slangvi.methods import exact as exact
    from slangvi.methods import full as full
    from slangvi.methods import mc_dropout as mc_dropout
    from slangvi.methods import mean_field as mean_field
    from slangvi.methods import online_eig as online_eig
    from slangvi.methods import slang as slang
    from slangvi.methods.bbb import BBB as BBB
    from slangvi.methods.full import FullGaussian as FullGaussian
    from slangvi.methods.mc_dropout import MCDropout as MCDropout
    from slangvi.methods.mean_field import VOGN as VOGN
    from slangvi.methods.online_eig import OnlineEig as OnlineEig
    from slangvi.methods.slang import SLANG as SLANG
    from slangvi.optimizer import VariationalOptimizer as VariationalOptimizer
    from slangvi.predict import decompose_uncertainty as decompose_uncertainty
    from slangvi.predict import estimate_prediction_memory as estimate_prediction_memory
    from slangvi.predict import functional_samples as functional_samples
    from slangvi.predict import linearised_predictive as linearised_predictive
    from slangvi.predict import predictive_samples as predictive_samples
    from slangvi.priors import ELBO as ELBO
    from slangvi.priors import merge_posteriors as merge_posteriors
    from slangvi.rows import register_rule as register_rule
    from slangvi.schedules import inverse_time as inverse_time
    from slangvi.schedules import slow_precision as slow_precision
    from slangvi.tracking import track as track
    from slangvi.types import Routes as Routes

# Importing torch takes seconds. Names are looked up on first use, so that the command line answers at once.
_NAMES = {
    "checkpoint": ("load", "save"),
    "diagnosis": ("Diagnosis", "History", "diagnose"),
    "distributions": ("DensePrecisionNormal", "LowRankPrecisionNormal"),
    "errors": (
        "CheckpointError",
        "DataError",
        "DivergenceError",
        "DivergenceWarning",
        "MemoryExceededError",
        "NumericalError",
        "UnsupportedModuleError",
        "UnverifiedGradientsWarning",
    ),
    "estimators": ("SLANGClassifier", "SLANGRegressor"),
    "likelihoods": ("Bernoulli", "Categorical", "Gaussian"),
    "memory": ("estimate_memory",),
    "methods.bbb": ("BBB",),
    "methods.full": ("FullGaussian",),
    "methods.mc_dropout": ("MCDropout",),
    "methods.mean_field": ("VOGN",),
    "methods.online_eig": ("OnlineEig",),
    "methods.slang": ("SLANG",),
    "optimizer": ("VariationalOptimizer",),
    "predict": (
        "decompose_uncertainty",
        "estimate_prediction_memory",
        "functional_samples",
        "linearised_predictive",
        "predictive_samples",
    ),
    "priors": ("ELBO", "merge_posteriors"),
    "rows": ("register_rule",),
    "schedules": ("inverse_time", "slow_precision"),
    "tracking": ("track",),
    "types": ("Routes",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_METHODS = ("bbb", "exact", "full", "mc_dropout", "mean_field", "online_eig", "slang")
_MODULES = ("checkpoint", "data", "diagnosis", "metrics", "plots", "replicas", "tracking")

__all__ = ["__version__", *_HOMES, *_METHODS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"slangvi.{_HOMES[name]}"), name)
    if name in _METHODS:
        return import_module(f"slangvi.methods.{name}")
    if name in _MODULES:
        return import_module(f"slangvi.{name}")
    raise AttributeError(f"module 'slangvi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
