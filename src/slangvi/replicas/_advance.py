"""The update of K replicas: those that have examples and have not failed take a step, the others stand still."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slangvi import checks
from slangvi.divergence import REMEDY, Watch, step_length
from slangvi.errors import NumericalError
from slangvi.linalg import LowRankPrecision
from slangvi.methods import online_eig, slang
from slangvi.methods.gather import checked_values
from slangvi.methods.step import Tensors
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.replicas import _settings
from slangvi.replicas._gather import LogLikelihood, gather_rows
from slangvi.replicas._inputs import Minibatch, checked_constants, read
from slangvi.replicas._settings import ReplicaSettings, pick
from slangvi.replicas.state import Failure, Generators, Info, State, noise
from slangvi.rows.dense import DenseGradients, rows_within
from slangvi.schedules import Rate

__all__ = ["Lockstep"]

UPDATES = {"slang": slang.update, "online_eig": online_eig.update}


class Numbers(NamedTuple):
    """What differs between replicas in one step, float64, (k, 1) each.

    Args:
        lr: α.
        precision_lr: β.
        momentum: γ.
        weight: N/R, divided by the temperature.
        steps: t.
    """

    lr: Tensor
    precision_lr: Tensor
    momentum: Tensor
    weight: Tensor
    steps: Tensor


class LaneValues:
    """Numbers of each replica, float64, (K,), its schedules and its prior.

    Args:
        settings: as they were passed.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        count, beta = settings.num_replicas, settings.precision_lr
        self.settings = settings
        self.num_data = _settings.numbers(
            "num_data", settings.num_data, count, lambda name, x: float(checks.count(name, x))
        )
        self.temperature = _settings.numbers(
            "temperature", settings.temperature, count, lambda name, x: checks.number(name, x, 0.0)
        )
        self.momentum = _settings.numbers(
            "momentum", settings.momentum, count, lambda name, x: checks.number(name, x, 0.0, 1.0, closed="low")
        )
        self.lr = _settings.Rates("lr", settings.lr, count, 1.0 if beta is None else math.inf)
        self.precision_lr = None if beta is None else _settings.Rates("precision_lr", beta, count, 1.0)

    def numbers(self, steps: Tensor, index: Tensor, rows: Tensor) -> Numbers:
        """Return those of some replicas at the steps they are about to take, with R rows each."""
        size, heat, decay = (pick(x, index) for x in (self.num_data, self.temperature, self.momentum))
        alpha = self.lr.at(steps, index)
        beta = alpha if self.precision_lr is None else self.precision_lr.at(steps, index)
        if self.settings.precision_warmup:
            beta = torch.maximum(beta, 1.0 / (steps + 1).to(beta.dtype))
        return Numbers(*(x.unsqueeze(1).double() for x in (alpha, beta, decay, size / (heat * rows), steps)))

    def prior(self, state: State) -> Prior:
        """λ and μ₀ of every replica, (K, P)."""
        lam = _settings.per_replica("prior_precision", self.settings.prior_precision, state.spec, state.loc)
        mean = _settings.per_replica("prior_mean", self.settings.prior_mean, state.spec, state.loc, positive=False)
        return Prior(lam, mean)


class Told(NamedTuple):
    """What `Info` tells of some replicas, (k, ...) each."""

    spectrum: Tensor
    total: Tensor
    residual: Tensor
    clipped: Tensor
    expected_log_likelihood: Tensor


@dataclass(frozen=True)
class _Part:
    """Some replicas after a step.

    Args:
        index: which, in order, (k,).
        lanes: their states; those that failed as they were.
        told: of their steps; NaN for those that failed.
        failures: those that failed.
        precision: factorised, unless one failed.
    """

    index: Tensor
    lanes: slang.State
    told: Told
    failures: list[Failure]
    precision: LowRankPrecision | None


