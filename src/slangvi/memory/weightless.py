"""Code run on tensors that have sizes but no values, every allocation written down.

What runs is the library's own code, so there is no formula here that could fall behind it. What remains is to answer
the questions it puts to values that do not exist, and to know which place in the code allocates for what. The tables
at the top, and `_MOST` and `_hidden` at the end, are all that this file knows about the rest of the library and torch.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slangvi.memory.ledger import Ledger

__all__ = ["Allocations", "weightless", "without_memory"]

aten = torch.ops.aten

# What the memory is for, by the place in the code that asked for it; of several places on the way to an allocation the
# first listed counts. Anything else is the model's own forward and backward.
SITES = (
    ("slangvi.grads.dense", "rows"),
    ("slangvi.methods.slang.update", "temporaries"),
    ("slangvi.methods.lowrank_step", "temporaries"),
    ("slangvi.linalg.lowrank.factorize", "factor"),
    ("slangvi.linalg.lowrank", "draws"),
    ("slangvi.params.mirror", "draws"),
    ("slangvi.grads.rules", "rows"),
    ("slangvi.grads.base", "rows"),
    ("slangvi.grads.blocks", "rows"),
    ("slangvi.grads.outer", "rows"),
    ("slangvi.grads.factored", "rows"),
    ("slangvi.grads.assemble", "rows"),
    ("slangvi.grads.replay", "rows"),
)
MODEL = "activations"

# Checks pass and errors are zero when the library asks. These places are answered "no": an iteration that does not
# converge goes on to the Gram matrix and its full decomposition, which take the most.
DOUBTED = ("slangvi.linalg.krylov", "slangvi.linalg.topk")


@contextmanager
def weightless(ledger: Ledger, device: torch.device) -> Iterator[Allocations]:
    """Inside the block new tensors have no memory, and what they would take on `device` is written to the ledger."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        allocations = stack.enter_context(Allocations(ledger, fake, device))
        stack.enter_context(_Values())
        stack.enter_context(_quiet(logging.getLogger(FakeTensorMode.__module__)))
        stack.callback(_forget)
        yield allocations


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """What torch logs as failed is often tried on purpose: vmap before one example at a time."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _forget() -> None:
    """Empty the library's function caches: a tensor without memory must not turn up in a step that has it."""
    modules = [module for name, module in sys.modules.items() if name.startswith("slangvi.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, FunctionType | _lru_cache_wrapper) and hasattr(value, "cache_clear"):
            value.cache_clear()


def without_memory(thing: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """A deep copy of a module or a batch whose tensors have no memory; nothing of the original is touched.

    Args:
        thing: anything that can be deep-copied.
        mode: the mode its tensors shall belong to.
        device: where they pretend to be.
    """
    with _Copying(mode, device):
        return copy.deepcopy(thing)


class _Copying(TorchFunctionMode):
    """Deep copies of tensors are made without memory."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.mode = mode
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            # Two names for one tensor stay two names for one tensor.
            return memo.setdefault(id(tensor), self._twin(tensor).requires_grad_(tensor.requires_grad))
        if func is Tensor.clone:  # nn.Parameter copies itself by cloning its data
            return self._twin(args[0])
        return func(*args, **(kwargs or {}))

    def _twin(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)


class _Values(TorchFunctionMode):
    """What tensors without values are asked for, other than by an operation: an address for each storage, arrays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if isinstance(x, FakeTensor):
            if func is Tensor.data_ptr:
                return x.untyped_storage()._cdata + x.storage_offset() * x.element_size()
            if func is Tensor.tolist:
                # Indices must be valid, checks pass.
                return np.full(x.shape, x.dtype is torch.bool).tolist()
            if func is Tensor.numpy and _asker().startswith("slangvi."):
                # The library hands NumPy small matrices, some to be factorised.
                square = x.ndim > 1 and x.shape[-1] == x.shape[-2]
                return np.broadcast_to(np.eye(x.shape[-1]) if square else np.ones(()), x.shape)
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """Sees every operation: answers what needs values, and writes down what it allocates."""

    def __init__(self, ledger: Ledger, fake: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.fake = fake
        self.device = device
        self.guesses = 0  # values the model asked for
        self._home = threading.get_ident()
        self._last = MODEL

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device(args[0])  # asked for at every turn, and dear when torch answers
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0], func)
        if func is aten.equal.default:
            return True
        known = _MOST.get(func)
        out = func(*args, **(kwargs or {})) if known is None else known(*args)
        if func.overloadpacket is aten.any:
            out._none = True
        new = [x for x in tree_leaves(out) if isinstance(x, Tensor) and _device(x) == self.device]
        for tensor in new:
            self.ledger.enter(tensor, self._part)
        self.ledger.inside(_hidden(func, args) if new else 0, self._part)
        return out

    def _answer(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        """A value for a tensor of one entry that has none: whatever lets a check pass."""
        asker = _asker()
        ours = asker.startswith("slangvi.")
        if tensor.dtype is torch.bool and asker in DOUBTED:
            return False
        if getattr(tensor, "constant", None) is not None:
            return read(tensor)
        self.guesses += not ours
        if tensor.dtype is torch.bool:
            return not hasattr(tensor, "_none")
        if tensor.is_floating_point():
            return 0.0 if ours else 1.0  # errors are zero; a model may divide by it
        return 1

    def _part(self) -> str:
        """What the current operation is for. Backward on a GPU runs in a thread of its own, where no caller shows."""
        if threading.get_ident() == self._home:
            places = [f"{name}.{function}" for name, function in _frames() if name.startswith("slangvi.")]
            self._last = next((part for site, part in SITES if any(p.startswith(site) for p in places)), MODEL)
        return self._last


def _asker() -> str:
    """The module whose code is running, torch's own left aside."""
    return next((name for name, _ in _frames() if not name.startswith("torch.")), "")


def _device(tensor: Tensor) -> torch.device:
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device


def _frames() -> Iterator[tuple[str, str]]:
    """Module and function of every caller outside this file, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__:
            yield name, frame.f_code.co_name
        frame = frame.f_back


def _most_unique(x: Tensor, *options: bool) -> tuple[Tensor, Tensor, Tensor]:
    count = x.numel()
    return x.new_empty(count), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(count, dtype=torch.int64)


# Results whose size depends on values: the largest they can be.
_MOST: dict[Any, Callable[..., Any]] = {
    aten._unique2.default: _most_unique,
    aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.ndim, dtype=torch.int64),
}


def _hidden(func: Any, args: Any) -> int:
    """Bytes that a kernel takes for itself, as far as they matter."""
    if func is aten._linalg_eigh.default:
        return int(2 * args[0].numel() * args[0].element_size())  # LAPACK's workspace for divide and conquer
    if torch.Tag.pointwise not in func.tags:
        return 0
    operands = [x for x in args if isinstance(x, Tensor) and x.ndim and _device(x).type == "cpu"]
    if len({x.dtype for x in operands}) < 2:
        return 0
    common = torch.result_type(*operands[:2])
    return sum(x.numel() * common.itemsize for x in operands if x.dtype is not common)  # CPUs convert beforehand
