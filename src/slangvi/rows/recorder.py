"""Record the user's own forward and backward passes through a model, and return the rows of each backward pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from slangvi.errors import NumericalError, UnsupportedModuleError
from slangvi.params import ParamSpec
from slangvi.rows.blocks import Block
from slangvi.rows.eager import backward_in_this_thread, run_eagerly
from slangvi.rows.factored import RowGroup
from slangvi.rows.graph import TOLERANCE, Plans, Recording, record, watch_outputs
from slangvi.rows.own_pass import Examples, OwnPass, single_output

__all__ = ["GradientRecorder", "check_modules", "check_sums"]

# Backward passes outside of blocks that are counted; a run that never takes a step must not fill the memory.
MOST_UNRECORDED = 64
# Rows of a pass may differ from the gradient they add up to by this much of their own size, times the tolerance of
# the graph, where they cancel.
CANCELLATION = 1e-2
# Relative difference between p.grad and the gradients of all passes that is rounding of their sum.
SAME_GRADIENT = 1e-3
# Modules that `check_modules` may refuse.
SPECIAL = (nn.Embedding, nn.EmbeddingBag, _BatchNorm)


@dataclass(eq=False)
class Call:
    """One call of the model.

    Args:
        num_examples: M.
        recording: rows of passes through it; None where sums are all that is wanted.
        in_backward: whether it was made inside a backward pass, by activation checkpointing.
        examples: those that a pass of our own goes through; None where there is none.
        pulls: number of a backward pass → Σ of its squared gradients of the output that the likelihood takes.
    """

    num_examples: int | None
    recording: Recording | None = None
    in_backward: bool = False
    examples: Examples | None = None
    pulls: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Backward:
    """One backward pass, or several through the same graph.

    Args:
        tasks: its number in autograd's engine, or theirs.
        calls: those that it reached.
        total: gradient as autograd added it up, (P,); None before a parameter was reached.
        accumulated: whether it was a `backward()`, which adds to p.grad, and not a `torch.autograd.grad`.
        completed: whether it came to its end; one that failed half way has gradients of some layers only.
        reads_gradient: whether p.grad will be its gradient, and no hook on a parameter is needed.
        is_partial: whether a parameter was reached before its gradient could be told from that of an earlier pass.
    """

    tasks: list[int]
    calls: dict[Call, None] = field(default_factory=dict)
    total: Tensor | None = None
    accumulated: bool = False
    completed: bool = False
    reads_gradient: bool = False
    is_partial: bool = False

    @property
    def is_signal(self) -> bool:
        """Tell whether it is to be learnt from."""
        return self.completed and self.accumulated and self.total is not None

    def absorb(self, other: Backward) -> None:
        """Add a second pass through the same graph: the same examples, one more loss term."""
        self.calls |= other.calls
        self.tasks += other.tasks
        assert self.total is not None
        assert other.total is not None
        self.total = self.total + other.total


class GradientRecorder:
    """Listens to a model between `recording()` and `collect()`.

    Hooks are registered once, on the model as a whole and on its parameters, and do nothing outside `recording()`; they
    hold no reference to this object, and leave the model when it is deleted.

    Args:
        model: any module; its first tensor argument has the batch as first dimension.
        spec: the parameters to infer.
        dtype: dtype of the rows.
        wants_rows: whether rows are wanted beside the sums over all examples.
        by_definition: find every row by going back from its own example's output, for comparison.
        verify: compare rows with their definition and with the gradients they add up to, ever more rarely.
        curvature_rows: examples of each backward pass whose rows are kept, drawn at random; None keeps all. They
            are weighted to stand for all: the sum of their outer products has the same expectation.
        generator: source of randomness for the choice.
        own_pass: takes the rows from a pass of our own over these examples, and sums alone from the user's.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> recorder = GradientRecorder(model, ParamSpec.of_module(model), torch.float32)
        >>> with recorder.recording():
        ...     model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
        >>> (group,) = recorder.collect()
        >>> group.blocks["weight"].form()
        tensor([[1., 2.],
                [3., 4.]])
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ParamSpec,
        dtype: torch.dtype,
        *,
        wants_rows: bool = True,
        by_definition: bool = False,
        verify: bool = True,
        curvature_rows: int | None = None,
        generator: torch.Generator | None = None,
        own_pass: OwnPass | None = None,
    ) -> None:
        self.model, self._spec, self.dtype = model, spec, dtype
        self.wants_rows, self.verify, self.own_pass = wants_rows, verify, own_pass
        self.curvature_rows, self.generator = curvature_rows, generator
        self.plans = Plans(verify, by_definition)
        self.active = False
        self.unrecorded: set[int] = set()  # backward passes that added to p.grad while this was not active
        self._num_passes = 0
        self._num_plans = -1  # plans that had been made when modules were last looked at
        self._special: list[nn.Module] = []  # modules that may have to be refused
        self._last_task = -1  # number of the last backward pass that reached a parameter
        self._backwards: dict[int, Backward] = {}
        self._data: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        found = {spec.canonical[n]: p for n, p in model.named_parameters() if n in spec.canonical}
        self._leaves = {name: found[name] for name in spec.names}
        me = weakref.ref(self)
        handles: list[Any] = [model.register_forward_hook(_ForwardHook(me), with_kwargs=True)]
        handles += [p.register_post_accumulate_grad_hook(partial(_confirm, me)) for p in self._leaves.values()]
        self._open: list[Recording] = []
        self._tensor_hooks: list[Any] = []  # on parameters, where p.grad would not tell a pass's own gradient
        self._has_passed = False  # whether p.grad was added to since it was seen to be empty
        self._left: Tensor | None = None  # p.grad of all parameters as the last pass left it, where that matters
        self._finalizer = weakref.finalize(self, _remove, [handles, self._tensor_hooks], self._open)

    def close(self) -> None:
        """Remove the hooks."""
        self._finalizer()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls and backward passes inside the block; what an earlier block left is dropped."""
        if self._num_plans != self.plans.num_made:  # another graph may have other modules
            self._num_plans = self.plans.num_made
            self._special = [module for module in self.model.modules() if isinstance(module, SPECIAL)]
        if self._special:
            check_modules(self.model, self.wants_rows, self._special)
        self._backwards.clear()
        self._detach()
        before, self.active = self.active, True
        try:
            with run_eagerly(), backward_in_this_thread():
                yield
        except BaseException:
            self.drop()
            raise
        finally:
            self.active = before

    @property
    def has_passes(self) -> bool:
        """Tell whether passes to learn from were recorded that nobody has collected."""
        return any(backward.is_signal for backward in self._backwards.values())

    def drop(self) -> None:
        """Forget the passes recorded so far; those to come are recorded."""
        self._backwards.clear()
        self._left = None
        self._detach()
        self.forget_data()

    def _detach(self) -> None:
        """Take all hooks off graphs, since a node and its hook hold each other."""
        for recording in self._open:
            recording.detach()
        self._open.clear()

    def forget_data(self) -> None:
        """Let go of copies of the data: the step that needed them is done."""
        self._data.clear()

    def collect(self) -> list[RowGroup]:
        """Return the per-example gradients of the passes recorded, one group for each."""
        signals: list[Backward] = []
        for backward in self._backwards.values():
            if backward.is_signal:
                twin = next((other for other in signals if other.calls.keys() & backward.calls.keys()), None)
                if twin is None:
                    signals.append(backward)
                else:
                    twin.absorb(backward)
        self._backwards = {}
        self._detach()
        groups = [self._group(backward) for backward in signals]
        if not groups:
            self.forget_data()
        return groups

    def with_changed_gradient(self, groups: list[RowGroup], is_unscaled: bool) -> list[RowGroup]:
        """Return groups whose sums are what p.grad is now, where it was changed after the last pass, as by clipping.

        Rows that come from the loss would have to be changed alike; only those of a pass of our own need not.

        Args:
            groups: collected since the last step.
            is_unscaled: whether a GradScaler has taken its factor out of p.grad.
        """
        left, self._left = self._left, None
        if not groups or left is None or all(param.grad is None for param in self._leaves.values()):
            return groups
        now, (first, *others) = self._gradient_now(), groups
        totals = torch.stack([group.total for group in groups if group.total is not None]).sum(0)
        if torch.equal(now, left) or not bool(now.any()) or not bool(totals.isfinite().all()):
            return groups
        is_whole = float((left - totals).double().norm()) <= SAME_GRADIENT * float(totals.double().norm())
        if not is_whole or any(group.scale != first.scale for group in others):
            raise UnsupportedModuleError(
                "p.grad was changed after backward, as by clipping, and does not hold the sum of all passes since the "
                "last step. Call zero_grad() once a step, before the first of several draws or micro-batches, which "
                "are to be of one size; or do not change p.grad."
            )
        if is_unscaled:  # gradients of outputs had the factor as well
            ratio = float(now.double().norm() / totals.double().norm())
            groups = [replace(group, misfit=group.misfit * ratio**2) for group in groups]
        zeros = [replace(group, total=torch.zeros_like(now)) for group in groups[1:]]
        return [replace(groups[0], total=now), *zeros]

    # ---- while the model runs

    def note_call(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Put hooks on the graph behind the outputs of a call that has just been made; return what it is to return."""
        if torch._C._functorch.peek_interpreter_stack() is not None or not torch.is_grad_enabled():
            return output  # inside torch.func tensors stand for others, and perhaps there is no batch
        if DistributedDataParallel._active_ddp_module is not None or isinstance(self.model, DistributedDataParallel):
            check_alone(self.model)
        leaves, structure = tree_flatten(output)
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        outputs = [leaves[k] for k in places]
        if not outputs:
            return output
        first = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim), None)
        call = Call(None if first is None else first.shape[0])
        call.in_backward = torch._C._current_graph_task_id() != -1
        if not call.in_backward:
            self._choose_hooks()
        if self.wants_rows and call.num_examples and not call.in_backward:
            chosen = self._choose(call.num_examples, outputs[0].device)
            if self.own_pass is not None:
                predictions = single_output(output, call.num_examples)
                predictions.register_hook(partial(_measure_pull, call))
                call.examples = Examples.choose((args, kwargs), predictions, call.num_examples, chosen)
            else:
                handed = self._record(call, outputs, chosen)
                leaves = [next(handed) if k in places else x for k, x in enumerate(leaves)]
        for tensor in outputs:
            tensor.register_hook(partial(_reach, weakref.ref(self), call))
        is_same = all(leaves[k] is tensor for k, tensor in zip(places, outputs, strict=True))
        return output if is_same else tree_unflatten(leaves, structure)

    def _record(self, call: Call, outputs: list[Tensor], chosen: Tensor | None) -> Iterator[Tensor]:
        """Put hooks on the graph behind some outputs; return the outputs that the caller is to use."""
        assert call.num_examples is not None
        self.active = False  # passes that find out about a new graph are our own
        try:
            call.recording = record(outputs, self._leaves, chosen, self.plans, call.num_examples, self._copy_data)
            self._open.append(call.recording)
        finally:
            self.active = True
        return iter(watch_outputs(call.recording, outputs))

    def _choose(self, count: int, device: torch.device) -> Tensor | None:
        """Return the examples of a batch whose rows are kept; None for all."""
        if self.curvature_rows is None or self.curvature_rows >= count:
            return None
        return torch.randperm(count, generator=self.generator, device=device)[: self.curvature_rows]

    def _copy_data(self, tensor: Tensor) -> Tensor:
        """Return a copy of data, since loops may refill their memory before the step; one copy for equal contents."""
        key = (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        original, copy = self._data.get(key, (None, None))
        is_known = original is not None and copy is not None and _is_same_view(original, tensor)
        # NumPy can write to a CPU tensor without changing its version.
        if is_known and copy is not None and (tensor.device.type != "cpu" or torch.equal(tensor, copy)):
            return copy
        copy = tensor.detach().clone()
        self._data[key] = (tensor, copy)  # holding the original keeps its address from being given away
        return copy

    def current_backward(self, is_first: bool = False) -> Backward:
        """Return the record of the backward pass that is running; before any parameter is reached, `is_first`."""
        task = torch._C._current_graph_task_id()
        found = self._backwards.get(task)
        if found is None:
            self._last_task = -1
            found = self._backwards[task] = Backward([task])
            is_mixed = self._has_passed or (is_first and any(p.grad is not None for p in self._leaves.values()))
            if is_mixed and not self._tensor_hooks:
                self._add_tensor_hooks()
            found.reads_gradient = not self._tensor_hooks
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._complete, task))
        return found

    def place_of(self, name: str) -> Tensor:
        """Return the part of the running pass's gradient that belongs to a parameter."""
        backward = self.current_backward()
        if backward.total is None:
            backward.total = torch.zeros(self._spec.num_params, dtype=self.dtype, device=self._leaves[name].device)
        return backward.total[self._spec.slices[name]]

    def _complete(self, task: int) -> None:
        """Note that a backward pass came to its end, and forget it if it was a `torch.autograd.grad`."""
        backward = self._backwards.get(task)
        if backward is None or not backward.accumulated:
            self._backwards.pop(task, None)
            return
        backward.completed = True
        if backward.reads_gradient:
            backward.total = self._read_gradient()
        if self.own_pass is not None:
            self._left = backward.total if backward.reads_gradient else self._gradient_now()

    def note_accumulation(self) -> None:
        """Note that the running pass has added to p.grad."""
        was_listening = bool(self._tensor_hooks)
        backward = self.current_backward()
        backward.accumulated = True
        backward.is_partial |= bool(self._tensor_hooks) and not was_listening
        self._has_passed = True

    # ---- gradients of a pass as a whole

    def _choose_hooks(self) -> None:
        """Take hooks on parameters away where p.grad will be the gradient of the next pass, and add them where not."""
        for param in self._leaves.values():
            if param.grad is not None:
                break
        else:
            _take_off(self._tensor_hooks)
            self._has_passed = False
            if not self._has_foreign_hooks():
                return
        if not self._tensor_hooks:
            self._add_tensor_hooks()

    def _has_foreign_hooks(self) -> bool:
        """Tell whether others may change a gradient before it is in p.grad, or take it from there."""
        for param in self._leaves.values():
            if param._backward_hooks or len(param._post_accumulate_grad_hooks) > 1:
                return True
        return False

    def _add_tensor_hooks(self) -> None:
        """Add a hook to each parameter that copies its gradient before others can change it."""
        me = weakref.ref(self)
        for name, param in self._leaves.items():
            others = list((param._backward_hooks or {}).items())
            self._tensor_hooks.append(param.register_hook(partial(_store_total, me, name)))
            hooks: Any = param._backward_hooks
            for key, hook in others:  # ours comes first
                del hooks[key]
                hooks[key] = hook

    def _read_gradient(self) -> Tensor:
        """Return p.grad of all parameters, (P,); zeros for those that were not reached."""
        if self._has_foreign_hooks() and not self._tensor_hooks:
            raise UnsupportedModuleError(
                "a hook was put on a parameter between forward and backward, and may have changed its gradient. "
                "Register hooks before the model is called."
            )
        return self._gradient_now()

    def _gradient_now(self) -> Tensor:
        """Return p.grad of all parameters as it is, (P,)."""
        parts = []
        for param in self._leaves.values():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            parts.append(grad.detach().reshape(-1))
        return torch.cat(parts).to(self.dtype)

    # ---- after the backward passes

    def _group(self, backward: Backward) -> RowGroup:
        """Return the rows of one backward pass, or of several through the same graph."""
        if not backward.calls or any(call.in_backward for call in backward.calls):
            raise UnsupportedModuleError(
                "gradients reached the parameters, but not through a recorded call of the model. Call the model as "
                "model(x), as a whole, with forward and backward inside the same block, without reentrant "
                "checkpointing (use_reentrant=False works), and not inside torch.func.vmap or grad."
            )
        if len(backward.calls) > 1:
            raise UnsupportedModuleError(
                f"the model was called {len(backward.calls)} times for one backward pass, and it cannot be told "
                "whether these are new examples or the same ones. New examples: call backward once per batch. The same "
                "ones (pairs, views): make the calls inside a module of your own and give that one to the optimizer."
            )
        if backward.is_partial:
            raise UnsupportedModuleError(
                "the second of two backward passes has a loss term that does not come from the outputs of the model. "
                "Call zero_grad() and the model between backward passes, or leave that term out."
            )
        (call,) = backward.calls
        if call.num_examples == 0:
            raise ValueError("the batch is empty: a step needs at least one example. Skip empty batches.")
        if call.num_examples is None:
            raise UnsupportedModuleError(
                "the model was called without a tensor that has a batch as first dimension, so examples cannot be "
                "counted. Pass the batch as an argument."
            )
        total, recording, count = backward.total, call.recording, call.num_examples
        assert total is not None
        if self.own_pass is not None:
            return self._own_group(call, count, total, backward.tasks)
        if recording is None or recording.plan is None:  # outputs were not finite, and the step must see that
            return RowGroup(count, {}, total)
        blocks = recording.blocks(self.dtype, backward.tasks)
        if recording.chosen is not None:
            return RowGroup(count, blocks, total, num_chosen=recording.num_rows)
        recording.check_unmodified()
        self._num_passes += 1
        if self.verify and self._num_passes.bit_count() == 1:
            check_sums(self._spec, blocks, total, max(recording.plan.tolerance, TOLERANCE.get(self.dtype, 0.0)))
        return RowGroup(count, blocks, total)

    def _own_group(self, call: Call, count: int, total: Tensor, tasks: Sequence[int]) -> RowGroup:
        """Return the sum of the user's pass, and the rows of a pass of our own at the same weights."""
        assert self.own_pass is not None
        assert call.examples is not None
        some = call.examples

        def outputs(repeats: int) -> Tensor:
            args, kwargs = some.repeated(repeats)
            with some.autocast():
                return single_output(self.model(*args, **kwargs), some.count * repeats)

        self._num_passes += 1
        try:
            with run_eagerly():
                if self.verify and self._num_passes.bit_count() == 1:
                    some.compare(outputs)
                made = self.own_pass.rows(outputs, self._leaves, some.outputs, count, self.dtype, self.generator)
        except NumericalError:  # the step says so, which may pass over bad batches
            return RowGroup(count, {}, torch.full_like(total, math.nan))
        pull = sum(float(call.pulls[task]) for task in tasks if task in call.pulls)
        return self.own_pass.group(made, count, some.count, total, pull)


