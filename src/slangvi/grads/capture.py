"""Hooks that write down what per-example gradients need while the user's own forward and backward run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from slangvi.errors import UnsupportedModuleError
from slangvi.grads._stance import eager
from slangvi.grads.assemble import Assembler, Engine
from slangvi.grads.blocks import Settle, as_it_is
from slangvi.grads.calls import Backward, Call, Surroundings, called_twice, modified
from slangvi.grads.factored import RowGroup
from slangvi.grads.rules import find_rule
from slangvi.grads.rules.embedding import check_embedding
from slangvi.params import Params, ParamSpec

__all__ = ["GradientCapture", "foreign_hooks"]


# Enough to tell; a run that never takes a step must not fill the memory.
_MOST_UNHEARD = 64


class GradientCapture:
    """Records forward calls and output gradients of a model between `recording()` and `collect()`.

    Hooks are registered once and do nothing outside `recording()`; they hold no reference to this object, and leave
    the model when it is deleted.

    Args:
        model: any module; its first tensor argument and its output have the batch as first dimension.
        spec: the parameters to infer.
        dtype: dtype of the rows.
        engine: "factored" or "dense".
        verify: check patterns of calls not seen before.
        leaf_totals: also record the gradients that reach the model's own parameters.
        memory_limit: bytes that rows in the making may take when a module is called again.
        settle: (name, block) → the same gradients in the form they are to be kept in.
        replayable: note what it takes to call modules again, and copy data that may be overwritten before the step;
            without it rules have to suffice.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ParamSpec,
        dtype: torch.dtype,
        engine: Engine = "factored",
        verify: bool = True,
        leaf_totals: bool = True,
        memory_limit: int | None = None,
        settle: Settle = as_it_is,
        replayable: bool = True,
    ) -> None:
        self.model = model
        self.replayable = replayable
        self.replayed_output: Tensor | None = None  # of a call that was replayed, and is not to be noted
        self.announcer: object = None  # what stands in for the model's forward, and calls `note_surroundings("")`
        self.assembler = Assembler(model, spec, dtype, engine, verify, memory_limit, settle)
        self.active = False
        self.unheard: set[int] = set()  # backward passes that added to p.grad while this was not active
        self._backwards: dict[int, Backward] = {}
        self._before: dict[str, Surroundings] = {}
        self._snapshots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.modules = self._heard(spec)
        self._leaves = {spec.canonical[n]: p for n, p in model.named_parameters() if n in spec.canonical}
        handles: list[Any] = []
        self._leaf_handles: list[Any] = []
        for name, module in self.modules.items():
            hook = _ForwardHook(weakref.ref(self), name)
            handles.append(module.register_forward_pre_hook(_PreHook(weakref.ref(self), name)))
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._leaf_totals = leaf_totals
        self.listen_at_leaves(leaf_totals)
        self._finalizer = weakref.finalize(self, _remove, handles, self._leaf_handles)

    def close(self) -> None:
        """Remove the hooks."""
        self._finalizer()

    def listen_at_leaves(self, wanted: bool) -> None:
        """Record (or do not) the gradients that reach the model's own parameters; each of these hooks takes time.

        They come back by themselves with the next call that is noted.
        """
        if wanted == bool(self._leaf_handles):
            return
        if wanted:
            for name, param in self._leaves.items():
                total, confirm = partial(_store_total, weakref.ref(self), name), partial(_confirm, weakref.ref(self))
                others = list((param._backward_hooks or {}).items())
                self._leaf_handles.append(param.register_hook(total))
                hooks: Any = param._backward_hooks
                for key, hook in others:  # behind ours again: they may have been added meanwhile
                    del hooks[key]
                    hooks[key] = hook
                self._leaf_handles.append(param.register_post_accumulate_grad_hook(confirm))
        elif not any(_others_listen(param) for param in self._leaves.values()):
            _remove(self._leaf_handles)
            self._leaf_handles.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down calls and gradients inside the block; what an earlier block left is dropped."""
        self._check_model()
        self._backwards.clear()
        self._before.clear()
        try:
            with self.listening(), eager():
                yield
        except BaseException:
            self.drop()
            raise

    @contextmanager
    def listening(self, active: bool = True) -> Iterator[None]:
        """The hooks write (or do not write) inside the block, beside what they have written."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def collect(self, values: Params, totals: Params | None = None, num_examples: int | None = None) -> list[RowGroup]:
        """Per-example gradients of the passes recorded, one group for each.

        Args:
            values: canonical parameter name → value the passes were made with.
            totals: gradients of the parameters, when they were not recorded by leaf hooks (one pass only).
            num_examples: M when known.
        """
        passes, self._backwards = list(self._backwards.values()), {}
        self.assembler.recent.clear()
        if totals is not None and passes:
            passes[-1].totals, passes[-1].accumulated = dict(totals), True
        reached = _merged([backward for backward in passes if backward.is_signal])
        if not reached:
            self.forget_inputs()
        for backward in reached:
            if backward.replayed and (backward.cotangents or len(backward.replayed) > 1):
                raise called_twice(len(backward.replayed) + sum(call.name == "" for call in backward.cotangents))
            if backward.replayed:
                continue
            if not backward.cotangents or any(call.recomputed for call in backward.cotangents):
                raise UnsupportedModuleError(
                    "gradients reached the parameters, but not through a recorded call of the model. Run forward and "
                    "backward inside the same block, on this model, without reentrant checkpointing "
                    "(use_reentrant=False works), and call it as model(x), not inside torch.func.vmap or grad."
                )
            # Now: calling the model again, to check, may change what it is given.
            for call in backward.cotangents:
                if find_rule(call.module) is not None and call.is_spoilt:
                    raise modified(call)
        with eager():
            return [b.replayed[0] if b.replayed else self._assembled(b, values, num_examples) for b in reached]

    def _heard(self, spec: ParamSpec) -> dict[str, nn.Module]:
        """Modules whose calls are noted: the model itself and every one that owns an inferred parameter."""
        return {"": self.model} | {
            name: module
            for name, module in self.model.named_modules()
            if any((f"{name}.{local}" if name else local) in spec.canonical for local in module._parameters)
        }

    def _check_model(self) -> None:
        check_model(self.model)

    def _assembled(self, backward: Backward, values: Params, num_examples: int | None) -> RowGroup:
        return self.assembler.assemble(backward, values, num_examples)

    def note_surroundings(self, name: str, announced: bool = False) -> None:
        """Before a call that may have to be made again: autocast and the random state."""
        module = self.modules[name]
        announcer = None if announced or name else self.announcer
        if announcer is not None and self.model.__dict__.get("forward") is announcer:
            return
        if self.replayable and (name == "" or find_rule(module) is None):
            device = next(iter(self.model.parameters())).device
            self._before[name] = Surroundings.now(device)

    @property
    def has_passes(self) -> bool:
        """Whether passes to learn from were recorded that nobody has collected."""
        return any(backward.is_signal for backward in self._backwards.values())

    def drop(self) -> None:
        """Forget the passes recorded so far; those to come are recorded."""
        self._backwards.clear()
        self.forget_inputs()

    def forget_inputs(self) -> None:
        """Let go of the copies of the data: the step that needed them is done."""
        self._snapshots.clear()

    def snapshot(self, value: Any) -> Any:
        """A copy of a tensor that is data, since loops may refill its memory before the step; one for equal contents.

        Activations inside the graph need none: autograd itself watches over them. Views of parameters do, which are the
        parameters' own memory: the mean, or the next draw, will be there before the step.
        """
        if not isinstance(value, Tensor):
            return value
        if not value.is_leaf:
            base = value._base if value._is_view() else None
            return value.detach().clone() if base is not None and base.is_leaf else value
        if not self.replayable:
            return value
        if value.layout is not torch.strided or value.is_nested:
            return value.detach().clone()
        key = (value.data_ptr(), value._version)
        original, copy = self._snapshots.get(key, (None, None))
        known = original is not None and copy is not None and _same_view(original, value)
        # NumPy can write to a CPU tensor without changing its version.
        if known and copy is not None and (value.device.type != "cpu" or torch.equal(value, copy)):
            return copy
        copy = value.detach().clone()
        self._snapshots[key] = (value, copy)  # holding the original keeps its address from being given away
        return copy

    def note_call(self, name: str, args: Any, kwargs: Any, output: Any) -> Any:
        """After a call: keep its inputs, and ask its outputs for their gradients.

        Where a module has several outputs, one may be computed from another inside it, and the gradient that reaches
        the latter from inside is not the loss's own. Such outputs are handed on as aliases, and the aliases are asked.
        """
        mine, self.replayed_output = self.replayed_output, None
        if mine is not None and output is mine:
            return output
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # Inside torch.func tensors stand for others: there is no memory to be copied, and perhaps no batch.
            self.assembler.leave_to_the_model(name, self.modules[name])
            return output
        if self._leaf_totals and not self._leaf_handles:
            self.listen_at_leaves(True)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            args = (self.snapshot(args[0]),)  # the usual case, without walking a tree
        else:
            args, kwargs = tree_map(self.snapshot, (args, kwargs))
        call = Call.of(name, self.modules[name], args, kwargs, self._before.get(name))
        call.recomputed = torch._C._current_graph_task_id() != -1
        call.watched = self.replayable
        self._noted(call, output)
        if isinstance(output, Tensor):
            if output.requires_grad:
                output.register_hook(partial(_store_cotangent, weakref.ref(self), call, 0, False))
            return output
        leaves, structure = tree_flatten(output)
        tracked = [k for k, value in enumerate(leaves) if isinstance(value, Tensor) and value.requires_grad]
        alone = len(tracked) < 2
        for k in tracked:
            if not alone:
                leaves[k].register_hook(partial(_store_cotangent, weakref.ref(self), call, k, True))
                leaves[k] = _Alias.apply(leaves[k])  # type: ignore[no-untyped-call]
            leaves[k].register_hook(partial(_store_cotangent, weakref.ref(self), call, k, False))
        return output if alone else tree_unflatten(leaves, structure)

    def _noted(self, call: Call, output: Any) -> None:
        """Look at a call that was noted, and at what it returned."""

    def current_backward(self) -> Backward:
        """The record of the backward pass that is running."""
        task = torch._C._current_graph_task_id()
        found = self._backwards.get(task)  # asked for by every hook, so nothing is built in vain
        if found is None:
            found = self._backwards[task] = Backward()
            torch.autograd.Variable._execution_engine.queue_callback(found.complete)
        return found


