"""Many small runs in lockstep, of SLANG or SLANG-OnlineEig: splits × folds × settings advanced as one batched run.

Every replica has its own data, data size, hyper-parameters and random stream, and is what it would be alone. Tensors
have the replica in front: K replicas, then whatever a single run has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.divergence import REACTIONS, REMEDY, Watch, step_length
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, keywords_of
from slangvi.linalg import LowRankPrecision
from slangvi.linalg.noise import standard_normal
from slangvi.methods import online_eig, slang
from slangvi.methods.gather import checked_values, one_per_example
from slangvi.methods.slang import posterior
from slangvi.methods.step import Diagnostics, Tensors
from slangvi.params import Params, ParamSpec
from slangvi.params.state import state_dtype
from slangvi.params.values import per_parameter
from slangvi.priors import Prior
from slangvi.rows.dense import DenseGradients, batch_size, rows_within
from slangvi.schedules import Rate, Schedule
from slangvi.settings import CheckedFields, checked, choice

__all__ = [
    "Failure",
    "Info",
    "Runs",
    "State",
    "build",
    "init",
    "pad",
    "posterior",
    "replica",
    "sample",
    "stack",
    "streams",
]

Generators = torch.Generator | Sequence[torch.Generator] | None
# (params, batch, constants) → (M,), for one replica.
LogLikelihood = Callable[[Params, Any, Any], Tensor]
UPDATES = {"slang": slang.update, "online_eig": online_eig.update}


@dataclass(frozen=True, eq=False)
class State(slang.State):
    """State of K replicas between steps: the tensors of `slangvi.slang.State` with the replica in front.

    Args:
        step: steps each has taken, (K,) integers on the CPU.
        failed: which have met NaN or Inf and stand still since, (K,) on the CPU.
    """

    step: Tensor  # type: ignore[assignment]
    failed: Tensor = field(kw_only=True)


class Failure(NamedTuple):
    """A replica that met NaN or Inf.

    Args:
        replica: which, from 0.
        step: number of the step it could not take, from 1.
        reason: in the words of a single run's error.
    """

    replica: int
    step: int
    reason: str


@dataclass(frozen=True, eq=False)
class Info(slang.Info):
    """Diagnostics of a step: those of `slangvi.slang.Info` with the replica in front, NaN for those that took none.

    Args:
        step: steps each replica has taken, (K,).
        num_rows: R of each, per-example gradients used; 0 for a replica that took no step, (K,).
        expected_log_likelihood: N times the mean log-likelihood over rows, (K,).
        failed: replicas that stand still, (K,).
        failures: those that failed in this step.
    """

    step: Tensor  # type: ignore[assignment]
    num_rows: Tensor  # type: ignore[assignment]
    expected_log_likelihood: Tensor = field(kw_only=True)  # type: ignore[assignment]
    failed: Tensor = field(kw_only=True)
    failures: tuple[Failure, ...] = field(kw_only=True)

    @property
    def elbo(self) -> Tensor:  # type: ignore[override]
        """Expected log-likelihood − KL, (K,)."""
        value: Tensor = self.expected_log_likelihood - self.kl
        return value


def init(
    params: Params | Sequence[Params], num_replicas: int, rank: int, init_precision: Any = 1.0, stacked: bool = False
) -> State:
    """Start K replicas with U = 0 and d = `init_precision`.

    Args:
        params: name → tensor, from which all start alike; or K of these.
        num_replicas: K.
        rank: L ≥ 0.
        init_precision: number, dict of names or globs, or (P,) tensor; or a sequence of K of these.
        stacked: the tensors of `params` have K in front, as `torch.func.stack_module_state` makes them.

    Example:
        >>> state = init({"w": torch.zeros(3)}, num_replicas=2, rank=1)
        >>> state.loc.shape, state.prec_factor.shape, state.step
        (torch.Size([2, 3]), torch.Size([2, 1, 3]), tensor([0, 0]))
    """
    rank = checks.rank("rank", rank)
    together = _together(params, num_replicas, stacked)
    spec = ParamSpec.of({name: value[0] for name, value in together.items()})
    dtype = state_dtype(list(together.values()))
    loc = spec.flatten({name: value.detach() for name, value in together.items()}, dtype).contiguous()
    if not bool(torch.isfinite(loc).all()):
        raise ValueError("params must be finite, got NaN or Inf. Re-initialise the models.")
    diag = per_replica("init_precision", init_precision, spec, loc).contiguous()
    steps, failed = torch.zeros(len(loc), dtype=torch.int64), torch.zeros(len(loc), dtype=torch.bool)
    factor = loc.new_zeros(len(loc), rank, loc.shape[1])
    return State(loc, factor, diag, torch.zeros_like(loc), steps, spec, failed=failed)


def _together(params: Any, count: int, stacked: bool) -> dict[str, Tensor]:
    """Return tensors with the replica in front."""
    if not isinstance(params, Mapping):
        many = listed("params", params, count)
        if many is None or not all(isinstance(one, Mapping) and one.keys() == many[0].keys() for one in many):
            raise TypeError(
                "params must be a dict of tensors, or a sequence of dicts with the same names, one for each replica."
            )
        return {name: torch.stack([one[name] for one in many]) for name in many[0]}
    spec = ParamSpec.of(params)
    if not checks.flag("stacked", stacked):
        return {name: params[name].expand(count, *params[name].shape) for name in spec.names}
    for name in spec.names:
        if params[name].shape[:1] != (count,):
            raise ValueError(
                f"with stacked=True params[{name!r}] must have the {count} replicas in front, got shape "
                f"{tuple(params[name].shape)}. Leave stacked out to start all replicas alike."
            )
    return dict(params)


def listed(name: str, value: Any, count: int) -> list[Any] | None:
    """Return the K values of a sequence, or None for one value that all replicas share."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    if len(value) != count:
        raise ValueError(
            f"{name} must be one value, or a sequence with one for each of the {count} replicas, got {len(value)}."
        )
    return list(value)


