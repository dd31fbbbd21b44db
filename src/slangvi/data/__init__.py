"""Data sets: made here, bundled with scikit-learn, or fetched into a cache."""

from slangvi.data.libsvm import LIBSVM as LIBSVM
from slangvi.data.libsvm import libsvm_splits as libsvm_splits
from slangvi.data.libsvm import load_libsvm as load_libsvm
from slangvi.data.mnist import IMAGES as IMAGES
from slangvi.data.mnist import Images as Images
from slangvi.data.mnist import load_fashion_mnist as load_fashion_mnist
from slangvi.data.mnist import load_mnist as load_mnist
from slangvi.data.regression import Indices as Indices
from slangvi.data.regression import Regression as Regression
from slangvi.data.regression import Standardised as Standardised
from slangvi.data.regression import folds as folds
from slangvi.data.regression import standardise as standardise
from slangvi.data.toy import Split as Split
from slangvi.data.uci import UCI as UCI
from slangvi.data.uci import load_uci as load_uci

__all__ = [
    "IMAGES",
    "LIBSVM",
    "UCI",
    "Images",
    "Indices",
    "Regression",
    "Split",
    "Standardised",
    "folds",
    "libsvm_splits",
    "load_fashion_mnist",
    "load_libsvm",
    "load_mnist",
    "load_uci",
    "standardise",
]
