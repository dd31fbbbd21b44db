"""Honest uncertainty for any PyTorch network.

SLANG (Mishkin et al. 2018): natural-gradient variational inference with a Gaussian whose precision is low-rank plus
diagonal, learnt from per-example gradients in one training run.
"""

from slangvi._steps import ELBO as ELBO
from slangvi._steps import inverse_time as inverse_time
from slangvi._version import __version__ as __version__
from slangvi.distributions import LowRankPrecisionNormal as LowRankPrecisionNormal
from slangvi.errors import NumericalError as NumericalError
from slangvi.errors import UnsupportedModuleError as UnsupportedModuleError
from slangvi.errors import UnverifiedGradientsWarning as UnverifiedGradientsWarning
from slangvi.grads import register_rule as register_rule
from slangvi.likelihoods import Bernoulli as Bernoulli
from slangvi.likelihoods import Categorical as Categorical
from slangvi.likelihoods import Gaussian as Gaussian
from slangvi.methods import slang as slang
from slangvi.methods.slang import SLANG as SLANG
from slangvi.predict import functional_samples as functional_samples
from slangvi.predict import predictive_samples as predictive_samples

__all__ = [
    # methods
    "SLANG",
    "slang",
    "inverse_time",
    "ELBO",
    # distributions and likelihoods
    "LowRankPrecisionNormal",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    # prediction
    "functional_samples",
    "predictive_samples",
    # extension and errors
    "register_rule",
    "NumericalError",
    "UnsupportedModuleError",
    "UnverifiedGradientsWarning",
    "__version__",
]
