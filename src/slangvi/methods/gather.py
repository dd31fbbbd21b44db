"""From a log-likelihood and draws of the weights to the gradient operator: the functional methods share this."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from slangvi.errors import NumericalError
from slangvi.grads import FactoredGradients, GradientCapture, RowGroup, per_example_gradients
from slangvi.grads.batched import BatchedPass
from slangvi.grads.blocks import Block, Unopened, cheapest
from slangvi.grads.dense import Together, batch_size, draws_at_once
from slangvi.grads.replay import rounding
from slangvi.params import Params, ParamSpec
from slangvi.settings import LogLikelihood
from slangvi.types import GradientOperator, Routes

__all__ = [
    "GRADIENT_REMEDY",
    "FactoredGatherer",
    "Gatherer",
    "SumGatherer",
    "checked_mean",
    "checked_values",
    "dense_gatherer",
    "one_per_example",
    "shapes_of",
    "sum_gatherer",
    "with_aliases",
]

# (layout, draws (S, P), batch) → operator with R = S·M rows, and the mean log-likelihood over them.
Gatherer = Callable[[ParamSpec, Tensor, Any], tuple[GradientOperator, float]]
# (layout, draws (S, P), batch) → Σ_i g_{i,s} for every draw, (S, P), and the log-likelihoods (S, M).
SumGatherer = Callable[[ParamSpec, Tensor, Any], tuple[Tensor, Tensor]]
# The layout, and what decides which layers are called with which shapes.
Kind = tuple[ParamSpec, object]
# Steps in a row at which a pass over all draws may disagree before it is left alone.
_TRIES = 4
GRADIENT_REMEDY = (
    "Look for NaN, Inf or huge values (squares must fit the dtype) in the inputs and the loss, or skip this batch."
)


def dense_gatherer(log_likelihood: LogLikelihood, memory_limit: int | None) -> Gatherer:
    """Rows through torch.func, for any function; small problems take all draws in one pass."""
    together = Together()

    def gather(spec: ParamSpec, thetas: Tensor, batch: Any) -> tuple[GradientOperator, float]:
        count = batch_size(batch)

        def values(theta: Tensor) -> Tensor:
            return one_per_example(log_likelihood(spec.unflatten(theta), batch), count)

        with torch.no_grad():
            mean = checked_mean(together(values, thetas, draws_at_once(spec, thetas, batch, memory_limit)))
        return per_example_gradients(log_likelihood, spec, thetas, batch, memory_limit, together), mean

    return gather


def sum_gatherer(log_likelihood: LogLikelihood) -> SumGatherer:
    """Gradients added up over the examples, all draws in one vmapped backward pass: no row of an example exists."""

    def gather(spec: ParamSpec, thetas: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        count = batch_size(batch)

        def loss(theta: Tensor) -> tuple[Tensor, Tensor]:
            values = one_per_example(log_likelihood(spec.unflatten(theta), batch), count)
            return -values.sum(), values

        graded = torch.func.grad_and_value(loss, has_aux=True)
        gradients, (_, values) = torch.func.vmap(graded, randomness="different")(thetas)
        return gradients, values

    return gather


def checked_mean(values: Tensor) -> float:
    """Mean of log-likelihoods (S, M), refused where one is not finite; one look at the device when all is well."""
    mean = float(values.mean())
    if not math.isfinite(mean):
        for row in values:
            checked_values(row, len(row))
    return mean


class FactoredGatherer:
    """Factors captured from the layers of the module behind the log-likelihood.

    Batches of new shapes are captured draw by draw and checked. Where nothing but rules is needed and vmap can follow,
    later ones go through the model once for all draws, and are checked again at the 2nd, 4th, 8th, … time.

    Args:
        log_likelihood: (params, batch) → (M,).
        model: the module it calls.
        rank: L.
        verify: check examples against the definition of their gradient.
        routes: see `FactoredGradients`.
        memory_limit: bytes that rows in the making may take when a module is called again.
    """

    def __init__(
        self,
        log_likelihood: LogLikelihood,
        model: nn.Module,
        rank: int,
        verify: bool,
        routes: Routes | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.log_likelihood = log_likelihood
        self.model = model
        self.rank = rank
        self.verify = verify
        self.routes = routes or Routes()
        self.memory_limit = memory_limit
        self.dtypes = {name: value.dtype for name, value in model.named_parameters(remove_duplicate=False)}
        self._captures: dict[tuple[ParamSpec, torch.dtype], GradientCapture] = {}
        self._simple: dict[Kind, BatchedPass] = {}
        self._uses: Counter[Kind] = Counter()
        self._misses: dict[Kind, int] = {}  # in a row, for kinds that have agreed before

    def __call__(self, spec: ParamSpec, thetas: Tensor, batch: Any) -> tuple[GradientOperator, float]:
        """The operator with R = S·M rows, and the mean log-likelihood over them."""
        kind = self.kind(spec, batch)
        fast = self.trusted(kind)
        self.count(kind)
        count = batch_size(batch)
        if fast is not None:
            try:
                group, table = fast.gather(thetas, batch)
            except Exception:  # another path through the model: draw by draw says what is wrong, if anything
                self._simple.pop(kind, None)
            else:
                return self._checked(spec, (group, table), thetas, count)
        recheck = self._simple.pop(kind, None) is not None or fast is not None
        return self._draw_by_draw(kind, thetas, batch, recheck)

    def kind(self, spec: ParamSpec, batch: Any) -> Kind:
        """What decides which layers are called with which shapes."""
        return spec, shapes_of(batch, self.model)

    def trusted(self, kind: Kind) -> BatchedPass | None:
        """The pass over all draws for the next batch of a kind, unless there is none or a check is due."""
        return None if _due(self._uses[kind] + 1) else self._simple.get(kind)

    def distrusted(self, kind: Kind) -> bool:
        """Whether such a pass was looked for and not found, or did not hold."""
        return not _due(self._uses[kind] + 1) and kind not in self._simple and not self._undecided(kind)

    def _undecided(self, kind: Kind) -> bool:
        """Whether the pass over all draws has agreed before and does not now, which may have been bad luck."""
        return 0 < self._misses.get(kind, 0) < _TRIES

    def count(self, kind: Kind) -> None:
        """Note that a batch of this kind was used."""
        self._uses[kind] += 1

    def operator(self, spec: ParamSpec, groups: list[RowGroup], like: Tensor) -> FactoredGradients:
        """The operator over rows of these groups; draws that show the dtype are not kept by it."""
        return FactoredGradients(spec, groups, self.rank, like.new_empty(0), self.routes)

    def _settle(self, name: str, block: Block | Unopened) -> Block:
        return cheapest(block, self.rank, self.routes, name)

    def _draw_by_draw(self, kind: Kind, thetas: Tensor, batch: Any, recheck: bool) -> tuple[FactoredGradients, float]:
        spec, count = kind[0], batch_size(batch)
        capture, groups, values = self._capture_for(spec, thetas.dtype), [], []
        capture.assembler.check_next = recheck
        for theta in thetas:
            found, value = self._captured(capture, spec.unflatten(theta), batch, count)
            groups += found
            values.append(value)
        capture.forget_inputs()
        fast = BatchedPass(self.model, capture.assembler.spec, self.log_likelihood, self._settle)
        same_dtype = set(self.dtypes.values()) == {thetas.dtype}
        simple = self.verify and same_dtype and capture.assembler.rules_sufficed and fast.possible
        # Looking costs a pass: a model that did not agree a few times is asked again when a check is due only.
        if simple and (_due(self._uses[kind]) or self._undecided(kind)):
            together = _agreeing(fast, thetas, batch, groups)
            if together is not None:
                self._simple[kind] = fast
                self._misses[kind] = 0
                # Rows of the pass that later batches take, though both are right: a run that was interrupted begins
                # with checks again, and must round as the one that was not.
                return self._checked(spec, together, thetas, count)
            if kind in self._misses:
                self._misses[kind] += 1
        return self.operator(spec, groups, thetas), float(torch.stack(values).mean())

    def _checked(
        self, spec: ParamSpec, found: tuple[RowGroup, Tensor], thetas: Tensor, count: int
    ) -> tuple[FactoredGradients, float]:
        """The operator over what a pass over all draws gave, and the mean log-likelihood."""
        group, table = found
        for row in table:
            checked_values(row, count)
        return self.operator(spec, [group], thetas), float(table.mean())

    def _captured(
        self, capture: GradientCapture, draw: Params, batch: Any, count: int
    ) -> tuple[list[RowGroup], Tensor]:
        """Rows and log-likelihoods at one draw, through the hooks."""
        params = {name: value.detach().to(self.dtypes[name]).requires_grad_() for name, value in draw.items()}
        with torch.enable_grad(), capture.recording():
            value = checked_values(self.log_likelihood(params, batch), count)
            grads = torch.autograd.grad(-value.sum(), list(params.values()), allow_unused=True)
        totals = {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}
        found = capture.collect(params, totals, count)
        if not found:
            raise ValueError("log_likelihood did not call model, so its layers cannot be read. Pass the right model=.")
        return found, value.detach()

    def _capture_for(self, spec: ParamSpec, dtype: torch.dtype) -> GradientCapture:
        key = (spec, dtype)
        if key not in self._captures:
            known = with_aliases(spec, self.model)
            self._captures[key] = GradientCapture(
                self.model,
                known,
                dtype,
                verify=self.verify,
                leaf_totals=False,
                memory_limit=self.memory_limit,
                settle=self._settle,
            )
        return self._captures[key]


def _due(use: int) -> bool:
    """Whether a check is due: at the 1st, 2nd, 4th, 8th, … use."""
    return use & (use - 1) == 0


def shapes_of(batch: Any, model: nn.Module | None = None) -> object:
    """What decides which layers are called with which shapes: the batch's structure, and train or eval mode."""
    leaves, structure = tree_flatten(batch)
    plain = (int, float, bool, str, bytes, type(None))
    shapes = tuple(
        (x.shape, x.dtype) if isinstance(x, Tensor) else x if isinstance(x, plain) else type(x).__qualname__
        for x in leaves
    )
    modes = () if model is None else tuple(module.training for module in model.modules())
    return str(structure), shapes, modes