class _Alias(torch.autograd.Function):
    """The same tensor as another node of the graph, and no view: the caller may change it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Hook:
    """A hook that forgets its owner when copied or pickled: copies of a model are not recorded."""

    def __init__(self, owner: weakref.ref[GradientCapture] | None = None, name: str = "") -> None:
        self.owner = owner
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def listening(self, module: nn.Module) -> GradientCapture | None:
        owner = self.owner() if self.owner is not None else None
        ready = owner is not None and owner.active and torch.is_grad_enabled()
        return owner if ready and owner is not None and owner.modules[self.name] is module else None


class _PreHook(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        owner = self.listening(module)
        if owner is not None:
            check_alone(module)
            owner.note_surroundings(self.name)


class _ForwardHook(_Hook):
    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        # Torch copies the list of hooks before it calls them, but asks later which ones want keywords. One that is
        # removed in between, as by the garbage collector, is called once more, without.
        kwargs, output = rest if len(rest) == 2 else ({}, *rest)
        owner = self.listening(module) if len(rest) == 2 else None
        return output if owner is None else owner.note_call(self.name, args, kwargs, output)


def foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that are not ours, which somebody wants to be called."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if hooks and not all(isinstance(hook, _Hook) for hook in hooks.values()):
            return True
    return False


def _others_listen(param: Tensor) -> bool:
    """Whether a parameter has hooks that are not ours, which may change the gradient that ours are to see."""
    return len(param._backward_hooks or ()) > 1


def _store_cotangent(
    owner: weakref.ref[GradientCapture], call: Call, leaf: int, inner: bool, grad: Tensor | None
) -> None:
    capture = owner()
    # Fused kernels with several outputs hand None to those the loss did not use.
    if capture is not None and capture.active and grad is not None:
        capture.current_backward().note(call, leaf, grad.detach(), inner)


def _store_total(owner: weakref.ref[GradientCapture], name: str, grad: Tensor) -> None:
    capture = owner()
    if capture is not None and capture.active:
        # Autograd may take a gradient nobody else holds as p.grad; this reference makes it copy instead. With
        # create_graph=True the graph must not be kept alive.
        capture.current_backward().totals[name] = grad.detach().clone() if grad.requires_grad else grad


def _confirm(owner: weakref.ref[GradientCapture], param: Tensor) -> None:
    capture = owner()
    if capture is None:
        return
    if capture.active:
        capture.current_backward().accumulated = True
    elif len(capture.unheard) < _MOST_UNHEARD:
        capture.unheard.add(torch._C._current_graph_task_id())


def check_model(model: nn.Module) -> None:
    """Refuse modules under which the examples of a batch have no gradients of their own."""
    check_tables(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise UnsupportedModuleError(
                f"module {name!r} ({type(module).__name__}) normalises with statistics of the batch, so examples "
                "have no gradients of their own. Put it in eval mode (module.eval()) with running statistics, or "
                "use GroupNorm or LayerNorm instead."
            )


def check_alone(module: nn.Module) -> None:
    """Refuse a call on behalf of several processes, which exchange `p.grad` and no more."""
    around = module if isinstance(module, DistributedDataParallel) else DistributedDataParallel._active_ddp_module
    if around is not None and around.process_group.size() > 1:
        raise UnsupportedModuleError(
            f"the model runs inside DistributedDataParallel with {around.process_group.size()} processes, which "
            "average p.grad alone: each would draw weights and learn a posterior of its own. Train in one process, on "
            "one device (devices=1 in Lightning, --num_processes 1 of accelerate)."
        )


def check_tables(model: nn.Module) -> None:
    """Refuse embedding tables whose gradient is sparse, or not that of the loss at the sample."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad:
            check_embedding(name, module)


def _same_view(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _merged(backwards: list[Backward]) -> list[Backward]:
    """Passes in order; one that reached a call an earlier pass had reached is added to that pass."""
    merged: list[Backward] = []
    for backward in backwards:
        twin = next((b for b in merged if b.cotangents.keys() & backward.cotangents.keys()), None)
        if twin is None:
            merged.append(backward)
        else:
            twin.absorb(backward)
    return merged


def _remove(*lists: list[Any]) -> None:
    for handle in chain.from_iterable(lists):
        handle.remove()
