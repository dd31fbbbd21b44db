"""SLANG as scikit-learn estimators: `fit`, `predict`, `predict_proba`, in pipelines and searches."""

try:
    import sklearn as _sklearn
except ImportError as error:
    raise ImportError(
        "SLANGClassifier and SLANGRegressor need scikit-learn 1.6 or later. Install it with: pip install "
        "'slangvi[sklearn]'"
    ) from error

from slangvi.estimators.classifier import SLANGClassifier as SLANGClassifier
from slangvi.estimators.regressor import SLANGRegressor as SLANGRegressor

__all__ = ["SLANGClassifier", "SLANGRegressor"]

del _sklearn
