"""A classifier with scikit-learn's interface and a posterior over its weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from slangvi.estimators._base import BaseSLANG
from slangvi.estimators._noise import Noise
from slangvi.estimators._recipe import Rates
from slangvi.estimators._training import Rows
from slangvi.estimators.data import Array

__all__ = ["SLANGClassifier"]


class SLANGClassifier(ClassifierMixin, BaseSLANG):  # type: ignore[misc]
    """A neural network for classes, trained by SLANG; probabilities are averaged over its posterior.

    Inputs are standardised inside. Rates fall along a half cosine over all epochs, so that the last state is the one
    to keep. The same `random_state` gives the same fit; no global source of randomness is touched then.

    Args:
        hidden_layer_sizes: widths of the hidden layers; () is a linear model.
        activation: "relu", "tanh", "logistic", "gelu", "silu" or "identity".
        rank: L, columns of the low-rank precision factor.
        prior_precision: λ of weights and biases; a number, or a dict of parameter names or globs of `module_`.
        temperature: the likelihood is weighed by 1/temperature; less than 1 makes the posterior narrower.
        learning_rate_init: α at the start. "auto" is 0.1 for `fit`, and 0.02 where training may end at any time: with
            `early_stopping`, and for `partial_fit`, where rates are constant.
        precision_learning_rate_init: β at the start. "auto" is 0.02 with a warm-up, unless the precision is slow.
        init_precision: d at the start. "auto" is 10, unless the precision is slow. It is for `fit` without
            `early_stopping` where both are "auto": by `slow_precision`, from a quarter of the rows or λ, whichever is
            more. What is left of that is taken out in the end.
        mc_samples: S, draws of the weights per step.
        batch_size: rows per step; "auto" is an eighth of the rows, but at least 8 and at most 32.
        max_iter: epochs. A few dozen rows make few steps an epoch: give them more epochs, or higher rates.
        predict_samples: draws of the weights to predict with.
        early_stopping: hold out rows, stop when their predictive negative log-likelihood (nll) has not improved for a
            while, and keep the best state. Epochs in which the noise of a regressor is not yet its own do not count.
        validation_fraction: share of the rows held out, of each class as far as possible.
        n_iter_no_change: epochs without improvement before training stops.
        tol: least improvement of the nll that counts.
        standardize: give every input column mean 0 and standard deviation 1 over the training rows.
        module: a `torch.nn.Module` (copied; it starts at its own weights) or a function (features, outputs) → module,
            in place of `hidden_layer_sizes` and `activation`. It takes (n, features) and returns one logit per class,
            and is trained in the mode, train or eval, that it comes in.
        num_data: N for `partial_fit`; None counts every row it was given, which is right as long as none comes twice.
        warm_start: let `fit` go on from the last state, with the sizes, scales and classes of the first fit.
        random_state: seed, `numpy.random.RandomState` or None, for initial weights, order of rows, and draws.
        device: where to train and predict.
        verbose: True writes a line per epoch to standard error; a function is called with it instead.

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

    _rates = Rates(falling=0.1, curvature=0.25, constant=(0.02, 0.02))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SLANGClassifier:
        """Learn a posterior from rows X (n, D) and labels y (n,).

        Args:
            X: array, DataFrame or nested list of numbers.
            y: labels of any kind.
            sample_weight: what each row counts for; a weight of 2 is the row given twice, 0 leaves it out.
        """
        with self._all_or_nothing():
            self._fit(X, y, sample_weight, {"y_numeric": False})
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> SLANGClassifier:
        """One pass over more rows, with constant rates.

        Args:
            X: rows; the first ones given decide the scale of the inputs.
            y: labels.
            classes: all labels there will be; needed at the first call.
            sample_weight: as in `fit`.
        """
        with self._all_or_nothing():
            _check_partial_fit_first_call(self, classes)
            self._partial_fit(X, y, sample_weight, {"y_numeric": False})
        return self

    def predict_proba(self, X: Any) -> Array:
        """Probability of each class averaged over the posterior, (n, C)."""
        return np.concatenate([draws.softmax(-1).mean(0).cpu().numpy() for draws in self._draws(X)])

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithm of `predict_proba`, taken before anything is rounded to zero, (n, C)."""
        logs = (draws.log_softmax(-1).logsumexp(0) - math.log(len(draws)) for draws in self._draws(X))
        return np.concatenate([chunk.cpu().numpy() for chunk in logs])

    def predict(self, X: Any) -> Any:
        """The most probable class of every row, (n,)."""
        probs = self.predict_proba(X)
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
        places: Array = np.searchsorted(self.classes_, y)
        return places

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _labels(self, rows: Rows) -> Tensor | None:
        return rows.y.cpu()

    def _noise(self, rows: Rows) -> Noise | None:
        return None

    def _nll(self, draws: Tensor, y: Tensor, noise: Noise | None) -> Tensor:
        logs = draws.log_softmax(-1).gather(-1, y.expand(len(draws), -1).unsqueeze(-1)).squeeze(-1)
        return math.log(len(draws)) - torch.logsumexp(logs, 0)
