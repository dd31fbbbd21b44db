"""A regressor with scikit-learn's interface, which knows how sure it is."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from slangvi import checks
from slangvi.errors import user_stacklevel
from slangvi.estimators._base import BaseSLANG
from slangvi.estimators._noise import Noise
from slangvi.estimators._parameters import RegressorParameters
from slangvi.estimators._training import AutoRates, Rows
from slangvi.estimators.data import Array, Scale, is_rounding, moments
from slangvi.keywords import bind_settings, keywords_of

__all__ = ["SLANGRegressor"]


class SLANGRegressor(RegressorMixin, BaseSLANG):  # type: ignore[misc]
    """A neural network for real targets, trained by SLANG, with the noise learnt or given.

    Inputs and targets are standardised inside. `SLANGClassifier` says more about the arguments and attributes that both
    have. Several target columns are learnt by one network, each with its own noise.

    Args:
        options: parameters, as follows.

    Attributes:
        noise_std_: standard deviation of the noise on the scale of y; (K,) for several target columns.
        target_scale_: mean and scale of the target columns.

    Example:
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> reg = SLANGRegressor(hidden_layer_sizes=(), mc_samples=1, random_state=0).fit(X, 3 * X[:, 0] + 7)
        >>> mean, std = reg.predict([[0.5]], return_std=True)
        >>> mean.round(1), bool(std < 0.5)
        (array([8.5]), True)
    """

    _parameters = RegressorParameters
    _rates = AutoRates(falling=0.1, curvature=1.0, constant=(0.1, 0.05))
    _y_checks: ClassVar = {"multi_output": True, "y_numeric": True}

    @keywords_of(RegressorParameters)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.__dict__.update(vars(bind_settings(type(self).__name__, RegressorParameters, *args, **options)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SLANGRegressor:
        """Learn a posterior from rows X (n, D) and targets y, (n,) or (n, K).

        Args:
            X: array, DataFrame or nested list of numbers.
            y: real numbers.
            sample_weight: what each row counts for; a weight of 2 is the row given twice, 0 leaves it out.
        """
        with self._all_or_nothing():
            self._fit(X, y, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> SLANGRegressor:
        """Pass once over more rows, with constant rates; the first rows given decide the scales, so give some dozen.

        Args:
            X: rows.
            y: targets.
            sample_weight: as in `fit`.
        """
        with self._all_or_nothing():
            first = not hasattr(self, "state_")
            self._fit(X, y, sample_weight, one_pass=True)
            if first and self.standardize and bool(self._kept_noise().most.isinf().any()):
                warnings.warn(
                    f"y does not vary among the {len(y)} rows of the first partial_fit, so the scale of the targets is "
                    "not known, and taken to be 1 from now on. Give some dozen rows with different targets first, or "
                    "scale X and y yourself and set standardize=False.",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the targets, of shape (n,) or (n, K) as y had it.

        Args:
            X: rows, (n, D).
            return_std: return the standard deviation of a new target too, noise included.
        """
        chunks = [(draws.mean(0), draws.var(0, correction=min(1, len(draws) - 1))) for draws in self._draws(X)]
        means, variances = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        scale, columns = self.target_scale_, 0 if self._one_column else slice(None)
        mean = (means.cpu().numpy() * scale.scale + scale.mean)[:, columns]
        if not return_std:
            return mean
        std = (variances + self._kept_noise().variance).sqrt()
        return mean, (std.cpu().numpy() * scale.scale)[:, columns]

    @property
    def noise_std_(self) -> Any:
        """Standard deviation of the noise on the scale of y."""
        check_is_fitted(self)
        std = self._kept_noise().variance.sqrt().cpu().numpy() * self.target_scale_.scale
        return float(std[0]) if self._one_column else std

    def _targets(self, y: Array, weights: Array, first: bool) -> Array:
        columns = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        if first:
            counts, self._one_column = weights > 0, y.ndim == 1
            scaled = Scale.of(columns[counts], weights[counts])
            self.target_scale_ = scaled if self.standardize else Scale.none(columns.shape[1])
        elif columns.shape[1] != len(self.target_scale_.mean):
            raise ValueError(
                f"y has {columns.shape[1]} columns, but this estimator began with {len(self.target_scale_.mean)}. "
                "Give the same columns, or fit anew with warm_start=False."
            )
        return self.target_scale_.apply(columns)

    def _num_outputs(self) -> int:
        return len(self.target_scale_.mean)

    def _own_sizes(self) -> dict[str, Any]:
        return super()._own_sizes() | {"noise": self._wanted_noise()}

    def _wanted_noise(self) -> float | str:
        """Return the parameter `noise`, checked: a standard deviation or "learn"."""
        if isinstance(self.noise, str) and self.noise == "learn":
            return "learn"
        hint = 'It is a standard deviation on the scale of y, or "learn".'
        return checks.number("noise", self.noise, 0.0, hint=hint)

    def _noise(self, rows: Rows) -> Noise | None:
        # Rows are weighted here as in the scale, so that standardised targets have variance 1.
        _, deviation = moments(rows.y.cpu().numpy(), rows.weights.numpy())
        # A deviation that was rounding before it was scaled is rounding.
        alike = is_rounding(deviation * self.target_scale_.scale, self.target_scale_.mean)
        spread, wanted = torch.from_numpy(np.where(alike, 0.0, deviation) ** 2).to(rows.y), self._wanted_noise()
        if isinstance(wanted, str):
            return Noise.unknown(spread)
        scale = torch.from_numpy(self.target_scale_.scale).to(rows.y)
        return Noise((wanted / scale).square(), spread)

    def _nll(self, draws: Tensor, y: Tensor, noise: Noise | None) -> Tensor:
        assert noise is not None
        return math.log(len(draws)) - torch.logsumexp(noise.log_prob(draws, y), 0)
