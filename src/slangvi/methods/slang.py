r"""SLANG: natural-gradient variational inference with a low-rank plus diagonal precision (Mishkin et al. 2018).

$$ q(\theta) = \mathcal N\bigl(\mu, (UU^\top + \mathrm{diag}\,d)^{-1}\bigr) $$
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.methods._averages import debiasing
from slangvi.methods._build import Common, Replay
from slangvi.methods._gaussian import start
from slangvi.methods._graph_functional import GraphRunner
from slangvi.methods._graph_loop import ReplayingOptimizer
from slangvi.methods._launched import Launched, Numbers
from slangvi.methods.gather import GRADIENT_REMEDY
from slangvi.methods.lowrank_state import STATE_REMEDY, Info, State, finite_check, kl_to_prior, state_of, told
from slangvi.methods.lowrank_step import Rates, eigenproblem, shift_by, widen_by
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.schedules import Rate
from slangvi.settings import CompiledOptimizerSettings, CompiledSettings, LogLikelihood
from slangvi.types import GradientOperator, Transform

__all__ = ["SLANG", "Info", "State", "build", "init", "kl_to_prior", "posterior", "sample", "update"]


def init(params: Params, rank: int, init_precision: Any = 1.0) -> State:
    """Start at the given values with U = 0 and d = `init_precision`.

    Args:
        params: name → tensor.
        rank: L ≥ 0.
        init_precision: number, dict of names or globs, or (P,) tensor.
    """
    rank = checks.rank("rank", rank)
    spec, loc, diag = start(params, init_precision)
    return State(loc, loc.new_zeros(rank, len(loc)), diag, torch.zeros_like(loc), 0, spec)


def update(
    state: State,
    gradients: GradientOperator,
    *,
    num_data: float,
    prior: Prior,
    lr: Rate,
    precision_lr: Rate | None = None,
    momentum: float | Tensor = 0.9,
    ages: Tensor | None = None,
) -> tuple[State, Info]:
    r"""One step of SLANG from per-example gradients G (R rows); leading dimensions of the state are runs in lockstep.

    $$ \hat G = \tfrac{N}{R} G^\top G, \qquad A = (1-\beta)\,UU^\top + \beta \hat G, \qquad
       U^+ = Q_{1:L}\Lambda_{1:L}^{1/2} $$
    $$ d^+ = (1-\beta)\,d + \beta\lambda + \mathrm{diag}\,A - \mathrm{diag}\,U^+U^{+\top} $$
    $$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
       \mu^+ = \mu - \alpha\,(U^+U^{+\top} + \mathrm{diag}\,d^+)^{-1}
       \bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] $$

    U⁺ is any factor of the best approximation: its rows are the scaled eigenvectors, or a rotation of them.

    Args:
        state: before the step; never modified.
        gradients: operator over R rows, with the leading dimensions of the state.
        num_data: N, divided by the temperature if there is one.
        prior: λ and μ₀, (P,), or one for each run, (..., P).
        lr: α.
        precision_lr: β; None means α.
        momentum: γ, on the likelihood gradient only.
        ages: t of each entry where some joined later, (P,); None for the state's own.

    Returns:
        The state after the step, and what can be told about it. Raises `NumericalError` instead of returning a state
        that is not finite.
    """
    step, weight = state.step + 1, num_data / gradients.num_rows
    beta = precision_lr or lr
    rates = Rates(lr.value, beta.value, beta.per_tensor, momentum, debiasing(momentum, step, ages))
    problem, total = eigenproblem(state.prec_factor, gradients, weight, rates), gradients.sum()
    diagonal = problem.diagonal()
    fresh = diagonal if isinstance(diagonal, Tensor) else diagonal.fresh
    if not math.isfinite(total.sum() + fresh.sum()):
        require_finite("the gradient", step, state.spec, GRADIENT_REMEDY, total, gradients.square_sum())
    try:
        solved = problem.solve()
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # sums may not fit the dtype together
        raise NumericalError(
            f"step {step}: the curvature of all parameters together is not finite. The state is unchanged. "
            + GRADIENT_REMEDY
        ) from error
    widened = widen_by(state.prec_diag, solved.factor, diagonal, prior, rates)
    del diagonal, fresh  # a vector less while the mean is found
    new = shift_by(state.loc, state.momentum, total, widened, weight, prior, rates)
    if not math.isfinite(new.told.sum()):
        require_finite("the new precision", step, state.spec, STATE_REMEDY, new.prec_diag, new.prec_factor)
        require_finite("the new mean", step, state.spec, STATE_REMEDY, new.loc)
    after = state_of(new, step, state.spec)
    told = (solved.leading, new.told[..., 0], solved.residual, new.told[..., 1])
    return after, Info(step, gradients.num_rows, *told, _state=after, _prior=prior)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: name → tensor with `sample_shape` in front, then the state's leading dimensions, then its shape."""
    return state.spec.unflatten(state.precision.sample(tuple(sample_shape), generator, state.loc))


