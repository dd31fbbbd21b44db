"""Steps of the functional interface by replaying graphs: draws, forward, backward and update."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from slangvi.errors import NumericalError
from slangvi.likelihoods import defer_checks
from slangvi.linalg import LowRankPrecision
from slangvi.methods.compiled.capture import has_graphs, warn_eager
from slangvi.methods.compiled.captured import CapturedStep, Numbers, Replayed
from slangvi.methods.gather import RowGatherer
from slangvi.priors import Prior
from slangvi.rows.factored import FactoredGradients

__all__ = ["PureSteps"]

# Graphs that are kept, the one that was not used for longest goes first; and steps of a kind that run eagerly before
# one is captured.
MOST_GRAPHS = 8
EAGER_STEPS = 2


class PureSteps:
    """Takes steps of `slangvi.slang.build` by graphs where it can.

    The first steps of each kind of batch run eagerly, and so do those at which a check of per-example gradients is due.

    Args:
        gather: from draws and batches to rows.
        draws: S.
        num_data: N, divided by the temperature.
    """

    def __init__(self, gather: RowGatherer, draws: int, num_data: float) -> None:
        self.gather, self.draws, self.num_data = gather, draws, num_data
        self._graphs: OrderedDict[Any, tuple[CapturedStep, list[Tensor]]] = OrderedDict()
        self._uses: dict[Any, int] = {}
        self._warned = False

    def step(
        self, state: Any, batch: Any, generator: torch.Generator | None, numbers: Numbers, prior: Prior
    ) -> Replayed | None:
        """Return the step by graphs; None if it has to be taken eagerly.

        Args:
            state: before the step, a `slang.State`.
            batch: any nesting of tensors.
            generator: source of the draws.
            numbers: rates of the step.
            prior: λ and μ₀.
        """
        device = state.loc.device
        if not has_graphs(device):
            self._warn(f"it needs a CUDA device, and the parameters are on {device.type}")
            return None
        leaves, structure = tree_flatten(batch)
        shapes = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in leaves)
        kind = (state.spec, state.loc.dtype, device, str(structure), shapes, id(generator))
        uses = self._uses[kind] = self._uses.get(kind, 0) + 1
        if uses <= EAGER_STEPS or (self.gather.plans.verify and uses.bit_count() == 1):
            return None
        before = None if generator is None else generator.get_state()
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        try:
            graph, places = self._find(kind, state, batch, tensors, generator, prior)
        except NumericalError:  # the eager step sees the same draws, and says what is wrong
            if generator is not None and before is not None:
                generator.set_state(before)
            return None
        except (RuntimeError, TypeError) as error:
            self._warn(f"the step cannot be captured ({type(error).__name__}: {str(error).splitlines()[0]})")
            self._uses[kind] = -(1 << 60)
            return None
        for place, value in zip(places, tensors, strict=True):
            place.copy_(value)
        found = graph.replay(state.tensors, state.precision, numbers)
        if found is None and generator is not None and before is not None:
            generator.set_state(before)  # the eager step sees the same draws, and says what is wrong
        return found

    def _find(
        self,
        kind: Any,
        state: Any,
        batch: Any,
        tensors: list[Tensor],
        generator: torch.Generator | None,
        prior: Prior,
    ) -> tuple[CapturedStep, list[Tensor]]:
        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            return self._graphs[kind]
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        places = [x.clone() for x in tensors]
        own = iter(places)
        leaves, structure = tree_flatten(batch)
        static = tree_unflatten([next(own) if isinstance(x, Tensor) else x for x in leaves], structure)
        spec = state.spec

        def gather(precision: LowRankPrecision, loc: Tensor, frozen: bool) -> tuple[FactoredGradients, Tensor]:
            thetas = precision.sample((self.draws,), generator, loc)
            self.gather.plans.is_frozen = frozen
            try:
                with defer_checks():
                    groups, values = self.gather.groups_at(spec, thetas, static, generator)
            finally:
                self.gather.plans.is_frozen = False
            return FactoredGradients(spec, groups, loc, self.gather.routes), values

        graph = CapturedStep(state.tensors, state.precision, spec, prior, self.num_data, gather, generator)
        self._graphs[kind] = (graph, places)
        return self._graphs[kind]

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warn_eager(reason)
