"""Blocks in which the model's weights are a draw, and the gradients that are collected in them."""

from __future__ import annotations

import atexit
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slangvi.optimizer._bad_batches import BadBatches
from slangvi.optimizer._inferred import Inferred, StateT
from slangvi.optimizer._losses import unscaled
from slangvi.optimizer._warnings import Warnings
from slangvi.out_of_memory import out_of_memory_advice
from slangvi.params import ParamSpec
from slangvi.rows import GradientRecorder, RowGroup

__all__ = ["Drawing"]

# Optimizers in a block that `train()` began.
_BEGUN: weakref.WeakSet[Any] = weakref.WeakSet()


class Drawing(Inferred[StateT]):
    """Puts draws into the model and the mean back, and keeps gradients at draws until a step takes them."""

    def _prepare(self) -> None:
        self._sampling = False
        self._begun: AbstractContextManager[None] | None = None
        self._bad = BadBatches()
        self._warnings = Warnings()

    # ---- what a method supplies

    @abstractmethod
    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientRecorder:
        """What reads gradients off the user's own backward."""

    @abstractmethod
    def _draw(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        """One draw of the weights, (P,)."""

    # ---- what a user calls

    def sampled_params(self, train: bool = False) -> AbstractContextManager[None]:
        """Put one draw of the weights into the model inside the block, and the mean back after it.

        Args:
            train: collect the gradients of every `backward()` in the block for the next `step()`. Several
                micro-batches may run in one block (they share the draw) or in blocks of their own.
        """
        return self._own()._block(train)

    def train(self) -> None:
        """Begin a block like `sampled_params(train=True)`, for loops that have no place for a `with`.

        It ends with the next `step()`, `eval()` or `train()`, which begins another. Inside a block with gradients
        nothing happens. `eval` and `train` are what schedule-free optimizers have; Hugging Face's `Trainer` calls them.
        """
        own = self._own()
        if own._begun is None and own._sampling and own._recorder.active:
            return
        own.eval()
        block = own._block(train=True)
        block.__enter__()
        own._begun = block
        _BEGUN.add(own)
        _watch_the_end()

    def eval(self) -> None:
        """End the block that `train()` began: its gradients are kept for `step()`, and the weights are the mean."""
        own = self._own()
        block, own._begun = own._begun, None
        _BEGUN.discard(own)
        if block is not None:
            with torch.enable_grad():  # modules may have to be called again
                block.__exit__(None, None, None)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were collected since the last step; a `state_dict` does not hold them."""
        own = self._own()
        return bool(own._rows) or own._recorder.has_passes

    def discard_gradients(self) -> None:
        """Forget gradients collected since the last step, e.g. after skipping a batch half way.

        A block that `train()` began is over; one of `sampled_params(train=True)` goes on without what it had.
        """
        own = self._own()
        own._recorder.drop()
        own.eval()
        own._rows = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `Inferred`; refused while gradients are kept, which know nothing of the new parameters."""
        if self._own() is not self:
            self._own().add_param_group(param_group)
            return
        if self.__dict__.get("_rows"):
            raise RuntimeError(
                "add_param_group was called between backward and step: the gradients collected so far know nothing of "
                "the new parameters. Call step() or discard_gradients() first."
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients collected for the next step stay, see `discard_gradients`."""
        self._own()._recorder.unrecorded.clear()
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:  # as torch does, without its wrappers, which take several times as long
            for param in group["params"]:
                param.grad = None

    # ---- inside

    @contextmanager
    def _block(self, train: bool) -> Iterator[None]:
        if self._sampling:
            raise RuntimeError(
                "sampled_params blocks cannot be nested: the weights are already a sample."
                + (" train() began that block; eval() ends it." if self._begun is not None else "")
            )
        self._sync()
        if train:
            self._mirror.check(self.model)
        with self._exact():
            self._write_draw(self._checked_generator())
        self._sampling = True
        try:
            if train:
                with out_of_memory_advice("in sampled_params", self._state, self._rows), self._recorder.recording():
                    yield
                advice = out_of_memory_advice("while gradients were collected", self._state, self._rows)
                with advice, self._exact():
                    groups = self._collected()
                self._rows += [unscaled(group, self.settings) for group in groups]
            else:
                yield
        finally:
            self._sampling = False
            self._write_mean()

    def _collected(self) -> list[RowGroup]:
        """Rows of the passes of the last block."""
        return self._recorder.collect()

    def _write_draw(self, generator: torch.Generator | None) -> None:
        """One draw into the model's parameters."""
        self._mirror.write(self._draw(self._state, generator))
        # Inside one autocast block torch would go on with its half-precision copy of the draw before.
        torch.clear_autocast_cache()

    def _write_mean(self) -> None:
        """The mean into the model's parameters."""
        self._mirror.write(self._state.loc)
        torch.clear_autocast_cache()

    def _checked_generator(self) -> torch.Generator | None:
        device = self._state.loc.device
        if self.generator is not None and self.generator.device.type != device.type:
            raise ValueError(
                f"generator is on {self.generator.device}, but the parameters are on {device}. "
                f"Use torch.Generator(device={device.type!r})."
            )
        return self.generator

    def _rebuild(self, old: StateT | None) -> None:
        super()._rebuild(old)
        self._recorder = self._listener(self._spec, self._state.loc.dtype)
        self._rows: list[RowGroup] = []  # those of another layout are of no use

    def _sync(self, contents: bool = True) -> None:
        if self._sampling:
            leave = "Leave sampled_params" if self._begun is None else "Call opt.eval()"
            raise RuntimeError(f"this needs the mean, but the weights are a sample. {leave} first.")
        super()._sync(contents and not self._rows)  # once after every step is enough


@cache
def _watch_the_end() -> None:
    """From the first block that has no end of its own."""
    atexit.register(_leave)


def _leave() -> None:
    """Put the mean back where a program ends inside a block: later, tensors are being taken apart, and torch aborts."""
    for opt in list(_BEGUN):
        opt._begun.gen.close()
