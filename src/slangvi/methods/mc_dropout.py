r"""MC dropout (Gal & Ghahramani 2016): weights trained with dropout and L2 decay, dropout kept on for predictions.

$$ q: \quad W = M\,\mathrm{diag}(z)/(1-p), \quad z_j \sim \mathrm{Bernoulli}(1-p) \ \text{ for every input } j
   \text{ of a weight matrix}, \qquad b = m \ \text{ for biases} $$

Dropping inputs and dropping columns are the same thing. The objective, in the units of this library, is

$$ \textstyle\sum_i \mathbb E_z[-\log p(y_i \mid x_i, W)] + \tfrac12\lambda(1-p)\|M\|^2 + \tfrac12\lambda\|m\|^2 . $$

**Where the penalty comes from.** The KL from q to the prior N(0, 1/λ) is E_q[λ‖W‖²/2] plus an entropy that hardly
depends on M. Gal writes W = M' diag(z) without the factor 1/(1−p), for which it is λ(1−p)‖M'‖²/2. With a Gaussian
likelihood of precision τ and λ = l², his length scale squared, division by Nτ gives his objective, the mean of half
squared errors plus ‖M'‖² times a weight decay of l²(1−p)/(2Nτ). τ is the likelihood's here, `slangvi.Gaussian(tau)`,
and does not enter the penalty.

**Which M.** Libraries scale by 1/(1−p), so that their M is (1−p)M', and Gal's published code puts that decay on M all
the same. So does `decay="gal"`, the default. `decay="kl"` is the expectation for weights as they are drawn here,
λ‖M‖²/(2(1−p)); at p = 0.05 the two are a tenth apart in λ. His code also takes squared errors without the half, which
is λ = l²/2 here, and does not decay biases.

In a plain torch loop the same model is `nn.Dropout(p)` before every layer, the mean negative log-likelihood, and
`torch.optim.Adam` with weight_decay λ(1−p)/N for weights and λ/N for biases; `posterior(init(params, rates))` predicts
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi import checks
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.methods import _masks
from slangvi.methods._adam import BETAS, EPS, AdamOptimizer, Betas, Moving, Number, fitted, moved, require_moved
from slangvi.methods._build import Basics
from slangvi.methods._gaussian import Told, flat_start
from slangvi.methods._masks import DroppedWeights, multipliers
from slangvi.methods.gather import checked_mean
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.priors import Prior
from slangvi.rows.dense import batch_size
from slangvi.schedules import Rate
from slangvi.settings import AdamOptimizerSettings, AdamSettings, LogLikelihood, MethodSettings, per_group
from slangvi.types import Transform

__all__ = [
    "DroppedWeights",
    "Info",
    "MCDropout",
    "Moving",
    "State",
    "advanced",
    "build",
    "decays",
    "draw_masks",
    "init",
    "multipliers",
    "posterior",
    "prior_precision_of",
    "sample",
    "update",
]


@dataclass(frozen=True, eq=False)
class State:
    """What the next step needs; leading dimensions are a batch of runs.

    Args:
        loc: M and biases, (..., P).
        momentum: Adam's mean of gradients, (..., P).
        square: its mean of their squares, (..., P).
        rates: p of each of the T parameter tensors, 0 for biases, (..., T).
        step: steps taken so far.
        spec: names and shapes behind the flat vectors.
    """

    loc: Tensor
    momentum: Tensor
    square: Tensor
    rates: Tensor
    step: int
    spec: ParamSpec

    @property
    def moving(self) -> Moving:
        """M with its running means, as `advanced` takes it."""
        return Moving(self.loc, self.momentum, self.square)


@dataclass(frozen=True, eq=False)
class Info(Told):
    """What a step can tell besides the new state.

    Args:
        step: number of the step, from 1.
        num_rows: R, examples at draws used.
        expected_log_likelihood: N times the mean log-likelihood over rows; NaN when the loss was not seen.
        skipped: bad batches an optimizer has passed over so far.
    """

    step: int
    num_rows: int
    expected_log_likelihood: float = float("nan")
    skipped: int = 0
    _state: State | None = field(default=None, repr=False)
    _decay: Tensor | None = field(default=None, repr=False)

    @cached_property
    def penalty(self) -> Any:
        """The L2 penalty after the step, the KL up to a constant: a number, for a batch a tensor (...)."""
        assert self._state is not None
        assert self._decay is not None
        found = 0.5 * (self._decay * self._state.loc.square()).sum(-1)
        return found if found.ndim else float(found)

    @property
    def kl(self) -> Any:
        """NaN: q has no density, and its KL to a Gaussian is known up to a constant only. See `penalty`."""
        return float("nan")


def init(params: Params, rates: Any = 0.05) -> State:
    """Start at the given values.

    Args:
        params: name → tensor; those of two dimensions or more are weights (out, in, ...), whose inputs are dropped.
        rates: p, the probability of dropping an input: a number for all weights, those of the first layer included,
            or a dict of names or globs; 0 ≤ p < 1. Tables of an `nn.Embedding`, weights of transposed or grouped
            convolutions and norms over several dimensions do not have inputs in their second dimension: give them 0.
    """
    spec, loc = flat_start(params)
    return _fresh(spec, loc, _masks.rates_of(rates, spec))


def _fresh(spec: ParamSpec, loc: Tensor, rates: Sequence[float]) -> State:
    if not any(len(shape) > 1 for shape in spec.shapes):
        raise ValueError(
            f"params has no tensor of two dimensions or more, got {', '.join(spec.names[:8])}: there are no inputs to "
            "drop. Give a weight the shape (out, in)."
        )
    return State(*Moving.at(loc), torch.tensor(list(rates), dtype=loc.dtype, device=loc.device), 0, spec)


def prior_precision_of(length_scale: float) -> float:
    """λ = l² of Gal's prior length scale l.

    Example:
        >>> prior_precision_of(0.5)
        0.25
    """
    return checks.number("length_scale", length_scale, 0.0, hint="Gal's experiments have 0.01.") ** 2


def draw_masks(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """What the inputs of each weight are multiplied by: 0 with probability p, else 1/(1−p). Looks at no number.

    Args:
        state: whose rates count.
        sample_shape: (S,) for a mask per draw, (S, M) for one per example.
        generator: source of randomness.

    Returns:
        Name → (*sample_shape, ..., in), for weights of two dimensions or more; `multipliers(masks, state.spec)` makes
        (*sample_shape, ..., P) of it.
    """
    return _masks.drawn_masks(state.rates, state.spec, sample_shape, generator)


def decays(state: State, prior_precision: Tensor, decay: str = "gal") -> Tensor:
    """λ(1−p) for weights and λ for biases, (..., P): half of it, times the squares, is the penalty.

    Args:
        state: whose rates count.
        prior_precision: λ, (P,) or (..., P).
        decay: "gal", or "kl" for λ/(1−p).
    """
    return _masks.decay_of(state.rates, state.spec, prior_precision, decay)


def advanced(
    weights: Moving,
    gradient: Tensor,
    *,
    weight: Number,
    decay: Tensor,
    lr: Rate | Number,
    step: int | Tensor,
    betas: Betas = BETAS,
    eps: Number = EPS,
) -> Moving:
    r"""The arithmetic of a step. It looks at no number and changes no tensor, so that a CUDA graph can capture it.

    $$ g = \tfrac NR\,\partial_M \textstyle\sum_r -\log p_r + \lambda(1-p)\,M $$

    and a step of Adam.

    Args:
        weights: M and biases with their running means, (..., P) each.
        gradient: by M, of the negative log-likelihood at dropped weights, added up over R rows, (..., P). From
            gradients g at the dropped weights themselves it is Σ g∘c, with c of `multipliers`.
        weight: N/R, divided by the temperature; a number or a tensor (..., 1).
        decay: what `decays` gives, (P,) or (..., P).
        lr: α; a number, a tensor (..., 1) with a rate for every run, or a `Rate`.
        step: t, the number of this step counted from 1; a number or a tensor, () or (..., 1).
        betas: β₁ and β₂ of Adam.
        eps: ε of Adam, against gradients of the whole objective.

    Returns:
        M after the step, with its running means.
    """
    whole = torch.addcmul(fitted(weight, weights.value) * gradient, decay, weights.value)
    return moved(weights, whole, lr=lr, step=step, betas=betas, eps=eps)


def update(
    state: State,
    gradient: Tensor,
    *,
    num_rows: int,
    num_data: Number,
    prior_precision: Tensor,
    lr: Rate | Number,
    betas: Betas = BETAS,
    eps: Number = EPS,
    decay: str = "gal",
    ages: Tensor | None = None,
) -> tuple[State, Info]:
    """One step from a gradient by M; leading dimensions of the state are a batch of runs.

    Args:
        state: before the step; never modified.
        gradient: by M, of the negative log-likelihood at dropped weights, added up over R rows, (..., P).
        num_rows: R = S·M, how many examples at how many draws that is.
        num_data: N, divided by the temperature if there is one; a number or a tensor (..., 1).
        prior_precision: λ, (P,) or (..., P); the prior's mean is 0.
        lr: α; a number, a tensor (..., 1) with a rate for every run, or a `Rate`.
        betas: β₁ and β₂ of Adam.
        eps: ε of Adam.
        decay: "gal" or "kl", see above.
        ages: t of each entry where some joined later, (P,); None for the state's own.

    Returns:
        The state after the step, and what can be told about it. Raises `NumericalError` instead of returning a state
        that is not finite, which is the one look at the numbers.
    """
    step, strength = state.step + 1, decays(state, prior_precision, decay)
    options: dict[str, Any] = {"lr": lr, "step": step if ages is None else ages, "betas": betas, "eps": eps}
    new = advanced(state.moving, gradient, weight=num_data / num_rows, decay=strength, **options)
    require_moved(step, state.spec, lambda: (gradient,), {"mean": new})
    after = State(*new, state.rates, step, state.spec)
    return after, Info(step, num_rows, _state=after, _decay=strength)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Weights with columns dropped: name → tensor with `sample_shape`, then a batch's dimensions, in front."""
    return state.spec.unflatten(posterior(state).sample(tuple(sample_shape), generator))