def per_replica(name: str, value: Any, spec: ParamSpec, like: Tensor, positive: bool = True) -> Tensor:
    """Return what `per_parameter` takes, or K of these in a sequence or a (K, P) tensor, as (K, P) like `like`."""
    many = listed(name, value.unbind(0) if isinstance(value, Tensor) and value.ndim == 2 else value, len(like))
    if many is None:
        return per_parameter(name, value, spec, like[0], positive).expand_as(like)
    rows = (per_parameter(f"{name}[{k}]", one, spec, like[0], positive) for k, one in enumerate(many))
    return torch.stack(list(rows))


def replica(state: State, k: int) -> slang.State:
    """Return one replica as an ordinary state, for `slangvi.slang` and everything that takes one."""
    return slang.State(*Tensors(*(x[k] for x in state.tensors)), int(state.step[k]), state.spec)


def stack(states: Sequence[slang.State]) -> State:
    """Return ordinary states of one layout and rank as replicas; their steps may differ."""
    shapes = {(state.spec, state.prec_factor.shape, state.loc.dtype, state.loc.device) for state in states}
    if len(shapes) != 1:
        raise ValueError(
            "states must be one or more with the same parameters, rank, dtype and device, got "
            f"{len(shapes) or 'no'} {'kinds' if shapes else 'states'}."
        )
    tensors = Tensors(*(torch.stack(parts) for parts in zip(*(state.tensors for state in states), strict=True)))
    steps, failed = torch.tensor([state.step for state in states]), torch.zeros(len(states), dtype=torch.bool)
    return State(*tensors, steps, states[0].spec, failed=failed)


def streams(seeds: Sequence[int], device: torch.device | str = "cpu") -> list[torch.Generator]:
    """Return a generator for each replica, from a seed each."""
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be one whole number for each replica, got {seeds!r}.")
    numbers = [checks.count("seeds", seed, least=-(2**63)) for seed in seeds]
    if any(seed >= 2**64 for seed in numbers):
        raise ValueError(f"seeds must be below 2⁶⁴, got {max(numbers)}.")
    return [torch.Generator(device).manual_seed(seed) for seed in numbers]


def noise(like: Tensor, sample_shape: Sequence[int], generators: Generators, index: Tensor | None = None) -> Tensor:
    """Draw standard normal numbers for some replicas, (k, *sample_shape, P).

    With a generator for each of the K replicas they are those a single run would draw; they come from the generators'
    device and are moved if the replicas are elsewhere. Generators of replicas outside `index` do not move.
    """
    count = len(like) if index is None else len(index)
    shape = (count, *sample_shape, like.shape[1])
    if generators is None or isinstance(generators, torch.Generator):
        return standard_normal(shape, like, generators)
    devices = {generator.device for generator in generators}
    if len(generators) != len(like) or len(devices) != 1:
        raise ValueError(
            f"generators must be one, or one for each of the {len(like)} replicas on one device, got "
            f"{len(generators)} on {len(devices)} devices. `replicas.streams(seeds)` makes them."
        )
    chosen = generators if count == len(like) else [generators[k] for k in index.tolist()]  # type: ignore[union-attr]
    drawn = torch.empty(shape, dtype=like.dtype, device=devices.pop())
    for part, generator in zip(drawn.unbind(0), chosen, strict=True):
        part.normal_(generator=generator)
    return drawn.to(like.device)