def check_sums(spec: ParamSpec, blocks: Mapping[str, Block], total: Tensor, tolerance: float) -> None:
    """Raise unless the rows of each parameter add up to its gradient.

    Args:
        spec: layout of the gradient.
        blocks: parameter name → rows.
        total: gradient, (P,).
        tolerance: relative difference that counts as rounding.
    """
    totals = {name: total[spec.slices[name]] for name in spec.names}
    norms = {name: float(total.double().norm()) for name, total in totals.items()}
    everything = math.hypot(*norms.values())
    wrong = []
    for name, total in totals.items():
        block = blocks.get(name)
        found = torch.zeros_like(total).flatten() if block is None else block.sum()
        size = 0.0 if block is None else float((block.num_rows * block.square_sum().double().sum()).sqrt())
        slack = norms[name] + CANCELLATION * (everything + size)
        # What is not finite is left to the step.
        if float((found - total.flatten()).double().norm()) > tolerance * slack:
            wrong.append(name)
    if wrong:
        named = ", ".join(map(repr, wrong[:3])) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise UnsupportedModuleError(
            f"the gradient of parameter(s) {named} does not come from the outputs of the model alone, so it cannot be "
            "told apart by example. Usual causes: a penalty on the weights in the loss (the prior is prior_precision), "
            "a gradient penalty, a parameter used in the loss only (move it into forward), backward(inputs=...), "
            "blocks of two of slangvi's optimizers around one backward pass (give one optimizer several groups "
            "instead). "
            "Remove it, or pass verify=False to go on with what was recorded."
        )


