"""Epochs of SLANG on rows in memory, with early stopping; nothing here knows scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slangvi.divergence import Watch
from slangvi.errors import NumericalError
from slangvi.estimators._noise import Noise
from slangvi.estimators._training_settings import ResolvedSettings, rows_per_step, steps_per_epoch
from slangvi.estimators.data import order_of
from slangvi.likelihoods import Categorical
from slangvi.methods import slang
from slangvi.params.values import per_parameter
from slangvi.schedules import Cosine, Schedule, rate_at
from slangvi.types import Transform

__all__ = ["Patience", "Rows", "Training", "lean", "without_start"]

# Share of a first fit for which learnt noise stays where it starts, and in which given noise falls to what it is.
_HOLD, _FALL = 0.3, 0.6
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Rows:
    """Examples, and what each counts for.

    Args:
        x: (n, D).
        y: (n,) labels or (n, K) targets.
        weights: (n,), positive.
    """

    x: Tensor
    y: Tensor
    weights: Tensor

    @property
    def total(self) -> float:
        """What they count for together."""
        return float(self.weights.sum())


@dataclass
class Patience:
    """Early stopping: validation losses, the best of them, and what was best.

    Args:
        loss: (state, noise) → validation loss.
        tol: a loss must be less than the best by so much to count.
        most: epochs without such a loss before training stops.
    """

    loss: Callable[[slang.State, Noise | None], float]
    tol: float
    most: int

    def __post_init__(self) -> None:
        self.losses: list[float] = []
        self.best = float("inf")
        self.kept: tuple[slang.State, Noise | None] | None = None
        self._since = 0

    def exhausted(self, state: slang.State, noise: Noise | None, counts: bool = True) -> bool:
        """Look at the state after an epoch, and say whether to stop; one that does not count is only looked at."""
        self.losses.append(self.loss(state, noise))
        if not counts:
            return False
        self._since = 0 if self.losses[-1] < self.best - self.tol else self._since + 1
        if self.losses[-1] < self.best:
            self.best, self.kept = self.losses[-1], (state, None if noise is None else noise.copy())
        return self._since >= self.most


class Training:
    """A module on its way.

    Args:
        module: the network; its parameters are where training starts, and are not changed.
        settings: how to train.
        noise: of real targets; None for classes.
        state: to go on from; None starts anew.
    """

    def __init__(
        self, module: nn.Module, settings: ResolvedSettings, noise: Noise | None, state: slang.State | None
    ) -> None:
        self.module, self.settings, self.noise = module, settings, noise
        self._watch = Watch("warn", f"Lower learning_rate_init (it is {settings.lr:g}), or give larger batches.")
        self._hold = self._fall = 0
        self.state: slang.State = self._method(1, settings.lr, settings.precision_lr, 1.0).init(self._params())
        # d and λ at the start of a slow precision.
        self._start: tuple[Tensor, Tensor] | None = None
        if state is not None:
            self.state = state
        elif not settings.precision_warmup:
            self._begin_slowly()

    def run(
        self,
        rows: Rows,
        epochs: int,
        generators: tuple[torch.Generator, torch.Generator],
        falling: bool,
        num_data: float | None = None,
        patience: Patience | None = None,
        report: Callable[[str], None] | None = None,
    ) -> list[float]:
        """Train, and return the mean negative log-likelihood of each epoch.

        Args:
            rows: to train on.
            epochs: at most.
            generators: of the order of rows, on the CPU, and of draws, on the device of the module.
            falling: let the rates fall along a half cosine over all epochs; else they keep their start values.
            num_data: N; None takes what the rows count for.
            patience: early stopping.
            report: called with a line for every epoch.
        """
        size, per_epoch = (count(len(rows.x), self.settings.batch_size) for count in (rows_per_step, steps_per_epoch))
        alpha, beta = self._rates(per_epoch * epochs, falling)
        # The methods take a whole N; a fraction goes where it is divided by.
        temperature = self.settings.temperature * len(rows.x) / (rows.total if num_data is None else num_data)
        method = self._method(len(rows.x), alpha, beta, temperature)
        # Noise waits until a new network knows something; see `Noise`.
        first = per_epoch * epochs if falling and self.state.step == 0 else 0
        # The last step sees given noise as it is, however few there are.
        self._hold, self._fall = round(_HOLD * first), min(round(_FALL * first), max(first - 1, 0))
        cumulative, losses = rows.weights.double().cumsum(0).cpu(), []
        for epoch in range(1, epochs + 1):
            order = order_of(cumulative, per_epoch * size, generators[0]).to(rows.x.device)
            try:
                losses.append(self._epoch(method, alpha, rows, order.split(size), generators[1]))
            except NumericalError as error:
                raise NumericalError(_advice(epoch, self.settings, error)) from error
            stop = patience is not None and patience.exhausted(self.state, self.noise, self._noise_is_own)
            if report is not None:
                held = "" if patience is None else f", validation nll {patience.losses[-1]:.4f}"
                report(f"epoch {epoch} of {epochs}: nll {losses[-1]:.4f}{held}")
            if stop:
                break
        if patience is not None and patience.kept is not None:
            self.state, self.noise = patience.kept
        if self._start is not None:
            betas = (rate_at("precision_lr", beta, step) for step in range(1, self.state.step + 1))
            self.state = without_start(self.state, *self._start, math.prod(1.0 - rate for rate in betas))
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
        """Mean squared residuals of a batch at draws of the weights, for each target column, (K,)."""
        if len(noise.variance) == 1:
            return noise.squares(log_likelihood)
        # A sum over columns does not tell them apart; one more draw, from the factors that the next step needs, does.
        dtypes = {name: p.dtype for name, p in self.module.named_parameters()}
        draw = {name: p.to(dtypes[name]) for name, p in slang.sample(self.state, generator=generator).items()}
        with torch.no_grad():
            outputs: Tensor = torch.func.functional_call(self.module, draw, (batch[0],))
        return (batch[1] - outputs).square().mean(0)

    @property
    def _noise_is_own(self) -> bool:
        """Whether the noise is learnt, or what was given: before that a loss says little of what it will be."""
        if self.noise is None:
            return True
        return self.state.step > (self._hold if self.noise.learnt else self._fall)

    def _begin_slowly(self) -> None:
        """At the prior's precision at least, or its pull overshoots until the precision has learnt of it."""
        like = self.state.prec_diag
        lam = per_parameter("prior_precision", self.settings.prior_precision, self.state.spec, like)
        self.state = replace(self.state, prec_diag=torch.maximum(like, lam))
        self._start = self.state.prec_diag, lam

    def _rates(self, steps: int, falling: bool) -> tuple[Schedule, Schedule]:
        alpha, beta, start = self.settings.lr, self.settings.precision_lr, self.state.step
        return (Cosine(alpha, steps, start), Cosine(beta, steps, start)) if falling else (alpha, beta)

    def _params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    def _method(self, num_data: int, alpha: Schedule, beta: Schedule, temperature: float) -> Transform:
        settings = self.settings
        return slang.build(
            (Categorical() if self.noise is None else self.noise).of(self.module),
            num_data=num_data,
            rank=settings.rank,
            lr=alpha,
            precision_lr=beta,
            precision_warmup=settings.precision_warmup,
            prior_precision=settings.prior_precision,
            init_precision=settings.init_precision,
            momentum=_MOMENTUM,
            mc_samples=settings.mc_samples,
            temperature=temperature,
            model=self.module,
            on_divergence="ignore",  # seen by a watch with advice of its own
        )


def _advice(epoch: int, settings: ResolvedSettings, error: NumericalError) -> str:
    return (
        f"fit met NaN or Inf in epoch {epoch}: {error} The estimator is as it was before. Lower learning_rate_init (it "
        f"is {settings.lr:g}), raise prior_precision or init_precision, keep standardize=True, or give float64 data."
    )


def without_start(state: slang.State, start: Tensor, prior: Tensor, share: float) -> slang.State:
    r"""What the precision is without what it started with, as in Adam's correction of averages that began at zero.

    $$ (U U^\top + \mathrm{diag}\,d - \ell\,\mathrm{diag}\,d_0) / (1 - \ell) $$

    Args:
        state: after some steps.
        start: d₀, (P,).
        prior: λ, (P,), which the diagonal part is never below, but for rounding.
        share: ℓ = Π (1 − βₜ), the weight that the start still has.
    """
    diag = torch.maximum((state.prec_diag - share * start) / (1.0 - share), prior)
    return replace(state, prec_diag=diag, prec_factor=state.prec_factor / math.sqrt(1.0 - share))


def lean(state: slang.State) -> slang.State:
    """The state without what can be computed from it, to be kept and pickled."""
    return replace(state)
