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
    from slangvi.rows import register_rule as register_rule
    from slangvi.schedules import inverse_time as inverse_time
    from slangvi.schedules import slow_precision as slow_precision
    from slangvi.tracking import track as track
    from slangvi.types import Routes as Routes

__all__ = [
    # methods
    "SLANG",
    "slang",
    "VOGN",
    "mean_field",
    "FullGaussian",
    "full",
    "OnlineEig",
    "online_eig",
    "exact",
    "BBB",
    "bbb",
    "MCDropout",
    "mc_dropout",
    "replicas",
    "inverse_time",
    "slow_precision",
    "ELBO",
    # estimators
    "SLANGClassifier",
    "SLANGRegressor",
    # distributions and likelihoods
    "LowRankPrecisionNormal",
    "DensePrecisionNormal",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    # prediction
    "functional_samples",
    "predictive_samples",
    "linearised_predictive",
    "decompose_uncertainty",
    "metrics",
    "plots",
    # checkpoints
    "save",
    "load",
    "checkpoint",
    # tracking
    "track",
    "tracking",
    # diagnosis
    "diagnose",
    "Diagnosis",
    "History",
    "diagnosis",
    # data
    "data",
    # memory and speed
    "estimate_memory",
    "estimate_prediction_memory",
    "Routes",
    # extension and errors
    "register_rule",
    "VariationalOptimizer",
    "CheckpointError",
    "DataError",
    "MemoryExceededError",
    "DivergenceError",
    "DivergenceWarning",
    "NumericalError",
    "UnsupportedModuleError",
    "UnverifiedGradientsWarning",
    "__version__",
]

# Importing torch takes seconds. Names are looked up on first use, so that the command line answers at once.
_HOMES = {
    "ELBO": "slangvi.priors",
    "inverse_time": "slangvi.schedules",
    "slow_precision": "slangvi.schedules",
    "LowRankPrecisionNormal": "slangvi.distributions",
    "DensePrecisionNormal": "slangvi.distributions",
    "CheckpointError": "slangvi.errors",
    "load": "slangvi.checkpoint",
    "Diagnosis": "slangvi.diagnosis",
    "History": "slangvi.diagnosis",
    "diagnose": "slangvi.diagnosis",
    "save": "slangvi.checkpoint",
    "DataError": "slangvi.errors",
    "MemoryExceededError": "slangvi.errors",
    "DivergenceError": "slangvi.errors",
    "DivergenceWarning": "slangvi.errors",
    "NumericalError": "slangvi.errors",
    "UnsupportedModuleError": "slangvi.errors",
    "UnverifiedGradientsWarning": "slangvi.errors",
    "SLANGClassifier": "slangvi.estimators",
    "SLANGRegressor": "slangvi.estimators",
    "estimate_memory": "slangvi.memory",
    "register_rule": "slangvi.rows",
    "Bernoulli": "slangvi.likelihoods",
    "Categorical": "slangvi.likelihoods",
    "Gaussian": "slangvi.likelihoods",
    "BBB": "slangvi.methods.bbb",
    "MCDropout": "slangvi.methods.mc_dropout",
    "SLANG": "slangvi.methods.slang",
    "VOGN": "slangvi.methods.mean_field",
    "FullGaussian": "slangvi.methods.full",
    "OnlineEig": "slangvi.methods.online_eig",
    "VariationalOptimizer": "slangvi.optimizer",
    "functional_samples": "slangvi.predict",
    "predictive_samples": "slangvi.predict",
    "linearised_predictive": "slangvi.predict",
    "decompose_uncertainty": "slangvi.predict",
    "estimate_prediction_memory": "slangvi.predict",
    "track": "slangvi.tracking",
    "Routes": "slangvi.types",
}
_MODULES = {
    "slang": "slangvi.methods.slang",
    "mean_field": "slangvi.methods.mean_field",
    "full": "slangvi.methods.full",
    "online_eig": "slangvi.methods.online_eig",
    "exact": "slangvi.methods.exact",
    "bbb": "slangvi.methods.bbb",
    "mc_dropout": "slangvi.methods.mc_dropout",
    "checkpoint": "slangvi.checkpoint",
    "data": "slangvi.data",
    "diagnosis": "slangvi.diagnosis",
    "metrics": "slangvi.metrics",
    "plots": "slangvi.plots",
    "replicas": "slangvi.replicas",
    "tracking": "slangvi.tracking",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'slangvi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
