"""The update of K replicas: those that have examples and have not failed take a step, the others stand still."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slangvi import checks
from slangvi.divergence import REMEDY, Watch, step_length
from slangvi.errors import NumericalError
from slangvi.grads.dense import rows_within
from slangvi.linalg import LowRankPrecision
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.replicas import _settings
from slangvi.replicas._gather import LockstepGatherer
from slangvi.replicas._inputs import Minibatch, checked_constants, read
from slangvi.replicas._replay import Given, GraphKeeper
from slangvi.replicas._rules import RULES, Lanes
from slangvi.replicas._settings import ReplicaSettings, pick
from slangvi.replicas._step import Numbers, Taken, Told, take_step, told_of, trouble
from slangvi.replicas.state import Failure, Generators, Info, State, noise

__all__ = ["Lockstep"]


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

    def numbers(self, steps: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """Those of some replicas at the steps they are about to take, with R rows each: float64, (k, 5)."""
        size, heat, decay = (pick(x, index) for x in (self.num_data, self.temperature, self.momentum))
        alpha = self.lr.at(steps, index)
        beta = alpha if self.precision_lr is None else self.precision_lr.at(steps, index)
        if self.settings.precision_warmup:
            beta = torch.maximum(beta, 1.0 / (steps + 1).to(beta.dtype))
        return torch.stack(Numbers(alpha, beta, decay, 1 - decay**steps, size / (heat * rows)), dim=1)

    def prior(self, state: State) -> Prior:
        """λ and μ₀ of every replica, (K, P)."""
        lam = _settings.per_replica("prior_precision", self.settings.prior_precision, state.spec, state.loc)
        mean = _settings.per_replica("prior_mean", self.settings.prior_mean, state.spec, state.loc, positive=False)
        return Prior(lam, mean)


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
    lanes: Lanes
    told: Told
    failures: list[Failure]
    precision: LowRankPrecision | None


class Lockstep:
    """Advances all replicas by one step; `Runs.update` calls it.

    Args:
        settings: of all replicas.
        gather: from draws and batches to gradients.
    """

    def __init__(self, settings: ReplicaSettings, gather: LockstepGatherer) -> None:
        self.settings = settings
        self.gather = gather
        self.values = LaneValues(settings)
        self.draws = settings.mc_samples
        self.constants = checked_constants(settings.constants, settings.num_replicas)
        self.rule = RULES[settings.method]
        self.watch = Watch(settings.on_divergence, REMEDY)
        self.graphs = GraphKeeper(self.rule) if settings.compile else None
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
        replayed = None if self.graphs is None else self._replayed(self.graphs, state, data, sizes, index, drawn)
        if replayed is not None:
            return replayed
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
        if self.gather.model is not None:
            return count
        return rows_within(self.settings.memory_limit, self.draws * length * params * state.loc.element_size(), count)

    def _advance(self, state: State, data: Minibatch, sizes: Tensor, index: Tensor, drawn: Tensor) -> _Part:
        """One step of some replicas."""
        whole, prior = len(index) == len(state.loc), self.prior_of(state)
        lanes = Lanes(*(pick(x, index) for x in (state.loc, state.prec_factor, state.prec_diag, state.momentum)))
        precision = state.precision if whole else _picked(state.precision, index)
        thetas = (lanes.loc + precision.transform_noise(drawn.transpose(0, 1))).transpose(0, 1)
        data = data if whole else data.take(index)
        gathered = self.gather(state.spec, thetas, data)
        steps, rows = pick(state.step, index) + 1, pick(sizes, index) * self.draws
        numbers = self.values.numbers(steps, index, rows).to(state.loc.device)
        prior = Prior(pick(prior.precision, index), pick(prior.mean, index))
        taken = take_step(self.rule, lanes, gathered, prior, numbers)
        told = told_of(taken, gathered, data.weights, (pick(self.values.num_data, index) / rows).to(state.loc.device))
        if bool(taken.fine.all()):
            return _Part(index, taken.lanes, told, [], taken.precision)
        reasons = _reasons(taken, gathered.values, rows // self.draws, steps, state.spec)
        bad = torch.tensor(list(reasons), device=state.loc.device, dtype=torch.int64)
        kept = Lanes(*(new.index_copy(0, bad, old[bad]) for new, old in zip(taken.lanes, lanes, strict=True)))
        failures = [Failure(int(index[k]), int(steps[k]), reason) for k, reason in reasons.items()]
        return _Part(index, kept, Told(*(x.index_fill(0, bad, torch.nan) for x in told)), failures, None)

    def _replayed(
        self, graphs: GraphKeeper, state: State, data: Minibatch, sizes: Tensor, index: Tensor, drawn: Tensor
    ) -> tuple[State, Info] | None:
        """The step by a graph; None when it has to be taken eagerly."""
        rank, count = state.prec_factor.shape[1], len(state.loc)
        whole = self._width(state, data.num_examples) == count
        if not len(index) or not graphs.usable(state.loc, rank, whole):
            return None
        kind = self.gather.ready(state.spec, data)
        if kind is None:
            return None
        moving, rows = torch.zeros(count, dtype=torch.int64).index_fill_(0, index, 1), sizes * self.draws
        every, prior = torch.arange(count), self.prior_of(state)
        numbers = self.values.numbers(state.step + 1, every, rows.clamp_min(1))
        share = self.values.num_data / rows.clamp_min(1)
        if len(index) < count:
            drawn = drawn.new_zeros(count, *drawn.shape[1:]).index_copy(0, index.to(drawn.device), drawn)
        numbers = torch.cat([numbers, torch.stack([share, moving.to(share.dtype)], 1)], 1)
        given = Given(data.batch, data.constants, data.weights, data.num_examples, drawn, numbers)
        key = kind, data.weights is None, self.gather.model is None, state.loc.dtype, state.loc.device
        found = graphs.step(key, lambda *args: self.gather.unchecked(kind, *args), state, given, prior)
        if found is None:
            return None
        step = state.step + moving
        new = State(*found.lanes, step, state.failed, state.spec)
        found.graph.made(new)
        return new, Info(step, rows * moving, *found.told, state.failed, (), new, prior)

    def _joined(
        self, state: State, parts: list[_Part], failures: tuple[Failure, ...], rows: Tensor
    ) -> tuple[State, Info]:
        """The parts put where they belong among all replicas."""
        lost = torch.tensor([failure.replica for failure in failures], dtype=torch.int64)
        moved = torch.cat([part.index for part in parts]) if parts else lost
        failed = state.failed.index_fill(0, lost, True)
        step = torch.where(failed, state.step, state.step.index_add(0, moved, torch.ones_like(moved)))
        old = (state.loc, state.prec_factor, state.prec_diag, state.momentum)
        lanes = Lanes(*(_put(x, [p.lanes[k] for p in parts], moved) for k, x in enumerate(old)))
        new = State(lanes.loc, lanes.prec_factor, lanes.prec_diag, lanes.momentum, step, failed, state.spec)
        if len(parts) == 1 and len(moved) == len(step) and parts[0].precision is not None:
            new.__dict__["precision"] = parts[0].precision  # fills the cached property
        blank = state.loc.new_full((len(step),), torch.nan)
        spectra = blank.unsqueeze(1).expand(-1, lanes.prec_factor.shape[1])
        blanks = Told(spectra, blank, blank, blank, blank.double())
        told = Told(*(_put(x, [p.told[k] for p in parts], moved) for k, x in enumerate(blanks)))
        rows = torch.where(step > state.step, rows, 0)
        return new, Info(step, rows, *told, failed, failures, new, self.prior_of(state))


def _reasons(taken: Taken, values: Tensor, sizes: Tensor, steps: Tensor, spec: ParamSpec) -> dict[int, str]:
    """Which replicas of a step failed, and why; a sum may overflow where no entry does."""
    suspects = (~taken.fine).nonzero().squeeze(1).tolist()
    found = {k: trouble(taken, values[k, :, : int(sizes[k])], k, int(steps[k]), spec) for k in suspects}
    return {k: reason for k, reason in found.items() if reason}


def _complaint(failures: Sequence[Failure]) -> str:
    first, others = failures[0], len(failures) - 1
    more = f" (and {others} more)" if others else ""
    return f"replica {first.replica}{more}: {first.reason}"


def _picked(precision: LowRankPrecision, index: Tensor) -> LowRankPrecision:
    return LowRankPrecision(*(pick(getattr(precision, item.name), index) for item in fields(precision)))


def _put(old: Tensor, parts: list[Tensor], index: Tensor) -> Tensor:
    """The old tensor with the entries of some replicas replaced."""
    if len(parts) == 1 and len(index) == len(old):
        return parts[0]
    return old.index_copy(0, index.to(old.device), torch.cat(parts).to(old.dtype)) if parts else old
