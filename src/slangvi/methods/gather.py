"""From a log-likelihood and draws of the weights to the gradient operator: the functional methods share this."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.errors import NumericalError
from slangvi.methods.step import GRADIENT_REMEDY
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, Plans, RowGroup, per_example_gradients, record, watch_outputs
from slangvi.rows.dense import Together, batch_size, draws_at_once
from slangvi.rows.operator import GradientOperator
from slangvi.rows.recorder import check_modules
from slangvi.settings import FunctionalSettings, LogLikelihood

__all__ = [
    "GRADIENT_REMEDY",
    "Gatherer",
    "RowGatherer",
    "SumGatherer",
    "checked_mean",
    "checked_values",
    "dense_gatherer",
    "dtypes_of",
    "one_per_example",
    "sum_gatherer",
]

# (layout, draws (S, P), batch, generator) → operator with R = S·M rows, and the mean log-likelihood over them.
Gatherer = Callable[[ParamSpec, Tensor, Any, torch.Generator | None], tuple[GradientOperator, float]]
# (layout, draws (S, P), batch) → Σ_i g_{i,s} for every draw, (S, P), and the log-likelihoods (S, M).
SumGatherer = Callable[[ParamSpec, Tensor, Any], tuple[Tensor, Tensor]]


def dense_gatherer(log_likelihood: LogLikelihood, memory_limit: int | None) -> Gatherer:
    """Rows through torch.func, for any function; small problems take all draws in one pass."""
    together = Together()

    def gather(
        spec: ParamSpec, thetas: Tensor, batch: Any, generator: torch.Generator | None = None
    ) -> tuple[GradientOperator, float]:
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


class RowGatherer:
    """Rows read off the graph of the log-likelihood, one backward pass for each draw.

    Args:
        log_likelihood: (params, batch) → (M,).
        settings: of the method.
    """

    def __init__(self, log_likelihood: LogLikelihood, settings: FunctionalSettings) -> None:
        self.log_likelihood, self.routes = log_likelihood, settings.routes_within_limit
        self.curvature_rows = settings.rows_of_pass
        self.plans = Plans(settings.verify)
        self.dtypes = dtypes_of(settings.model)
        self.model = settings.model

    def __call__(
        self, spec: ParamSpec, thetas: Tensor, batch: Any, generator: torch.Generator | None = None
    ) -> tuple[GradientOperator, float]:
        """Return the operator with R = S·M rows, or fewer, and the mean log-likelihood over all S·M."""
        if self.model is not None:
            self._check_model(self.model, spec)
        count, groups, values = batch_size(batch), [], []
        for theta in thetas:
            chosen = self.choose(count, thetas.device, generator)
            group, value = self.gather_one(spec, theta, batch, count, chosen)
            groups.append(group)
            values.append(value)
        mean = checked_mean(torch.stack(values))
        return FactoredGradients(spec, groups, thetas.new_empty(0), self.routes), mean

    def _check_model(self, model: nn.Module, spec: ParamSpec) -> None:
        """Refuse a model whose examples have no gradients of their own, and parameters that it does not have."""
        check_modules(model)
        for name in spec.names:
            if name not in self.dtypes:
                raise ValueError(
                    f"params has {name!r}, which is no parameter of model. Use model.named_parameters() names."
                )

    def gather_one(
        self, spec: ParamSpec, theta: Tensor, batch: Any, count: int, chosen: Tensor | None
    ) -> tuple[RowGroup, Tensor]:
        """Return the rows at one draw (P,), and the log-likelihoods (M,)."""
        draw = spec.unflatten(theta.detach())
        params = {n: x.to(self.dtypes.get(n, x.dtype)).requires_grad_() for n, x in draw.items()}
        with torch.enable_grad():
            values = one_per_example(self.log_likelihood(params, batch), count)
            if not values.requires_grad:
                raise ValueError(
                    "log_likelihood does not depend on params: its result has no gradient. Use params in it."
                )
            # The batch is the caller's, who gets control back only after the step.
            recording = record([values], params, chosen, self.plans, count, copy_data=lambda data: data)
            watch_outputs(recording, [values])
            ones = -torch.ones_like(values)
            try:
                with torch.autograd.set_multithreading_enabled(False):  # see `GradientRecorder.recording`
                    grads = torch.autograd.grad(values, list(params.values()), ones, allow_unused=True)
            finally:
                recording.detach()
        reached = zip(params.values(), grads, strict=True)
        total = torch.cat([(torch.zeros_like(p) if g is None else g).flatten().to(theta.dtype) for p, g in reached])
        blocks = recording.blocks(theta.dtype)
        if chosen is None:
            return RowGroup(count, blocks, total), values.detach()
        return RowGroup(count, blocks, total, num_chosen=len(chosen)), values.detach()

    def choose(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor | None:
        """Return the examples of a batch whose rows are kept; None for all."""
        if self.curvature_rows is None or self.curvature_rows >= count:
            return None
        return torch.randperm(count, generator=generator, device=device)[: self.curvature_rows]


def dtypes_of(model: nn.Module | None) -> dict[str, torch.dtype]:
    """Return the dtypes that parameters of a model are to have when it is called, by name; {} without a model."""
    if model is None:
        return {}
    return {name: value.dtype for name, value in model.named_parameters(remove_duplicate=False)}


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
