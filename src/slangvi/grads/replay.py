"""Per-example gradients of any module by calling it again: one vmap where possible, one backward per example where not.

Both take the recorded inputs of a call and the recorded gradient of its outputs, so the loss is never needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from slangvi.grads.calls import Call, Surroundings, modified
from slangvi.grads.dense import rows_within

__all__ = ["Replay", "call_tolerance"]


class Replay:
    """A call that can be made again with other parameter values.

    Args:
        call: the recorded call.
        params: values by name local to the module; all others stay as they are.
        cotangents: output leaf → gradient of the loss there.
        inner: the same with what arrived from inside the module; used when the module computes the loss itself, so that
            nothing but a scalar has a gradient from outside.
        num_examples: M; only leaves with this first dimension are used.
        memory_limit: bytes that rows in the making may take; vmap then goes over the examples in chunks.
    """

    def __init__(
        self,
        call: Call,
        params: Mapping[str, Tensor],
        cotangents: Mapping[int, Tensor],
        inner: Mapping[int, Tensor],
        num_examples: int,
        memory_limit: int | None = None,
    ) -> None:
        if not call.untouched:
            raise modified(call)
        self.call = call
        self.params = {name: value.detach() for name, value in params.items()}
        self.num_examples = num_examples
        self.memory_limit = memory_limit
        self.cotangents = self._by_batch(cotangents) or self._by_batch(inner)
        self._buffers = dict(call.module.named_buffers())

    def _by_batch(self, cotangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {k: v for k, v in cotangents.items() if v.ndim and v.shape[0] == self.num_examples}

    @property
    def tolerance(self) -> float:
        """Relative error that rounding alone explains."""
        return call_tolerance(self.call, {value.dtype for value in self.cotangents.values()})

    @property
    def by_example(self) -> bool:
        """Whether inputs and outputs carry the batch in their first dimension."""
        return bool(self.cotangents) and any(self._batched(x) for x in self.call.leaves)

    def rows(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gradients of the named parameters, each (M, p): vmap first, example by example when it cannot."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vmap speaks of slow batching rules; the result is the same
                return self.rows_by_vmap(names)
        except Exception:
            # Data-dependent control flow, in-place updates, random draws, missing batching rules (GRU), indices into
            # the batch. What is really wrong is wrong below as well.
            return self.rows_by_masking(names, range(self.num_examples))

    def rows_by_vmap(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Each example as a batch of one; needs a module that treats examples independently and draws nothing."""
        chosen = {name: self.params[name] for name in names}
        slots = [0 if self._batched(x) else None for x in self.call.leaves]

        def one(leaves: list[Any], cotangents: list[Tensor]) -> dict[str, Tensor]:
            single = [x if slot is None else x.unsqueeze(0) for x, slot in zip(leaves, slots, strict=True)]
            pull = torch.func.vjp(lambda chosen: self._outputs(chosen, single), chosen)[1]
            (grads,) = pull([x.unsqueeze(0) for x in cotangents])
            return dict(grads)

        row_bytes = sum(value.numel() * value.element_size() for value in chosen.values())
        chunk = rows_within(self.memory_limit, max(1, row_bytes), self.num_examples)
        mapped = torch.func.vmap(one, in_dims=(slots, 0), randomness="error", chunk_size=chunk)
        with self._surroundings().restored():
            grads = mapped(self.call.leaves, list(self.cotangents.values()))
        return {name: grad.reshape(self.num_examples, -1) for name, grad in grads.items()}

    def rows_by_masking(self, names: Sequence[str], examples: Sequence[int]) -> dict[str, Tensor]:
        """One full call, then one backward per example with every other example's gradient set to zero.

        This is the definition: it holds for modules that mix examples and, the random state being replayed, for
        modules that draw random numbers.
        """
        pull = self._recorded(names)
        grads = [pull(self._masked(example)) for example in examples]
        return {name: torch.stack([g[name].flatten() for g in grads]) for name in names}

    def _recorded(self, names: Sequence[str]) -> Callable[[list[Tensor]], dict[str, Tensor]]:
        """Make the call once with gradients on; return the map from output gradients to parameter gradients."""
        chosen = {name: self.params[name].clone().requires_grad_() for name in names}
        with torch.enable_grad(), self._surroundings().restored():
            outputs = self._outputs(chosen, self.call.leaves)

        def pull(cotangents: list[Tensor]) -> dict[str, Tensor]:
            pairs = [(out, grad) for out, grad in zip(outputs, cotangents, strict=True) if out.requires_grad]
            if not pairs:
                return {name: torch.zeros_like(value) for name, value in chosen.items()}
            # Activation checkpointing goes forward again meanwhile, and must meet the same values.
            grads = self._with_values(
                chosen,
                lambda module: torch.autograd.grad(
                    [out for out, _ in pairs],
                    list(chosen.values()),
                    [grad for _, grad in pairs],
                    retain_graph=True,
                    allow_unused=True,
                ),
            )
            filled = (torch.zeros_like(v) if g is None else g for v, g in zip(chosen.values(), grads, strict=True))
            return dict(zip(chosen, filled, strict=True))

        return pull

    def _outputs(self, chosen: Mapping[str, Tensor], leaves: Sequence[Any]) -> list[Tensor]:
        """Output leaves that carry gradient, with modules' buffers kept out of reach of in-place updates."""
        args, kwargs = tree_unflatten(list(leaves), self.call.structure)
        outputs = self._with_values(chosen, lambda module: module(*args, **kwargs))
        flat = tree_flatten(outputs)[0]
        return [flat[leaf] for leaf in self.cotangents]

    def _with_values(self, chosen: Mapping[str, Tensor], run: Callable[[nn.Module], Any]) -> Any:
        """What `run` makes of the module while it has other parameters and copies of its buffers."""
        values = {name: buffer.clone() for name, buffer in self._buffers.items()}
        values |= self.params | dict(chosen)
        with _attributes_restored(self.call.module):
            named = {f"module.{name}": value for name, value in values.items()}
            return torch.func.functional_call(_Lent(self.call.module), named, (run,))

    def _masked(self, example: int) -> list[Tensor]:
        masked = [torch.zeros_like(x) for x in self.cotangents.values()]
        for target, source in zip(masked, self.cotangents.values(), strict=True):
            target[example] = source[example]
        return masked

    def _batched(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.num_examples

    def _surroundings(self) -> Surroundings:
        found = self.call.surroundings
        assert found is not None
        return found


def call_tolerance(call: Call, dtypes: set[torch.dtype]) -> float:
    """Relative error that rounding explains, by the coarsest precision that takes part in a call."""
    around = call.surroundings
    if around is not None and around.autocast:
        dtypes = dtypes | {around.autocast_dtype}
    device = None if around is None else around.device
    return rounding(call.module, device, dtypes)


def rounding(module: nn.Module, device: torch.device | None, dtypes: set[torch.dtype]) -> float:
    """1e3 units of the coarsest dtype, TF32 counted in where the device may use it."""
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7)
    if device is not None and device.type == "cuda" and _uses_tf32(module):
        coarsest = max(coarsest, 1e-3)
    return min(0.1, max(1e-7, 1e3 * coarsest))


def _uses_tf32(module: nn.Module) -> bool:
    """Products only when asked for, convolutions unless forbidden: those are torch's defaults."""
    if torch.get_float32_matmul_precision() != "highest":
        return True
    try:
        convolutions = bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # set through torch's newer names, which the old one then refuses to sum up
        convolutions = True
    return convolutions and any(isinstance(part, _ConvNd) for part in module.modules())


class _Lent(nn.Module):
    """A module in the hands of a function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[nn.Module], Any]) -> Any:
        return run(self.module)


@contextmanager
def _attributes_restored(module: nn.Module) -> Iterator[None]:
    """What forward writes to the modules themselves (counters, cached activations) is undone."""
    before = [(part, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
