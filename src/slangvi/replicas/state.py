"""States of K replicas: how they start, draw and diagnose themselves, and the way to and from single runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slangvi import checks
from slangvi.linalg.noise import standard_normal
from slangvi.methods import slang
from slangvi.methods.slang import posterior
from slangvi.methods.step import Tensors
from slangvi.params import Params, ParamSpec
from slangvi.params.state import state_dtype
from slangvi.params.values import per_parameter
from slangvi.rows.dense import batch_size

__all__ = [
    "Failure",
    "Generators",
    "Info",
    "State",
    "init",
    "listed",
    "noise",
    "pad",
    "per_replica",
    "posterior",
    "replica",
    "sample",
    "stack",
    "streams",
]

Generators = torch.Generator | Sequence[torch.Generator] | None


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
