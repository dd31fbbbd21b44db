"""One step of SLANG on tensors without values, made of the parts that the optimizer and `slang.build` are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from slangvi.divergence import step_length
from slangvi.errors import UnsupportedModuleError
from slangvi.likelihoods import Likelihood, likelihood_named
from slangvi.linalg import products
from slangvi.memory.fake import FakeMemory, fake_memory
from slangvi.methods import slang
from slangvi.methods.gather import RowGatherer, dense_gatherer
from slangvi.out_of_memory import tensors_in
from slangvi.params import Params, ParamSpec
from slangvi.params.values import per_parameter
from slangvi.priors import Prior
from slangvi.rows import FactoredGradients, Formed, GradientRecorder, Plan, Plans, RowGroup, factored, make_plan
from slangvi.rows.nodes import walk
from slangvi.rows.operator import GradientOperator
from slangvi.rows.recorder import check_sums
from slangvi.schedules import Rate
from slangvi.settings import CompiledOptimizerSettings, CompiledSettings, LogLikelihood

__all__ = ["CHECK", "FIRST_UPDATE", "FakePlans", "FakeRun", "Loss"]

# (output, target) → one number, or one for each example.
Loss = Callable[[Any, Any], Tensor]
Settings = CompiledOptimizerSettings | CompiledSettings
# Phases of a step, and the parts for which their allocations count unless they are labelled otherwise.
DRAW = ("a draw of the weights", "draws")
PASS = ("forward and backward", "activations")
COLLECT = ("collecting per-example gradients", "captured")
OWN_PASS = ("a pass of the likelihood's curvature", "activations")
CHECK = ("a check of per-example gradients", "rows")
FORM = ("the update", "rows")
UPDATE = ("the update", "temporaries")
FIRST_UPDATE = ("an update of the first steps", "temporaries")
# Examples whose number, a prime, is no other dimension of a model.
MANY = 10_007
# Slices of a long vector that are gone through; their temporaries are that much smaller than the vector.
MOST_SLICES = 64


class FakeRun:
    """A fake copy of a model and of a batch, as given to `slangvi.estimate_memory`, with one step on them."""

    def __init__(
        self,
        memory: FakeMemory,
        model: nn.Module,
        batch: Any,
        loss: Loss | None,
        likelihood: str | Likelihood | None,
        settings: Settings,
    ) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.memory, self.loss, self.settings = memory, loss, settings
        self.model = memory.copy(model, [*model.parameters(), *model.buffers()], "parameters", self.device)
        batch = memory.copy(batch, tree_leaves(batch), "data", self.device)
        self.inputs, *rest = (batch or [None]) if isinstance(batch, tuple | list) else (batch, None)
        self.target = rest[0] if len(rest) == 1 else tuple(rest)
        self.num_examples = _num_examples(self.inputs)
        self.spec = ParamSpec.of_module(self.model)
        self.params = {name: self.model.get_parameter(name) for name in self.spec.names}
        self.log_likelihood: LogLikelihood = self._negative_losses
        if settings.curvature != "ef" and likelihood is not None:
            self.log_likelihood = likelihood_named(likelihood).on(self.outputs)
        names = ("rank", "memory_limit", "verify", "curvature_rows", "curvature")
        options: dict[str, Any] = {name: getattr(settings, name) for name in names}
        self.gatherer = RowGatherer(self.log_likelihood, CompiledSettings(num_data=1, lr=0.1, model=model, **options))

    def take_step(self, plans: Plans) -> int:
        """Take one step, and return the bytes that stay when it is done."""
        memory, settings, own_pass = self.memory, self.settings, self.gatherer.own_pass
        is_optimizer = isinstance(settings, CompiledOptimizerSettings)
        state = replace(slang.init(self.params, settings.rank), spec=self.spec)
        memory.label([state.prec_factor], "factor")
        prior = Prior(*(per_parameter(name, 1.0, self.spec, state.loc) for name in ("prior_precision", "prior_mean")))
        self.gatherer.plans = plans
        if own_pass is not None:
            own_pass.plans = plans
        gather = self._gather_by_optimizer if is_optimizer else self._gather_by_function
        kept, gradients = gather(state)
        options: dict[str, Any] = {"in_place": is_optimizer, "projection": settings.projection, "num_data": 1}
        options |= {"prior": prior, "lr": Rate(0.1), "longest": None if own_pass is None else 1.0}
        # Factor analysis begins by another projection; later, directions that the rows did not fill may wait for it.
        later = slang.EIGENVECTOR_STEPS + 2 * settings.rank
        phases = [(UPDATE, later)] if settings.projection == "eig" else [(FIRST_UPDATE, 0), (UPDATE, later)]
        with torch.autocast(self.device.type, enabled=False), torch.no_grad():
            for phase, step in phases:
                with memory.phase(*phase, condition=False), _few_slices(self.spec.num_params, settings.rank):
                    # No iteration converges. The mean before is kept, as every few steps, to measure the step's length.
                    before = replace(state, loc=state.loc.clone()) if is_optimizer else state
                    new, info = slang.update(replace(state, step=step), gradients, **options)
                    step_length(before, new, prior, 0.1, 0.9)
            factors = {"blocks", "groups", "_plan"}
            formed = {name: value for name, value in vars(gradients).items() if name not in factors}
            memory.label(tensors_in(formed), "rows", of=UPDATE[1])  # for both passes over the segments
        memory.label([] if is_optimizer else new.tensors, "next_state")
        del kept, gradients, state, before
        assert info.step  # the new state stays, and what is known about the step
        return memory.live

    def _draw(self, state: slang.State, sample_shape: tuple[int, ...]) -> Tensor:
        """Return draws, (*sample_shape, P), as in first steps, which by the likelihood's curvature are narrower."""
        with self.memory.phase(*DRAW), torch.autocast(self.device.type, enabled=False), torch.no_grad():
            drawn = state.precision.sample(sample_shape, None, state.loc)
            return drawn if self.gatherer.own_pass is None else torch.lerp(state.loc, drawn, 0.5)

    def _gather_by_optimizer(self, state: slang.State) -> tuple[Any, GradientOperator]:
        """Return the rows of a pass for each draw, and what they are made from, which the optimizer keeps."""
        memory, settings, own_pass, groups = self.memory, self.settings, self.gatherer.own_pass, list[RowGroup]()
        options: dict[str, Any] = {"curvature_rows": settings.rows_of_pass(self.spec.num_params), "own_pass": own_pass}
        verify = settings.verify and own_pass is not None
        recorder = GradientRecorder(self.model, self.spec, state.loc.dtype, verify=verify, **options)
        recorder.plans = self.gatherer.plans
        for _ in range(settings.mc_samples):
            self._draw(state, ())
            with memory.phase(*PASS), recorder.recording():
                self.model.zero_grad()
                self.losses().mean().backward()
            memory.label((p.grad for p in self.params.values()), "gradients")
            with memory.phase(*(COLLECT if own_pass is None else OWN_PASS)):
                groups += recorder.collect()
            self._label_kept(groups[-1])
            if settings.verify and groups[-1].num_chosen is None:
                assert groups[-1].total is not None
                with memory.phase(*CHECK):
                    check_sums(self.spec, groups[-1].blocks, groups[-1].total, math.inf)
        with memory.phase(*FORM):  # rows of several draws are put together
            if own_pass is not None:
                groups = recorder.with_changed_gradient(groups, False)
            recorder.close()
            return groups, FactoredGradients(self.spec, groups, state.loc, settings.routes_within_limit)

    def _gather_by_function(self, state: slang.State) -> tuple[Any, GradientOperator]:
        """Return the rows at all draws, and the draws."""
        settings = self.settings
        assert isinstance(settings, CompiledSettings)
        thetas = self._draw(state, (settings.mc_samples,))
        gather = self.gatherer if settings.reads_graph else dense_gatherer(self.log_likelihood, settings.memory_limit)
        with self.memory.phase(*PASS):
            gradients, _ = gather(self.spec, thetas, (self.inputs, self.target), None)
        self._label_kept(RowGroup(0, getattr(gradients, "blocks", {})))
        return thetas, gradients

    def _label_kept(self, group: RowGroup) -> None:
        """Label what is kept of a pass until the update."""
        formed = [block for block in group.blocks.values() if isinstance(block, Formed)]
        factors = [block for block in group.blocks.values() if not isinstance(block, Formed)]
        self.memory.label(tensors_in(formed), "rows")
        self.memory.label(tensors_in([factors, group.total]), "captured")

    def outputs(self, params: Params | None, inputs: Any) -> Any:
        """Call the model, at other parameters than its own if they are given."""
        args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        with self._explained():
            return functional_call(self.model, dict(params or {}), args, kwargs)

    def losses(self) -> Tensor:
        """Return the loss of each example, (M,)."""
        return self.losses_of(self.outputs(None, self.inputs), self.target, self.num_examples)

    def _negative_losses(self, params: Params, batch: Any) -> Tensor:
        inputs, target = batch
        return -self.losses_of(self.outputs(params, inputs), target, _num_examples(inputs))  # dense: of one at a time

    def losses_of(self, output: Any, target: Any, count: int) -> Tensor:
        """Return the loss of each example, (M,), given the output of the model."""
        with self._explained():
            values = _cross_entropies(output, count) if self.loss is None else [self.loss(output, target)]
            torch.clear_autocast_cache()  # as at the end of a loop's own autocast block
            return torch.stack([v.flatten(1).sum(1) if v.ndim > 1 else v.expand(count) for v in values]).sum(0)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what to do about errors of the model and of the loss."""
        try:
            yield
        except UnsupportedModuleError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"estimate_memory could not call {type(self.model).__name__} on tensors that have sizes but no values: "
                f"{type(error).__name__}: {error}\nIt is called as model(x), as model(**x) when batch (or its first "
                "entry) is a dict, as model(*x) when its first entry is a tuple. A forward that needs values (NumPy, "
                "boolean indexing, torch.compile, kernels torch does not know) cannot be planned: train one step on a "
                "small batch and read torch.cuda.max_memory_allocated()."
            ) from error

    def find_plans(self) -> Iterator[tuple[int, Plan]]:
        """Yield the number of nodes and the plan of each graph that is read, for `MANY` examples."""

        def enlarge(x: Any) -> Any:
            has_batch = isinstance(x, Tensor) and x.ndim and len(x) == self.num_examples
            return x.new_empty(MANY, *x.shape[1:]) if has_batch else x

        batch, draws = tree_map(enlarge, (self.inputs, self.target)), self.settings.mc_samples
        theta, gather = torch.empty(draws, self.spec.num_params), self.gatherer
        if isinstance(self.settings, CompiledOptimizerSettings) or gather.own_pass is not None:
            yield self._plan_of(self.outputs(None, batch[0]), self.params)
            return
        for is_shared in {False, gather.shares_pass(theta, (self.inputs, self.target))}:  # vmap may fail to follow
            with suppress(Exception):
                params = gather.params_at(self.spec, theta if is_shared else theta[0])
                yield self._plan_of(gather.values_at(params, batch, is_shared), params)

    def _plan_of(self, found: Any, params: Mapping[str, Tensor]) -> tuple[int, Plan]:
        outputs = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
        with self.memory.phase(*CHECK, condition=True):
            return len(walk(outputs)), make_plan(outputs, params, MANY)


class FakePlans(Plans):
    """The plans of a model's graphs, found without values; build it outside of `fake_memory`.

    With values the batch is found by what single examples do. Here it is found by its size: the model is called on
    `MANY` examples. One that insists on its number of examples gets a plan that may mistake a dimension. The arguments
    are those of `FakeRun` without `memory`.
    """

    def __init__(self, *run: Any) -> None:
        super().__init__(verify=run[-1].verify, by_definition=run[-1].engine == "dense")
        self.found: dict[int, Plan] = {}  # by the number of nodes
        self.is_due = True
        with suppress(Exception), fake_memory() as self.memory:
            self.found.update(FakeRun(self.memory, *run).find_plans())

    def find(
        self, nodes: Any, structure: Any, outputs: Any, params: Mapping[str, Tensor], num_examples: int
    ) -> Plan | None:
        """Return the plan, after passes like those that make one."""
        plan = self.found.get(len(nodes))
        if plan is None or self.by_definition:
            with self.memory.phase(*CHECK, condition=True):
                return super().find(nodes, structure, outputs, params, num_examples)
        if self.is_due:
            with self.memory.phase(*CHECK):
                leaves, seeds = list(params.values()), [torch.ones_like(output) for output in outputs]
                # Gradients of two examples by definition, one by one and together, while the rules are applied; then
                # the rows of one parameter after the other, and their differences from the definition.
                definition = [torch.empty(4, *leaf.shape, dtype=leaf.dtype) for leaf in leaves]
                torch.autograd.grad(outputs, leaves, seeds, retain_graph=True, allow_unused=True)
                torch.empty_like(max(definition, key=torch.Tensor.numel))
        self.is_due = self.verify  # which compares at any pass, though rarely
        return replace(plan, num_examples=num_examples)


@contextmanager
def _few_slices(num_params: int, rank: int) -> Iterator[None]:
    """Let a CPU take larger slices of long vectors than its cache holds: Python takes as long for a small one."""
    sizes = (
        (products, "_CACHED", num_params),
        (factored, "CPU_COLUMNS", num_params),
        (factored, "CPU_ENTRIES", num_params * max(1, rank)),
    )
    with ExitStack() as stack:
        for module, name, size in sizes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, max(getattr(module, name), size // MOST_SLICES))
        yield


def _cross_entropies(output: Any, count: int) -> list[Tensor]:
    """Return what a cross-entropy over the last dimension would take, for each output with the batch in front."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    leaves = [x for x in leaves if x.ndim == 0 or x.shape[0] == count]
    if not leaves:
        raise ValueError(
            f"no tensor with the batch (here {count}) as first dimension was found in the output "
            f"({type(output).__name__}). Give loss=."
        )
    return [F.log_softmax(x, -1).neg() if x.ndim > 1 else x for x in leaves]


def _num_examples(inputs: Any) -> int:
    """Return M, the first dimension of the first tensor."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(
        "batch must hold the model's input with the examples as first dimension: a tensor, a dict for model(**x), or a "
        f"tuple (x, y) as a loader gives it. Its first entry is {type(inputs).__name__} and holds no tensor."
    )