def sample(state: State, sample_shape: Sequence[int] = (), generators: Generators = None) -> dict[str, Tensor]:
    """Draws from each q: name → (K, *sample_shape, ...).

    With a generator for each replica they are what a single run would draw; one generator for all, or None for torch's
    own, is faster on a GPU.
    """
    drawn = noise(state.loc, sample_shape, generators).movedim(0, -2)
    return state.spec.unflatten((state.loc + state.precision.transform_noise(drawn)).movedim(-2, 0))


def pad(batches: Sequence[Any]) -> tuple[Any, list[int]]:
    """Join batches or data sets of different length, one for each replica, into one with counts.

    Args:
        batches: nestings of tensors with the examples in front, alike but for their number.

    Returns:
        The same nesting of tensors (K, M, ...), zeros behind the shorter ones, and the length of each, for
        `update(counts=...)`.

    Example:
        >>> pad([torch.tensor([1, 2]), torch.tensor([3])])
        (tensor([[1, 2], [3, 0]]), [2, 1])
    """
    counts = [batch_size(batch) for batch in batches]
    if not counts:
        raise ValueError("batches must be one or more, one for each replica, got none.")
    try:  # by name, not by place: dicts may hold the same names in another order
        return tree_map(lambda *parts: _padded(parts), *batches), counts
    except ValueError as error:
        raise ValueError(f"batches must be nested alike, with tensors that differ in length only: {error}") from error


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors (M, ...) of several lengths into one (K, M, ...)."""
    kinds = {(part.dtype, *part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"got dtypes and shapes {sorted(map(str, kinds))}.")
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


# ---- runs in lockstep


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


# States of some replicas after a step, those that failed as they were; spectrum, total, residual, clipped and expected
# log-likelihood, NaN if failed; the precisions, None if one failed; and the failures.
Advanced = tuple[tuple[Tensor, ...], LowRankPrecision | None, list[Failure]]


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
        num_replicas, prior = len(state.loc), self.prior_of(state)
        if num_replicas != self.settings.num_replicas:
            raise ValueError(f"state has {num_replicas} replicas, but num_replicas is {self.settings.num_replicas}.")
        constants = self.constants
        if callable(constants):
            constants = checked_constants(constants(state.step + 1), num_replicas)
        data, sizes = read_batch(batch, counts, constants, state.loc)
        index = ((sizes > 0) & ~state.failed).nonzero().squeeze(1)
        drawn = noise(state.loc, (self.draws,), generators, index)
        bytes_each = self.draws * data.num_examples * state.loc.shape[1] * state.loc.element_size()
        width = rows_within(self.settings.memory_limit, bytes_each, num_replicas)
        blank = state.loc.new_full((num_replicas,), torch.nan)
        blanks = (blank.unsqueeze(1).expand(-1, state.prec_factor.shape[1]), blank, blank, blank, blank.double())
        found: Sequence[Tensor] = (*state.tensors, *blanks)
        takes_all = len(index) == num_replicas <= width
        if not takes_all:
            found = [x.clone() for x in found]
        precision, failures = None, list[Failure]()
        for members, numbers in zip(index.split(width), drawn.split(width), strict=True):
            if len(members):
                after, precision, failed = self._advance(state, data, sizes, members, numbers)
                failures += failed
                if takes_all:
                    found = after
                else:
                    for old, new in zip(found, after, strict=True):
                        old.index_copy_(0, members.to(old.device), new.to(old.dtype))
        if failures and self.settings.on_failure == "raise":
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise NumericalError(f"replica {failures[0].replica}{more}: {failures[0].reason}")
        stuck = state.failed.index_fill(0, torch.tensor([x.replica for x in failures], dtype=torch.int64), True)
        step = torch.where(stuck, state.step, state.step.index_add(0, index, torch.ones_like(index)))
        result = State(*Tensors(*found[:4]), step=step, failed=stuck, spec=state.spec)
        if takes_all and precision is not None:
            result.__dict__["precision"] = precision  # fills the cached property
        self._look(state, result)
        rows, told = torch.where(step > state.step, sizes * self.draws, 0), Diagnostics(*found[4:8])
        others: dict[str, Any] = {"failed": stuck, "failures": tuple(failures), "_state": result, "_prior": prior}
        return result, Info(step, rows, *told, expected_log_likelihood=found[8], **others)

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

    def _advance(self, state: State, data: Minibatch, sizes: Tensor, index: Tensor, drawn: Tensor) -> Advanced:
        """Take one step of some replicas, given by their places in order."""
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
        return (*new.tensors, *_diagnostics(info), fit), new.precision, []

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
    ) -> Advanced:
        """Take the steps one after the other, to find out which of them fail and why."""
        failures, found = list[Failure](), list[tuple[Tensor, ...]]()
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
                found.append((*own.tensors, nothing.expand(lanes.prec_factor.shape[-2]), *[nothing] * 4))
            else:
                found.append((*new.tensors, *_diagnostics(info), fit[k]))
        # Diagnostics of those that failed are float64.
        wide = [[x.double() for x in parts] if k >= 4 else parts for k, parts in enumerate(zip(*found, strict=True))]
        return tuple(map(torch.stack, wide)), None, failures


def _diagnostics(info: slang.Info) -> Diagnostics:
    return Diagnostics(info.spectrum, info.total, info.residual, info.clipped)


@dataclass(frozen=True)
class Minibatch:
    """Data that the likelihoods see in one step: any nestings of tensors."""

    batch: Any  # (K, M, ...)
    constants: Any  # (K, ...)
    weights: Tensor | None  # 1 for examples, 0 for padding, (K, M); None when there is no padding
    num_examples: int  # M, padding included

    def take(self, index: Tensor | slice) -> Minibatch:
        """Return the data of some of the replicas."""
        data = (self.batch, self.constants, self.weights)
        batch, constants, weights = tree_map_only(Tensor, lambda x: x[index], data)
        return Minibatch(batch, constants, weights, self.num_examples)


def gather_rows(
    log_likelihood: LogLikelihood, spec: ParamSpec, thetas: Tensor, data: Minibatch
) -> tuple[Tensor, Tensor]:
    """Return the gradient of every example at draws (K, S, P), (K, S·M, P), and the log-likelihoods, (K, S, M)."""

    def one(params: dict[str, Tensor], example: Any, weight: Tensor | None, constants: Any) -> tuple[Tensor, Tensor]:
        single = tree_map_only(Tensor, lambda x: x.unsqueeze(0), example)
        value = one_per_example(log_likelihood(params, single, constants), 1)[0]
        return -(value if weight is None else value * weight), value

    given = (data.batch, data.constants, data.weights)
    batch, constants, weights = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, given)
    rows_of = torch.func.grad(one, has_aux=True)
    for dims in ((None, batch, weights, None), (0, None, None, None), (0, batch, weights, constants)):
        rows_of = torch.func.vmap(rows_of, in_dims=dims, randomness="different")
    found, values = rows_of(spec.unflatten(thetas), data.batch, data.weights, data.constants)
    shape = (len(thetas), thetas.shape[1] * data.num_examples, -1)
    return torch.cat([found[name].reshape(shape) for name in spec.names], -1), values


def read_batch(batch: Any, counts: Any, constants: Any, like: Tensor) -> tuple[Minibatch, Tensor]:
    """Return the batch for replicas like a (K, P) tensor, and the number of examples of each, (K,) on the CPU."""
    count = len(like)
    shapes = {tuple(x.shape[:2]) for x in tree_leaves(batch) if isinstance(x, Tensor)}
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 2 or shape[0] != count or not shape[1]:
        raise ValueError(
            f"batch must hold tensors of shape ({count}, M, ...), one entry per replica and example, got first "
            f"dimensions {sorted(shapes) or 'none: it has no tensors'}."
        )
    length = shape[1]
    sizes = torch.full((count,), length) if counts is None else _checked_counts(counts, count, length)
    constants = tree_map_only(Tensor, lambda x: x.to(like.device), constants)
    if bool(((sizes == length) | (sizes == 0)).all()):
        return Minibatch(batch, constants, None, length), sizes
    real = (torch.arange(length) < sizes.unsqueeze(1)).to(like.device)
    # Padding repeats the first example with weight 0, so that whatever stands there cannot spoil a product.
    filled = tree_map_only(Tensor, lambda x: x.where(real.view(*real.shape, *(1,) * (x.ndim - 2)), x[:, :1]), batch)
    return Minibatch(filled, constants, real.to(like.dtype), length), sizes


def checked_constants(constants: Any, count: int) -> Any:
    """Return tensors with K in front, or a function that gives them; None becomes an empty nesting."""
    if constants is None or callable(constants):
        return constants or ()
    for leaf in tree_leaves(constants):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,):
            what = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"constants must be tensors with the {count} replicas in front, got {what}.")
    return constants


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
