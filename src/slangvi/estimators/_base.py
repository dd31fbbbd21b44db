"""What classifier and regressor share: parameters, checks, and the way from arrays to a posterior and back."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.estimators._noise import Noise
from slangvi.estimators._parameters import EstimatorParameters
from slangvi.estimators._training import Patience, Rows, Training, lean
from slangvi.estimators._training_settings import AutoRates, RequestedSettings
from slangvi.estimators.data import Array, Scale, held_out
from slangvi.estimators.network import ACTIVATIONS, check_outputs, input_dtype, layer_sizes, made_module, mlp, seeded
from slangvi.keywords import document_fields
from slangvi.methods import slang
from slangvi.predict.samples import drawn_in_chunks

__all__ = ["BaseSLANG"]

_FLOATS = (np.float64, np.float32)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


class BaseSLANG(BaseEstimator, ABC):  # type: ignore[misc]
    """Parameters and training; see `SLANGClassifier` for what they mean."""

    # What "auto" stands for.
    _rates: ClassVar[AutoRates]

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        document_fields(cls)

    def _store(self, parameters: EstimatorParameters) -> None:
        """Set every parameter as an attribute, which is all that scikit-learn wants of `__init__`."""
        for item in fields(parameters):
            setattr(self, item.name, getattr(parameters, item.name))

    @property
    def posterior_(self) -> LowRankPrecisionNormal:
        """The Gaussian over the weights of `module_`, for scaled inputs: `slangvi.predictive_samples` takes both."""
        check_is_fitted(self)
        return slang.posterior(self.state_)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "state_")

    # ---- what the two differ in ----

    @abstractmethod
    def _targets(self, y: Array, weights: Array, first: bool) -> Array:
        """Targets as they are trained on; learns classes or scales from the first ones."""

    @abstractmethod
    def _num_outputs(self) -> int:
        """C."""

    @abstractmethod
    def _labels(self, rows: Rows) -> Tensor | None:
        """Classes, of which each should be held out in proportion, (n,); None where there are none."""

    @abstractmethod
    def _noise(self, rows: Rows) -> Noise | None:
        """The noise to begin with."""

    @abstractmethod
    def _nll(self, draws: Tensor, y: Tensor, noise: Noise | None) -> Tensor:
        """−log of the averaged likelihood of each row, for draws of the outputs (S, n, C), (n,)."""

    # ---- training ----

    def _fit(self, X: Any, y: Any, sample_weight: Any, options: dict[str, Any]) -> None:
        settings = self._checked()
        go_on = self.warm_start and hasattr(self, "state_")
        X, y, weights = self._validated(X, y, sample_weight, not go_on, options)
        if not go_on:
            self._forget()
        generators = self._generators()
        whole = self._rows(X, y, weights, generators[0], not go_on)
        rows, held = self._split(whole, generators[0]) if self.early_stopping else (whole, None)
        patience = None if held is None else Patience(self._loss_on(held), self.tol, self.n_iter_no_change)
        with seeded(generators[0], self.device):
            training = self._training(rows, settings, self.max_iter, go_on)
            losses = training.run(
                rows, self.max_iter, generators, falling=True, patience=patience, report=self._report()
            )
        self.loss_curve_ = losses
        self.n_iter_ = len(losses)
        self.n_samples_seen_ = whole.total
        if patience is not None:
            self.validation_nll_, self.best_validation_nll_ = patience.losses, patience.best
        self._keep(training)

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any, options: dict[str, Any]) -> None:
        settings, first = self._checked(), not hasattr(self, "state_")
        X, y, weights = self._validated(X, y, sample_weight, first, options)
        generators = self._generators()
        rows = self._rows(X, y, weights, generators[0], first)
        seen = getattr(self, "n_samples_seen_", 0.0) + rows.total
        num_data = seen if self.num_data is None else float(self.num_data)
        with seeded(generators[0], self.device):
            training = self._training(rows, settings, None, not first)
            losses = training.run(rows, 1, generators, falling=False, num_data=num_data, report=self._report())
        self.n_samples_seen_ = seen
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), *losses]
        self.n_iter_ = len(self.loss_curve_)
        self._keep(training)

    def _checked(self) -> RequestedSettings:
        """Parameters, checked when they are needed and not before, as scikit-learn wants it."""
        layer_sizes(self.hidden_layer_sizes)
        checks.choice("activation", self.activation, tuple(ACTIVATIONS))
        checks.count("max_iter", self.max_iter)
        checks.count("predict_samples", self.predict_samples)
        checks.count("n_iter_no_change", self.n_iter_no_change)
        checks.number("validation_fraction", self.validation_fraction, 0.0, 1.0)
        checks.number("tol", self.tol, 0.0, closed="low")
        for name in ("early_stopping", "standardize", "warm_start"):
            given = getattr(self, name)
            checks.flag(name, bool(given) if isinstance(given, np.bool_) else given)
        if self.num_data is not None:
            checks.number("num_data", self.num_data, 0.0)
        checks.device("device", self.device)
        auto, hint = _is_auto(self.batch_size), "Or 'auto', which is 8 to 32."
        return RequestedSettings(
            rank=checks.count("rank", self.rank, least=0),
            prior_precision=self.prior_precision,
            temperature=checks.number("temperature", self.temperature, 0.0),
            mc_samples=checks.count("mc_samples", self.mc_samples),
            lr=self._rate("learning_rate_init"),
            precision_lr=self._rate("precision_learning_rate_init", 1.0),
            init_precision=self._given_start(),
            batch_size=None if auto else checks.count("batch_size", self.batch_size, hint=hint),
        )

    def _rate(self, name: str, high: float = math.inf) -> float | None:
        """A rate that was given; None for "auto"."""
        given = getattr(self, name)
        return None if _is_auto(given) else checks.rate(name, given, high, hint="Or 'auto'.")

    def _given_start(self) -> Any:
        """The precision to start with, if one was given; None for "auto"."""
        given = self.init_precision
        if given is None or (isinstance(given, str) and not _is_auto(given)):
            raise TypeError(
                "init_precision must be a number, a dict of parameter names or globs, a tensor, or 'auto', "
                f"got {given!r}. Leave it out for 'auto'."
            )
        return None if _is_auto(given) else given

    def _validated(
        self, X: Any, y: Any, sample_weight: Any, reset: bool, options: dict[str, Any]
    ) -> tuple[Array, Array, Array]:
        X, y = validate_data(self, X, y, dtype=_FLOATS, reset=reset, **options)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("sample_weight must have a positive sum, got zeros. Leave it out to count rows alike.")
        return X, y, weights

    def _rows(self, X: Array, y: Array, weights: Array, generator: torch.Generator, first: bool) -> Rows:
        """Scaled tensors on the device, without rows that count for nothing; the first ones decide scales and sizes."""
        counts = weights > 0
        targets = self._targets(y, weights, first)[counts]
        X, weights = X if counts.all() else X[counts], weights[counts]  # rows are copied if they must be
        if first:
            self.input_scale_ = Scale.of(X, weights) if self.standardize else Scale.none(X.shape[1])
            self.module_ = self._made(X.shape[1], generator, torch.from_numpy(np.empty(0, X.dtype)).dtype)
        goal = torch.from_numpy(np.ascontiguousarray(targets)).to(self.device)
        goal = goal.to(input_dtype(self.module_)) if goal.is_floating_point() else goal
        return Rows(self._inputs(X), goal, torch.from_numpy(weights))

    def _inputs(self, X: Array) -> Tensor:
        """Scaled rows as the module takes them."""
        scaled = torch.from_numpy(np.ascontiguousarray(self.input_scale_.apply(X)))
        return scaled.to(self.device, input_dtype(self.module_))

    def _made(self, features: int, generator: torch.Generator, dtype: torch.dtype) -> nn.Module:
        outputs = self._num_outputs()
        if self.module is None:
            hidden = layer_sizes(self.hidden_layer_sizes)
            made: nn.Module = mlp(features, hidden, outputs, self.activation, dtype, generator)
        else:
            made = made_module(self.module, features, outputs, generator)
        return made.to(self.device)

    def _split(self, rows: Rows, generator: torch.Generator) -> tuple[Rows, Rows]:
        """Rows to train on, and rows to stop by."""
        count = len(rows.x)
        held = max(1, round(self.validation_fraction * count))
        if held >= count:
            raise ValueError(
                f"early_stopping holds out {held} of {count} rows (n_samples={count}), which leaves none to train on. "
                "Lower validation_fraction or give more rows."
            )
        stopping = held_out(count, held, self._labels(rows), generator)
        training = torch.ones(count, dtype=torch.bool).index_fill(0, stopping, False).nonzero()[:, 0]
        places = training, stopping
        parts = [Rows(rows.x[p.to(rows.x.device)], rows.y[p.to(rows.y.device)], rows.weights[p]) for p in places]
        return parts[0], parts[1]

    def _training(self, rows: Rows, settings: RequestedSettings, epochs: int | None, go_on: bool) -> Training:
        """From a new state or the last one; for so many epochs, or nobody knows how many."""
        if go_on:
            self._check_sizes()
        else:
            self._sizes = self._own_sizes()
            with torch.no_grad():
                check_outputs(self.module_(rows.x[:2]), len(rows.x[:2]), self._num_outputs())
        noise = self._kept_noise() if go_on else self._noise(rows)
        spread = 1.0 if noise is None else float(noise.spread.mean())
        if epochs is None or self.early_stopping:  # a slow precision would still be near its high start
            resolved = settings.resolve_endless(self._rates)
        else:
            resolved = settings.resolve(self._rates, len(rows.x), rows.total, epochs, spread)
        return Training(self.module_, resolved, noise, self.state_ if go_on else None)

    def _own_sizes(self) -> dict[str, Any]:
        """What cannot change from one fit to the next that goes on from it."""
        layers = {"hidden_layer_sizes": layer_sizes(self.hidden_layer_sizes), "activation": self.activation}
        always = {"rank": self.rank, "standardize": self.standardize, "module": self.module}
        return always | (layers if self.module is None else {})

    def _check_sizes(self) -> None:
        for name, now in self._own_sizes().items():
            before = self._sizes.get(name, now)
            if now != before:
                raise ValueError(
                    f"{name} was {_told(before)} when this estimator was first fitted, and is {_told(now)} now. What "
                    "was learned cannot go on with it. Set it back, or fit anew with warm_start=False."
                )

    def _keep(self, training: Training) -> None:
        self.state_ = lean(training.state)
        self._last_noise = training.noise

    def _kept_noise(self) -> Noise | None:
        noise: Noise | None = self._last_noise
        return None if noise is None else noise.copy()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What fails or is interrupted inside leaves the estimator as it was, so that it can be done again.

        A random source that was handed in, or is numpy's own, has moved on all the same: it is not ours to set back.
        """
        before, source = dict(vars(self)), getattr(self, "_source", None)
        drawn = source.get_state() if source is not None and isinstance(self.random_state, Integral) else None
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            if source is not None and drawn is not None:
                source.set_state(drawn)
            raise

    def _forget(self) -> None:
        """What an earlier fit left behind, so that the next one does not depend on it."""
        for name in [name for name in vars(self) if name.endswith("_") or name in ("_source", "_predict_seed")]:
            if name not in ("n_features_in_", "feature_names_in_"):
                delattr(self, name)

    def _generators(self) -> tuple[torch.Generator, torch.Generator]:
        """Sources for the order of rows and for draws; later calls on a fitted estimator go on where these ended."""
        if not hasattr(self, "_source"):
            self._source = check_random_state(self.random_state)
            self._predict_seed = int(self._source.randint(2**31 - 1))
        seeds = [int(self._source.randint(2**31 - 1)) for _ in range(2)]
        first, second = torch.Generator(), torch.Generator(torch.device(self.device))
        return first.manual_seed(seeds[0]), second.manual_seed(seeds[1])

    def _report(self) -> Callable[[str], None] | None:
        if callable(self.verbose):
            given: Callable[[str], None] = self.verbose
            return given
        return (lambda line: _write(f"[{type(self).__name__}] {line}\n")) if self.verbose else None

    # ---- prediction ----

    def _draws(self, X: Any) -> Iterator[Tensor]:
        """Outputs at draws of the weights, (S, m, C) for chunks of rows; the same draws for every row and call."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_FLOATS, reset=False)
        samples = checks.count("predict_samples", self.predict_samples)
        yield from self._drawn(self._inputs(X), self.state_, samples)

    def _drawn(self, x: Tensor, state: slang.State, samples: int) -> Iterator[Tensor]:
        return drawn_in_chunks(self.module_, slang.posterior(state), x, samples, self._predict_seed)

    def _loss_on(self, held: Rows) -> Callable[[slang.State, Noise | None], float]:
        """Mean −log predictive density of held-out rows."""

        def loss(state: slang.State, noise: Noise | None) -> float:
            values: list[Tensor] = []
            for draws in self._drawn(held.x, state, self.predict_samples):
                done = sum(map(len, values))
                values.append(self._nll(draws, held.y[done : done + draws.shape[1]], noise).cpu())
            return float((held.weights * torch.cat(values)).sum() / held.weights.sum())

        return loss


def _told(value: Any) -> str:
    """In a message; a module would fill pages."""
    return f"another {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)


def _write(line: str) -> None:
    sys.stderr.write(line)
