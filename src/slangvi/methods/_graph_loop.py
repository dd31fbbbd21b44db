"""Graphs of the optimizer's step: rows collected in the user's own loop are copied in, and the weights written out."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slangvi.errors import user_stacklevel
from slangvi.grads import FactoredGradients, GradientCapture, RowGroup
from slangvi.methods._gaussian import GaussianOptimizer
from slangvi.methods._graph import Captured
from slangvi.methods._graph_pass import PassRunner
from slangvi.methods._launched import Launched, Numbers, Setup
from slangvi.methods._row_leaves import ReplayedBlocks, Signature, bytes_of, key_of, leaves_of, rebuilt, too_large
from slangvi.methods.graph_runner import Runner, has_graphs, packed
from slangvi.optimizer import InfoT, StateT
from slangvi.params import ParamSpec
from slangvi.priors import Prior
from slangvi.settings import CompiledOptimizerSettings
from slangvi.types import Routes

__all__ = ["LoopRunner", "LoopStep", "ReplayingOptimizer"]

# Values of momentum in a row, all different, after which no graph is waited for.
_RESTLESS = 8
# Kinds of batch that are remembered: texts of any length would be new ones for ever.
_MOST_SEEN = 256


class LoopStep(Captured):
    """The step from rows that were collected outside.

    Args:
        spec: layout.
        rows: an example of the rows to come; copied, or read where they are if others will lie there.
        routes: see `FactoredGradients`.
        params: the model's parameters, which draws and the mean are written to.
        setup: see `Setup`.
    """

    hurries = False  # Python around the passes takes longer than what could be saved

    def __init__(
        self,
        spec: ParamSpec,
        rows: Sequence[RowGroup],
        routes: Routes,
        params: Sequence[Tensor],
        setup: Setup,
    ) -> None:
        super().__init__(setup)
        self.spec, self.routes, self.params = spec, routes, list(params)
        # Those of replayed passes lie in the same place at every step, and are read there.
        stay = {key_of(x) for group in rows if isinstance(group.blocks, ReplayedBlocks) for x in group.blocks.flats}
        places = {key: x if key in stay else x.detach().clone() for key, x in leaves_of(rows)[1].items()}
        self.places = list(places.values())
        self.rows = [rebuilt(group, places) for group in rows]
        self.capture()

    def gradients(self) -> tuple[FactoredGradients, Tensor]:
        """The operator over the copied rows; the loss was not seen."""
        like = self.state[0]
        return FactoredGradients(self.spec, self.rows, self.rank, like, self.routes), like.new_zeros(())

    def explain(self) -> None:
        """Nothing is known but the gradients."""

    def extra_pieces(self) -> list[Callable[[], None]]:
        """Draws into the parameters, and the mean back."""
        return [self.write_draw, self.write_mean]

    def write_draw(self) -> None:
        """One draw into the parameters."""
        self.receive()
        self._write(self.draw(()))

    def write_mean(self) -> None:
        """The mean into the parameters."""
        self._write(self.state[0])

    def feed(self, leaves: Sequence[Tensor]) -> None:
        """Hand over the tensors of rows of the same make; those that are where they are to be stay there."""
        known = {place.data_ptr() for place in self.places}
        pairs = [(a, b) for a, b in zip(self.places, leaves, strict=True) if a.data_ptr() != b.data_ptr()]
        if pairs:
            # What lies in another's place would be overwritten before it is read.
            given = [b.clone() if b.data_ptr() in known else b for _, b in pairs]
            torch._foreach_copy_([a for a, _ in pairs], given)

    def _write(self, flat: Tensor) -> None:
        pieces = flat.split(self.spec.numels)
        torch._foreach_copy_(self.params, [x.view(p.shape) for x, p in zip(pieces, self.params, strict=True)])


class LoopRunner(Runner[LoopStep]):
    """Takes the optimizer's steps and draws by replaying graphs where that is possible, and says once why when not.

    Args:
        num_data: N over the temperature.
        routes: see `FactoredGradients`.
    """

    def __init__(self, num_data: float, routes: Routes) -> None:
        super().__init__()
        self.num_data, self.routes = num_data, routes
        self._seen: Counter[Signature] = Counter()
        self._momenta: list[float] = []  # of the last steps
        self._said = False  # that some steps are too large

    def step(
        self,
        state: Any,
        rows: Sequence[RowGroup],
        params: Sequence[Tensor],
        generator: torch.Generator | None,
        numbers: Numbers,
        momentum: float,
        prior: Prior,
        check: Callable[..., None],
    ) -> Launched | None:
        """One step, or None when it has to be taken eagerly: the first of its kind, or for good."""
        if self._given_up or self._declined(self.like(state).device) or self._restless(momentum):
            return None
        if len({isinstance(group.blocks, ReplayedBlocks) for group in rows}) > 1:
            return None  # some passes were due to be checked; such steps become ever more rare
        signature, leaves = leaves_of(rows)
        if too_large(leaves):
            self._say_too_large(bytes_of(leaves))
            return None
        graph = self._graph(signature, state, rows, params, generator, momentum, prior)
        if graph is None:
            return None
        given = list(leaves.values())
        return self._advanced(graph, state, lambda: graph.feed(given), generator, numbers, check)

    def _restless(self, momentum: float) -> bool:
        """Whether γ is another one at every step, as with OneCycleLR, which is said once: graphs hold it as it was."""
        if self.graphs:
            return False
        self._momenta = [*self._momenta, momentum][-_RESTLESS:]
        if len(set(self._momenta)) < _RESTLESS:
            return False
        return self._give_up("momentum changes at every step; give the scheduler cycle_momentum=False")

    def _say_too_large(self, size: int) -> None:
        """Once."""
        if not self._said:
            self._said = True
            text = (
                f"compile=True has no effect on a step like this one: its gradients take {size / 1e9:.1f} GB, and "
                "graphs would hold copies of them. It runs eagerly."
            )
            warnings.warn(text, UserWarning, stacklevel=user_stacklevel())

    def write_draw(self, state: Any, params: Sequence[Tensor], generator: torch.Generator | None) -> bool:
        """Put a draw into the parameters, if a graph holds this state."""
        graph = self._holding(state, params)
        if graph is None or (generator is None) != (graph.generator is None):
            return False
        source = graph.default if generator is None else generator
        graph.replay("write_draw", source, source.get_state())
        torch.autograd.graph.increment_version(list(params))
        return True

    def write_mean(self, state: Any, params: Sequence[Tensor]) -> bool:
        """Put the mean into the parameters, if a graph holds this state."""
        graph = self._holding(state, params)
        if graph is None:
            return False
        graph.graphs["write_mean"].replay()
        torch.autograd.graph.increment_version(list(params))
        return True

    def _holding(self, state: Any, params: Sequence[Tensor]) -> LoopStep | None:
        if self._made is None or self._made[0]() is not state:
            return None
        graph = self._made[1].graph
        assert isinstance(graph, LoopStep)
        same = all(a.data_ptr() == b.data_ptr() for a, b in zip(graph.params, params, strict=True))
        return graph if same else None

    def _graph(
        self,
        signature: Signature,
        state: Any,
        rows: Sequence[RowGroup],
        params: Sequence[Tensor],
        generator: torch.Generator | None,
        momentum: float,
        prior: Prior,
    ) -> LoopStep | None:
        places = tuple(param.data_ptr() for param in params)
        key = (signature, places, generator is None, momentum, id(prior))
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        if key not in self.graphs and self._seen[key] < 2:  # a last batch that is smaller need not be captured
            return None

        def capture() -> LoopStep:
            setup = Setup(packed(state), prior, self.num_data, momentum, generator, self.pool)
            return LoopStep(state.spec, rows, self.routes, params, setup)

        return self._kept(key, capture)


class ReplayingOptimizer(GaussianOptimizer[StateT, InfoT]):
    """An optimizer whose steps and draws are replayed from graphs when `compile=True`."""

    settings: CompiledOptimizerSettings

    @abstractmethod
    def _from_launched(self, running: Launched, prior: Prior) -> tuple[StateT, InfoT]:
        """State and info of a replayed step."""

    @abstractmethod
    def _finite_check(self, step: int) -> Callable[..., None]:
        """What raises when a vector is not finite."""

    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        done = self._replayed(rows) if self.settings.compile else None
        return super()._advance_rows(rows) if done is None else done

    def _replayed(self, rows: list[RowGroup]) -> tuple[StateT, InfoT] | None:
        """The step by replaying graphs; None when groups differ or it has to be taken eagerly."""
        hyper, step = self._hyper, self._state.step + 1
        alpha, momentum, prior = hyper.lr().value, hyper.momentum(), hyper.prior()
        tied = hyper.precision_lr(self._warming_step)
        beta = alpha if tied is None else tied.value
        if hyper.ages(step) is not None:  # for some steps after a group was added
            return None
        if isinstance(alpha, Tensor) or isinstance(beta, Tensor) or isinstance(momentum, Tensor):
            self._warnings.of_different_groups()
            return None
        numbers, check = Numbers(alpha, beta, 1 - momentum**step), self._finite_check(step)
        params = self._mirror.params
        running = self._graphs.step(self._state, rows, params, self.generator, numbers, momentum, prior, check)
        if running is None:
            return None
        running.outcome()  # waited for: a step that fails must not reach the weights
        after, info = self._from_launched(running, prior)
        self._graphs.remember(after, running)
        return after, info

    @cached_property
    def _passes(self) -> PassRunner | None:
        """What replays forward and backward; None where there are no graphs."""
        like, options = self._state.loc, self.settings
        if not options.compile or options.engine != "factored" or not has_graphs(like.device):
            return None
        recorder = GradientCapture(
            self.model, self._spec, like.dtype, "factored", False, False, None, self._settle, replayable=False
        )
        steps = self._graphs
        return PassRunner(self.model, self._mirror.named, self._capture, recorder, lambda: steps.pool)

    def _rebuild(self, old: StateT | None) -> None:
        super()._rebuild(old)
        for made in ("_passes", "_graphs"):
            self.__dict__.pop(made, None)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        with super()._recorded(), self._passes.replaying() if self._passes else nullcontext():
            yield

    def _collected(self) -> list[RowGroup]:
        groups = super()._collected()
        if self._passes is not None:
            self._passes.note(groups)
        return groups

    @cached_property
    def _graphs(self) -> LoopRunner:
        return LoopRunner(self.settings.num_data / self.settings.temperature, self._routes)

    def _write_draw(self, generator: torch.Generator | None) -> None:
        if self.settings.compile and self._graphs.write_draw(self._state, self._mirror.params, generator):
            self._mirror.mark()
            torch.clear_autocast_cache()
        else:
            super()._write_draw(generator)

    def _write_mean(self) -> None:
        if self.settings.compile and self._graphs.write_mean(self._state, self._mirror.params):
            self._mirror.mark()
            torch.clear_autocast_cache()
        else:
            super()._write_mean()
