"""Which parameters are inferred, the state of their distribution, and the model that holds its mean."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

from slangvi.errors import UnsupportedModuleError
from slangvi.keywords import document_fields
from slangvi.optimizer.groups import JOINED, GroupValues, check_group
from slangvi.params import Params, ParamSpec
from slangvi.params.mirror import Mirror
from slangvi.params.spec import uncompiled
from slangvi.params.state import FlatState, state_dtype, tensors_of
from slangvi.priors import Prior
from slangvi.settings import OptimizerSettings

__all__ = ["Inferred", "StateT"]

StateT = TypeVar("StateT", bound=FlatState)


class Inferred(Optimizer, ABC, Generic[StateT]):
    """One flat state for the parameters of all groups, and the model's parameters as a copy of its mean."""

    settings: OptimizerSettings
    _state: StateT
    _hyper: GroupValues

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        document_fields(cls)

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.model = _checked_model(model)
        # Groups hold the parameters from now on, and the generator may be replaced.
        self.settings = replace(settings, params=None, generator=None)
        self.generator = settings.generator
        self._ready = False
        self._handed_out = False  # whether somebody else may hold tensors of the state, which must not change then
        self._prepare()
        # Wrappers that pass for their optimizer, as Lightning's do, run its methods as their own.
        self._itself: Callable[[], Any] = weakref.ref(self)
        super().__init__(_chosen(self.model, settings.params), settings.group_defaults())
        self._rebuild(None)
        self._ready = True

    # ---- what a method or a layer above supplies

    @abstractmethod
    def _prepare(self) -> None:
        """Set what has to be there before the first parameters are."""

    @abstractmethod
    def _begin(self, params: Params, hyper: GroupValues) -> StateT:
        """The state before the first step."""

    @abstractmethod
    def _posterior(self, state: StateT) -> Distribution:
        """Q as a distribution."""

    @abstractmethod
    def _kl(self, state: StateT, prior: Prior) -> float:
        """KL(q ‖ prior)."""

    # ---- what a user calls

    @property
    def posterior(self) -> Any:
        """Q over the flat parameter vector, as a torch distribution; it does not change with later steps."""
        own = self._own()
        own._sync()
        own._handed_out = True
        return own._posterior(own._state)

    def kl(self) -> float:
        """KL(q ‖ prior), in closed form."""
        own = self._own()
        own._sync()
        with own._exact():
            return own._kl(own._state, own._hyper.prior())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; their posterior starts at their values with `init_precision`.

        Warm-up and corrections of averages count the steps of a group from when it was added.
        """
        if self._ready:
            self._sync()
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault(JOINED, self._state.step if self._ready else 0)
        try:
            check_group(self.param_groups[-1])
            if self._ready:
                self._rebuild(self._state)
        except BaseException:
            self.param_groups.pop()
            raise

    # ---- inside

    def _own(self) -> Self:
        """The optimizer itself, when this is a wrapper that passes for it."""
        found: Self | None = self._itself()
        assert found is not None
        return found

    def _rebuild(self, old: StateT | None) -> None:
        """Lay out all groups' parameters; keep what an earlier, shorter state holds. Nothing changes if it fails."""
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        devices = sorted({str(param.device) for param in params})
        if len(devices) > 1:
            raise ValueError(f"all parameters must be on one device, got {devices}. Move the model to one of them.")
        spec = ParamSpec.of_module(self.model, params)
        mirror = Mirror(dict(zip(spec.names, params, strict=True)), spec)
        name_of = {id(param): name for name, param in mirror.named.items()}
        like = torch.empty(0, dtype=state_dtype(params), device=params[0].device)
        hyper = GroupValues(self.param_groups, spec, name_of, like)
        hyper.prior()
        fresh = self._begin(mirror.named, hyper)
        if old is not None:
            for name, value in tensors_of(old):
                getattr(fresh, name)[tuple(slice(length) for length in value.shape)] = value
            fresh = replace(fresh, step=old.step)  # type: ignore[type-var]
        self._spec, self._mirror, self._name_of, self._hyper, self._state = spec, mirror, name_of, hyper, fresh

    def _sync(self, contents: bool = True) -> None:
        """Take over parameters that were changed from outside: a loaded model, another device, a re-initialisation.

        Args:
            contents: also compare the numbers, where that makes a GPU wait.
        """
        if self._mirror.changed(self._state.loc, contents):
            moved = {name: value.to(self._mirror.device) for name, value in tensors_of(self._state)}
            moved["loc"] = self._mirror.read(moved["loc"])
            self._replace(moved)

    def _replace(self, tensors: dict[str, Tensor], **others: Any) -> None:
        """Put other tensors, perhaps on another device, into the state."""
        self._state = replace(self._state, **tensors, **others)  # type: ignore[type-var]
        self._hyper = GroupValues(self.param_groups, self._spec, self._name_of, self._state.loc)

    def _exact(self) -> AbstractContextManager[Any]:
        """Full precision for the state's own arithmetic, whatever autocast the caller is in."""
        kind = self._mirror.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _checked_model(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the module itself, not "
            "model.parameters(): per-example gradients are read from its layers."
        )
    model = uncompiled(model)
    if any(kind.__name__ == "FullyShardedDataParallel" for part in model.modules() for kind in type(part).__mro__):
        raise UnsupportedModuleError(
            "the model is wrapped in FullyShardedDataParallel, which spreads its parameters over processes, and so "
            "would be the posterior, which is not supported. Build the optimizer on the whole model, in one process."
        )
    if getattr(model, "batch_first", None) is False:
        raise UnsupportedModuleError(
            f"{type(model).__name__} has batch_first=False, but examples must be the first dimension of the "
            "model's input and output. Build it with batch_first=True."
        )
    return model


def _chosen(model: nn.Module, params: Any) -> list[Any]:
    """Parameters or groups to infer: all of the model's that require grad unless some are given."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got a single tensor. Put it in a list.")
    chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    if not chosen:
        raise ValueError(
            "there is nothing to infer: the model has no trainable parameters. Set requires_grad_(True) on some."
        )
    return chosen
