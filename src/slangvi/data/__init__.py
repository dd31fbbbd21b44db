"""Data sets: made here, bundled with scikit-learn, or fetched into a cache."""

from slangvi.data.libsvm import LIBSVM as LIBSVM
from slangvi.data.libsvm import libsvm_splits as libsvm_splits
from slangvi.data.libsvm import load_libsvm as load_libsvm
from slangvi.data.toy import Split as Split

__all__ = ["LIBSVM", "Split", "libsvm_splits", "load_libsvm"]
