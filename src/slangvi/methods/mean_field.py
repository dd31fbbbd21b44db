r"""Mean-field natural-gradient variational inference; with the empirical Fisher it is VOGN (Khan et al. 2018).

$$ q(\theta) = \mathcal N\bigl(\mu, \mathrm{diag}(s)^{-1}\bigr) $$
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import NumericalError
from slangvi.grads.assemble import Engine
from slangvi.linalg import DiagonalPrecision
from slangvi.methods._averages import debiasing, lerp, mean_gradient
from slangvi.methods._build import Common
from slangvi.methods._curvature import HESSIAN_REMEDY, check_curvature, hessian_gatherer
from slangvi.methods._gaussian import GaussianOptimizer, Info, place, start
from slangvi.methods.gather import GRADIENT_REMEDY
from slangvi.methods.lowrank_state import STATE_REMEDY
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.params.state import require_finite
from slangvi.priors import Prior
from slangvi.schedules import Rate, Schedule
from slangvi.types import GradientOperator, Routes, Transform

__all__ = ["VOGN", "Info", "State", "build", "init", "posterior", "sample", "update"]


@dataclass(frozen=True, eq=False)
class State:
    """What the next step needs; leading dimensions are a batch of runs.

    Args:
        loc: μ, (..., P).
        prec_diag: s, (..., P).
        momentum: m, the running mean of likelihood gradients, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
    """

    loc: Tensor
    prec_diag: Tensor
    momentum: Tensor
    step: int
    spec: ParamSpec

    @cached_property
    def precision(self) -> DiagonalPrecision:
        """diag(s), with its operations."""
        return DiagonalPrecision(self.prec_diag)


def init(params: Params, init_precision: Any = 1.0) -> State:
    """Start at the given values with s = `init_precision`.

    Args:
        params: name → tensor.
        init_precision: number, dict of names or globs, or (P,) tensor.
    """
    spec, loc, diag = start(params, init_precision)
    return State(loc, diag, torch.zeros_like(loc), 0, spec)


def update(
    state: State,
    gradients: GradientOperator,
    *,
    num_data: float,
    prior: Prior,
    lr: Rate,
    precision_lr: Rate | None = None,
    momentum: float | Tensor = 0.0,
    curvature: Tensor | None = None,
    ages: Tensor | None = None,
) -> tuple[State, Info]:
    r"""One step from per-example gradients (R rows); leading dimensions of the state are a batch of runs.

    $$ s^+ = (1-\beta)\,s + \beta\,(\tfrac NR h + \lambda), \qquad h = \textstyle\sum_r g_r \circ g_r
       \ \text{ or } \ \sum_r \mathrm{diag}\,H_r $$
    $$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
       \mu^+ = \mu - \alpha\,\bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] / s^+ $$

    Args:
        state: before the step; never modified.
        gradients: operator over R rows, of which only the sum and the sum of squares are used.
        num_data: N, divided by the temperature if there is one.
        prior: λ and μ₀, (..., P).
        lr: α.
        precision_lr: β; None means α.
        momentum: γ, on the likelihood gradient only.
        curvature: diagonals of the R Hessians of the negative log-likelihood, summed, (..., P); None takes the
            empirical Fisher from the gradients.
        ages: t of each entry where some joined later, (P,); None for the state's own.

    Returns:
        The state after the step, and what can be told about it. Raises `NumericalError` instead of returning a state
        that is not finite, or whose precision is not positive.
    """
    weight, beta = num_data / gradients.num_rows, (precision_lr or lr).value
    total, squares = gradients.sum(), gradients.square_sum() if curvature is None else curvature
    diag = lerp(state.prec_diag, prior.precision, beta).add_((beta * weight) * squares)
    correction = debiasing(momentum, state.step + 1, ages)
    average, gradient = mean_gradient(state.loc, state.momentum, total, weight, prior, momentum, correction)
    after = State(state.loc - lr.value * (gradient / diag), diag, average, state.step + 1, state.spec)
    # NaN and Inf survive the sums.
    if not (math.isfinite(float(after.loc.sum() + diag.sum())) and bool(diag.min() > 0)):
        _refuse(after, total, squares)
    return after, Info(after.step, gradients.num_rows, _state=after, _prior=prior)


def _refuse(after: State, total: Tensor, squares: Tensor) -> None:
    """Say what is wrong with a step, if anything is: sums may overflow where no entry does."""
    step, spec, diag = after.step, after.spec, after.prec_diag
    require_finite("the gradient", step, spec, GRADIENT_REMEDY, total, squares)
    require_finite("the new precision", step, spec, STATE_REMEDY, diag)
    if bool((diag <= 0).any()):
        member, where = place((diag <= 0).any(-1))
        name, part = next((n, diag[member][s]) for n, s in spec.slices.items() if bool((diag[member][s] <= 0).any()))
        raise NumericalError(
            f"step {step}: the new precision of parameter {name!r} is not positive ({int((part <= 0).sum())} of "
            f"{part.numel()} entries, down to {float(part.min()):.3g}){where}. The state is unchanged. {HESSIAN_REMEDY}"
        )
    require_finite("the new mean", step, spec, STATE_REMEDY, after.loc)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draws from q: name → tensor with `sample_shape`, then a batch's dimensions, in front of the parameter's shape."""
    return state.spec.unflatten(state.precision.sample(tuple(sample_shape), generator, state.loc))


def posterior(state: State) -> LowRankPrecisionNormal:
    """Q as a torch distribution over the flat vector, of rank 0."""
    factor = state.loc.new_zeros(*state.loc.shape, 0)
    return LowRankPrecisionNormal(state.loc, factor, state.prec_diag, validate_args=False, param_spec=state.spec)


