"""Parts that classifier and regressor share: checks, and the way from arrays to a posterior and back."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
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
from slangvi.estimators._parameters import EstimatorParameters, check_parameters
from slangvi.estimators._training import AutoRates, Patience, Rows, Training, resolve_options
from slangvi.estimators.data import Array, Scale, held_out
from slangvi.estimators.network import check_outputs, input_dtype, layer_sizes, made_module, mlp, seeded
from slangvi.keywords import document_fields
from slangvi.likelihoods import Categorical, OutputLogLikelihood
from slangvi.methods import slang
from slangvi.methods.learning import prior_precision_of
from slangvi.predict.samples import drawn_in_chunks

_FLOATS = (np.float64, np.float32)


class BaseSLANG(BaseEstimator, ABC):  # type: ignore[misc]
    """Parameters and training; see `SLANGClassifier` for what they mean."""

    _parameters: ClassVar[type[EstimatorParameters]]
    _rates: ClassVar[AutoRates]
    _y_checks: ClassVar[dict[str, bool]]  # arguments of scikit-learn's `validate_data`

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        document_fields(cls)

    @property
    def posterior_(self) -> LowRankPrecisionNormal:
        """The Gaussian over the weights of `module_`, for scaled inputs: `slangvi.predictive_samples` takes both."""
        check_is_fitted(self)
        return slang.posterior(self.state_)

    def scaled_batch(self, X: Any, y: Any) -> tuple[OutputLogLikelihood, tuple[Tensor, Tensor]]:
        """Return the log-likelihood of the weights, and rows as it takes them: (params, batch) → (n,).

        Args:
            X: rows, (n, D).
            y: labels or targets, as for `fit`.
        """
        check_is_fitted(self)
        X, y = validate_data(self, X, y, dtype=_FLOATS, reset=False, **self._y_checks)
        rows = self._rows(X, y, np.ones(len(X)), torch.Generator(), first=False)
        likelihood = Categorical() if self._last_noise is None else self._last_noise
        return likelihood.of(self.module_), (rows.x, rows.y)

    @property
    def prior_precision_(self) -> dict[str, float]:
        """λ of each parameter tensor of `module_`, given or learnt, by name."""
        check_is_fitted(self)
        lam, spec = prior_precision_of(self.prior_precision, self.state_), self.state_.spec
        return {name: float(lam[part].mean()) for name, part in spec.slices.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for item in fields(self._parameters):  # those that came after it was pickled
            self.__dict__.setdefault(item.name, item.default)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "state_")

    # ---- where the two differ ----

    @abstractmethod
    def _targets(self, y: Array, weights: Array, first: bool) -> Array:
        """Return targets as they are trained on; learn classes or scales from the first ones."""

    @abstractmethod
    def _num_outputs(self) -> int:
        """Return C."""

    def _noise(self, rows: Rows) -> Noise | None:
        """Return the noise to begin with; None for classes."""
        return None

    @abstractmethod
    def _nll(self, draws: Tensor, y: Tensor, noise: Noise | None) -> Tensor:
        """Return −log of the averaged likelihood of each row, (n,), for draws of the outputs (S, n, C)."""

    # ---- training ----

    def _fit(self, X: Any, y: Any, sample_weight: Any, one_pass: bool = False) -> None:
        """Train until the end, or for one more pass at constant rates if `one_pass`."""
        options, batch_size = self._checked()
        go_on = (one_pass or self.warm_start) and hasattr(self, "state_")
        X, y = validate_data(self, X, y, dtype=_FLOATS, reset=not go_on, **self._y_checks)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("sample_weight must have a positive sum, got zeros. Leave it out to count rows alike.")
        if not (go_on or one_pass):
            self._forget()
        generators = self._generators()
        rows = self._rows(X, y, weights, generators[0], not go_on)
        seen = rows.total + (getattr(self, "n_samples_seen_", 0.0) if one_pass else 0.0)
        patience = None
        if self.early_stopping and not one_pass:
            rows, held = self._split(rows, generators[0])
            patience = Patience(partial(self._loss_on, held), self.tol, self.n_iter_no_change)
        num_data = rows.total
        if one_pass:
            num_data = seen if self.num_data is None else float(self.num_data)
        epochs = 1 if one_pass else self.max_iter
        with seeded(generators[0], self.device):
            training = self._training(rows, options, batch_size, None if one_pass else epochs, go_on)
            losses = training.run(rows, epochs, generators, not one_pass, num_data, patience, self._report)
        self.n_samples_seen_ = seen
        self.loss_curve_ = [*(getattr(self, "loss_curve_", []) if one_pass else []), *losses]
        self.n_iter_ = len(self.loss_curve_)
        if patience is not None:
            self.validation_nll_, self.best_validation_nll_ = patience.losses, patience.best
        self.state_ = replace(training.state)  # without what is cached in it, to be pickled
        self._last_noise = training.noise

    def _checked(self) -> tuple[dict[str, Any], int | None]:
        """Check parameters; return options of `slang.build`, and the batch size, with None for "auto".

        Scikit-learn wants parameters to be checked when they are needed and not before.
        """
        found = check_parameters(self._parameters, self)
        names = ("rank", "curvature", "projection", "prior_precision", "temperature", "mc_samples", "init_precision")
        rates = {"lr": found["learning_rate_init"], "precision_lr": found["precision_learning_rate_init"]}
        return {name: found[name] for name in names} | rates, found["batch_size"]

    def _rows(self, X: Array, y: Array, weights: Array, generator: torch.Generator, first: bool) -> Rows:
        """Return scaled tensors without rows of weight 0; the first ones decide scales and sizes."""
        counts = weights > 0
        targets = self._targets(y, weights, first)[counts]
        X, weights = X if counts.all() else X[counts], weights[counts]  # rows are copied if they must be
        if first:
            self.input_scale_ = Scale.of(X, weights) if self.standardize else Scale.none(X.shape[1])
            if self.module is None:
                sizes = [X.shape[1], *layer_sizes(self.hidden_layer_sizes), self._num_outputs()]
                dtype = torch.from_numpy(np.empty(0, X.dtype)).dtype
                made: nn.Module = mlp(sizes, self.activation, dtype, generator)
            else:
                made = made_module(self.module, X.shape[1], self._num_outputs(), generator)
            self.module_ = made.to(self.device)
        goal = torch.from_numpy(np.ascontiguousarray(targets)).to(self.device)
        goal = goal.to(input_dtype(self.module_)) if goal.is_floating_point() else goal
        return Rows(self._inputs(X), goal, torch.from_numpy(weights))

    def _inputs(self, X: Array) -> Tensor:
        """Return scaled rows as the module takes them."""
        scaled = torch.from_numpy(np.ascontiguousarray(self.input_scale_.apply(X)))
        return scaled.to(self.device, input_dtype(self.module_))

    def _split(self, rows: Rows, generator: torch.Generator) -> tuple[Rows, Rows]:
        """Return rows to train on, and rows to stop by."""
        count = len(rows.x)
        held = max(1, round(self.validation_fraction * count))
        if held >= count:
            raise ValueError(
                f"early_stopping holds out {held} of {count} rows (n_samples={count}), which leaves none to train on. "
                "Lower validation_fraction or give more rows."
            )
        labels = None if rows.y.is_floating_point() else rows.y.cpu()
        stopping = held_out(count, held, labels, generator)
        training = torch.ones(count, dtype=torch.bool).index_fill(0, stopping, False).nonzero()[:, 0]

        def part(index: Tensor) -> Rows:
            return Rows(rows.x[index.to(rows.x.device)], rows.y[index.to(rows.y.device)], rows.weights[index])

        return part(training), part(stopping)

    def _training(
        self, rows: Rows, options: dict[str, Any], batch_size: int | None, epochs: int | None, go_on: bool
    ) -> Training:
        """Return a training from a new state or the last one; `epochs` is None where their number is not known."""
        count = len(rows.x)
        if go_on:
            self._check_sizes()
            noise = self._kept_noise()
        else:
            self._sizes = self._own_sizes()
            with torch.no_grad():
                check_outputs(self.module_(rows.x[:2]), len(rows.x[:2]), self._num_outputs())
            noise = self._noise(rows)
        size = min(count, batch_size or min(32, max(8, count // 8)))
        steps = None
        if epochs is not None and not self.early_stopping:  # else a slow precision may still be near its high start
            steps = epochs * -(-count // size)
        spread = 1.0 if noise is None else float(noise.spread.mean())
        resolved = resolve_options(options, self._rates, rows.total, steps, spread)
        return Training(self.module_, resolved, size, noise, self.state_ if go_on else None)

    def _own_sizes(self) -> dict[str, Any]:
        """Return parameters that cannot change from one fit to the next that goes on from it."""
        layers = {"hidden_layer_sizes": layer_sizes(self.hidden_layer_sizes), "activation": self.activation}
        always = {"rank": self.rank, "standardize": self.standardize, "module": self.module}
        return always | (layers if self.module is None else {})

    def _check_sizes(self) -> None:
        for name, now in self._own_sizes().items():
            before = self._sizes.get(name, now)
            if now != before:
                # A module would fill pages of the message.
                was, is_now = (
                    f"another {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)
                    for value in (before, now)
                )
                raise ValueError(
                    f"{name} was {was} when this estimator was first fitted, and is {is_now} now. What was "
                    "learned cannot go on with it. Set it back, or fit anew with warm_start=False."
                )

    def _kept_noise(self) -> Any:
        """Return a copy of the noise of the last fit; None for classes."""
        return copy.copy(self._last_noise)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Leave the estimator as it was if the block fails or is interrupted, so that it can be done again.

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
        """Remove what an earlier fit left behind, so that the next one does not depend on it."""
        for name in [name for name in vars(self) if name.endswith("_") or name in ("_source", "_predict_seed")]:
            if name not in ("n_features_in_", "feature_names_in_"):
                delattr(self, name)

    def _generators(self) -> tuple[torch.Generator, torch.Generator]:
        """Return sources for the order of rows and for draws; on a fitted estimator they go on where these ended."""
        if not hasattr(self, "_source"):
            self._source = check_random_state(self.random_state)
            self._predict_seed = int(self._source.randint(2**31 - 1))
        seeds = [int(self._source.randint(2**31 - 1)) for _ in range(2)]
        first, second = torch.Generator(), torch.Generator(torch.device(self.device))
        return first.manual_seed(seeds[0]), second.manual_seed(seeds[1])

    def _report(self, line: str) -> None:
        if callable(self.verbose):
            self.verbose(line)
        elif self.verbose:
            sys.stderr.write(f"[{type(self).__name__}] {line}\n")

    def _draws(self, X: Any) -> Iterator[Tensor]:
        """Yield outputs at draws of the weights, (S, m, C) for chunks of rows; the same draws for every row."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_FLOATS, reset=False)
        samples = checks.count("predict_samples", self.predict_samples)
        yield from self._draws_at(self._inputs(X), self.state_, samples)

    def _draws_at(self, x: Tensor, state: slang.State, samples: int) -> Iterator[Tensor]:
        return drawn_in_chunks(self.module_, slang.posterior(state), x, samples, self._predict_seed)

    def _loss_on(self, held: Rows, state: slang.State, noise: Noise | None) -> float:
        """Return the mean −log predictive density of held-out rows."""
        values: list[Tensor] = []
        for draws in self._draws_at(held.x, state, self.predict_samples):
            done = sum(map(len, values))
            values.append(self._nll(draws, held.y[done : done + draws.shape[1]], noise).cpu())
        return float((held.weights * torch.cat(values)).sum() / held.weights.sum())
