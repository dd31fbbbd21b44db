"""SLANG and SLANG-OnlineEig for K replicas: those that have examples and have not failed take a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.divergence import REACTIONS, REMEDY, Watch, step_length
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, keywords_of
from slangvi.linalg import LowRankPrecision
from slangvi.methods import online_eig, slang
from slangvi.methods.gather import checked_values, one_per_example
from slangvi.methods.step import Diagnostics, Tensors
from slangvi.params import Params, ParamSpec
from slangvi.priors import Prior
from slangvi.replicas.state import (
    Failure,
    Generators,
    Info,
    State,
    init,
    listed,
    noise,
    per_replica,
    posterior,
    replica,
    sample,
    stack,
)
from slangvi.rows.dense import DenseGradients, rows_within
from slangvi.schedules import Rate, Schedule
from slangvi.settings import CheckedFields, checked, choice

__all__ = ["ReplicaSettings", "Runs", "build"]

# (params, batch, constants) → (M,), for one replica.
LogLikelihood = Callable[[Params, Any, Any], Tensor]
UPDATES = {"slang": slang.update, "online_eig": online_eig.update}


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaSettings(CheckedFields):
    """Settings of `slangvi.replicas.build`.

    Args:
        num_replicas: K.
        num_data: N, examples in the training set.
        rank: L ≥ 0, columns of U.
        lr: α, a number or a function of the step counted from 1.
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor; K in a sequence, or (K, P).
        prior_mean: μ₀, likewise.
        precision_lr: β, at most 1; None follows `lr`.
        momentum: γ.
        mc_samples: S, draws of the weights per step.
        init_precision: d at the start; given like `prior_precision`.
        temperature: the likelihood is weighed by 1/temperature.
        precision_warmup: let the first steps average the curvature they see, βₜ = max(β, 1/(t+1)); for all replicas.
        constants: any nesting of tensors (K, ...), of which each likelihood sees its own entry: a noise precision, say.
            Or a function that makes it from the steps the replicas are about to take, counted from 1, (K,) on the CPU:
            a noise that falls while a network learns.
        memory_limit: bytes that rows may take; replicas beyond it wait for their turn, at least one is advanced at a
            time.
        on_failure: a replica that meets NaN or Inf is left where it was, told in `info`, and the others go on
            ("freeze"); or the step raises `NumericalError` ("raise").
        on_divergence: what to do when the mean of a replica keeps going to and fro by more than a posterior standard
            deviation in a step, as with rates that are far too large: "warn", "raise" or "ignore".
        method: "slang", or "online_eig" for SLANG-OnlineEig, whose replicas are what `online_eig.build` makes of them.
    """

    num_replicas: int = field(metadata={"check": checks.count})
    num_data: int | Sequence[int]
    rank: int = field(metadata={"check": checks.rank})
    lr: Schedule | Sequence[Schedule]
    prior_precision: Any = 1.0
    prior_mean: Any = 0.0
    precision_lr: Schedule | Sequence[Schedule] | None = None
    momentum: float | Sequence[float] = 0.9
    mc_samples: int = checked(1, checks.count)
    init_precision: Any = 1.0
    temperature: float | Sequence[float] = 1.0
    precision_warmup: bool = checked(True, checks.flag)
    constants: Any = None
    memory_limit: int | None = checked(None, partial(checks.count, hint="It is a number of bytes."))
    on_failure: str = checked("freeze", choice("freeze", "raise"))
    on_divergence: str = checked("warn", choice(*REACTIONS))
    method: Literal["slang", "online_eig"] = checked("slang", choice(*UPDATES))


class Runs(NamedTuple):
    """Result of `build`.

    Args:
        init: (params, stacked=False) → state.
        update: (state, batch, generators=None, counts=None) → state, info.
        sample: (state, shape, generators=None) → draws.
        posterior: state → distribution with batch shape (K,).
        replica: (state, k) → state of a single run.
        stack: states of single runs → state.
    """

    init: Callable[..., State]
    update: Callable[..., tuple[State, Info]]
    sample: Callable[..., dict[str, Tensor]]
    posterior: Callable[[State], LowRankPrecisionNormal]
    replica: Callable[[State, int], slang.State]
    stack: Callable[[Sequence[slang.State]], State]


@keywords_of(ReplicaSettings)
def build(log_likelihood: Callable[..., Tensor], **options: Any) -> Runs:
    """Build SLANG for many small problems advanced as one; each is what `slang.build` makes of it alone.

    The problems share the log-likelihood function, the shapes of the parameters, rank and number of draws. Whatever
    else is listed as one value may also be a sequence with one for each replica.

    Args:
        log_likelihood: (params, batch) → (M,) for one replica, or (params, batch, constants) → (M,) when there are
            constants. It is called under `torch.func.vmap`.
        options: settings, as follows.

    Returns:
        The functions of `Runs`. `update` takes the batch with (K, M, ...) tensors and a sequence of K generators, from
        each of which a replica draws what it would draw alone; one generator or None draws for all together, which is
        faster on a GPU. `counts` says how many examples of each replica are real, the rest being padding at the end;
        a replica with 0 sits out this step.

    Example:
        >>> import torch
        >>> def log_likelihood(params, batch, tau):
        ...     return -0.5 * tau * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> runs = build(log_likelihood, num_replicas=2, num_data=[2, 30], rank=1, lr=[0.5, 0.1],
        ...              constants=torch.tensor([1.0, 4.0]))
        >>> state = runs.init({"w": torch.zeros(1)})
        >>> batch = {"x": torch.ones(2, 3, 1), "y": torch.ones(2, 3)}
        >>> generators = [torch.Generator().manual_seed(k) for k in range(2)]
        >>> state, info = runs.update(state, batch, generators, counts=[2, 3])
        >>> state.step, info.num_rows
        (tensor([1, 1]), tensor([2, 3]))
    """
    settings = bind_settings("build", ReplicaSettings, **options)

    def paired(params: Params, batch: Any, own: Any) -> Tensor:
        return log_likelihood(params, batch) if settings.constants is None else log_likelihood(params, batch, own)

    lockstep = Lockstep(settings, paired)

    def begin(params: Params | Sequence[Params], stacked: bool = False) -> State:
        state = init(params, settings.num_replicas, settings.rank, settings.init_precision, stacked)
        lockstep.prior_of(state)
        return state

    return Runs(begin, lockstep.update, sample, posterior, replica, stack)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return the entries of some replicas, given in order; all of them as they are."""
    return x if len(index) == len(x) else x[index.to(x.device)]


