"""Saving, loading and copying: everything an exact resume needs."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from slangvi.errors import user_stacklevel
from slangvi.optimizer._bad_batches import BadBatches
from slangvi.optimizer._drawing import Drawing
from slangvi.optimizer._hooks import called, held
from slangvi.optimizer._inferred import StateT
from slangvi.params.packing import check_packed, pack

__all__ = ["Saving"]


class Saving(Drawing[StateT]):
    """Goes out as a `state_dict`, a copy or a pickle, and comes back to go on bit by bit."""

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact resume needs: flat tensors, step, layout, groups, and the generator's state."""
        if self._own() is not self:
            return self._own().state_dict()
        self._sync()
        with held(self, "_optimizer_state_dict_post_hooks") as after:
            packed = super().state_dict()
        self._handed_out = True
        packed["slangvi"] = pack(type(self).__name__, self._state, self.generator, self.settings.num_data)
        packed["slangvi"]["bad_batches"] = [self._bad.in_a_row, self._bad.total]
        return called(after, self, packed)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; the model's parameters become its mean."""
        own = self._own()
        if own._sampling and own._begun is None:
            raise RuntimeError("load_state_dict() was called inside sampled_params. Leave the block first.")
        kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        with held(own, kinds[0]) as before, held(own, kinds[1]) as after:
            own._take_over(called(before, own, state_dict.copy()))
        for hook in after:
            hook(own)

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        saved: dict[str, Any] = state_dict.get("slangvi")  # type: ignore[assignment]
        check_packed(saved, type(self).__name__, self._state)
        _warn_of_other_data(saved["num_data"], self.settings.num_data)
        random = _random_state(saved["generator"], self.generator)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if self.generator is not None and random is not None:
            self.generator.set_state(random)
        device = self._state.loc.device
        tensors = {name: value.detach().to(device, copy=True) for name, value in saved["tensors"].items()}
        self._replace(tensors, step=int(saved["step"]))
        self._bad = BadBatches(*saved.get("bad_batches", (0, 0)))
        self.discard_gradients()
        self._mirror.write(self._state.loc)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own() is not self:  # a copy of a wrapper is an optimizer
            return self._own().__reduce__()
        # Copies and pickles carry the model along: an optimizer without its module could not read gradients.
        groups = [{**g, "params": [self._name_of[id(p)] for p in g["params"]]} for g in self.param_groups]
        settings = {item.name: getattr(self.settings, item.name) for item in fields(self.settings)}
        others = {"generator": self.generator, "settings_class": type(self.settings)}
        return _restore, (type(self), self.model, groups, self.defaults, settings, others, self.state_dict())


def _restore(
    kind: type[Saving[Any]],
    model: nn.Module,
    groups: list[dict[str, Any]],
    defaults: dict[str, Any],
    settings: dict[str, Any],
    others: dict[str, Any],
    state: dict[str, Any],
) -> Saving[Any]:
    """Build a copied or unpickled optimizer anew on its model.

    Pickles of version 0.1 have some settings among the defaults and the others, and some that a method does not use.
    """
    named = dict(model.named_parameters())
    settings_class = others.get("settings_class") or kind.__init__.settings_class  # type: ignore[attr-defined]
    known = {item.name for item in fields(settings_class)}
    given = {name: value for name, value in {**defaults, **settings, **others}.items() if name in known}
    given["params"] = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
    opt = kind.__new__(kind)
    Saving.__init__(opt, model, settings_class(**given))
    opt.defaults.update(defaults)
    opt.load_state_dict(state)
    return opt


# Pickles name the place of this function, and outlive the order of files in here.
_restore.__module__ = "slangvi.optimizer"


def _random_state(saved: Tensor | None, generator: torch.Generator | None) -> Tensor | None:
    """A saved state of the generator, seen to be one before anything is changed."""
    if saved is None:
        return None
    if generator is None:
        warnings.warn(
            "state_dict holds the state of a generator, and this optimizer has none: its draws will be others. "
            "Build it with generator=torch.Generator() to go on with the same draws.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
        return None
    try:
        torch.Generator(generator.device).set_state(saved.cpu())
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"state_dict['generator'] is no state of a generator on {generator.device}: {error}"
        ) from error
    return saved.cpu()


def _warn_of_other_data(then: int, now: int) -> None:
    if then != now:
        warnings.warn(
            f"state_dict was made with num_data={then}, this optimizer has num_data={now}; the posterior will change "
            "width.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
