"""A CUDA graph on a CPU, without Python in it: operations written down once, and run again on the same memory.

As on a device, a replay does not see what Python has changed since, writes where the capture wrote, leaves versions
alone, and finds nothing of use in memory that was given back by the end of the capture; nor does anybody else in memory
of the same pool that was free when it began. Reading a number is refused.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
# What has to wait for the device: a number is looked at, or decides a shape.
_WAITS = {
    aten._local_scalar_dense,
    aten._linalg_check_errors,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten._unique2,
}
# What writes no memory although its name says so.
_VIEWS = {aten.squeeze_, aten.unsqueeze_, aten.transpose_, aten.t_}


class Tape(TorchDispatchMode):
    """What runs inside the block, with everything it did to older memory and to the random state undone at the end."""

    def __init__(self, generators: list[torch.Generator], pool: list[Tape]) -> None:
        super().__init__()
        self.generators = generators
        self.pool = pool
        self.taken = unused(pool, pool)
        pool.append(self)
        self.over = False
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Tape:
        self._random = [(torch.default_generator, torch.get_rng_state())]
        self._random += [(generator, generator.get_state()) for generator in self.generators]
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        super().__exit__(kind, error, trace)
        for whole, before in self._kept.values():
            whole.copy_(before)
        for generator, state in self._random:
            generator.set_state(state)
        self._held, self.over = self.held(), True
        self.given_back = unused([self], self.pool)
        for whole in self.made.values():
            whole.fill_(255)  # not a number, whatever kind of float

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _WAITS:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        if func.overloadpacket in _VIEWS:
            return func(*args, **(kwargs or {}))
        # Their memory, with versions of its own.
        mine, options = tree_map(lambda x: x.data if isinstance(x, Tensor) else x, (args, kwargs or {}))
        named = {argument.name: given for argument, given in zip(func._schema.arguments, args, strict=False)}
        named |= kwargs or {}  # out= is among them
        written = [
            named[argument.name]
            for argument in func._schema.arguments
            if argument.name in named and argument.alias_info is not None and argument.alias_info.is_write
        ]
        for x in tree_leaves(written):
            if isinstance(x, Tensor) and _memory(x) not in self.made.keys() | self._kept.keys():
                whole = _bytes(x)
                self._kept[_memory(x)] = (whole, whole.clone())
        result = func(*args, **(kwargs or {}))
        if written:
            self.operations.append((func, mine, options, []))
        elif all(value.alias_info is None for value in func._schema.returns):
            found = [x.data for x in tree_leaves(result) if isinstance(x, Tensor)]
            known = {_memory(x) for x in tree_leaves((mine, options)) if isinstance(x, Tensor)}
            self.operations.append((func, mine, options, found))
            for x in found:
                if x.numel() and _memory(x) not in known:
                    self.made[_memory(x)] = _bytes(x)
        return result

    def held(self) -> list[int]:
        """Memory that the operations hold, once for each time; they do not change when the capture is over."""
        if not self.over:
            self._held = [_memory(x) for x in tree_leaves(self.operations) if isinstance(x, Tensor)]
        return self._held

    @torch.no_grad()
    def play(self) -> None:
        for whole in self.taken:
            whole.fill_(255)
        for func, args, kwargs, results in self.operations:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for place, value in zip(results, again, strict=False):
                place.copy_(value)
        for whole in self.given_back:
            whole.fill_(255)


def unused(tapes: list[Tape], pool: list[Tape]) -> list[Tensor]:
    """Memory that tapes have made and that nobody holds but the tapes of the pool."""
    ours = Counter(memory for tape in pool for memory in tape.held())
    # Two more holders are `made` itself and the Python object of the storage.
    counts = {memory: torch._C._storage_Use_Count(memory) - ours[memory] for tape in tapes for memory in tape.made}
    return [whole for tape in tapes for memory, whole in tape.made.items() if counts[memory] <= 2]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(x: Tensor) -> Tensor:
    """All of the memory a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
