"""States of K replicas: what a step needs and tells, where they start, and the way to and from single runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils._pytree import tree_map

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.linalg import LowRankPrecision, factorize
from slangvi.linalg.noise import standard_normal
from slangvi.methods import slang
from slangvi.params import Params, ParamSpec
from slangvi.params.state import state_dtype
from slangvi.priors import Prior
from slangvi.replicas import _settings
from slangvi.rows.dense import batch_size

__all__ = [
    "Failure",
    "Generators",
    "Info",
    "State",
    "init",
    "noise",
    "pad",
    "posterior",
    "replica",
    "sample",
    "stack",
    "streams",
]

Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True, eq=False)
class State:
    """What the next step of K replicas needs.

    Args:
        loc: μ, (K, P).
        prec_factor: U by rows, (K, L, P).
        prec_diag: d, (K, P).
        momentum: m, (K, P).
        step: steps each has taken, (K,) integers on the CPU.
        failed: which have met NaN or Inf and stand still since, (K,) on the CPU.
        spec: names and shapes behind the flat vectors of one replica.
    """

    loc: Tensor
    prec_factor: Tensor
    prec_diag: Tensor
    momentum: Tensor
    step: Tensor
    failed: Tensor
    spec: ParamSpec

    @cached_property
    def precision(self) -> LowRankPrecision:
        """UUᵀ + diag d of all replicas, factorised once per state."""
        return factorize(self.prec_factor, self.prec_diag)


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
class Info:
    """What a step can tell besides the new state; NaN for replicas that took none.

    Args:
        step: steps each replica has taken, (K,).
        num_rows: R of each, per-example gradients used; 0 for a replica that took no step, (K,).
        spectrum: leading L eigenvalues of (1−β)UUᵀ + βĜ, for OnlineEig of Ĝ, largest first, (K, L).
        total: sum of all its eigenvalues, (K,).
        residual: bound on the relative error of those eigenpairs; 0 when they were computed in full, (K,).
        clipped: Σ of what rounding would have taken from d⁺ below its bound; rounding only, (K,).
        expected_log_likelihood: N times the mean log-likelihood over rows, (K,).
        failed: replicas that stand still, (K,).
        failures: those that failed in this step.
    """

    step: Tensor
    num_rows: Tensor
    spectrum: Tensor
    total: Tensor
    residual: Tensor
    clipped: Tensor
    expected_log_likelihood: Tensor
    failed: Tensor
    failures: tuple[Failure, ...]
    _state: State = field(repr=False)
    _prior: Prior = field(repr=False)

    @property
    def captured(self) -> Tensor:
        """Share of the curvature's trace that the low-rank part holds, 0…1, (K,)."""
        return torch.where(self.total > 0, self.spectrum.sum(-1) / self.total, torch.ones_like(self.total))

    @property
    def loss(self) -> Tensor:
        """Negative expected log-likelihood, the fit part of the negative ELBO, (K,)."""
        return -self.expected_log_likelihood

    @cached_property
    def kl(self) -> Tensor:
        """KL(q ‖ prior) after the step, computed when first asked for, (K,)."""
        prior = Independent(Normal(self._prior.mean, self._prior.precision.rsqrt(), validate_args=False), 1)
        return kl_divergence(posterior(self._state), prior)

    @property
    def elbo(self) -> Tensor:
        """Expected log-likelihood − KL, (K,)."""
        return self.expected_log_likelihood - self.kl


def init(
    params: Params | Sequence[Params],
    num_replicas: int,
    rank: int,
    init_precision: Any = 1.0,
    stacked: bool = False,
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
    diag = _settings.per_replica("init_precision", init_precision, spec, loc).contiguous()
    steps, failed = torch.zeros(len(loc), dtype=torch.int64), torch.zeros(len(loc), dtype=torch.bool)
    return State(loc, loc.new_zeros(len(loc), rank, loc.shape[1]), diag, torch.zeros_like(loc), steps, failed, spec)


def _together(params: Any, count: int, stacked: bool) -> dict[str, Tensor]:
    """Tensors with the replica in front."""
    if not isinstance(params, Mapping):
        many = _settings.listed("params", params, count)
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


def replica(state: State, k: int) -> slang.State:
    """One replica as an ordinary state, for `slangvi.slang` and everything that takes one."""
    return slang.State(
        state.loc[k], state.prec_factor[k], state.prec_diag[k], state.momentum[k], int(state.step[k]), state.spec
    )


def stack(states: Sequence[slang.State]) -> State:
    """Ordinary states of one layout and rank as replicas; their steps may differ."""
    shapes = {(state.spec, state.prec_factor.shape, state.loc.dtype, state.loc.device) for state in states}
    if len(shapes) != 1:
        raise ValueError(
            "states must be one or more with the same parameters, rank, dtype and device, got "
            f"{len(shapes) or 'no'} {'kinds' if shapes else 'states'}."
        )
    return State(
        torch.stack([state.loc for state in states]),
        torch.stack([state.prec_factor for state in states]),
        torch.stack([state.prec_diag for state in states]),
        torch.stack([state.momentum for state in states]),
        torch.tensor([state.step for state in states]),
        torch.zeros(len(states), dtype=torch.bool),
        states[0].spec,
    )


def streams(seeds: Sequence[int], device: torch.device | str = "cpu") -> list[torch.Generator]:
    """A generator for each replica, from a seed each."""
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be one whole number for each replica, got {seeds!r}.")
    numbers = [checks.count("seeds", seed, least=-(2**63)) for seed in seeds]
    if any(seed >= 2**64 for seed in numbers):
        raise ValueError(f"seeds must be below 2⁶⁴, got {max(numbers)}.")
    return [torch.Generator(device).manual_seed(seed) for seed in numbers]


def noise(like: Tensor, sample_shape: Sequence[int], generators: Generators, index: Tensor | None = None) -> Tensor:
    """Standard normal numbers for some replicas, (k, *sample_shape, P).

    With a generator for each replica they are those a single run would draw; they come from the generators' device and
    are moved if the replicas are elsewhere.

    Args:
        like: (K, P).
        sample_shape: of the draws of each.
        generators: one for each of the K replicas, one for all, or None for torch's own.
        index: which replicas, (k,); the generators of others do not move. None means all.
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

    Args:
        state: of K replicas.
        sample_shape: of the draws of each.
        generators: one for each replica, which gives what a single run would draw; or one for all, or None for torch's
            own, which is faster on a GPU.
    """
    drawn = noise(state.loc, sample_shape, generators).movedim(0, -2)
    return state.spec.unflatten((state.loc + state.precision.transform_noise(drawn)).movedim(-2, 0))


def posterior(state: State) -> LowRankPrecisionNormal:
    """All q as one torch distribution over flat vectors, with batch shape (K,)."""
    return LowRankPrecisionNormal(
        state.loc, state.prec_factor.mT, state.prec_diag, validate_args=False, param_spec=state.spec
    )


def pad(batches: Sequence[Any]) -> tuple[Any, list[int]]:
    """Batches or data sets of different length, one for each replica, as one with counts.

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
    """Tensors (M, ...) of several lengths as one (K, M, ...)."""
    kinds = {(part.dtype, *part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"got dtypes and shapes {sorted(map(str, kinds))}.")
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
