"""Tensors that have sizes but no values, and a count of the memory that they would take."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeMemory", "fake_memory"]

T = TypeVar("T")
aten = torch.ops.aten


class FakeMemory(TorchDispatchMode):
    """Counts the bytes of tensors by phase and part, and answers what needs values. Build it with `fake_memory`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0  # bytes
        self.guesses = 0  # values that a model asked for
        self.peaks: dict[str, tuple[int, list[list[Any]]]] = {}  # phase → bytes, and the records [bytes, part] of them
        self._alive: dict[int, list[Any]] = {}
        self._now: tuple[str, str, bool | None] = ("setting up", "state", None)
        self._runs_model = False

    def copy(self, thing: T, tensors: Iterable[Any], part: str, device: torch.device) -> T:
        """Return a deep copy in which some tensors have no values and count for a part."""
        with self.phase("setting up", part):
            known = (x for x in tensors if isinstance(x, Tensor) and not is_lazy(x))
            twin = copy.deepcopy(thing, {id(x): _fake_twin(x, device) for x in known})
        if isinstance(twin, nn.Module):
            twin.register_forward_pre_hook(lambda *_: setattr(self, "_runs_model", True))
            twin.register_forward_hook(lambda *_: setattr(self, "_runs_model", False), always_call=True)
        return twin

    @contextmanager
    def phase(self, name: str, part: str, condition: bool | None = None) -> Iterator[None]:
        """Name what happens inside the block, and the part for which its allocations count.

        The library finds its conditions to be `condition`; None lets checks pass, `all` but not `any`.
        """
        before = self._now, self._runs_model
        self._now, self._runs_model = (name, part, condition), False
        try:
            yield
        finally:
            self._now, self._runs_model = before

    def label(self, tensors: Iterable[Any], part: str, of: str | None = None) -> None:
        """Count the memory of tensors, or what counts for part `of`, for a part, in peaks that have been as well."""
        for tensor in tensors:
            record = self._note(tensor) if isinstance(tensor, Tensor) else [0, None]
            record[1] = part if of in (None, record[1]) else record[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note the memory that it takes."""
        if func is aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return self._answer(args[0])
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:  # as many as there can be
            return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.int64)
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is aten.any:
            result._is_any = True
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        self._add(0, _bytes_inside(func, args))
        self._remove(0)
        return result

    def _answer(self, tensor: Tensor) -> Any:
        """Return a value for a tensor of one entry; one that is not zero to a model, which may divide by it."""
        self.guesses += self._runs_model
        condition = None if self._runs_model else self._now[2]
        if tensor.dtype is torch.bool:
            return not hasattr(tensor, "_is_any") if condition is None else condition
        number = 0 if condition else 1  # differences are zero where conditions hold
        return float(number) if tensor.is_floating_point() else number

    def _note(self, tensor: Tensor) -> list[Any]:
        storage = tensor.untyped_storage()
        if id(storage) not in self._alive:
            self._add(id(storage), storage.nbytes())
            weakref.finalize(storage, self._remove, id(storage)).atexit = False
        return self._alive[id(storage)]

    def _add(self, key: int, nbytes: int) -> None:
        name, part, _ = self._now
        self._alive[key] = [nbytes, part]
        self.live += nbytes
        if self.live > self.peaks.get(name, (0, []))[0]:
            self.peaks[name] = self.live, list(self._alive.values())

    def _remove(self, key: int) -> None:
        self.live -= self._alive.pop(key)[0]


@contextmanager
def fake_memory() -> Iterator[FakeMemory]:
    """Give new tensors no values inside the block, and count the memory that they would take.

    Example:
        >>> with fake_memory() as memory:
        ...     x = torch.zeros(1000) + 1
        >>> memory.live, memory.peaks["setting up"][0]
        (4000, 8000)
    """
    logger = logging.getLogger(FakeTensorMode.__module__)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _give_addresses(stack)
        stack.callback(_clear_caches)
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True  # it reports what is tried and may fail, such as vmap
        yield stack.enter_context(FakeMemory())


def _give_addresses(stack: ExitStack) -> None:
    """Tell the memory of tensors without values apart by its address, until a stack is left."""
    at = torch.UntypedStorage.data_ptr
    answers: dict[Any, Callable[[Any], int]] = {
        torch.UntypedStorage: lambda storage: storage._cdata if storage.device.type == "meta" else at(storage),
        FakeTensor: lambda x: x.untyped_storage().data_ptr() + x.storage_offset() * x.element_size(),
    }
    for kind, answer in answers.items():
        stack.callback(setattr, kind, "data_ptr", kind.data_ptr)
        kind.data_ptr = answer


def _fake_twin(tensor: Tensor, device: torch.device) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin.requires_grad_(tensor.requires_grad)


def _clear_caches() -> None:
    """Empty the function caches of the library, which may hold tensors without values."""
    modules = [module for name, module in sys.modules.items() if name.startswith("slangvi.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, _lru_cache_wrapper):
            value.cache_clear()


def _bytes_inside(func: Any, args: Any) -> int:
    """Return the bytes that a kernel of a CPU takes and gives back before it returns, where they matter."""
    if func is aten._linalg_eigh.default:
        return int(2 * args[0].nbytes)  # LAPACK's workspace for divide and conquer
    operands = [x for x in args if isinstance(x, Tensor) and x.ndim and x.device.type == "cpu"]
    if func.overloadpacket in (aten.convolution, aten.convolution_backward):
        return sum(x.nbytes for x in operands)  # in another order
    if torch.Tag.pointwise not in func.tags or len({x.dtype for x in operands}) < 2:
        return 0
    common = torch.result_type(*operands[:2])
    return sum(x.numel() * common.itemsize for x in operands if x.dtype is not common)  # converted beforehand
