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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.utils._pytree import tree_map, tree_map_only

from slangvi import checks
from slangvi.distributions import Posterior
from slangvi.keywords import bind_settings, init_keywords_of, keywords_of
from slangvi.methods import _adam, _gaussian
from slangvi.methods._adam import BETAS, EPS, AdamOptimizer, Betas, Moving, Number
from slangvi.methods.gather import one_per_example
from slangvi.optimizer.groups import GroupValues
from slangvi.params import Params, ParamSpec
from slangvi.params.values import per_tensor
from slangvi.priors import Prior
from slangvi.rows.dense import batch_size
from slangvi.schedules import Rate
from slangvi.settings import (
    AdamOptimizerSettings,
    AdamSettings,
    LogLikelihood,
    MethodSettings,
    checked,
    choice,
    per_group,
)
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

# Name → factors of the inputs of a weight, (..., in).
Masks = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class State:
    """State between steps; leading dimensions are a batch of runs.

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
class Info(_gaussian.Info):
    """Diagnostics of a step, those of `slangvi.bbb.Info` with the `penalty` in place of the KL."""

    _state: Any = field(default=None, repr=False)
    _decay: Tensor | None = field(default=None, repr=False)

    @cached_property
    def penalty(self) -> Any:
        """The L2 penalty after the step, the KL up to a constant: a number, for a batch a tensor (...)."""
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
    spec, loc = _gaussian.flat_start(params)
    return _start(spec, loc, _rates_of(rates, spec))


def _start(spec: ParamSpec, loc: Tensor, rates: Sequence[float]) -> State:
    if not any(len(shape) > 1 for shape in spec.shapes):
        raise ValueError(
            f"params has no tensor of two dimensions or more, got {', '.join(spec.names[:8])}: there are no inputs to "
            "drop. Give a weight the shape (out, in)."
        )
    return State(*Moving.at(loc), torch.tensor(list(rates), dtype=loc.dtype, device=loc.device), 0, spec)


def prior_precision_of(length_scale: float) -> float:
    """Return λ = l² of Gal's prior length scale l."""
    return checks.number("length_scale", length_scale, 0.0, hint="Gal's experiments have 0.01.") ** 2


def _rates_of(rates: Any, spec: ParamSpec, known: ParamSpec | None = None) -> list[float]:
    """Return the dropout rates of all tensors, 0 for vectors; `known` is the whole model, when `spec` is a part."""
    every = known or spec
    matrices, droppable = _matrices(spec), _matrices(every)
    for key in map(str, rates if isinstance(rates, Mapping) else ()):
        found = [name for name in every.canonical if fnmatchcase(name, key)]
        if found and not any(name in droppable.canonical for name in found):
            raise ValueError(
                f"rates names {key!r}, which is no weight of two dimensions or more (out, in, ...): biases are never "
                "dropped. Remove the entry, or give the parameter the shape (1, in) if it is a matrix of one row."
            )
    numbers = per_tensor("rates", rates, matrices, droppable, 0.0, 1.0, closed="low")
    by_name = dict(zip(matrices.names, numbers, strict=True))
    return [by_name.get(name, 0.0) for name in spec.names]


def _matrices(spec: ParamSpec) -> ParamSpec:
    """Return the layout of the tensors (out, in, ...), whose inputs can be dropped."""
    shapes = {name: shape for name, shape in zip(spec.names, spec.shapes, strict=True) if len(shape) > 1}
    aliases = tuple((alias, name) for alias, name in spec.aliases if name in shapes)
    return ParamSpec(tuple(shapes), tuple(shapes.values()), aliases)