def build(
    log_likelihood: Callable[[Params, Any], Tensor],
    *,
    num_data: int,
    lr: Schedule,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    precision_lr: Schedule | None = None,
    momentum: float = 0.0,
    mc_samples: int = 1,
    init_precision: Any = 1.0,
    temperature: float = 1.0,
    precision_warmup: bool = True,
    curvature: str = "ef",
    model: nn.Module | None = None,
    engine: Engine | None = None,
    verify: bool = True,
    memory_limit: int | None = None,
    routes: Routes | None = None,
    on_divergence: str = "warn",
) -> Transform:
    """Mean-field inference as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example.
        num_data: N, examples in the training set.
        lr: α, a number or a function of the step counted from 1.
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor.
        prior_mean: μ₀, likewise.
        precision_lr: β, at most 1; None follows `lr`.
        momentum: γ.
        mc_samples: S, draws of the weights per step.
        init_precision: s at the start.
        temperature: the likelihood is weighed by 1/temperature.
        precision_warmup: let the first steps average the curvature they see, βₜ = max(β, 1/(t+1)), so that the
            precision is there before the mean relies on it.
        curvature: "ef", the empirical Fisher (VOGN), or "hessian", the exact diagonal of the Hessian at every draw.
            That takes a backward pass for each of the P parameters, and needs a log-likelihood that is concave, or
            nearly so.
        model: the module behind `log_likelihood`, so that the factored engine can see its layers.
        engine: "factored" (needs `model`) or "dense"; None takes factored when there is a model.
        verify: let the factored engine check examples against the definition of their gradient, ever more rarely.
        memory_limit: bytes that formed gradients (of one parameter, for the factored engine) and temporaries may take.
        routes: what the factored engine forms; None leaves it to counting.
        on_divergence: what to do when the mean keeps going to and fro by more than a posterior standard deviation in a
            step, as long as the steps of one run follow each other: "warn", once for what is built here, "raise"
            `DivergenceError`, or "ignore". Results are the same.

    Returns:
        `init(params)`, `update(state, batch, generator=None)`, `sample(state, shape, generator=None)` and
        `posterior(state)`.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"]) ** 2
        >>> vi = build(log_likelihood, num_data=2, lr=1.0, curvature="hessian")
        >>> state = vi.init({"w": torch.zeros(2)})
        >>> batch = {"x": torch.tensor([[1.0, 0.0], [1.0, 2.0]]), "y": torch.tensor([1.0, 2.0])}
        >>> state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
        >>> state.prec_diag, info.num_rows
        (tensor([3., 5.]), 2)
    """
    hessian = check_curvature(curvature)
    common = Common(
        log_likelihood,
        num_data=num_data,
        lr=lr,
        prior_precision=prior_precision,
        prior_mean=prior_mean,
        precision_lr=precision_lr,
        momentum=momentum,
        mc_samples=mc_samples,
        temperature=temperature,
        precision_warmup=precision_warmup,
        model=model,
        engine=engine,
        verify=verify,
        memory_limit=memory_limit,
        routes=routes,
        on_divergence=on_divergence,
    )
    gather = hessian_gatherer(log_likelihood, diagonal=True, dtypes=common.dtypes) if hessian else None
    return common.transform(lambda params: init(params, init_precision), update, sample, posterior, curvature=gather)


class VOGN(GaussianOptimizer[State, Info]):
    """Mean-field inference with the empirical Fisher, as a torch optimizer for any module.

    Args:
        model: any module; call it with the batch as first dimension.
        params: parameters to infer (tensors, or groups as in torch.optim); None takes all that require grad.
        num_data: N, examples in the training set.
        lr: α.
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor.
        momentum: γ, on the likelihood gradient.
        precision_lr: β, at most 1; None follows `lr`, schedule included.
        mc_samples: S, draws of the weights in `step(closure)`.
        init_precision: s at the start; number, dict or tensor.
        prior_mean: μ₀; number, dict or tensor.
        temperature: the likelihood is weighed by 1/temperature.
        precision_warmup: let the first steps average the curvature they see, βₜ = max(β, 1/(t+1)), so that the
            precision is there before the mean relies on it.
        loss_reduction: "mean" or "sum" over the examples of a batch, as your loss does it.
        accumulation_steps: what your loop divides each micro-batch's loss by; 1 when it does not divide.
        curvature: "ef", the empirical Fisher.
        engine: "factored", or "dense" to form all per-example gradients (slow; for comparison).
        verify: check examples against the definition of their gradient, ever more rarely.
        memory_limit: bytes that formed gradients of one parameter, and temporaries, may take; None leaves it to fixed
            defaults.
        routes: what the factored engine forms; None leaves it to counting.
        max_bad_batches: batches with NaN or Inf in loss, gradient or new state that are skipped in a row, counted in
            `info.skipped`, before `NumericalError` is raised; 0 raises at the first.
        on_divergence: what to do when the mean keeps going to and fro by more than a posterior standard deviation in a
            step, which is what too large a rate comes to: "warn" once, "raise" `DivergenceError`, or "ignore".
        generator: source of randomness, on the parameters' device; None uses torch's global one.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> opt = VOGN(model, num_data=100, lr=0.05)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> with opt.sampled_params(train=True):
        ...     opt.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    rank = 0
    _update = staticmethod(update)

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, hyper.per_parameter("init_precision"))

    def _posterior(self, state: State) -> LowRankPrecisionNormal:
        return posterior(state)
