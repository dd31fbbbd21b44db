"""From a log-likelihood and draws of the weights to the gradient operator: the functional methods share this."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from slangvi import _checks
from slangvi._steps import Schedule
from slangvi.errors import NumericalError
from slangvi.grads import FactoredGradients, GradientCapture, RowGroup, per_example_gradients
from slangvi.grads.batched import BatchedPass
from slangvi.grads.dense import batch_size
from slangvi.types import GradientOperator, Params, ParamSpec

__all__ = ["GRADIENT_REMEDY", "Gatherer", "check_schedule", "dense_gatherer", "factored_gatherer"]

LogLikelihood = Callable[[Params, Any], Tensor]
# (layout, draws (S, P), batch) → operator with R = S·M rows, and the mean log-likelihood over them.
Gatherer = Callable[[ParamSpec, Tensor, Any], tuple[GradientOperator, float]]
GRADIENT_REMEDY = (
    "Look for NaN, Inf or huge values (squares must fit the dtype) in the inputs and the loss, or skip this batch."
)


def check_schedule(name: str, schedule: Schedule | None, ceiling: float) -> None:
    """Numbers are checked when built; functions of the step, at every step."""
    if schedule is not None and not callable(schedule):
        _checks.rate(name, schedule, ceiling)


def dense_gatherer(log_likelihood: LogLikelihood, memory_limit: int | None) -> Gatherer:
    """Rows through torch.func, for any function."""

    def gather(spec: ParamSpec, thetas: Tensor, batch: Any) -> tuple[GradientOperator, float]:
        count = batch_size(batch)
        with torch.no_grad():
            values = [_checked(log_likelihood(spec.unflatten(theta), batch), count) for theta in thetas]
        operator = per_example_gradients(log_likelihood, spec, thetas, batch, memory_limit)
        return operator, float(torch.stack(values).mean())

    return gather


def factored_gatherer(log_likelihood: LogLikelihood, model: nn.Module | None, rank: int, verify: bool) -> Gatherer:
    """Factors captured from the layers of the module behind the log-likelihood."""
    if model is None:
        raise ValueError('engine="factored" needs model=: pass the module whose layers log_likelihood calls.')
    captures: dict[tuple[ParamSpec, torch.dtype], GradientCapture] = {}
    # Batches of these shapes were once captured draw by draw, checked, and found to need nothing but rules.
    simple: dict[tuple[ParamSpec, object], BatchedPass] = {}
    uses: Counter[tuple[ParamSpec, object]] = Counter()

    dtypes = {name: value.dtype for name, value in model.named_parameters(remove_duplicate=False)}

    def capture_for(spec: ParamSpec, dtype: torch.dtype) -> GradientCapture:
        key = (spec, dtype)
        if key not in captures:
            known = _with_aliases(spec, model)
            captures[key] = GradientCapture(model, known, dtype, verify=verify, leaf_totals=False)
        return captures[key]

    def gather(spec: ParamSpec, thetas: Tensor, batch: Any) -> tuple[GradientOperator, float]:
        count = batch_size(batch)
        kind = (spec, _shapes_of(batch, model))
        uses[kind] += 1
        recheck = kind in simple and uses[kind] & (uses[kind] - 1) == 0
        if kind in simple and not recheck:
            try:
                group, table = simple[kind].gather(thetas, batch)
            except Exception:  # another path through the model: draw by draw says what is wrong, if anything
                recheck = True
            else:
                for row in table:
                    _checked(row, count)
                return FactoredGradients(spec, [group], rank, thetas), float(table.mean())
        simple.pop(kind, None)
        capture, groups, values = capture_for(spec, thetas.dtype), [], []
        capture.assembler.check_next = recheck
        for theta in thetas:
            params = {
                name: value.detach().to(dtypes[name]).requires_grad_() for name, value in spec.unflatten(theta).items()
            }
            with torch.enable_grad(), capture.recording():
                value = _checked(log_likelihood(params, batch), count)
                grads = torch.autograd.grad(-value.sum(), list(params.values()), allow_unused=True)
            totals = {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}
            found = capture.collect(params, totals, count)
            if not found:
                raise ValueError(
                    "log_likelihood did not call model, so its layers cannot be read. Pass the right model=."
                )
            groups += found
            values.append(value.detach())
        capture.forget_inputs()
        fast = BatchedPass(model, capture.assembler.spec, log_likelihood)
        same_dtype = set(dtypes.values()) == {thetas.dtype}
        if (
            verify
            and same_dtype
            and capture.assembler.rules_sufficed
            and fast.possible
            and _agrees(fast, thetas, batch, groups)
        ):
            simple[kind] = fast
        return FactoredGradients(spec, groups, rank, thetas), float(torch.stack(values).mean())

    return gather


def _shapes_of(batch: Any, model: nn.Module) -> object:
    """What decides which layers are called with which shapes: the batch's structure, and train or eval mode."""
    leaves, structure = tree_flatten(batch)
    plain = (int, float, bool, str, bytes, type(None))
    shapes = tuple(
        (x.shape, x.dtype) if isinstance(x, Tensor) else x if isinstance(x, plain) else type(x).__qualname__
        for x in leaves
    )
    return str(structure), shapes, tuple(module.training for module in model.modules())


def _agrees(fast: BatchedPass, thetas: Tensor, batch: Any, groups: list[RowGroup]) -> bool:
    """Whether the pass over all draws gives the gradient sums that autograd gave draw by draw."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap speaks of slow batching rules
            group, _ = fast.gather(thetas, batch)
    except Exception:
        return False  # vmap cannot follow this model; draw by draw it is
    expected: dict[str, Tensor] = {}
    for part in groups:
        for name, total in part.totals.items():
            expected[name] = expected.get(name, 0) + total.flatten()
    if expected.keys() != group.blocks.keys():
        return False
    gaps = {name: float((group.blocks[name].sum() - total).norm()) for name, total in expected.items()}
    tolerance = 1e3 * torch.finfo(thetas.dtype).eps
    scale = sum(float(total.norm()) for total in expected.values())
    return all(gap <= tolerance * scale for gap in gaps.values())


def _checked(values: Any, num_examples: int) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != (num_examples,):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"log_likelihood must return one value per example, shape ({num_examples},), got {shape}. "
            "Use reduction='none' and sum over output dimensions."
        )
    if not bool(torch.isfinite(values).all()):
        count = int((~torch.isfinite(values)).sum())
        raise NumericalError(
            f"log_likelihood is not finite for {count} of {num_examples} examples. The state is unchanged. "
            + GRADIENT_REMEDY
        )
    return values


def _with_aliases(spec: ParamSpec, model: nn.Module) -> ParamSpec:
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