class Lockstep:
    """Advances all replicas by one step; `Runs.update` calls it.

    Args:
        settings: of all replicas.
        log_likelihood: (params, batch, constants) → (M,), for one replica.
    """

    def __init__(self, settings: ReplicaSettings, log_likelihood: LogLikelihood) -> None:
        self.settings = settings
        self.log_likelihood = log_likelihood
        self.values = LaneValues(settings)
        self.draws = settings.mc_samples
        self.constants = checked_constants(settings.constants, settings.num_replicas)
        self.update_lanes = UPDATES[settings.method]
        self.watch = Watch(settings.on_divergence, REMEDY)
        self._priors: dict[tuple[ParamSpec, torch.dtype, torch.device], Prior] = {}

    def prior_of(self, state: State) -> Prior:
        """λ and μ₀, worked out once."""
        key = (state.spec, state.loc.dtype, state.loc.device)
        if key not in self._priors:
            self._priors[key] = self.values.prior(state)
        return self._priors[key]

    def update(
        self, state: State, batch: Any, generators: Generators = None, counts: Sequence[int] | Tensor | None = None
    ) -> tuple[State, Info]:
        """One step of every replica that has examples and has not failed."""
        new, info = self._taken(state, batch, generators, counts)
        self._look(state, new)
        return new, info

    def _look(self, state: State, new: State) -> None:
        """Show the step to the watch, whose windows are counted by the replica that has taken most."""
        clock = int(new.step.max())
        if not self.watch.due(clock) or clock == int(state.step.max()):
            return
        lr = self.values.lr.at(state.step + 1, torch.arange(len(new.step)))
        alpha, decay, steps = (x.to(new.loc).unsqueeze(1) for x in (lr, self.values.momentum, new.step))
        after = replace(new, step=steps)
        lengths = step_length(state, after, self.prior_of(state), alpha, decay)
        # Those that stand still have gone nowhere, whatever their momentum says.
        lengths = torch.where((new.step > state.step).to(lengths.device), lengths, 0.0)
        self.watch.note(lengths, new.loc, lr.tolist(), clock)

    def _taken(
        self, state: State, batch: Any, generators: Generators, counts: Sequence[int] | Tensor | None
    ) -> tuple[State, Info]:
        if len(state.loc) != self.settings.num_replicas:
            raise ValueError(f"state has {len(state.loc)} replicas, but num_replicas is {self.settings.num_replicas}.")
        data, sizes = read(batch, counts, self._constants_at(state.step + 1), state.loc)
        moving = (sizes > 0) & ~state.failed
        index = moving.nonzero().squeeze(1)
        drawn = noise(state.loc, (self.draws,), generators, index)
        width = self._width(state, data.num_examples)
        pieces = zip(index.split(width), drawn.split(width), strict=True)
        parts = [self._advance(state, data, sizes, *piece) for piece in pieces] if len(index) else []
        failures = tuple(failure for part in parts for failure in part.failures)
        if failures and self.settings.on_failure == "raise":
            raise NumericalError(_complaint(failures))
        return self._joined(state, parts, failures, sizes * self.draws)

    def _constants_at(self, steps: Tensor) -> Any:
        """Those of the steps that replicas are about to take."""
        return checked_constants(self.constants(steps), len(steps)) if callable(self.constants) else self.constants

    def _width(self, state: State, length: int) -> int:
        """How many replicas are advanced at a time."""
        count, params = state.loc.shape
        return rows_within(self.settings.memory_limit, self.draws * length * params * state.loc.element_size(), count)

    def _advance(self, state: State, data: Minibatch, sizes: Tensor, index: Tensor, drawn: Tensor) -> _Part:
        """Take one step of some replicas."""
        whole, prior, device = len(index) == len(state.loc), self.prior_of(state), state.loc.device
        old = Tensors(*(pick(x, index) for x in (state.loc, state.prec_factor, state.prec_diag, state.momentum)))
        lanes = slang.State(*old, step=0, spec=state.spec)
        precision = state.precision if whole else lanes.precision
        thetas = (lanes.loc + precision.transform_noise(drawn.transpose(0, 1))).transpose(0, 1)
        data = data if whole else data.take(index)
        rows, values = gather_rows(self.log_likelihood, state.spec, thetas, data)
        steps, counts = pick(state.step, index) + 1, pick(sizes, index) * self.draws
        numbers = Numbers(*(x.to(device) for x in self.values.numbers(steps, index, counts)))
        prior = Prior(pick(prior.precision, index), pick(prior.mean, index))
        weighted = values if data.weights is None else values * data.weights.unsqueeze(1)
        share = (pick(self.values.num_data, index) / counts).to(device)
        fit = weighted.sum((1, 2), dtype=torch.float64) * share
        try:
            if not bool(torch.isfinite(values).all()):
                raise NumericalError("")  # each says which of its own
            new, info = self._step(lanes, rows, prior, numbers)
        except NumericalError:
            return self._one_by_one(lanes, rows, values, prior, numbers, index, counts // self.draws, fit)
        told = Told(info.spectrum, info.total, info.residual.to(fit), info.clipped, fit)
        return _Part(index, new, told, [], new.precision)

    def _step(self, lanes: slang.State, rows: Tensor, prior: Prior, numbers: Numbers) -> tuple[slang.State, slang.Info]:
        """Take the step of runs in lockstep, or of one alone."""
        return self.update_lanes(
            lanes,
            DenseGradients.from_rows(rows),
            num_data=numbers.weight * rows.shape[-2],
            prior=prior,
            lr=Rate(numbers.lr),
            precision_lr=Rate(numbers.precision_lr),
            momentum=numbers.momentum,
            ages=numbers.steps,
        )

    def _one_by_one(
        self,
        lanes: slang.State,
        rows: Tensor,
        values: Tensor,
        prior: Prior,
        numbers: Numbers,
        index: Tensor,
        counts: Tensor,
        fit: Tensor,
    ) -> _Part:
        """Take the steps one after the other, to find out which of them fail and why."""
        failures, kept, told = list[Failure](), list[slang.State](), list[Told]()
        rank = lanes.prec_factor.shape[-2]
        for k in range(len(index)):
            step = int(numbers.steps[k])
            own = slang.State(*Tensors(*(x[k] for x in lanes.tensors)), step=step - 1, spec=lanes.spec)
            try:
                for row in values[k, :, : int(counts[k])]:
                    checked_values(row, len(row))
                mine = Numbers(*(x[k] for x in numbers))
                new, info = self._step(own, rows[k], Prior(prior.precision[k], prior.mean[k]), mine)
            except NumericalError as error:
                failures.append(Failure(int(index[k]), step, str(error)))
                nothing = fit.new_tensor(math.nan)
                told.append(Told(nothing.expand(rank), nothing, nothing, nothing, nothing))
                kept.append(own)
            else:
                told.append(Told(info.spectrum, info.total, info.residual, info.clipped, fit[k]))
                kept.append(new)
        tensors = Tensors(*(torch.stack(list(parts)) for parts in zip(*(each.tensors for each in kept), strict=True)))
        joined = Told(*(torch.stack([x.double() for x in parts]) for parts in zip(*told, strict=True)))
        return _Part(index, slang.State(*tensors, step=0, spec=lanes.spec), joined, failures, None)

    def _joined(
        self, state: State, parts: list[_Part], failures: tuple[Failure, ...], rows: Tensor
    ) -> tuple[State, Info]:
        """The parts put where they belong among all replicas."""
        lost = torch.tensor([failure.replica for failure in failures], dtype=torch.int64)
        moved = torch.cat([part.index for part in parts]) if parts else lost
        failed = state.failed.index_fill(0, lost, True)
        step = torch.where(failed, state.step, state.step.index_add(0, moved, torch.ones_like(moved)))
        old = (state.loc, state.prec_factor, state.prec_diag, state.momentum)
        lanes = Tensors(*(_put(x, [p.lanes.tensors[k] for p in parts], moved) for k, x in enumerate(old)))
        new = State(*lanes, step=step, failed=failed, spec=state.spec)
        if len(parts) == 1 and len(moved) == len(step) and parts[0].precision is not None:
            new.__dict__["precision"] = parts[0].precision  # fills the cached property
        blank = state.loc.new_full((len(step),), torch.nan)
        spectra = blank.unsqueeze(1).expand(-1, state.prec_factor.shape[1])
        blanks = Told(spectra, blank, blank, blank, blank.double())
        told = Told(*(_put(x, [p.told[k] for p in parts], moved) for k, x in enumerate(blanks)))
        rows = torch.where(step > state.step, rows, 0)
        return new, Info(step, rows, *told, failed, failures, new, self.prior_of(state))


def _complaint(failures: Sequence[Failure]) -> str:
    first, others = failures[0], len(failures) - 1
    more = f" (and {others} more)" if others else ""
    return f"replica {first.replica}{more}: {first.reason}"


def _put(old: Tensor, parts: list[Tensor], index: Tensor) -> Tensor:
    """The old tensor with the entries of some replicas replaced."""
    if len(parts) == 1 and len(index) == len(old):
        return parts[0]
    return old.index_copy(0, index.to(old.device), torch.cat(parts).to(old.dtype)) if parts else old