def draw_masks(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draw the factors of the inputs of each weight: 0 with probability p, else 1/(1−p). Looks at no number.

    Returns:
        Name → (*sample_shape, ..., in), for weights of two dimensions or more: a `sample_shape` of (S,) gives a mask
        per draw, (S, M) one per example. `multipliers(masks, state.spec)` makes (*sample_shape, ..., P) of it.
    """
    return posterior(state).draw_masks(sample_shape, generator)


def multipliers(masks: Masks, spec: ParamSpec) -> Tensor:
    """Return the factor of every weight when the inputs of its matrix are masked: ones for biases.

    Masks are name → (..., in), for tensors of two dimensions or more; the result is (..., P).

    Example:
        >>> spec = ParamSpec.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
        >>> multipliers({"w": torch.tensor([0.0, 2.0, 2.0])}, spec)
        tensor([0., 2., 2., 0., 2., 2., 1., 1.])
    """
    one = next(iter(masks.values()))
    parts = []
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        if len(shape) > 1:
            mask = masks[name]
            wide = mask.reshape(*mask.shape[:-1], 1, shape[1], *(1 for _ in shape[2:]))
            parts.append(wide.expand(*mask.shape[:-1], *shape).flatten(mask.ndim - 1))
        else:
            parts.append(one.new_ones(()).expand(*one.shape[:-1], shape.numel()))
    return torch.cat(parts, dim=-1)


def decays(state: State, prior_precision: Tensor, decay: str = "gal") -> Tensor:
    """Return λ(1−p) for weights, λ/(1−p) with `decay="kl"`, and λ for biases, (..., P).

    Half of it, times the squares, is the penalty. `prior_precision` is λ, (P,) or (..., P).
    """
    keep = 1 - state.rates
    return prior_precision * _repeat(keep if decay == "gal" else keep.reciprocal(), state.spec.numels)


def _repeat(values: Tensor, counts: Iterable[int]) -> Tensor:
    """Repeat one number per tensor, (..., T), over a number of entries each; nothing is sent to a device."""
    pieces = [values[..., k : k + 1].expand(*values.shape[:-1], count) for k, count in enumerate(counts)]
    return torch.cat(pieces, dim=-1)


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
    r"""Return M after a step. No number is read and no tensor changed, so that a CUDA graph can capture it.

    $$ g = \tfrac NR\,\partial_M \textstyle\sum_r -\log p_r + \lambda(1-p)\,M $$

    and a step of Adam. The gradient is by M, of the negative log-likelihood at dropped weights, added up over R rows,
    (..., P); from gradients g at the dropped weights themselves it is Σ g∘c, with c of `multipliers`. `decay` is what
    `decays` gives. The other arguments are those of `slangvi.bbb.advanced`.
    """
    whole = torch.addcmul(_adam.to_dtype_of(weights.value, weight) * gradient, decay, weights.value)
    return _adam.adam_step(weights, whole, lr=lr, step=step, betas=betas, eps=eps)


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
    """Take one step from a gradient by M; leading dimensions of the state are a batch of runs.

    Arguments are those of `advanced`. N/R comes apart: `num_rows` is R = S·M, draws times examples, `num_data` is N,
    divided by the temperature if there is one. The decay is given by λ, (P,) or (..., P), and "gal" or "kl". `ages` are
    t of each entry where some joined later, (P,).

    Returns:
        The state after the step, and its diagnostics. Raises `NumericalError` instead of returning a state that is not
        finite, which is the one look at the numbers.
    """
    step, strength = state.step + 1, decays(state, prior_precision, decay)
    options: dict[str, Any] = {"lr": lr, "step": step if ages is None else ages, "betas": betas, "eps": eps}
    new = advanced(state.moving, gradient, weight=num_data / num_rows, decay=strength, **options)
    _adam.require_finite_step(step, state.spec, lambda: (gradient,), {"mean": new})
    after = State(*new, state.rates, step, state.spec)
    return after, Info(step, num_rows, _state=after, _decay=strength)


def sample(
    state: State, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Draw weights with columns dropped: name → tensor with `sample_shape`, then a batch's dimensions, in front."""
    return state.spec.unflatten(posterior(state).sample(tuple(sample_shape), generator))


def posterior(state: State) -> DroppedWeights:
    """Return q over the flat vector: mean, variance, and draws with dropped columns."""
    return DroppedWeights(state.loc, state.rates, state.spec)


class DroppedWeights(Posterior):
    r"""Weights whose inputs are dropped: W = M diag(z)/(1−p) for matrices, the values themselves for biases.

    $$ \mathbb E\,W = M, \qquad \mathrm{Var}\,W = \tfrac{p}{1-p}\, M \circ M $$

    The entries of one column are dropped together, so that they are correlated. There is no density.

    Args:
        loc: M and biases, flat, (..., P).
        rates: p of each parameter tensor, 0 where nothing is dropped, (..., T).
        param_spec: names and shapes behind the flat vector.

    Example:
        >>> spec = ParamSpec.of({"w": torch.zeros(1, 2), "b": torch.zeros(1)})
        >>> q = DroppedWeights(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.0]), spec)
        >>> q.mean, q.variance
        (tensor([1., 2., 3.]), tensor([1., 4., 0.]))
        >>> q.sample((2,), generator=torch.Generator().manual_seed(1))
        tensor([[2., 0., 3.],
                [0., 4., 3.]])
    """

    param_spec: ParamSpec
    arg_constraints = {}  # noqa: RUF012 - torch reads this class attribute
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, rates: Tensor, param_spec: ParamSpec) -> None:
        self.loc = loc
        self.rates = rates
        self.param_spec = param_spec
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """M and the biases, (..., P)."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """p/(1−p)·M² for matrices, 0 for biases, (..., P)."""
        return _repeat(self.rates / (1 - self.rates), self.param_spec.numels) * self.loc.square()

    @property
    def covariance_matrix(self) -> Tensor:
        """p/(1−p)·M[o, j]·M[o', j] within a column j of a matrix, 0 elsewhere, dense (..., P, P)."""
        spec, odds = self.param_spec, _repeat(self.rates / (1 - self.rates), self.param_spec.numels)
        # A number for each column, and 1 for all biases, whose odds are 0.
        numbers = torch.arange(2, 2 + sum(self._widths), device=self.loc.device).split(self._widths)
        column = multipliers(dict(zip(spec.names, numbers, strict=True)), spec)
        return (column.unsqueeze(-1) == column) * (odds * self.loc).unsqueeze(-1) * self.loc.unsqueeze(-2)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws, (*sample_shape, ..., P); `generator` keeps the global RNG untouched."""
        return self.loc * multipliers(self.draw_masks(sample_shape, generator), self.param_spec)

    def draw_masks(self, sample_shape: Sequence[int], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draw the factors of the inputs of each weight, see `slangvi.mc_dropout.draw_masks`."""
        each = _repeat(self.rates, self._widths)
        chance = torch.rand((*sample_shape, *each.shape), dtype=each.dtype, device=each.device, generator=generator)
        scaled = (chance >= each).to(each.dtype) / (1 - each)
        pieces = zip(self.param_spec.names, scaled.split(self._widths, -1), self._widths, strict=True)
        return {name: piece for name, piece, width in pieces if width}

    @property
    def _widths(self) -> list[int]:
        """Number of inputs of each parameter tensor that can be dropped."""
        return [shape[1] if len(shape) > 1 else 0 for shape in self.param_spec.shapes]


@dataclass(frozen=True, eq=False, kw_only=True)
class _DropoutSettings(MethodSettings):
    """Settings of both interfaces.

    Args:
        rates: p, the probability of dropping an input: a number for all weights of two dimensions or more, or a dict of
            names or globs; see `init` for those to give 0. Optimizers read it once, when a group is added.
        decay: "gal" or "kl", see the module's docstring.
    """

    rates: Any = per_group(0.05)
    decay: str = checked("gal", choice("gal", "kl"))


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

    masks: str = checked("example", choice("example", "draw"))


@dataclass(frozen=True, eq=False, kw_only=True)
class MCDropoutOptimizerSettings(AdamOptimizerSettings, _DropoutSettings):
    """Settings of `MCDropout`."""


@keywords_of(MCDropoutSettings)
def build(log_likelihood: LogLikelihood, **options: Any) -> Transform:
    """Build MC dropout as pure functions over an immutable state.

    Args:
        log_likelihood: (params, batch) → (M,), the log-likelihood of each example; vmap must be able to follow it.
        options: settings, see `MCDropoutSettings`.

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
    by_example = settings.masks == "example"

    def gather(state: State, batch: Any, generator: torch.Generator | None) -> tuple[tuple[Tensor], Tensor]:
        shape = (settings.mc_samples, batch_size(batch)) if by_example else (settings.mc_samples,)
        masks = draw_masks(state, shape, generator)
        gradient, values = _masked_gradient(log_likelihood, state.spec, state.loc, masks, batch, by_example)
        return (gradient,), values

    def step(state: State, gradient: Tensor, prior: Prior, **options: Any) -> tuple[State, Info]:
        return update(state, gradient, prior_precision=prior.precision, decay=settings.decay, **options)

    return _adam.adam_transform(settings, partial(init, rates=settings.rates), gather, step, sample, posterior)


def _masked_gradient(
    log_likelihood: LogLikelihood, spec: ParamSpec, loc: Tensor, masks: dict[str, Tensor], batch: Any, by_example: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient by M (P,), and log-likelihoods (S, M).

    Masks are (S, M, in) by example, where every example sees weights of its own, else (S, in).
    """

    def at_draw(flat: Tensor, mask: Masks, examples: Any) -> Tensor:
        found = log_likelihood(spec.unflatten(flat * multipliers(mask, spec)), examples)
        return one_per_example(found, batch_size(examples))

    def at_example(flat: Tensor, mask: Masks, example: Any) -> Tensor:
        return at_draw(flat, mask, tree_map_only(Tensor, lambda x: x.unsqueeze(0), example))[0]

    rows = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
    each = torch.func.vmap(at_example, in_dims=(None, 0, rows), randomness="different") if by_example else at_draw
    every = torch.func.vmap(each, in_dims=(None, 0, None), randomness="different")

    def loss(flat: Tensor) -> tuple[Tensor, Tensor]:
        values = every(flat, masks, batch)
        return -values.sum(), values

    gradient, (_, values) = torch.func.grad_and_value(loss, has_aux=True)(loc)
    return gradient, values


class MCDropout(AdamOptimizer[State, Info]):
    """MC dropout as a torch optimizer for any module, without dropout layers in it.

    `sampled_params` drops inputs of the weights themselves, with one mask for the whole batch: take several draws a
    step. For a mask per example use `nn.Dropout` in a plain torch loop, as the module's docstring says.

    Args:
        model: any module; call it with the batch as first dimension.
        options: settings, see `slangvi.mc_dropout.MCDropoutOptimizerSettings`.

    Example:
        >>> opt = MCDropout(nn.Linear(3, 2), num_data=100, rates=0.1)  # then as `slangvi.SLANG`
        >>> opt.posterior.variance.shape
        torch.Size([8])
    """

    settings: MCDropoutOptimizerSettings

    @init_keywords_of(MCDropoutOptimizerSettings)
    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, bind_settings(type(self).__name__, MCDropoutOptimizerSettings, *args, **options))

    def _begin(self, params: Params, hyper: GroupValues) -> State:
        spec, loc = _gaussian.flat_start(params)
        found = [_rates_of(given, inner, hyper.spec) for inner, given in hyper.per_group("rates")]
        return _start(spec, loc, [rate for group in found for rate in group])

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