def posterior(state: State) -> DroppedWeights:
    """Q over the flat vector: mean, variance, and draws with dropped columns."""
    return DroppedWeights(state.loc, state.rates, state.spec)


@dataclass(frozen=True, eq=False, kw_only=True)
class _DropoutSettings(MethodSettings):
    """Settings of both interfaces.

    Args:
        rates: p, the probability of dropping an input: a number for all weights of two dimensions or more, or a dict of
            names or globs; see `init` for those to give 0. Optimizers read it once, when a group is added.
        decay: "gal" or "kl", see the module's docstring.
    """

    rates: Any = per_group(0.05)
    decay: str = "gal"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("decay", checks.choice, ("gal", "kl"))


@dataclass(frozen=True, eq=False, kw_only=True)
class MCDropoutSettings(AdamSettings, _DropoutSettings):
    """Settings of `build`.

    Args:
        prior_precision: λ; a number, a dict of names or globs, or a (P,) tensor. `prior_precision_of` knows it from a
            length scale.
        mc_samples: S, masks per step (and per example).
        masks: "example", every example has a mask of its own, as under `nn.Dropout`; or "draw", the examples of a batch
            share one. The former takes the memory of S·M sets of weights.
    """

    masks: str = "example"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("masks", checks.choice, ("example", "draw"))


