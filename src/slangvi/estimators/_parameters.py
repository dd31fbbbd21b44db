"""Parameters of the estimators, written once; scikit-learn sees them in the signature of `__init__`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from slangvi import checks
from slangvi.estimators.network import ACTIVATIONS, layer_sizes
from slangvi.settings import LIKELIHOOD_CURVATURES, Check, checked, choice


def _or_auto(check: Check) -> Check:
    """Return a check that makes None of "auto"."""
    return lambda name, value: None if isinstance(value, str) and value == "auto" else check(name, value)


def _flag(name: str, value: Any) -> bool:
    return checks.flag(name, bool(value) if isinstance(value, np.bool_) else value)


def _start(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        raise TypeError(
            f"{name} must be a number, a dict of parameter names or globs, a tensor, or 'auto', got {value!r}. "
            "Leave it out for 'auto'."
        )
    return value


_positive = partial(checks.number, low=0.0)
_rate = partial(checks.rate, hint="Or 'auto'.")


@dataclass(frozen=True, kw_only=True)
class EstimatorParameters:
    """Parameters of both estimators, unchecked until `fit`, as scikit-learn wants it.

    Args:
        hidden_layer_sizes: widths of the hidden layers; () is a linear model.
        activation: "relu", "tanh", "logistic", "gelu", "silu" or "identity".
        rank: L, columns of the low-rank precision factor.
        curvature: "ef" from the gradient of every row, as in the paper; "ggn" or "fisher" from the likelihood, see
            `slangvi.SLANG`; "auto" takes "ggn" for up to four outputs and "fisher" for more.
        projection: "eig" as in the paper, or "em", see `slangvi.SLANG`; "auto" takes "eig" with "ef", and "em" else.
        prior_precision: λ of weights and biases; a number, or a dict of parameter names or globs of `module_`. "learn"
            learns one in the fit, "learn-each" one of each parameter tensor, and "learn" in a dict one of that entry.
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
    """

    hidden_layer_sizes: Any = field(
        default=(50,), kw_only=False, metadata={"check": lambda name, value: layer_sizes(value)}
    )
    activation: str = field(default="relu", kw_only=False, metadata={"check": choice(*ACTIVATIONS)})
    rank: int = checked(4, partial(checks.count, least=0))
    curvature: str = checked("ef", choice("auto", "ef", *LIKELIHOOD_CURVATURES))
    projection: str = checked("auto", choice("auto", "eig", "em"))
    prior_precision: Any = 1.0
    temperature: float = checked(1.0, _positive)
    learning_rate_init: float | str = checked("auto", _or_auto(_rate))
    precision_learning_rate_init: float | str = checked("auto", _or_auto(partial(_rate, high=1.0)))
    init_precision: Any = checked("auto", _or_auto(_start))
    mc_samples: int = checked(4, checks.count)
    batch_size: int | str = checked("auto", _or_auto(partial(checks.count, hint="Or 'auto', which is 8 to 32.")))
    max_iter: int = checked(100, checks.count)
    predict_samples: int = checked(64, checks.count)
    early_stopping: bool = checked(False, _flag)
    validation_fraction: float = checked(0.1, partial(checks.number, low=0.0, high=1.0))
    n_iter_no_change: int = checked(10, checks.count)
    tol: float = checked(1e-4, partial(checks.number, low=0.0, closed="low"))
    standardize: bool = checked(True, _flag)
    module: nn.Module | Callable[[int, int], nn.Module] | None = None
    num_data: float | None = checked(None, _positive)
    warm_start: bool = checked(False, _flag)
    random_state: Any = None
    device: str | torch.device = checked("cpu", checks.device)
    verbose: bool | Callable[[str], None] = False


@dataclass(frozen=True, kw_only=True)
class RegressorParameters(EstimatorParameters):
    """Parameters of the regressor.

    Args:
        noise: "learn", or the standard deviation of the noise on the scale of y.
        learning_rate_init: α at the start. "auto" is 0.1, and does not fall in `partial_fit`.
        precision_learning_rate_init: β at the start. "auto" is 0.05 with a warm-up, unless the precision is slow.
        init_precision: d at the start. "auto" is 10, unless the precision is slow: for `fit` without `early_stopping`
            where both are "auto", from the number of rows over the variance of the targets, or λ. What is left of that
            is taken out in the end.
        early_stopping: stop by the nll of held-out rows, once the noise is learnt, or has fallen to what was given.
        validation_fraction: share of the rows held out.
        standardize: standardise inputs and targets over the training rows.
        module: a `torch.nn.Module`, or a function (features, outputs) → module; returns one number per target column,
            (n, K).
    """

    noise: float | str = "learn"


def check_parameters(kind: type[EstimatorParameters], given: Any) -> dict[str, Any]:
    """Return the parameters that are attributes of an estimator, checked and converted; None stands for "auto"."""
    found = {item.name: getattr(given, item.name) for item in fields(kind)}
    for item in fields(kind):
        value, check = found[item.name], item.metadata.get("check")
        if check is not None and not (value is None and item.default is None):
            found[item.name] = check(item.name, value)
    return found
