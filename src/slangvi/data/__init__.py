"""Small data sets that are made here or bundled with scikit-learn, so that nothing has to be fetched."""

from slangvi.data.toy import Split as Split
from slangvi.data.toy import breast_cancer as breast_cancer
from slangvi.data.toy import cubic as cubic

__all__ = ["Split", "breast_cancer", "cubic"]
