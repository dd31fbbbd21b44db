"""SLANG and its relatives for K replicas as pure functions over an immutable state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.keywords import bind_settings, keywords_of
from slangvi.methods import slang
from slangvi.params import Params
from slangvi.replicas._advance import Lockstep
from slangvi.replicas._settings import ReplicaSettings
from slangvi.replicas.state import Info, State, init, posterior, replica, sample, stack

__all__ = ["Runs", "build"]


class Runs(NamedTuple):
    """What `build` returns.

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
    """SLANG for many small problems advanced as one; each is what `slang.build` makes of it alone.

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