@dataclass(frozen=True, eq=False, kw_only=True)
class MCDropoutOptimizerSettings(AdamOptimizerSettings, _DropoutSettings):
    """Settings of `MCDropout`."""


@keywords_of(MCDropoutSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """MC dropout as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example; vmap must be able to follow it.
        options: settings, see `MCDropoutSettings`.

    Returns:
        `init(params)`, `update(state, batch, generator=None)`, `sample(state, shape, generator=None)` and
        `posterior(state)`.

    Example:
        >>> def log_likelihood(params, batch):
        ...     return -0.5 * (batch["y"] - batch["x"] @ params["w"].T).square().sum(-1)
        >>> vi = build(log_likelihood, num_data=2, lr=0.1, rates=0.5)
        >>> state = vi.init({"w": torch.ones(1, 2)})
        >>> batch = {"x": torch.eye(2), "y": torch.zeros(2, 1)}
        >>> state, info = vi.update(state, batch, generator=torch.Generator().manual_seed(0))
        >>> state.loc, info.num_rows, vi.posterior(state).variance
        (tensor([0.9000, 0.9000]), 2, tensor([0.8100, 0.8100]))
    """
    settings = bind_settings("build", MCDropoutSettings, **options)
    basics, by_example = Basics(settings), settings.masks == "example"
    gather = (_masks.example_gatherer if by_example else _masks.draw_gatherer)(log_likelihood)

    def take(state: State, batch: Any, generator: torch.Generator | None) -> tuple[State, Info]:
        shape = (settings.mc_samples, batch_size(batch))
        drawn = draw_masks(state, shape if by_example else shape[:1], generator)
        gradient, values = gather(state.spec, state.loc, drawn, batch)
        fit = settings.num_data * checked_mean(values)
        new, info = update(
            state,
            gradient,
            num_rows=values.numel(),
            num_data=basics.effective_num_data,
            prior_precision=basics.prior_of(state).precision,
            lr=basics.rate(state.step + 1),
            betas=settings.betas,
            eps=settings.eps,
            decay=settings.decay,
        )
        return new, replace(info, expected_log_likelihood=fit)

    return basics.framed(partial(init, rates=settings.rates), take, sample, posterior)


class MCDropout(AdamOptimizer[State, Info]):
    """MC dropout as a torch optimizer for any module, without dropout layers in it.

    `sampled_params` drops inputs of the weights themselves, with one mask for the whole batch: take several draws a
    step. For a mask per example use `nn.Dropout` in a plain torch loop, as the module's docstring says.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.mc_dropout.MCDropoutOptimizerSettings`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> opt = MCDropout(model, num_data=100, rates=0.1)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> with opt.sampled_params(train=True):
        ...     opt.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        >>> opt.step()
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    settings: MCDropoutOptimizerSettings

    @init_keywords_of(MCDropoutOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, MCDropoutOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        spec, loc = flat_start(params)
        found = [_masks.rates_of(given, inner, hyper.spec) for inner, given in hyper.per_group("rates")]
        return _fresh(spec, loc, [rate for group in found for rate in group])

    def _draw(self, state: State, generator: torch.Generator | None) -> Tensor:
        self._drawn = multipliers(draw_masks(state, (), generator), state.spec)
        return state.loc * self._drawn

    def _advance_sums(self, gradients: Tensor, drawn: Tensor, **options: Any) -> tuple[State, Info]:
        strength, gradient = self._hyper.prior().precision, (gradients * drawn).sum(0)
        return update(self._state, gradient, prior_precision=strength, decay=self.settings.decay, **options)

    def _posterior(self, state: State) -> DroppedWeights:
        return posterior(state)

    def _kl(self, state: State, prior: Prior) -> float:
        return float("nan")