# ---- hooks


class _ForwardHook:
    """A hook that forgets its owner when copied or pickled: copies of a model are not recorded."""

    def __init__(self, owner: weakref.ref[GradientRecorder] | None = None) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        owner = None if self.owner is None else self.owner()
        # Torch copies the list of hooks before it calls them, but asks later which ones want keywords. One that is
        # removed in between, as by the garbage collector, is called once more, without.
        if owner is None or len(rest) < 2 or not owner.active or owner.model is not module:
            return rest[-1]
        return owner.note_call(args, *rest)


def _reach(owner: weakref.ref[GradientRecorder], call: Call, grad: Tensor | None) -> None:
    recorder = owner()
    # Fused kernels with several outputs hand None to those the loss did not use.
    is_own = call.recording is not None and call.recording.is_paused  # a pass inside of the one that is recorded
    if recorder is not None and recorder.active and grad is not None and not is_own:
        recorder.current_backward(is_first=True).calls[call] = None


def _measure_pull(call: Call, grad: Tensor) -> None:
    """Note how large the gradient of the outputs is."""
    call.pulls[torch._C._current_graph_task_id()] = grad.detach().double().square().sum()


def _store_total(owner: weakref.ref[GradientRecorder], name: str, grad: Tensor) -> None:
    recorder = owner()
    if recorder is not None and recorder.active:
        # Copied at once: autograd then takes the gradient, which nobody else holds, as p.grad.
        recorder.place_of(name).view(grad.shape).copy_(grad.detach())


