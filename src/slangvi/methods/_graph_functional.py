"""Graphs of the functional step: which steps are replayed, and what is said when none can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from slangvi._steps import Prior
from slangvi.grads.batched import BatchedPass
from slangvi.methods._gather import FactoredGatherer, checked_values
from slangvi.methods._graph import Captured, Numbers, Outcome, Setup
from slangvi.methods._graph_runner import Runner, packed
from slangvi.types import GradientOperator, ParamSpec

__all__ = ["FunctionalStep", "GraphRunner"]

NO_PASS = (
    "the draws cannot pass through the model together (it has dropout, layers without a rule, parameters of another "
    "dtype, or control flow that depends on values; or verify=False)"
)


class FunctionalStep(Captured):
    """Draws, and the model passed through by all of them at once.

    Args:
        fast: the pass over all draws.
        gatherer: whose operator is used.
        spec: layout.
        batch: an example of the batches to come; copied.
        draws: S.
        setup: see `Setup`.
    """

    def __init__(
        self,
        fast: BatchedPass,
        gatherer: FactoredGatherer,
        spec: ParamSpec,
        batch: Any,
        draws: int,
        setup: Setup,
    ) -> None:
        super().__init__(setup)
        self.fast, self.gatherer, self.spec, self.draws = fast, gatherer, spec, draws
        leaves, self.structure = tree_flatten(batch)
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.capture()

    def gradients(self) -> tuple[GradientOperator, Tensor]:
        """Rows of all draws, and the mean of their log-likelihoods."""
        thetas = self.draw((self.draws,))
        group, self.table = self.fast.gather(thetas, tree_unflatten(self.leaves, self.structure))
        return self.gatherer.operator(self.spec, [group], thetas), self.table.mean()

    def explain(self) -> None:
        """Log-likelihoods that are not finite are refused as elsewhere."""
        for row in self.table:
            checked_values(row, len(row))

    def feed(self, batch: Any) -> None:
        """Hand over a batch of the shapes captured."""
        for mine, given in zip(self.leaves, tree_flatten(batch)[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)


class GraphRunner(Runner[FunctionalStep]):
    """Takes steps by replaying graphs where that is possible, and says once why when it is not.

    Args:
        gatherer: the factored engine of the functional interface, or None for the dense one.
        draws: S.
        num_data: N over the temperature.
        momentum: γ.
    """

    def __init__(self, gatherer: FactoredGatherer | None, draws: int, num_data: float, momentum: float) -> None:
        super().__init__()
        self.gatherer = gatherer
        self.draws, self.num_data, self.momentum = draws, num_data, momentum

    def step(
        self,
        state: Any,
        batch: Any,
        generator: torch.Generator | None,
        numbers: Numbers,
        prior: Prior,
        check: Callable[..., None],
    ) -> Outcome | None:
        """One step, or None when it has to be taken eagerly: the first of its kind, a check is due, or for good.

        Args:
            state: a `slang.State`.
            batch: as `log_likelihood` takes it.
            generator: source of the draws.
            numbers: rates of this step.
            prior: λ and μ₀.
            check: raises when a vector is not finite.
        """
        if self._given_up or self._declined(state.loc.device):
            return None
        assert self.gatherer is not None
        kind = self.gatherer.kind(state.spec, batch)
        fast = self.gatherer.trusted(kind)
        if fast is None:
            if self.gatherer.distrusted(kind):
                self._give_up(NO_PASS)
            return None
        graph = self._graph(kind, fast, state, batch, generator, prior)
        if graph is None:
            return None
        self.gatherer.count(kind)
        return self._advanced(graph, state, lambda: graph.feed(batch), generator, numbers, check)

    def _declined(self, device: torch.device) -> bool:
        if self.gatherer is None:
            return self._give_up('it needs engine="factored" with model=')
        return super()._declined(device)

    def _graph(
        self,
        kind: tuple[ParamSpec, object],
        fast: BatchedPass,
        state: Any,
        batch: Any,
        generator: torch.Generator | None,
        prior: Prior,
    ) -> FunctionalStep | None:
        assert self.gatherer is not None
        key = (kind, state.loc.dtype, state.loc.device, generator is None, _baked_in(self.gatherer, state.spec))

        def capture() -> FunctionalStep:
            assert self.gatherer is not None
            setup = Setup(packed(state), prior, self.num_data, self.momentum, generator)
            return FunctionalStep(fast, self.gatherer, state.spec, batch, self.draws, setup)

        return self._kept(key, capture)


def _baked_in(gatherer: FactoredGatherer, spec: ParamSpec) -> tuple[object, ...]:
    """What a graph reads by address or has settled when captured: frozen tensors, buffers, autocast."""
    model, inferred = gatherer.model, set(spec.names)
    tensors = [p for name, p in model.named_parameters() if name not in inferred]
    addresses = tuple(x.data_ptr() for x in (*tensors, *model.buffers()))
    return addresses, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