def posterior(state: State) -> LowRankPrecisionNormal:
    """Q as a torch distribution over the flat vector."""
    return LowRankPrecisionNormal(
        state.loc, state.prec_factor.mT, state.prec_diag, validate_args=False, param_spec=state.spec
    )


@keywords_of(CompiledSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """SLANG as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        options: settings, see `slangvi.settings.CompiledSettings`.

    Returns:
        `init(params)`, `update(state, batch, generator=None)`, `sample(state, shape, generator=None)` and
        `posterior(state)`.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> vi = build(log_likelihood, num_data=2, rank=1, lr=0.5)
        >>> state = vi.init({"w": torch.zeros(1)})
        >>> batch = {"x": torch.tensor([[1.0], [2.0]]), "y": torch.tensor([1.0, 2.0])}
        >>> state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
        >>> state.step, info.num_rows
        (1, 2)
    """
    settings = bind_settings("build", CompiledSettings, **options)
    common = Common(log_likelihood, settings, settings.rank)
    replay = _replay(common) if settings.compile else None
    begin = partial(init, rank=settings.rank, init_precision=settings.init_precision)
    return common.transform(begin, update, sample, posterior, replay=replay)


def _replay(common: Common) -> Replay[State]:
    """Steps by replaying graphs: None where one has to be taken eagerly."""
    size, decay = common.settings.num_data, common.settings.momentum
    graphs = GraphRunner(common.factored, common.settings.mc_samples, common.effective_num_data, decay)

    def replay(
        state: State, batch: Any, generator: torch.Generator | None, lr: float, precision_lr: float | None
    ) -> tuple[State, Info] | None:
        step, prior = state.step + 1, common.prior_of(state, graphs.like(state))
        numbers = Numbers(lr, lr if precision_lr is None else precision_lr, 1 - decay**step)
        running = graphs.step(state, batch, generator, numbers, prior, finite_check(state.spec, step))
        if running is None:
            return None
        after, info = told(running, state, prior, lambda mean: size * mean)
        graphs.remember(after, running)
        return after, info

    return replay


class SLANG(ReplayingOptimizer[State, Info]):
    """SLANG as a torch optimizer for any module.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.settings.CompiledOptimizerSettings`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> opt = SLANG(model, num_data=100, rank=2, lr=0.05)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> with opt.sampled_params(train=True):
        ...     opt.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    _update = staticmethod(update)

    @init_keywords_of(CompiledOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, CompiledOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, self.settings.rank, hyper.per_parameter("init_precision"))

    def _from_launched(self, running: Launched, prior: Prior) -> tuple[State, Info]:
        return told(running, self._state, prior, lambda _: float("nan"))

    def _finite_check(self, step: int) -> Callable[..., None]:
        return finite_check(self._spec, step)

    def _posterior(self, state: State) -> LowRankPrecisionNormal:
        return posterior(state)
