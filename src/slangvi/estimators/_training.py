"""Epochs of SLANG on rows in memory, with early stopping; nothing here knows scikit-learn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.divergence import Watch
from slangvi.errors import NumericalError
from slangvi.estimators._noise import Noise
from slangvi.estimators.data import order_of
from slangvi.likelihoods import Categorical
from slangvi.methods import slang
from slangvi.methods.learning import prior_precision_of
from slangvi.schedules import Cosine, Schedule, rate_at, slow_precision
from slangvi.types import Transform

# Share of a first fit for which learnt noise stays where it starts, and in which given noise falls to what it is.
_HOLD, _FALL = 0.3, 0.6
_MOMENTUM = 0.9


@dataclass(frozen=True)
class AutoRates:
    """Values that "auto" stands for in a kind of estimator.

    Args:
        falling: α of `fit`, where rates fall.
        curvature: κ of `slow_precision`, for targets of variance 1.
        constant: α and β where the number of steps is not known, in `partial_fit` and with early stopping.
        init_precision: d at the start, where the precision is not slow.
    """

    falling: float
    curvature: float
    constant: tuple[float, float]
    init_precision: float = 10.0


def resolve_options(
    options: dict[str, Any], auto: AutoRates, num_data: float, steps: int | None, spread: float = 1.0
) -> dict[str, Any]:
    """Return options of `slang.build` with rates and the start filled in where they are None.

    The precision is slow where the number of steps is known, not None, and neither its rate nor its start is given.
    The spread is the variance of the targets.
    """
    default = auto.constant[0] if steps is None else auto.falling
    options = options | {"lr": default if options["lr"] is None else options["lr"]}
    beta, start = options["precision_lr"], options["init_precision"]
    if steps is not None and beta is None and start is None:
        temperature = options["temperature"]
        return options | slow_precision(num_data, steps, curvature=auto.curvature / spread, temperature=temperature)
    return options | {
        "precision_lr": auto.constant[1] if beta is None else beta,
        "init_precision": auto.init_precision if start is None else start,
        "precision_warmup": True,
    }


@dataclass(frozen=True)
class Rows:
    """Examples x (n, D) with labels (n,) or targets (n, K), and what each counts for, (n,), positive."""

    x: Tensor
    y: Tensor
    weights: Tensor

    @property
    def total(self) -> float:
        """What they count for together."""
        return float(self.weights.sum())


@dataclass
class Patience:
    """Early stopping: validation losses, the best of them, and the state and noise that had it.

    Training stops after `most` epochs without an improvement of the loss by `tol`.
    """

    loss: Callable[[slang.State, Noise | None], float]
    tol: float
    most: int
    losses: list[float] = field(default_factory=list)
    best: float = math.inf
    kept: tuple[slang.State, Noise | None] | None = None
    _since: int = 0

    def exhausted(self, state: slang.State, noise: Noise | None, counts: bool) -> bool:
        """Note the loss of a state, and return whether to stop; one that does not count is only noted."""
        self.losses.append(self.loss(state, noise))
        if not counts:
            return False
        self._since = 0 if self.losses[-1] < self.best - self.tol else self._since + 1
        if self.losses[-1] < self.best:
            self.best, self.kept = self.losses[-1], (state, copy.copy(noise))
        return self._since >= self.most


class Training:
    """A network in training from a state, or from its own parameters, which are not changed.

    Options are those of `slang.build`, the size is in rows per step; there is no noise where targets are classes.
    """

    def __init__(
        self, module: nn.Module, options: dict[str, Any], size: int, noise: Noise | None, state: slang.State | None
    ) -> None:
        self.module, self.options, self.size, self.noise = module, options, size, noise
        self._watch = Watch("warn", f"Lower learning_rate_init (it is {options['lr']:g}), or give larger batches.")
        self._hold = self._fall = 0
        self._start: Tensor | None = None  # d at the start of a slow precision
        params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        self.state: slang.State = self._method(1).init(params)
        if state is not None:
            self.state = state
        elif not options["precision_warmup"]:
            # Below the prior's precision, its pull would overshoot until the precision has learnt of it.
            lam = prior_precision_of(options["prior_precision"], self.state)
            self._start = torch.maximum(self.state.prec_diag, lam)
            self.state = replace(self.state, prec_diag=self._start)

    def run(
        self,
        rows: Rows,
        epochs: int,
        generators: tuple[torch.Generator, torch.Generator],
        falling: bool,
        num_data: float,
        patience: Patience | None,
        report: Callable[[str], object],
    ) -> list[float]:
        """Train, and return the mean negative log-likelihood of each epoch.

        Rates fall along a half cosine over all epochs, or keep their start values. The generators are of the order of
        rows, on the CPU, and of draws, on the device of the module. A report gets a line for every epoch.
        """
        count, size = len(rows.x), self.size
        per_epoch = -(-count // size)  # the last step of an epoch may see rows again
        steps, start = per_epoch * epochs, self.state.step
        rates: dict[str, Schedule] = {name: self.options[name] for name in ("lr", "precision_lr")}
        if falling:
            rates = {name: Cosine(self.options[name], steps, start) for name in rates}
        # The methods take a whole N; a fraction goes where it is divided by.
        method = self._method(count, **rates, temperature=self.options["temperature"] * count / num_data)
        # Noise waits until a new network knows something; see `Noise`.
        first = steps if falling and start == 0 else 0
        # The last step sees given noise as it is, however few there are.
        self._hold, self._fall = round(_HOLD * first), min(round(_FALL * first), max(first - 1, 0))
        cumulative, losses = rows.weights.double().cumsum(0).cpu(), []
        for epoch in range(1, epochs + 1):
            order = order_of(cumulative, per_epoch * size, generators[0]).to(rows.x.device)
            try:
                losses.append(self._epoch(method, rates["lr"], rows, order.split(size), generators[1]))
            except NumericalError as error:
                raise NumericalError(
                    f"fit met NaN or Inf in epoch {epoch}: {error} The estimator is as it was before. Lower "
                    f"learning_rate_init (it is {self.options['lr']:g}), raise prior_precision or init_precision, keep "
                    "standardize=True, or give float64 data."
                ) from error
            stop = patience is not None and patience.exhausted(self.state, self.noise, self._noise_is_final())
            held = "" if patience is None else f", validation nll {patience.losses[-1]:.4f}"
            report(f"epoch {epoch} of {epochs}: nll {losses[-1]:.4f}{held}")
            if stop:
                break
        if patience is not None and patience.kept is not None:
            self.state, self.noise = patience.kept
        if self._start is not None:
            betas = (rate_at("precision_lr", rates["precision_lr"], k) for k in range(1, self.state.step + 1))
            lam = prior_precision_of(self.options["prior_precision"], self.state)
            self.state = without_start(self.state, self._start, lam, math.prod(1.0 - beta for beta in betas))
        if self.noise is not None:
            self.noise.fall(1.0)  # a fit may have ended on the way
        return losses

    def _epoch(
        self, method: Transform, lr: Schedule, rows: Rows, batches: tuple[Tensor, ...], generator: torch.Generator
    ) -> float:
        total = 0.0
        for picked in batches:
            if self.noise is not None:
                self.noise.fall(min(1.0, self.state.step / self._fall) if self._fall else 1.0)
            before = self.state
            batch = rows.x[picked], rows.y[picked]
            self.state, info = method.update(before, batch, generator=generator)
            if self._watch.due(self.state.step):
                self._watch.look(before, self.state, info._prior, rate_at("lr", lr, self.state.step), _MOMENTUM)
            seen = info.expected_log_likelihood / len(rows.x)
            total -= seen
            if self.noise is not None and self.noise.learnt and self.state.step > self._hold:
                self.noise.follow(self._squares(self.noise, seen, batch, generator), len(batches))
        return total / len(batches)

    def _squares(
        self, noise: Noise, log_likelihood: float, batch: tuple[Tensor, Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return mean squared residuals of a batch at draws of the weights, for each target column, (K,)."""
        if len(noise.variance) == 1:
            return noise.squares(log_likelihood)
        # A sum over columns does not tell them apart; one more draw, from the factors that the next step needs, does.
        dtypes = {name: p.dtype for name, p in self.module.named_parameters()}
        draw = {name: p.to(dtypes[name]) for name, p in slang.sample(self.state, generator=generator).items()}
        with torch.no_grad():
            outputs: Tensor = torch.func.functional_call(self.module, draw, (batch[0],))
        return (batch[1] - outputs).square().mean(0)

    def _noise_is_final(self) -> bool:
        """Return whether the noise is learnt, or what was given; before that a loss says little of what it will be."""
        if self.noise is None:
            return True
        return self.state.step > (self._hold if self.noise.learnt else self._fall)

    def _method(self, num_data: int, **changes: Any) -> Transform:
        return slang.build(
            (Categorical() if self.noise is None else self.noise).of(self.module),
            num_data=num_data,
            momentum=_MOMENTUM,
            model=self.module,
            on_divergence="ignore",  # a watch with advice of its own looks for it
            **(self.options | changes),
        )


def without_start(state: slang.State, start: Tensor, prior: Tensor, share: float) -> slang.State:
    r"""Return the state without what its precision started with, as Adam corrects averages that began at zero.

    $$ (U U^\top + \mathrm{diag}\,d - \ell\,\mathrm{diag}\,d_0) / (1 - \ell) $$

    The start d₀ still has the share ℓ = Π (1 − βₜ). But for rounding, the diagonal part is never below the prior's λ.
    """
    diag = torch.maximum((state.prec_diag - share * start) / (1.0 - share), prior)
    return replace(state, prec_diag=diag, prec_factor=state.prec_factor / math.sqrt(1.0 - share))