def _agreeing(fast: BatchedPass, thetas: Tensor, batch: Any, groups: list[RowGroup]) -> tuple[RowGroup, Tensor] | None:
    """What the pass over all draws gives, if for some draw it has the gradient sums that autograd gave draw by draw."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap speaks of slow batching rules
            group, table = fast.gather(thetas, batch)
    except Exception:
        return None  # vmap cannot follow this model; draw by draw it is
    if len(groups) != len(thetas) or any(part.totals.keys() != group.blocks.keys() for part in groups):
        return None
    draws = torch.eye(len(thetas), dtype=thetas.dtype, device=thetas.device).repeat_interleave(groups[0].num_rows, 0)
    gaps, scales = thetas.new_zeros(2, len(thetas))
    for name, block in group.blocks.items():
        expected = torch.stack([part.totals[name].flatten() for part in groups])
        gaps = torch.maximum(gaps, (block.t_mm(draws) - expected).norm(dim=1))
        # Rounding is relative to the rows, which may cancel in the sum.
        scales += expected.norm(dim=1) + 1e-2 * (block.num_rows * block.square_sum().sum()).sqrt()
    # A unit whose input is zero up to rounding may be on either side of a kink: that spoils single draws.
    tolerance = rounding(fast.model, thetas.device, {thetas.dtype})
    return (group, table) if bool((gaps <= tolerance * scales).any()) else None


def one_per_example(values: Any, num_examples: int) -> Tensor:
    """Refuse anything but one log-likelihood per example."""
    if not isinstance(values, Tensor) or values.shape != (num_examples,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"log_likelihood must return one value per example, shape ({num_examples},), got {shape}. "
            "Use reduction='none' and sum over output dimensions."
        )
    return values


def checked_values(given: Any, num_examples: int) -> Tensor:
    """Refuse anything but one finite log-likelihood per example."""
    values: Tensor = one_per_example(given, num_examples)
    if not bool(torch.isfinite(values).all()):
        count = int((~torch.isfinite(values)).sum())
        raise NumericalError(
            f"log_likelihood is not finite for {count} of {num_examples} examples. The state is unchanged. "
            + GRADIENT_REMEDY
        )
    return values


def with_aliases(spec: ParamSpec, model: nn.Module) -> ParamSpec:
    """The same layout, knowing the other names that tied tensors have in the model."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name in spec.names:
        if name not in tensors:
            raise ValueError(
                f"params has {name!r}, which is no parameter of model. Use model.named_parameters() names."
            )
    pairs = ((alias, name) for name in spec.names for alias in tensors)
    aliases = tuple((alias, name) for alias, name in pairs if alias != name and tensors[alias] is tensors[name])
    return ParamSpec(spec.names, spec.shapes, aliases)