class PerReplica:
    """A number for each of K replicas, or a function of its step if it may be scheduled.

    The value is one for all, or a sequence or (K,) tensor of K; `check` takes the name and a number.
    """

    def __init__(
        self, name: str, value: Any, count: int, check: Callable[[str, Any], float], scheduled: bool = False
    ) -> None:
        plain = value.tolist() if isinstance(value, Tensor) and value.ndim == 1 else value
        many = listed(name, plain, count)
        self.check, self._shared = check, many is None
        self._named = [(name, plain)] * count if many is None else [(f"{name}[{k}]", x) for k, x in enumerate(many)]
        varies = [scheduled and callable(one) for _, one in self._named]
        fixed = [check(*named) for named, is_function in zip(self._named, varies, strict=True) if not is_function]
        self._fixed = None if any(varies) else torch.tensor(fixed, dtype=torch.float64)

    def at(self, steps: Tensor, index: Tensor) -> Tensor:
        """Return the numbers of some replicas at their own steps, counted from 1: float64, (k,)."""
        if self._fixed is not None:
            return pick(self._fixed, index)
        times = steps.tolist()
        if self._shared and times.count(times[0]) == len(times):
            return torch.full(steps.shape, self._one(0, times[0]), dtype=torch.float64)
        found = [self._one(k, step) for k, step in zip(index.tolist(), times, strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    def _one(self, k: int, step: int) -> float:
        name, value = self._named[k]
        return self.check(name, value(step) if callable(value) else value)


def _rate_below(high: float) -> Callable[[str, Any], float]:
    """Return a check of rates that are at most `high`."""

    def check(name: str, value: Any) -> float:
        # The check proper takes longer than a step of a small replica can afford.
        is_plain = type(value) is float and 0.0 < value <= high < math.inf
        return value if is_plain else checks.rate(name, value, high)

    return check


class _Part(NamedTuple):
    """Some replicas after a step: their indices (k,) in order, and their states; those that failed as they were."""

    members: Tensor
    tensors: Tensors
    diagnostics: tuple[Tensor, ...]  # spectrum, total, residual, clipped, expected log-likelihood; NaN if failed
    failures: list[Failure]
    precision: LowRankPrecision | None  # None if one failed


class Lockstep:
    """Advances all replicas by one step; `Runs.update` calls it."""

    def __init__(self, settings: ReplicaSettings, log_likelihood: LogLikelihood) -> None:
        self.settings, self.log_likelihood, self.draws = settings, log_likelihood, settings.mc_samples
        count, beta = settings.num_replicas, settings.precision_lr
        self.num_data = PerReplica("num_data", settings.num_data, count, checks.count)
        positive, share = partial(checks.number, low=0.0), partial(checks.number, low=0.0, high=1.0, closed="low")
        self.temperature = PerReplica("temperature", settings.temperature, count, positive)
        self.momentum = PerReplica("momentum", settings.momentum, count, share)
        self.lr = PerReplica("lr", settings.lr, count, _rate_below(1.0 if beta is None else math.inf), scheduled=True)
        self.precision_lr = (
            None if beta is None else PerReplica("precision_lr", beta, count, _rate_below(1.0), scheduled=True)
        )
        self.constants = checked_constants(settings.constants, count)
        self.watch = Watch(settings.on_divergence, REMEDY)
        self._priors: dict[tuple[ParamSpec, torch.dtype, torch.device], Prior] = {}

    def prior_of(self, state: State) -> Prior:
        """Return λ and μ₀ of every replica, (K, P), computed once for each layout."""
        key = (state.spec, state.loc.dtype, state.loc.device)
        if key not in self._priors:
            lam = per_replica("prior_precision", self.settings.prior_precision, state.spec, state.loc)
            mean = per_replica("prior_mean", self.settings.prior_mean, state.spec, state.loc, positive=False)
            self._priors[key] = Prior(lam, mean)
        return self._priors[key]

    def update(
        self, state: State, batch: Any, generators: Generators = None, counts: Sequence[int] | Tensor | None = None
    ) -> tuple[State, Info]:
        """Take one step of every replica that has examples and has not failed."""
        if len(state.loc) != self.settings.num_replicas:
            raise ValueError(f"state has {len(state.loc)} replicas, but num_replicas is {self.settings.num_replicas}.")
        constants = self.constants
        if callable(constants):
            constants = checked_constants(constants(state.step + 1), len(state.step))
        data, sizes = read_batch(batch, counts, constants, state.loc)
        index = ((sizes > 0) & ~state.failed).nonzero().squeeze(1)
        drawn = noise(state.loc, (self.draws,), generators, index)
        bytes_each = self.draws * data.num_examples * state.loc.shape[1] * state.loc.element_size()
        width = rows_within(self.settings.memory_limit, bytes_each, len(state.loc))
        pieces = zip(index.split(width), drawn.split(width), strict=True)
        parts = [self._advance(state, data, sizes, *piece) for piece in pieces] if len(index) else []
        failures = tuple(failure for part in parts for failure in part.failures)
        if failures and self.settings.on_failure == "raise":
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise NumericalError(f"replica {failures[0].replica}{more}: {failures[0].reason}")
        new, info = self._join(state, parts, failures, sizes * self.draws)
        self._look(state, new)
        return new, info

    def _look(self, state: State, new: State) -> None:
        """Show the step to the watch, whose windows are counted by the replica that has taken most."""
        clock, every = int(new.step.max()), torch.arange(len(new.step))
        if not self.watch.due(clock) or clock == int(state.step.max()):
            return
        lr, decay = self.lr.at(state.step + 1, every), self.momentum.at(state.step + 1, every)
        alpha, decay, steps = (x.to(new.loc).unsqueeze(1) for x in (lr, decay, new.step))
        lengths = step_length(state, replace(new, step=steps), self.prior_of(state), alpha, decay)
        # Those that stand still have gone nowhere, whatever their momentum says.
        lengths = torch.where((new.step > state.step).to(lengths.device), lengths, 0.0)
        self.watch.note(lengths, new.loc, lr.tolist(), clock)

    def _advance(self, state: State, data: Minibatch, sizes: Tensor, index: Tensor, drawn: Tensor) -> _Part:
        """Take one step of some replicas."""
        whole, prior, device = len(index) == len(state.loc), self.prior_of(state), state.loc.device
        lanes = slang.State(*Tensors(*(pick(x, index) for x in state.tensors)), step=0, spec=state.spec)
        precision = state.precision if whole else lanes.precision
        thetas = (lanes.loc + precision.transform_noise(drawn.transpose(0, 1))).transpose(0, 1)
        data = data if whole else data.take(index)
        rows, values = gather_rows(self.log_likelihood, state.spec, thetas, data)
        steps, counts = pick(state.step, index) + 1, pick(sizes, index)
        size, heat = self.num_data.at(steps, index), self.temperature.at(steps, index)
        alpha = self.lr.at(steps, index)
        beta = alpha if self.precision_lr is None else self.precision_lr.at(steps, index)
        if self.settings.precision_warmup:
            beta = torch.maximum(beta, 1.0 / (steps + 1).to(beta.dtype))
        share = size / (counts * self.draws)
        # What differs between replicas, (k, 1) each in float64, and the prior, (k, P).
        options = {"lr": alpha, "precision_lr": beta, "momentum": self.momentum.at(steps, index), "ages": steps}
        options["num_data"] = share / heat * rows.shape[-2]
        options = {name: x.unsqueeze(1).double().to(device) for name, x in options.items()}
        options |= {"prior_precision": pick(prior.precision, index), "prior_mean": pick(prior.mean, index)}
        weighted = values if data.weights is None else values * data.weights.unsqueeze(1)
        fit = weighted.sum((1, 2), dtype=torch.float64) * share.to(device)
        try:
            if not bool(torch.isfinite(values).all()):
                raise NumericalError("")  # each says which of its own
            new, info = self._step(lanes, rows, options)
        except NumericalError:
            return self._advance_singly(lanes, rows, values, options, index, counts, fit)
        found = (info.spectrum, info.total, info.residual.to(fit), info.clipped, fit)
        return _Part(index, new.tensors, found, [], new.precision)

    def _step(self, lanes: slang.State, rows: Tensor, options: dict[str, Tensor]) -> tuple[slang.State, slang.Info]:
        """Take the step of runs in lockstep, or of one alone."""
        given: dict[str, Any] = dict(options)
        given |= {name: Rate(options[name]) for name in ("lr", "precision_lr")}
        given["prior"] = Prior(given.pop("prior_precision"), given.pop("prior_mean"))
        return UPDATES[self.settings.method](lanes, DenseGradients.from_rows(rows), **given)

    def _advance_singly(
        self,
        lanes: slang.State,
        rows: Tensor,
        values: Tensor,
        options: dict[str, Tensor],
        index: Tensor,
        counts: Tensor,
        fit: Tensor,
    ) -> _Part:
        """Take the steps one after the other, to find out which of them fail and why."""
        failures, kept, found = list[Failure](), list[Tensors](), list[tuple[Tensor, ...]]()
        nothing = fit.new_tensor(math.nan)
        for k in range(len(index)):
            step = int(options["ages"][k])
            own = slang.State(*Tensors(*(x[k] for x in lanes.tensors)), step=step - 1, spec=lanes.spec)
            try:
                for row in values[k, :, : int(counts[k])]:
                    checked_values(row, len(row))
                new, info = self._step(own, rows[k], {name: x[k] for name, x in options.items()})
            except NumericalError as error:
                failures.append(Failure(int(index[k]), step, str(error)))
                found.append((nothing.expand(lanes.prec_factor.shape[-2]), *[nothing] * 4))
                kept.append(own.tensors)
            else:
                found.append((info.spectrum, info.total, info.residual, info.clipped, fit[k]))
                kept.append(new.tensors)
        tensors = Tensors(*(torch.stack(parts) for parts in zip(*kept, strict=True)))
        told = tuple(torch.stack([x.double() for x in parts]) for parts in zip(*found, strict=True))
        return _Part(index, tensors, told, failures, None)

    def _join(
        self, state: State, parts: list[_Part], failures: tuple[Failure, ...], rows: Tensor
    ) -> tuple[State, Info]:
        """Put the parts where they belong among all replicas."""
        lost = torch.tensor([failure.replica for failure in failures], dtype=torch.int64)
        moved = torch.cat([part.members for part in parts]) if parts else lost
        failed = state.failed.index_fill(0, lost, True)
        step = torch.where(failed, state.step, state.step.index_add(0, moved, torch.ones_like(moved)))
        lanes = Tensors(*(_put(x, [p.tensors[k] for p in parts], moved) for k, x in enumerate(state.tensors)))
        new = State(*lanes, step=step, failed=failed, spec=state.spec)
        if len(parts) == 1 and len(moved) == len(step) and parts[0].precision is not None:
            new.__dict__["precision"] = parts[0].precision  # fills the cached property
        blank = state.loc.new_full((len(step),), torch.nan)
        blanks = (blank.unsqueeze(1).expand(-1, state.prec_factor.shape[1]), blank, blank, blank, blank.double())
        *found, fit = (_put(x, [p.diagnostics[k] for p in parts], moved) for k, x in enumerate(blanks))
        told = Diagnostics(*found)
        others: dict[str, Any] = {"failed": failed, "failures": failures, "_state": new, "_prior": self.prior_of(state)}
        rows = torch.where(step > state.step, rows, 0)
        return new, Info(step, rows, *told, expected_log_likelihood=fit, **others)


def _put(old: Tensor, parts: list[Tensor], index: Tensor) -> Tensor:
    """Return the old tensor with the entries of some replicas replaced."""
    if len(parts) == 1 and len(index) == len(old):
        return parts[0]
    return old.index_copy(0, index.to(old.device), torch.cat(parts).to(old.dtype)) if parts else old


@dataclass(frozen=True)
class Minibatch:
    """Data that the likelihoods see in one step: any nestings of tensors."""

    batch: Any  # (K, M, ...)
    constants: Any  # (K, ...)
    weights: Tensor | None  # 1 for examples, 0 for padding, (K, M); None when there is no padding
    num_examples: int  # M, padding included

    def take(self, index: Tensor | slice) -> Minibatch:
        """Return the data of some of the replicas."""
        batch, constants, weights = _each(lambda x: x[index], (self.batch, self.constants, self.weights))
        return Minibatch(batch, constants, weights, self.num_examples)


def gather_rows(
    log_likelihood: LogLikelihood, spec: ParamSpec, thetas: Tensor, data: Minibatch
) -> tuple[Tensor, Tensor]:
    """Return the gradient of every example at draws (K, S, P), (K, S·M, P), and the log-likelihoods, (K, S, M)."""

    def one(params: dict[str, Tensor], example: Any, weight: Tensor | None, constants: Any) -> tuple[Tensor, Tensor]:
        single = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, example)
        value = one_per_example(log_likelihood(params, single, constants), 1)[0]
        return -(value if weight is None else value * weight), value

    batch, constants, weights = (_dims(x) for x in (data.batch, data.constants, data.weights))
    rows_of = torch.func.grad(one, has_aux=True)
    for dims in ((None, batch, weights, None), (0, None, None, None), (0, batch, weights, constants)):
        rows_of = torch.func.vmap(rows_of, in_dims=dims, randomness="different")
    found, values = rows_of(spec.unflatten(thetas), data.batch, data.weights, data.constants)
    shape = (len(thetas), thetas.shape[1] * data.num_examples, -1)
    return torch.cat([found[name].reshape(shape) for name in spec.names], -1), values


def _dims(tree: Any) -> Any:
    """Return where vmap finds the dimension to go over: in front of tensors."""
    return tree_map(lambda x: 0 if isinstance(x, Tensor) else None, tree)


def read_batch(batch: Any, counts: Any, constants: Any, like: Tensor) -> tuple[Minibatch, Tensor]:
    """Return the batch for replicas like a (K, P) tensor, and the number of examples of each, (K,) on the CPU."""
    count = len(like)
    shapes = {tuple(x.shape[:2]) for x in tree_flatten(batch)[0] if isinstance(x, Tensor)}
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 2 or shape[0] != count or not shape[1]:
        raise ValueError(
            f"batch must hold tensors of shape ({count}, M, ...), one entry per replica and example, got first "
            f"dimensions {sorted(shapes) or 'none: it has no tensors'}."
        )
    length = shape[1]
    sizes = torch.full((count,), length) if counts is None else _checked_counts(counts, count, length)
    constants = _each(lambda x: x.to(like.device), constants)
    if bool(((sizes == length) | (sizes == 0)).all()):
        return Minibatch(batch, constants, None, length), sizes
    real = (torch.arange(length) < sizes.unsqueeze(1)).to(like.device)
    # Padding repeats the first example with weight 0, so that whatever stands there cannot spoil a product.
    filled = _each(lambda x: x.where(real.view(*real.shape, *(1,) * (x.ndim - 2)), x[:, :1]), batch)
    return Minibatch(filled, constants, real.to(like.dtype), length), sizes


def checked_constants(constants: Any, count: int) -> Any:
    """Return tensors with K in front, or a function that gives them; None becomes an empty nesting."""
    if constants is None or callable(constants):
        return constants or ()
    for leaf in tree_flatten(constants)[0]:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,):
            what = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"constants must be tensors with the {count} replicas in front, got {what}.")
    return constants


def _each(function: Any, tree: Any) -> Any:
    """Apply a function to every tensor in a nesting."""
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def _checked_counts(counts: Any, count: int, length: int) -> Tensor:
    found = torch.as_tensor(counts, device="cpu")
    if found.shape != (count,) or found.is_floating_point() or found.dtype is torch.bool:
        raise ValueError(
            f"counts must be {count} whole numbers, the examples of each replica, got shape {tuple(found.shape)} of "
            f"{found.dtype}."
        )
    if bool((found < 0).any() or (found > length).any()):
        raise ValueError(
            f"counts must lie between 0 (sit out) and the batch's {length} examples, got {int(found.min())} to "
            f"{int(found.max())}."
        )
    return found.long()
