r"""Dropout as a distribution of weights: which inputs are dropped, moments, gradients through masks, decay.

$$ W = M\,\mathrm{diag}(z) / (1-p), \qquad z_j \sim \mathrm{Bernoulli}(1-p) $$
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.utils._pytree import tree_map

from slangvi.methods.gather import one_per_example, sum_gatherer
from slangvi.params import ParamSpec
from slangvi.params.values import per_tensor
from slangvi.settings import LogLikelihood

__all__ = [
    "DroppedWeights",
    "decay_of",
    "draw_gatherer",
    "drawn_masks",
    "example_gatherer",
    "multipliers",
    "rates_of",
]

# Name → what the inputs of a weight are multiplied by, (..., in).
Masks = Mapping[str, Tensor]
# Layout, M (P,), masks (S, in) or (S, M, in), batch → the gradient by M (P,), and the log-likelihoods (S, M).
MaskedGatherer = Callable[[ParamSpec, Tensor, Masks, Any], tuple[Tensor, Tensor]]


class DroppedWeights(Distribution):
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
        odds = self.rates / (1 - self.rates)
        return _repeated(odds, self.param_spec.numels) * self.loc.square()

    @property
    def covariance_matrix(self) -> Tensor:
        """p/(1−p)·M[o, j]·M[o', j] within a column j of a matrix, 0 elsewhere, dense (..., P, P)."""
        odds = _repeated(self.rates / (1 - self.rates), self.param_spec.numels)
        column = _columns(self.param_spec, self.loc.device)
        together = column.unsqueeze(-1) == column
        return together * (odds * self.loc).unsqueeze(-1) * self.loc.unsqueeze(-2)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws, (*sample_shape, ..., P); `generator` keeps the global RNG untouched."""
        masks = drawn_masks(self.rates, self.param_spec, tuple(sample_shape), generator)
        return self.loc * multipliers(masks, self.param_spec)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradients, (*sample_shape, ..., P)."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)


def _columns(spec: ParamSpec, device: torch.device) -> Tensor:
    """A number for every parameter that those of its column share, (P,)."""
    parts, start = [], 0
    for shape, count in zip(spec.shapes, spec.numels, strict=True):
        inputs = torch.arange(start, start + shape[1] if len(shape) > 1 else start + count, device=device)
        wide = inputs.reshape(1, -1, *(1 for _ in shape[2:])).expand(shape) if len(shape) > 1 else inputs
        parts.append(wide.flatten())
        start += len(inputs)
    return torch.cat(parts)


def rates_of(rates: Any, spec: ParamSpec, known: ParamSpec | None = None) -> list[float]:
    """Dropout rates of all parameter tensors: 0 for those of fewer than two dimensions.

    Args:
        rates: a number, or a dict of names or globs that has an entry for every tensor of two dimensions or more.
        spec: layout of the tensors.
        known: layout of the whole model, when `spec` is a part of it.

    Example:
        >>> spec = ParamSpec.of({"w": torch.zeros(3, 2), "b": torch.zeros(3)})
        >>> rates_of(0.1, spec), rates_of({"w": 0.5}, spec)
        ([0.1, 0.0], [0.5, 0.0])
    """
    matrices, every = _matrices(spec), known or spec
    if isinstance(rates, Mapping):
        _refuse_vectors(rates, every)
    found = per_tensor("rates", rates, matrices, _matrices(every), 0.0, 1.0, closed="low")
    by_name = dict(zip(matrices.names, found, strict=True))
    return [by_name.get(name, 0.0) for name in spec.names]


def _matrices(spec: ParamSpec) -> ParamSpec:
    """The layout of what can be dropped: tensors (out, in, ...)."""
    pairs = [(name, shape) for name, shape in zip(spec.names, spec.shapes, strict=True) if len(shape) > 1]
    names = {name for name, _ in pairs}
    aliases = tuple((alias, name) for alias, name in spec.aliases if name in names)
    return ParamSpec(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs), aliases)


def _refuse_vectors(rates: Mapping[str, Any], spec: ParamSpec) -> None:
    matrices = _matrices(spec).canonical
    for key in map(str, rates):
        if any(fnmatchcase(name, key) for name in spec.canonical) and not any(fnmatchcase(n, key) for n in matrices):
            raise ValueError(
                f"rates names {key!r}, which is no weight of two dimensions or more (out, in, ...): biases are never "
                "dropped. Remove the entry, or give the parameter the shape (1, in) if it is a matrix of one row."
            )


def drawn_masks(
    rates: Tensor, spec: ParamSpec, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """What the inputs of every matrix are multiplied by: 0 with probability p, else 1/(1−p).

    Args:
        rates: p of each parameter tensor, (..., T).
        spec: layout.
        sample_shape: in front.
        generator: source of randomness.

    Returns:
        name → (*sample_shape, ..., in), for tensors of two dimensions or more; `in` is their second one.
    """
    widths = [shape[1] if len(shape) > 1 else 0 for shape in spec.shapes]
    each = _repeated(rates, widths)
    chance = torch.rand((*sample_shape, *each.shape), dtype=rates.dtype, device=rates.device, generator=generator)
    scaled = (chance >= each).to(rates.dtype) / (1 - each)
    pieces = zip(spec.names, scaled.split(widths, -1), widths, strict=True)
    return {name: piece for name, piece, width in pieces if width}


def multipliers(masks: Masks, spec: ParamSpec) -> Tensor:
    """What every weight is multiplied by when the inputs of its matrix are masked: ones for biases.

    Args:
        masks: name → (..., in), for tensors of two dimensions or more.
        spec: layout.

    Returns:
        (..., P).

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


def draw_gatherer(log_likelihood: LogLikelihood) -> MaskedGatherer:
    """A mask per draw: gradients at the dropped weights, which M sees through the mask."""
    gather = sum_gatherer(log_likelihood)

    def gathered(spec: ParamSpec, loc: Tensor, masks: Masks, batch: Any) -> tuple[Tensor, Tensor]:
        factors = multipliers(masks, spec)
        gradients, values = gather(spec, loc * factors, batch)
        return (gradients * factors).sum(0), values

    return gathered


def example_gatherer(log_likelihood: LogLikelihood) -> MaskedGatherer:
    """A mask per draw and example: every example sees weights of its own, all in one backward pass."""

    def gathered(spec: ParamSpec, loc: Tensor, masks: Masks, batch: Any) -> tuple[Tensor, Tensor]:
        def one(flat: Tensor, mask: Masks, example: Any) -> Tensor:
            single = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, example)
            return one_per_example(log_likelihood(spec.unflatten(flat * multipliers(mask, spec)), single), 1)[0]

        rows = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
        examples = torch.func.vmap(one, in_dims=(None, 0, rows), randomness="different")
        every = torch.func.vmap(examples, in_dims=(None, 0, None), randomness="different")

        def loss(flat: Tensor) -> tuple[Tensor, Tensor]:
            values = every(flat, dict(masks), batch)
            return -values.sum(), values

        gradient, (_, values) = torch.func.grad_and_value(loss, has_aux=True)(loc)
        return gradient, values

    return gathered


def decay_of(rates: Tensor, spec: ParamSpec, prior_precision: Tensor, decay: str = "gal") -> Tensor:
    """What the L2 penalty multiplies each squared weight by, twice: λ(1−p) for "gal", λ/(1−p) for "kl".

    Args:
        rates: p of each parameter tensor, (..., T).
        spec: layout.
        prior_precision: λ, (..., P).
        decay: see `slangvi.mc_dropout`.

    Returns:
        (..., P); λ itself for biases.
    """
    keep = 1 - rates
    return prior_precision * _repeated(keep if decay == "gal" else keep.reciprocal(), spec.numels)


def _repeated(values: Tensor, counts: Iterable[int]) -> Tensor:
    """One number per tensor, (..., T), repeated so many times each; nothing is sent to a device."""
    pieces = [values[..., k : k + 1].expand(*values.shape[:-1], count) for k, count in enumerate(counts)]
    return torch.cat(pieces, dim=-1)
