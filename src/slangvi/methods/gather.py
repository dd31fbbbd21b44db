"""From a log-likelihood and draws of the weights to the gradient operator: the functional methods share this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.errors import NumericalError
from slangvi.likelihoods import Likelihood, OutputLogLikelihood, input_and_target
from slangvi.methods._gaussian import own_pass_of
from slangvi.methods.step import GRADIENT_REMEDY
from slangvi.params import Params, ParamSpec
from slangvi.rows import FactoredGradients, OwnPass, Plans, RowGroup, per_example_gradients, record, watch_outputs
from slangvi.rows.dense import Together, batch_size, bytes_of, draws_at_once
from slangvi.rows.operator import GradientOperator
from slangvi.rows.own_pass import Examples, single_output
from slangvi.rows.recorder import check_modules
from slangvi.settings import OWN_PASS, FunctionalSettings, LogLikelihood

__all__ = [
    "GRADIENT_REMEDY",
    "Gatherer",
    "RowGatherer",
    "SumGatherer",
    "checked_mean",
    "checked_values",
    "dense_gatherer",
    "dtypes_of",
    "likelihood_of",
    "one_per_example",
    "sum_gatherer",
]

# Bytes up to which draws share a pass, and what it holds of an example in units of it: a guess, as layers are not seen.
SHARED_BYTES, ACTIVATIONS = 1 << 26, 8
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

    Where the curvature does not come from the gradients, their sum is all that is taken from that pass, and rows come
    from another one over the outputs.

    Args:
        log_likelihood: (params, batch) → (M,).
        settings: of the method.
    """

    def __init__(self, log_likelihood: LogLikelihood, settings: FunctionalSettings) -> None:
        settings = settings.for_likelihood(likelihood_of(log_likelihood))
        self.log_likelihood, self.routes = log_likelihood, settings.routes_within_limit
        self.rows_of_pass = settings.rows_of_pass
        self.plans, self.together = Plans(settings.verify), Together()
        self.dtypes = dtypes_of(settings.model)
        self.model = settings.model
        self.own_pass: OwnPass | None = None
        if settings.curvature in OWN_PASS:
            if not isinstance(log_likelihood, OutputLogLikelihood):
                raise ValueError(
                    f"curvature={settings.curvature!r} needs a log-likelihood that knows its outputs. Build it as "
                    "slangvi.Categorical().of(model), or as slangvi.Gaussian(τ).on(function of (params, x))."
                )
            self.own_pass = own_pass_of(log_likelihood.likelihood, settings.curvature, settings.verify)
            self.model = settings.model or log_likelihood.model
            self.dtypes = dtypes_of(self.model)

    def __call__(
        self, spec: ParamSpec, thetas: Tensor, batch: Any, generator: torch.Generator | None = None
    ) -> tuple[GradientOperator, float]:
        """Return the operator with R = S·M rows, or fewer, and the mean log-likelihood over all S·M."""
        if self.model is not None:
            self._check_model(self.model, spec)
        groups, values = self.groups_at(spec, thetas, batch, generator)
        return FactoredGradients(spec, groups, thetas.new_empty(0), self.routes), checked_mean(values)

    def groups_at(
        self, spec: ParamSpec, thetas: Tensor, batch: Any, generator: torch.Generator | None
    ) -> tuple[list[RowGroup], Tensor]:
        """Return the rows at draws (S, P), and the log-likelihoods (S, M)."""
        if self.shares_pass(thetas, batch):
            gather = partial(self._gather, spec, thetas, batch, None)
            # While a graph is captured nothing can be tried: steps before have shown what is possible.
            found = gather() if self.plans.is_frozen else self.together.attempt(gather, thetas.device)
            if found is not None:
                return [found[0]], found[1]
        groups, values, count = [], [], batch_size(batch)
        for theta in thetas:
            chosen = self._choose(count, theta, generator)
            if self.own_pass is None:
                group, value = self._gather(spec, theta, batch, chosen)
            else:
                group, value = self._gather_own(spec, theta, batch, chosen, generator)
            groups.append(group)
            values.append(value)
        return groups, torch.stack(values)

    def shares_pass(self, thetas: Tensor, batch: Any) -> bool:
        """Tell whether all draws go through one vmapped pass: all rows of a small problem, slow for its many calls."""
        count, draws = batch_size(batch), len(thetas)
        takes_all = (self.rows_of_pass(thetas.shape[-1]) or count) >= count
        # A dimension of S must not be mistaken for the batch.
        if not takes_all or draws in (1, count) or self.together.possible is False or self.own_pass is not None:
            return False
        limit = SHARED_BYTES if self.routes.form_bytes is None else min(SHARED_BYTES, self.routes.form_bytes)
        return max(thetas.nbytes, draws * ACTIVATIONS * bytes_of(batch)) <= limit

    def _check_model(self, model: nn.Module, spec: ParamSpec) -> None:
        """Refuse a model whose examples have no gradients of their own, and parameters that it does not have."""
        check_modules(model)
        for name in spec.names:
            if name not in self.dtypes:
                raise ValueError(
                    f"params has {name!r}, which is no parameter of model. Use model.named_parameters() names."
                )

    def _gather(self, spec: ParamSpec, theta: Tensor, batch: Any, chosen: Tensor | None) -> tuple[RowGroup, Tensor]:
        """Return the rows at one draw (P,) and its log-likelihoods (M,), or at several (S, P) and theirs (S, M)."""
        count, draws = batch_size(batch), theta.shape[:-1].numel()
        params = self.params_at(spec, theta)
        with torch.enable_grad():
            values = self.values_at(params, batch, theta.ndim > 1)
            _require_gradient(values)
            # The batch is the caller's, who gets control back only after the step.
            recording = record([values], params, chosen, self.plans, count, copy_data=lambda data: data)
            watch_outputs(recording, [values])
            ones = -torch.ones_like(values)
            try:
                with torch.autograd.set_multithreading_enabled(False):  # see `GradientRecorder.recording`
                    grads = torch.autograd.grad(values, list(params.values()), ones, allow_unused=True)
            finally:
                recording.detach()
        total = _joined(params, grads, theta)
        blocks = recording.blocks(theta.dtype)
        if theta.ndim > 1:
            total, blocks = total.sum(0), {name: block.split_draws(draws) for name, block in blocks.items()}
        num_chosen = None if chosen is None else len(chosen)
        return RowGroup(draws * count, blocks, total, num_chosen=num_chosen), values.detach()

    def _gather_own(
        self, spec: ParamSpec, theta: Tensor, batch: Any, chosen: Tensor | None, generator: torch.Generator | None
    ) -> tuple[RowGroup, Tensor]:
        """Return the gradient and rows of the likelihood's curvature at one draw (P,), and log-likelihoods (M,)."""
        source, own_pass = self.log_likelihood, self.own_pass
        assert own_pass is not None
        assert isinstance(source, OutputLogLikelihood)
        (x, y), count, params = input_and_target(batch), batch_size(batch), self.params_at(spec, theta)
        with torch.enable_grad():
            outputs = single_output(source.outputs(params, x), count)
            values = one_per_example(source.likelihood.log_prob(outputs, y), count)
            _require_gradient(values)
            leaves, ones = [outputs, *params.values()], -torch.ones_like(values)
            pull, *grads = torch.autograd.grad(values, leaves, ones, allow_unused=True)
        some = Examples.choose(x, outputs, count, chosen)

        def call(repeats: int) -> Tensor:
            return single_output(source.outputs(params, some.repeated(repeats)), some.count * repeats)

        made = own_pass.rows(call, params, some.outputs, count, theta.dtype, generator)
        size = float(pull.double().square().sum())
        return own_pass.group(made, count, some.count, _joined(params, grads, theta), size), values.detach()

    def params_at(self, spec: ParamSpec, theta: Tensor) -> dict[str, Tensor]:
        """Return the parameters at one draw (P,), or at several (S, P) with S in front, to be differentiated by."""
        named = spec.unflatten(theta.detach())
        return {name: x.to(self.dtypes.get(name, x.dtype)).requires_grad_() for name, x in named.items()}

    def values_at(self, params: Params, batch: Any, is_stacked: bool) -> Tensor:
        """Return the log-likelihoods (M,), or (S, M) for parameters with S in front."""
        count = batch_size(batch)

        def values(params: Params) -> Tensor:
            return one_per_example(self.log_likelihood(params, batch), count)

        found: Tensor = torch.func.vmap(values, randomness="different")(params) if is_stacked else values(params)
        return found

    def _choose(self, count: int, theta: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Return the examples of a batch whose rows are kept at a draw (P,); None for all."""
        most = self.rows_of_pass(len(theta)) or count
        return None if most >= count else torch.randperm(count, generator=generator, device=theta.device)[:most]


def likelihood_of(log_likelihood: LogLikelihood) -> Likelihood | None:
    """Return the likelihood of a function that knows the outputs it is made of; None for any other."""
    return log_likelihood.likelihood if isinstance(log_likelihood, OutputLogLikelihood) else None


def _require_gradient(values: Tensor) -> None:
    """Refuse log-likelihoods that do not depend on the parameters."""
    if not values.requires_grad:
        raise ValueError("log_likelihood does not depend on params: its result has no gradient. Use params in it.")


def _joined(params: Params, grads: Sequence[Tensor | None], theta: Tensor) -> Tensor:
    """Return gradients of the parameters as one vector, (..., P)."""
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)]
    return torch.cat([grad.reshape(*theta.shape[:-1], -1).to(theta.dtype) for grad in found], -1)


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