def _confirm(owner: weakref.ref[GradientRecorder], param: Tensor) -> None:
    recorder, task = owner(), torch._C._current_graph_task_id()
    if recorder is None or task == recorder._last_task:
        return
    if recorder.active:
        recorder.note_accumulation()
        recorder._last_task = task
    elif len(recorder.unrecorded) < MOST_UNRECORDED:
        recorder.unrecorded.add(task)


def _remove(handles: list[list[Any]], recordings: list[Recording]) -> None:
    for recording in recordings:
        recording.detach()
    for some in handles:
        _take_off(some)


def _take_off(handles: list[Any]) -> None:
    """Remove hooks, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


# ---- refusals


def check_modules(model: nn.Module, wants_rows: bool = True, among: Iterable[nn.Module] | None = None) -> None:
    """Refuse modules whose gradients are not those of the loss at the sample, or not those of single examples.

    Args:
        model: the model.
        wants_rows: whether gradients of single examples are wanted.
        among: modules of the model that are looked at; None for all.
    """
    for module in model.modules() if among is None else among:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_table(model, module)
        elif wants_rows and isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise UnsupportedModuleError(
                f"{_name_of(model, module)} normalises with statistics of the batch, so examples "
                "have no gradients of their own. Put it in eval mode (module.eval()) with running statistics, or "
                "use GroupNorm or LayerNorm instead."
            )


def _name_of(model: nn.Module, module: nn.Module) -> str:
    """Return how errors speak of a module."""
    name = next(name for name, other in model.named_modules() if other is module)
    return f"module {name!r} ({type(module).__name__})"


def check_alone(module: nn.Module) -> None:
    """Refuse a call on behalf of several processes, which exchange `p.grad` and no more."""
    around = module if isinstance(module, DistributedDataParallel) else DistributedDataParallel._active_ddp_module
    if around is not None and around.process_group.size() > 1:
        raise UnsupportedModuleError(
            f"the model runs inside DistributedDataParallel with {around.process_group.size()} processes, which "
            "average p.grad alone: each would draw weights and learn a posterior of its own. Train in one process, on "
            "one device (devices=1 in Lightning, --num_processes 1 of accelerate)."
        )


def _check_table(model: nn.Module, table: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse embedding tables whose gradient is sparse, or not that of the loss at the sample."""
    if not table.weight.requires_grad or not (table.sparse or table.max_norm is not None or table.scale_grad_by_freq):
        return
    kind = _name_of(model, table)
    if table.sparse:
        raise UnsupportedModuleError(
            f"{kind} has sparse=True, and sparse gradients are not supported. Build it with sparse=False: the "
            "table's gradient is kept as touched rows anyway."
        )
    if table.max_norm is not None:
        raise UnsupportedModuleError(
            f"{kind} has max_norm={table.max_norm}, which rewrites the weights inside forward and so changes the "
            "sample. Build it with max_norm=None; the prior keeps rows small."
        )
    raise UnsupportedModuleError(
        f"{kind} has scale_grad_by_freq=True, which mixes examples. Build it with scale_grad_by_freq=False."
    )
