"""Data sets of the experiments, fetched into a cache and read from there."""

from slangvi_reproduction.data.libsvm import LIBSVM as LIBSVM
from slangvi_reproduction.data.libsvm import libsvm_splits as libsvm_splits
from slangvi_reproduction.data.libsvm import load_libsvm as load_libsvm
from slangvi_reproduction.data.mnist import IMAGES as IMAGES
from slangvi_reproduction.data.mnist import Images as Images
from slangvi_reproduction.data.mnist import load_fashion_mnist as load_fashion_mnist
from slangvi_reproduction.data.mnist import load_mnist as load_mnist
from slangvi_reproduction.data.regression import Indices as Indices
from slangvi_reproduction.data.regression import Regression as Regression
from slangvi_reproduction.data.regression import Standardised as Standardised
from slangvi_reproduction.data.regression import folds as folds
from slangvi_reproduction.data.regression import standardise as standardise
from slangvi_reproduction.data.uci import UCI as UCI
from slangvi_reproduction.data.uci import load_uci as load_uci

__all__ = [
    "IMAGES",
    "LIBSVM",
    "UCI",
    "Images",
    "Indices",
    "Regression",
    "Standardised",
    "folds",
    "libsvm_splits",
    "load_fashion_mnist",
    "load_libsvm",
    "load_mnist",
    "load_uci",
    "standardise",
]
