"""A classifier with scikit-learn's interface and a posterior over its weights."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from slangvi.estimators._base import BaseSLANG
from slangvi.estimators._noise import Noise
from slangvi.estimators._parameters import EstimatorParameters
from slangvi.estimators._training import AutoRates
from slangvi.estimators.data import Array
from slangvi.keywords import bind_settings, keywords_of

__all__ = ["SLANGClassifier"]


class SLANGClassifier(ClassifierMixin, BaseSLANG):  # type: ignore[misc]
    """A neural network for classes, trained by SLANG; probabilities are averaged over its posterior.

    Inputs are standardised inside. Rates fall along a half cosine over all epochs, so that the last state is the one
    to keep. The same `random_state` gives the same fit; no global source of randomness is touched then.

    Args:
        options: parameters, as follows.

    Attributes:
        classes_: labels, in the order of the columns of `predict_proba`.
        module_: the network; its own parameters are the initial ones.
        posterior_: the Gaussian over its weights.
        state_: SLANG's state, after `state_.step` steps.
        loss_curve_: mean negative log-likelihood of each epoch at its draws.
        n_iter_: epochs run.
        validation_nll_: of each epoch, with early stopping; `best_validation_nll_` is the least.
        input_scale_: mean and scale of the input columns.
        n_samples_seen_: what all rows given so far count for.

    Example:
        >>> X = np.linspace(-2, 2, 40).reshape(-1, 1)
        >>> y = np.where(X[:, 0] > 0, "yes", "no")
        >>> clf = SLANGClassifier(hidden_layer_sizes=(4,), random_state=0).fit(X, y)
        >>> clf.predict([[-3.0], [3.0]])
        array(['no', 'yes'], dtype='<U3')
    """

    _parameters = EstimatorParameters
    _rates = AutoRates(falling=0.1, curvature=0.25, constant=(0.02, 0.02))
    _y_checks: ClassVar = {"y_numeric": False}

    @keywords_of(EstimatorParameters)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.__dict__.update(vars(bind_settings(type(self).__name__, EstimatorParameters, *args, **options)))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SLANGClassifier:
        """Learn a posterior from rows X (n, D) and labels y (n,).

        Args:
            X: array, DataFrame or nested list of numbers.
            y: labels of any kind.
            sample_weight: what each row counts for; a weight of 2 is the row given twice, 0 leaves it out.
        """
        with self._all_or_nothing():
            self._fit(X, y, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> SLANGClassifier:
        """Pass once over more rows, with constant rates.

        Args:
            X: rows; the first ones given decide the scale of the inputs.
            y: labels.
            classes: all labels there will be; needed at the first call.
            sample_weight: as in `fit`.
        """
        with self._all_or_nothing():
            _check_partial_fit_first_call(self, classes)
            self._fit(X, y, sample_weight, one_pass=True)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class averaged over the posterior, (n, C)."""
        return np.concatenate([draws.softmax(-1).mean(0).cpu().numpy() for draws in self._draws(X)])

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of `predict_proba`, taken before anything is rounded to zero, (n, C)."""
        logs = (draws.log_softmax(-1).logsumexp(0) - math.log(len(draws)) for draws in self._draws(X))
        return np.concatenate([chunk.cpu().numpy() for chunk in logs])

    def predict(self, X: Any) -> Any:
        """Return the most probable class of every row, (n,)."""
        probs = self.predict_proba(X)  # checks that the estimator is fitted
        return self.classes_[probs.argmax(1)]

    def _targets(self, y: Array, weights: Array, first: bool) -> Array:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if first and not hasattr(self, "classes_"):
            self.classes_ = np.unique(y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y holds {unknown[:5].tolist()}, which are not among the classes {self.classes_[:20].tolist()} this "
                "estimator began with. Give all classes to the first partial_fit, or fit anew with warm_start=False."
            )
        labels: Array = np.searchsorted(self.classes_, y)
        return labels

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _nll(self, draws: Tensor, y: Tensor, noise: Noise | None) -> Tensor:
        logs = draws.log_softmax(-1).gather(-1, y.expand(len(draws), -1).unsqueeze(-1)).squeeze(-1)
        return math.log(len(draws)) - torch.logsumexp(logs, 0)
