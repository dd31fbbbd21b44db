"""Graphs of the functional step: which steps are replayed, and what is said when none can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from slangvi.grads import FactoredGradients
from slangvi.grads.batched import BatchedPass
from slangvi.methods._graph import Captured
from slangvi.methods._launched import Launched, Numbers, Setup
from slangvi.methods.gather import FactoredGatherer, checked_values
from slangvi.methods.graph_runner import Runner, packed
from slangvi.params import ParamSpec
from slangvi.priors import Prior

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
        others: addresses of what it reads besides the state and the batch.
    """

    def __init__(
        self,
        fast: BatchedPass,
        gatherer: FactoredGatherer,
        spec: ParamSpec,
        batch: Any,
        draws: int,
        setup: Setup,
        others: tuple[int, ...] = (),
    ) -> None:
        super().__init__(setup)
        self.fast, self.gatherer, self.spec, self.draws, self.others = fast, gatherer, spec, draws, others
        leaves, self.structure = tree_flatten(batch)
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.capture()

    def gradients(self) -> tuple[FactoredGradients, Tensor]:
        """Rows of all draws, and the mean of their log-likelihoods."""
        thetas = self.draw((self.draws,))
        group, self.table = self.fast.gather(thetas, tree_unflatten(self.leaves, self.structure))
        return self.gatherer.operator(self.spec, [group], thetas), self.table.mean()

    def explain(self) -> None:
        """Log-likelihoods that are not finite are refused as elsewhere."""
        for row in self.table:
            checked_values(row, len(row))

    def leaves_like(self, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Tensors of a batch of the shapes captured, each behind the place it is to be copied to."""
        pairs = zip(self.leaves, tree_flatten(batch)[0], strict=True)
        return [(mine, given) for mine, given in pairs if isinstance(mine, Tensor)]

    def feed(self, given: list[tuple[Tensor, Tensor]]) -> None:
        """Hand over what `leaves_like` returned."""
        for mine, value in given:
            mine.copy_(value, non_blocking=True)


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
    ) -> Launched | None:
        """One step, or None when it has to be taken eagerly: the first of its kind, a check is due, or for good.

        Args:
            state: a `slang.State`.
            batch: as `log_likelihood` takes it.
            generator: source of the draws.
            numbers: rates of this step.
            prior: λ and μ₀.
            check: raises when a vector is not finite.
        """
        like = self.like(state)
        if self._given_up or self._declined(like.device):
            return None
        assert self.gatherer is not None
        kind = self.gatherer.kind(state.spec, batch)
        fast = self.gatherer.trusted(kind)
        if fast is None:
            if self.gatherer.distrusted(kind):
                self._give_up(NO_PASS)
            return None
        graph = self._graph(kind, fast, state, like, batch, generator, prior)
        if graph is None:
            return None
        self.gatherer.count(kind)
        given = graph.leaves_like(batch)
        running = self._advanced(graph, state, lambda: graph.feed(given), generator, numbers, check)
        if graph.others:
            running.outcome()  # waited for: it may have to be repeated, and these could change until then
        return running

    def _declined(self, device: torch.device) -> bool:
        if self.gatherer is None:
            return self._give_up('it needs engine="factored" with model=')
        return super()._declined(device)

    def _graph(
        self,
        kind: tuple[ParamSpec, object],
        fast: BatchedPass,
        state: Any,
        like: Tensor,
        batch: Any,
        generator: torch.Generator | None,
        prior: Prior,
    ) -> FunctionalStep | None:
        assert self.gatherer is not None
        others = _others(self.gatherer.model, state.spec)
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = (kind, like.dtype, like.device, generator is None, others, cast)

        def capture() -> FunctionalStep:
            assert self.gatherer is not None
            setup = Setup(packed(state), prior, self.num_data, self.momentum, generator, self.pool)
            return FunctionalStep(fast, self.gatherer, state.spec, batch, self.draws, setup, others)

        return self._kept(key, capture)


def _others(model: nn.Module, spec: ParamSpec) -> tuple[int, ...]:
    """Addresses of what a graph reads where it lay when captured: frozen tensors and buffers."""
    inferred = set(spec.names)
    tensors = [p for name, p in model.named_parameters() if name not in inferred]
    return tuple(x.data_ptr() for x in (*tensors, *model.buffers()))
