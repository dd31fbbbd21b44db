"""SLANG and its relatives for K replicas as pure functions over an immutable state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.divergence import REACTIONS, REMEDY, Watch
from slangvi.grads.assemble import Engine
from slangvi.methods import slang
from slangvi.params import Params
from slangvi.replicas._advance import Lockstep, Settings
from slangvi.replicas._gather import LockstepGatherer
from slangvi.replicas._inputs import checked_constants
from slangvi.replicas._replay import GraphKeeper
from slangvi.replicas._rules import RULES
from slangvi.replicas.state import Info, State, init, posterior, replica, sample, stack
from slangvi.schedules import Schedule

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


def build(
    log_likelihood: Callable[..., Tensor],
    *,
    num_replicas: int,
    num_data: int | Sequence[int],
    rank: int,
    lr: Schedule | Sequence[Schedule],
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    precision_lr: Schedule | Sequence[Schedule] | None = None,
    momentum: float | Sequence[float] = 0.9,
    mc_samples: int = 1,
    init_precision: Any = 1.0,
    temperature: float | Sequence[float] = 1.0,
    precision_warmup: bool = True,
    constants: Any = None,
    model: nn.Module | None = None,
    engine: Engine | None = None,
    memory_limit: int | None = None,
    on_failure: str = "freeze",
    on_divergence: str = "warn",
    compile: bool = False,
    method: Literal["slang", "online_eig"] = "slang",
) -> Runs:
    """SLANG for many small problems advanced as one; each is what `slang.build` makes of it alone.

    The problems share the log-likelihood function, the shapes of the parameters, rank and number of draws. Whatever
    else is listed as one value may also be a sequence with one for each replica.

    Args:
        log_likelihood: (params, batch) → (M,) for one replica, or (params, batch, constants) → (M,) when there are
            constants. It is called under `torch.func.vmap`.
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
        model: the module behind `log_likelihood`, so that the factored engine can see its layers.
        engine: "factored" (needs `model`) or "dense"; None takes factored when there is a model.
        memory_limit: bytes the dense engine's rows may take; replicas beyond it wait for their turn, at least one is
            advanced at a time.
        on_failure: a replica that meets NaN or Inf is left where it was, told in `info`, and the others go on
            ("freeze"); or the step raises `NumericalError` ("raise").
        on_divergence: what to do when the mean of a replica keeps going to and fro by more than a posterior standard
            deviation in a step, as with rates that are far too large: "warn", "raise" or "ignore".
        compile: on a GPU in float32, replay the step of all replicas as one CUDA graph, tens of times as fast for small
            networks. The first step of each shape of batch, and ever rarer ones at which gradients are checked, run
            eagerly; where nothing can be captured a warning says why and all do. What `log_likelihood` reads besides
            its arguments must stay where it is.
        method: "slang", or "online_eig" for SLANG-OnlineEig, whose replicas are what `online_eig.build` makes of them;
            beyond rank 5 that one has no graphs.

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
    count = checks.count("num_replicas", num_replicas)
    rank = checks.count("rank", rank, least=0, hint="0 keeps the diagonal only; 1 to 32 is usual.")
    kind = checks.choice("engine", engine or ("factored" if model else "dense"), ("factored", "dense"))
    if kind == "factored" and model is None:
        raise ValueError('engine="factored" needs model=: pass the module whose layers log_likelihood calls.')
    if memory_limit is not None:
        memory_limit = checks.count("memory_limit", memory_limit, hint="It is a number of bytes.")

    def paired(params: Params, batch: Any, own: Any) -> Tensor:
        return log_likelihood(params, batch) if constants is None else log_likelihood(params, batch, own)

    rule = RULES[checks.choice("method", method, tuple(RULES))]
    lockstep = Lockstep(
        rule,
        Settings.checked(
            count, num_data, lr, precision_lr, momentum, temperature, prior_precision, prior_mean, precision_warmup
        ),
        LockstepGatherer(paired, rank, model if kind == "factored" else None),
        checks.count("mc_samples", mc_samples),
        checked_constants(constants, count),
        memory_limit,
        checks.choice("on_failure", on_failure, ("freeze", "raise")) == "raise",
        Watch(checks.choice("on_divergence", on_divergence, REACTIONS), REMEDY),
        GraphKeeper(rule) if checks.flag("compile", compile) else None,
    )

    def begin(params: Params | Sequence[Params], stacked: bool = False) -> State:
        state = init(params, count, rank, init_precision, stacked)
        lockstep.prior_of(state)
        return state

    return Runs(begin, lockstep.update, sample, posterior, replica, stack)
