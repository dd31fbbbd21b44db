r"""SLANG: natural-gradient variational inference with a low-rank plus diagonal precision (Mishkin et al. 2018).

$$ q(\theta) = \mathcal N\bigl(\mu, (UU^\top + \mathrm{diag}\,d)^{-1}\bigr) $$
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi import checks
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.linalg import LowRankPrecision, factorize
from slangvi.methods._build import Common, Replay
from slangvi.methods._gaussian import GaussianOptimizer, Told, kl_to_prior, start
from slangvi.methods.compiled import LoopSteps, Numbers, PureSteps, warn_eager
from slangvi.methods.gather import RowGatherer, likelihood_of
from slangvi.methods.step import Diagnostics, Rates, Tensors, take_step
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.priors import Prior
from slangvi.rows import RowGroup
from slangvi.rows.dense import batch_size
from slangvi.rows.operator import GradientOperator
from slangvi.schedules import Rate
from slangvi.settings import CompiledOptimizerSettings, CompiledSettings, LogLikelihood
from slangvi.types import Transform

__all__ = ["SLANG", "Info", "State", "build", "init", "kl_to_prior", "posterior", "sample", "update"]


# Steps of any run that keep the leading eigenvectors: factor analysis leaves columns of U as they are that are zero.
EIGENVECTOR_STEPS = 20


@dataclass(frozen=True, eq=False)
class State:
    """Everything the next step needs; leading dimensions, the same everywhere, are runs that go in lockstep.

    Args:
        loc: μ, (..., P).
        prec_factor: U by rows, (..., L, P).
        prec_diag: d, (..., P).
        momentum: m, the running mean of likelihood gradients, (..., P).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
        learnt: numbers of noise and prior that the run learns, see `slangvi.methods.learning`; None for none.
    """

    loc: Tensor
    prec_factor: Tensor
    prec_diag: Tensor
    momentum: Tensor
    step: int
    spec: ParamSpec
    learnt: Tensor | None = None

    @cached_property
    def precision(self) -> LowRankPrecision:
        """UUᵀ + diag d, factorised once per state; `sample((S,), generator, loc)` gives draws of shape (S, ..., P)."""
        return factorize(self.prec_factor, self.prec_diag)

    @property
    def tensors(self) -> Tensors:
        """The tensors that a step changes."""
        return Tensors(self.loc, self.prec_factor, self.prec_diag, self.momentum)


@dataclass(frozen=True, eq=False)
class Info(Told):
    """Diagnostics of a step.

    For runs in lockstep every number is a tensor with their leading dimensions.

    Args:
        step: number of the step, from 1.
        num_rows: R, per-example gradients used.
        spectrum: leading L eigenvalues of (1−β)UUᵀ + βĜ, largest first, (..., L); with `projection="em"` those of
            D^(−1/2)UUᵀD^(−1/2) after the step, which do not depend on the scale of parameters.
        total: sum of all eigenvalues, of that matrix plus one for "em"; `captured` is the share that U⁺ holds, (...).
        residual: bound on the relative error of those eigenpairs; 0 when they were computed in full, (...).
        clipped: Σ of what rounding would have taken from d⁺ below its bound; rounding only, (...).
        expected_log_likelihood: N times the mean log-likelihood over rows; NaN when the loss was not seen.
        skipped: bad batches an optimizer has passed over so far.
        noise_precision: τ after the step, where it is learnt.
        prior_precision: λ after the step of each parameter whose own is learnt, by name.
    """

    step: int
    num_rows: int
    spectrum: Tensor
    total: Tensor
    residual: Tensor
    clipped: Tensor
    expected_log_likelihood: float = float("nan")
    skipped: int = 0
    noise_precision: float | None = None
    prior_precision: Mapping[str, float] | None = None
    _state: State | None = field(default=None, repr=False)
    _prior: Prior | None = field(default=None, repr=False)

    @property
    def captured(self) -> Any:
        """Share of the curvature's trace that the low-rank part holds, 0…1."""
        share = torch.where(self.total > 0, self.spectrum.sum(-1) / self.total, 1.0)
        return share if share.ndim else float(share)

    @property
    def rank_used(self) -> Any:
        """Directions whose eigenvalue is above rounding."""
        tiny = torch.finfo(self.spectrum.dtype).eps * self.total.unsqueeze(-1)
        used = (self.spectrum > tiny).sum(-1)
        return used if used.ndim else int(used)


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
    num_data: float | Tensor,
    prior: Prior,
    lr: Rate,
    precision_lr: Rate | None = None,
    momentum: float | Tensor = 0.9,
    ages: Tensor | None = None,
    longest: float | None = None,
    in_place: bool = False,
    projection: str = "eig",
) -> tuple[State, Info]:
    r"""One step of SLANG from per-example gradients G (R rows); leading dimensions of the state are runs in lockstep.

    $$ \hat G = \tfrac{N}{R} G^\top G, \qquad A = (1-\beta)\,UU^\top + \beta \hat G, \qquad
       U^+ = Q_{1:L}\Lambda_{1:L}^{1/2} $$
    $$ d^+ = (1-\beta)\,d + \beta\lambda + \mathrm{diag}\,A - \mathrm{diag}\,U^+U^{+\top} $$
    $$ m^+ = \gamma m + (1-\gamma)\tfrac{N}{R}\textstyle\sum_r g_r, \qquad
       \mu^+ = \mu - \alpha\,(U^+U^{+\top} + \mathrm{diag}\,d^+)^{-1}
       \bigl[\tfrac{m^+}{1-\gamma^t} + \lambda(\mu-\mu_0)\bigr] $$

    A prior that has a factor C, as posteriors do, adds βCCᵀ to A and CCᵀ(μ − μ₀) to the gradient of the mean. U⁺ is any
    factor of the best approximation: its rows are the scaled eigenvectors, or a rotation of them.

    Args:
        state: before the step; modified only with `in_place`.
        gradients: operator over R rows, with the leading dimensions of the state.
        num_data: N, divided by the temperature if there is one.
        prior: λ and μ₀, (P,), or one for each run, (..., P).
        lr: α.
        precision_lr: β; None means α.
        momentum: γ, on the likelihood gradient only.
        ages: t of each entry where some joined later, (P,); None for the state's own.
        longest: how far the mean may go, in posterior standard deviations of a typical parameter; None for any length.
        in_place: write the new state over the old one, segment by segment, instead of into fresh memory.
        projection: "eig" as above; "em" for a step of factor analysis instead, after the first steps, in which
            directions enter by their eigenvectors.

    Returns:
        The state after the step, and what can be told about it. Raises `NumericalError` instead of returning a state
        that is not finite; the old one is as it was then.
    """
    step = state.step + 1
    rates = Rates(lr.value, precision_lr or lr, momentum, 1 - momentum ** (step if ages is None else ages))
    old = state.tensors
    new = old if in_place else Tensors(*map(torch.empty_like, old))
    first = max(EIGENVECTOR_STEPS, -(-2 * old.prec_factor.shape[-2] // gradients.height))
    precision, diagnostics = take_step(
        old,
        new,
        gradients,
        num_data=num_data,
        prior=prior,
        rates=rates,
        spec=state.spec,
        step=step,
        longest=longest,
        by_em=projection == "em",
        is_start=step <= first,
    )
    return finished(new, precision, diagnostics, step, state.spec, gradients.num_rows, prior)


def finished(
    new: Tensors,
    precision: LowRankPrecision,
    diagnostics: Diagnostics,
    step: int,
    spec: ParamSpec,
    num_rows: int,
    prior: Prior,
) -> tuple[State, Info]:
    """Return the state and the info of a step that was taken."""
    after = State(*new, step, spec)
    after.__dict__["precision"] = precision  # fills the cached property
    return after, Info(step, num_rows, *diagnostics, _state=after, _prior=prior)


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
    settings = bind_settings("build", CompiledSettings, **options).for_likelihood(likelihood_of(log_likelihood))
    common = Common(log_likelihood, settings)
    begin = partial(init, rank=settings.rank, init_precision=settings.init_precision)
    advance = partial(update, projection=settings.projection)
    return common.transform(begin, advance, sample, posterior, replay=_replay(common) if settings.compile else None)


def _replay(common: Common) -> Replay[State]:
    """Return a function that takes steps by replaying graphs."""
    if not isinstance(common.gather, RowGatherer):
        warn_eager('it needs engine="factored", or a model')
        return lambda *given: None
    decay = common.settings.momentum
    steps = PureSteps(common.gather, common.settings.mc_samples, common.effective_num_data)

    def replay(
        state: State, batch: Any, generator: torch.Generator | None, lr: float, precision_lr: float | None
    ) -> tuple[State, Info, float] | None:
        step, prior = state.step + 1, common.prior_of(state)
        numbers = Numbers(lr, lr if precision_lr is None else precision_lr, decay, 1 - decay**step)
        found = steps.step(state, batch, generator, numbers, prior)
        if found is None:
            return None
        rows = common.settings.mc_samples * batch_size(batch)
        after, info = finished(found.tensors, found.precision, found.diagnostics, step, state.spec, rows, prior)
        return after, info, found.fit

    return replay


class SLANG(GaussianOptimizer[State, Info]):
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

    _writes_in_place = True

    settings: CompiledOptimizerSettings

    @init_keywords_of(CompiledOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, CompiledOptimizerSettings, *args, **options))

    def _update(self, state: State, gradients: GradientOperator, **options: Any) -> tuple[State, Info]:
        return update(state, gradients, projection=self.settings.projection, **options)

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        return init(params, self.settings.rank, hyper.per_parameter("init_precision"))

    def _advance_rows(self, rows: list[RowGroup]) -> tuple[State, Info]:
        found = self._replay(rows) if self.settings.compile else None
        return super()._advance_rows(rows) if found is None else found

    def _replay(self, rows: list[RowGroup]) -> tuple[State, Info] | None:
        """Return the step by replaying graphs; None if it has to be taken eagerly."""
        step, before, prior = self._state.step + 1, self._state, self._hyper.prior()
        given = self._hyper.rates(step, self.settings.precision_warmup)
        alpha, beta, gamma = rates = (given.lr.value, given.precision_lr.value, given.momentum)
        numbers = None
        if given.ages is None and all(isinstance(rate, float | int) for rate in rates):
            numbers = Numbers(alpha, beta, gamma, 1 - gamma**step)  # type: ignore[arg-type]
        found = self._steps.step(before, rows, numbers, prior)
        if found is None:
            return None
        count = sum(group.num_rows for group in rows)
        after, info = finished(found.tensors, found.precision, found.diagnostics, step, self._spec, count, prior)
        if self._watch.due(step):
            self._watch.look(before, after, prior, alpha, gamma)
        return after, info

    @cached_property
    def _steps(self) -> LoopSteps:
        settings = self.settings
        return LoopSteps(settings.rank, self._routes, settings.num_data / settings.temperature)

    def _posterior(self, state: State) -> LowRankPrecisionNormal:
        return posterior(state)
