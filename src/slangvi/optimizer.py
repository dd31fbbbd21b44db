"""A torch optimizer whose weights are a distribution: what every method's optimizer shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

from slangvi import _checks
from slangvi._steps import ELBO, Prior, Rate
from slangvi.errors import NumericalError
from slangvi.grads import FactoredGradients, GradientCapture, RowGroup
from slangvi.grads.assemble import Engine
from slangvi.types import GradientOperator, Params, ParamSpec

__all__ = ["Settings", "VariationalOptimizer"]


class FlatState(Protocol):
    """A dataclass of flat (..., P) tensors, with the step count and the layout."""

    @property
    def loc(self) -> Tensor:
        """The mean, (P,)."""

    @property
    def step(self) -> int:
        """Steps taken."""

    @property
    def spec(self) -> ParamSpec:
        """Layout."""


StateT = TypeVar("StateT", bound=FlatState)
InfoT = TypeVar("InfoT")


@dataclass(frozen=True)
class Settings:
    """What holds for all parameters alike; checked when built.

    Args:
        num_data: N.
        mc_samples: S in `step(closure)`.
        temperature: likelihood weighed by 1/temperature.
        loss_reduction: "mean" or "sum".
        accumulation_steps: what the loop divides each micro-batch's loss by.
        engine: "factored" or "dense".
        verify: check per-example gradients of new patterns of calls.
    """

    num_data: int
    mc_samples: int = 1
    temperature: float = 1.0
    loss_reduction: str = "mean"
    accumulation_steps: int = 1
    engine: Engine = "factored"
    verify: bool = True

    def __post_init__(self) -> None:
        _checks.count("num_data", self.num_data, hint="Pass the number of training examples, len(train_set).")
        _checks.count("mc_samples", self.mc_samples)
        _checks.number("temperature", self.temperature, 0.0)
        _checks.choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        _checks.count("accumulation_steps", self.accumulation_steps)
        _checks.choice("engine", self.engine, ("factored", "dense"))
        _checks.flag("verify", self.verify)


class VariationalOptimizer(Optimizer, ABC, Generic[StateT, InfoT]):
    """Base of the methods' optimizers: draws weights, collects per-example gradients, takes transactional steps.

    The state is one flat vector per quantity, in float32 (float64 if a parameter is), whatever the model computes in.
    The model's parameters hold the mean except inside `sampled_params`.
    """

    rank = 0  # columns of the low-rank factor, for methods that have one
    _state: StateT
    _prior_values: list[Any]
    _named: dict[str, Tensor]

    # GradScaler then hands over its scale instead of touching p.grad, which holds no per-example gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        params: Any,
        defaults: dict[str, Any],
        settings: Settings,
        generator: torch.Generator | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the module itself, not "
                "model.parameters(): per-example gradients are read from its layers."
            )
        self.model = model
        self.settings = settings
        self.generator = generator
        self.info: InfoT | None = None
        self._ready = False
        self._rows: list[RowGroup] = []
        self._sampling = False
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        if not isinstance(chosen, list):
            chosen = list(chosen)
        if not chosen:
            raise ValueError(
                "there is nothing to infer: the model has no trainable parameters. Set requires_grad_(True) on some."
            )
        super().__init__(chosen, defaults)
        self._rebuild(None)
        self._ready = True

    # ---- what a method supplies

    @abstractmethod
    def _begin(self, params: Params, init_precision: Tensor) -> StateT:
        """The state before the first step."""

    @abstractmethod
    def _draw(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        """One draw of the weights, (P,)."""

    @abstractmethod
    def _advance(
        self,
        state: StateT,
        gradients: GradientOperator,
        prior: Prior,
        lr: Rate,
        precision_lr: Rate | None,
        momentum: float | Tensor,
    ) -> tuple[StateT, InfoT]:
        """The method's pure update."""

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
        self._sync()
        return self._posterior(self._state)

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Put one draw of the weights into the model inside the block, and the mean back after it.

        Args:
            train: collect per-example gradients of every `backward()` in the block for the next `step()`. Several
                micro-batches may run in one block (they share the draw) or in blocks of their own.
        """
        if self._sampling:
            raise RuntimeError("sampled_params blocks cannot be nested: the weights are already a sample.")
        self._sync()
        self._write(self._draw(self._state, self._checked_generator()))
        self._sampling = True
        try:
            if train:
                with self._capture.recording():
                    yield
                self._rows += [self._unscaled(group) for group in self._capture.collect(self._named)]
            else:
                yield
        finally:
            self._sampling = False
            self._write(self._state.loc)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients collected since the last one.

        Args:
            closure: computes the loss and calls backward; it is run `mc_samples` times, each at its own draw.

        Returns:
            The mean of the closure's losses, or None. A step that fails leaves state and weights as they were.
        """
        if self._sampling:
            raise RuntimeError("step() was called inside sampled_params. Leave the block first.")
        losses = self._run(closure) if closure is not None else []
        rows, self._rows = self._rows, []
        if self._overflowed():
            return _mean(losses)
        if not rows:
            raise RuntimeError(
                "step() found no gradients. Run loss.backward() inside `with opt.sampled_params(train=True):`, or "
                "pass a closure that does forward and backward."
            )
        self._sync()
        gradients = FactoredGradients(self._spec, [self._unamplified(r) for r in rows], self.rank, self._state.loc)
        state, info = self._advance(
            self._state, gradients, self._prior(), self._rate("lr"), self._precision_rate(), self._momentum()
        )
        if losses:
            info = replace(info, expected_log_likelihood=self._log_likelihood(losses, gradients))  # type: ignore[type-var]
        self._state, self.info = state, info
        self._write(state.loc)
        return _mean(losses)

    def discard_gradients(self) -> None:
        """Forget gradients collected since the last step, e.g. after skipping a batch half way."""
        self._rows = []

    def elbo(self, closure: Callable[[], Any], mc_samples: int | None = None) -> ELBO:
        """Expected log-likelihood and KL, apart.

        Args:
            closure: returns the loss on the data at the current weights, without backward: its mean over examples
                for `loss_reduction="mean"`, its sum over the whole training set for "sum".
            mc_samples: draws to average over; None takes the optimizer's.
        """
        draws = _checks.count("mc_samples", self.settings.mc_samples if mc_samples is None else mc_samples)
        losses = []
        for _ in range(draws):
            with self.sampled_params(), torch.no_grad():
                losses.append(float(closure()))
        scale = self.settings.num_data if self.settings.loss_reduction == "mean" else 1
        return ELBO(-scale * sum(losses) / draws, self.kl())

    def kl(self) -> float:
        """KL(q ‖ prior), in closed form."""
        self._sync()
        return self._kl(self._state, self._prior())

    # ---- torch.optim's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; their posterior starts at their values with `init_precision`."""
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])
        if self._ready:
            self.discard_gradients()
            self._sync()
            self._rebuild(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact resume needs: flat tensors, step, layout, groups, and the generator's state."""
        self._sync()
        packed = super().state_dict()
        packed["slangvi"] = {
            "method": type(self).__name__,
            "names": list(self._spec.names),
            "shapes": [list(shape) for shape in self._spec.shapes],
            "step": self._state.step,
            "tensors": dict(_tensors(self._state)),
            "generator": None if self.generator is None else self.generator.get_state(),
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; the model's parameters become its mean."""
        saved = state_dict.get("slangvi")
        if saved is None:
            raise ValueError("state_dict has no 'slangvi' entry: it was not written by a slangvi optimizer.")
        self._check_saved(saved)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        like = self._state.loc
        tensors = {name: value.detach().to(like.device, copy=True) for name, value in saved["tensors"].items()}
        self._state = replace(self._state, step=int(saved["step"]), **tensors)  # type: ignore[type-var]
        self._prior_values = []
        if self.generator is not None and saved["generator"] is not None:
            self.generator.set_state(saved["generator"].cpu())
        self.discard_gradients()
        self._write(self._state.loc)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles carry the model along: an optimizer without its module could not read gradients.
        groups = [{**g, "params": [self._name_of[id(p)] for p in g["params"]]} for g in self.param_groups]
        keep = {k: v for k, v in self.__dict__.items() if k in ("generator", "rank")}
        return _restore, (
            type(self),
            self.model,
            groups,
            self.defaults,
            asdict(self.settings),
            keep,
            self.state_dict(),
        )

    # ---- inside

    def _rebuild(self, old: StateT | None) -> None:
        """Lay out all groups' parameters; keep what an earlier, shorter state holds."""
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        self._spec = ParamSpec.of_module(self.model, params)
        self._named = dict(zip(self._spec.names, params, strict=True))
        self._name_of = {id(p): name for name, p in self._named.items()}
        if len({p.device for p in params}) > 1:
            raise ValueError(
                "all parameters must be on one device, got " + str(sorted({str(p.device) for p in params}))
            )
        like = torch.empty(0, dtype=_state_dtype(params), device=params[0].device)
        fresh = self._begin(self._named, self._per_parameter("init_precision", like))
        if old is not None:
            size = old.spec.num_params
            for name, value in _tensors(old):
                getattr(fresh, name)[..., :size] = value
            fresh = replace(fresh, step=old.step)  # type: ignore[type-var]
        self._state = fresh
        self._prior_values = []
        self._prior()
        self._capture = GradientCapture(
            self.model, self._spec, fresh.loc.dtype, self.settings.engine, self.settings.verify
        )
        self._remember()

    def _check_group(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if not param.requires_grad:
                raise ValueError(
                    "params holds a tensor with requires_grad=False. Leave frozen parameters out, or unfreeze it."
                )
        free = group["precision_lr"] is not None
        try:
            _checks.rate("lr", group["lr"], float("inf") if free else 1.0)
        except ValueError as error:
            hint = (
                "" if free else " precision_lr follows lr, so lr may not exceed 1; give precision_lr to separate them."
            )
            raise ValueError(f"{error}{hint}") from None
        if free:
            _checks.rate("precision_lr", group["precision_lr"], 1.0)
        _checks.number("momentum", group["momentum"], 0.0, 1.0, closed="low")

    def _check_saved(self, saved: dict[str, Any]) -> None:
        if saved["method"] != type(self).__name__:
            raise ValueError(f"state_dict is of method {saved['method']!r}, this optimizer is {type(self).__name__!r}.")
        mine = list(zip(self._spec.names, map(list, self._spec.shapes), strict=True))
        theirs = list(zip(saved["names"], map(list, saved["shapes"]), strict=True))
        for ours, other in zip(mine, theirs, strict=False):
            if ours != other:
                raise ValueError(
                    f"state_dict does not fit the model: expected parameter {ours[0]!r} of shape {ours[1]}, "
                    f"found {other[0]!r} of shape {other[1]}."
                )
        if len(mine) != len(theirs):
            raise ValueError(f"state_dict has {len(theirs)} parameters, the optimizer has {len(mine)}.")
        for name, value in _tensors(self._state):
            other = saved["tensors"].get(name)
            if other is None or other.shape != value.shape or other.dtype != value.dtype:
                found = "nothing" if other is None else f"{tuple(other.shape)} {other.dtype}"
                raise ValueError(
                    f"state_dict[{name!r}] must be {tuple(value.shape)} {value.dtype}, found {found}. "
                    "Build the optimizer with the same rank and dtype."
                )

    def _write(self, flat: Tensor) -> None:
        """Put a flat vector into the model's parameters."""
        views = [flat[self._spec.slices[name]].view(param.shape) for name, param in self._named.items()]
        with torch.no_grad():
            torch._foreach_copy_(list(self._named.values()), views)
        self._remember()

    def _remember(self) -> None:
        """Note what the parameters look like, to see later whether somebody else wrote to them."""
        self._seen = [(p.data_ptr(), p._version) for p in self._named.values()]

    def _sync(self) -> None:
        """Take over parameters that were changed from outside: a loaded model, another device, a re-initialisation."""
        if self._sampling:
            raise RuntimeError("this needs the mean, but the weights are a sample. Leave sampled_params first.")
        now = [(p.data_ptr(), p._version) for p in self._named.values()]
        if now == self._seen:
            return
        device = next(iter(self._named.values())).device
        moved = {name: value.to(device) for name, value in _tensors(self._state)}
        loc = moved["loc"].clone()
        for (name, param), old, new in zip(self._named.items(), self._seen, now, strict=True):
            if old != new:
                part = loc[self._spec.slices[name]]
                # A half-precision copy of the mean is not news: keep the digits of the float32 one.
                if not torch.equal(part.to(param.dtype), param.detach().flatten()):
                    part.copy_(param.detach().flatten())
        self._state = replace(self._state, **(moved | {"loc": loc}))  # type: ignore[type-var]
        self._prior_values = []
        self._remember()

    def _checked_generator(self) -> torch.Generator | None:
        device = self._state.loc.device
        if self.generator is not None and self.generator.device.type != device.type:
            raise ValueError(
                f"generator is on {self.generator.device}, but the parameters are on {device}. "
                f"Use torch.Generator(device={device.type!r})."
            )
        return self.generator

    def _run(self, closure: Callable[[], Any]) -> list[Any]:
        losses = []
        for _ in range(self.settings.mc_samples):
            with torch.enable_grad(), self.sampled_params(train=True):
                losses.append(closure())
        seen = [loss for loss in losses if loss is not None]
        for loss in seen:
            if not bool(torch.isfinite(torch.as_tensor(loss)).all()):
                self.discard_gradients()
                raise NumericalError(
                    f"step {self._state.step + 1}: the loss is {float(loss)}. The state is unchanged. Look for NaN or "
                    "Inf in the inputs and targets, lower lr, or skip this batch."
                )
        return seen

    def _unscaled(self, group: RowGroup) -> RowGroup:
        """Gradients of each example's own loss, whatever the batch's loss was divided by."""
        if self.settings.loss_reduction == "sum":
            return group
        return group.scaled(float(group.num_rows * self.settings.accumulation_steps))

    def _unamplified(self, group: RowGroup) -> RowGroup:
        """Undo GradScaler's factor."""
        scale = getattr(self, "grad_scale", None)
        return group if scale is None else group.scaled(1.0 / float(scale))

    def _overflowed(self) -> bool:
        """Whether GradScaler found Inf, in which case the step is skipped as for every torch optimizer."""
        if hasattr(self, "grad_scale") and self.grad_scale is None:
            raise RuntimeError(
                "scaler.unscale_(opt) divides p.grad only, not the per-example gradients. Call scaler.step(opt) without it."
            )
        return bool(getattr(self, "found_inf", 0.0))

    def _log_likelihood(self, losses: list[Any], gradients: GradientOperator) -> float:
        mean = float(sum(losses)) / len(losses) * self.settings.accumulation_steps
        if self.settings.loss_reduction == "sum":
            mean = float(sum(losses)) / gradients.num_rows
        return -self.settings.num_data * mean

    def _group_values(self, key: str) -> list[Any]:
        """The group's value, once for every parameter tensor."""
        return [group[key] for group in self.param_groups for _ in group["params"]]

    def _rate(self, key: str) -> Rate:
        high = 1.0 if key == "precision_lr" or None in self._group_values("precision_lr") else float("inf")
        hint = "A scheduler may lower it to 0; give precision_lr if lr must exceed 1."
        values = [_checks.number(key, v, 0.0, high, "low high", hint) for v in self._group_values(key)]
        return Rate.of(values, self._spec, self._state.loc)

    def _precision_rate(self) -> Rate | None:
        own, tied = self._group_values("precision_lr"), self._group_values("lr")
        if all(value is None for value in own):
            return None
        values = [float(t if v is None else v) for v, t in zip(own, tied, strict=True)]
        return Rate.of(
            [_checks.number("precision_lr", v, 0.0, 1.0, "low high") for v in values],
            self._spec,
            self._state.loc,
        )

    def _momentum(self) -> float | Tensor:
        values = [_checks.number("momentum", v, 0.0, 1.0, "low") for v in self._group_values("momentum")]
        return Rate.of(values, self._spec, self._state.loc).value

    def _prior(self) -> Prior:
        """λ and μ₀ as flat vectors, made again when a group's entry was replaced."""
        values = [group[key] for group in self.param_groups for key in ("prior_precision", "prior_mean")]
        known = self._prior_values
        if len(known) != len(values) or not all(
            a is b or _same_number(a, b) for a, b in zip(known, values, strict=True)
        ):
            like = self._state.loc
            self._flat_prior = Prior(
                self._per_parameter("prior_precision", like),
                self._per_parameter("prior_mean", like, positive=False),
            )
            self._prior_values = values
        return self._flat_prior

    def _per_parameter(self, key: str, like: Tensor, positive: bool = True) -> Tensor:
        parts = []
        for group in self.param_groups:
            names = [self._name_of[id(p)] for p in group["params"]]
            inner = ParamSpec(tuple(names), tuple(self._named[n].shape for n in names))
            value = group[key]
            if isinstance(value, Tensor) and value.shape == (self._spec.num_params,):
                value = torch.cat([value[self._spec.slices[n]] for n in names])
            parts.append(_checks.per_parameter(key, value, inner, like, positive, known=self._spec))
        return torch.cat(parts)


def _state_dtype(params: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(p.dtype is torch.float64 for p in params) else torch.float32


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensor fields of a state."""
    for item in fields(state):
        value = getattr(state, item.name)
        if isinstance(value, Tensor):
            yield item.name, value


def _same_number(a: Any, b: Any) -> bool:
    return isinstance(a, float | int) and isinstance(b, float | int) and a == b


def _mean(losses: list[Any]) -> Any:
    return sum(losses) / len(losses) if losses else None


def _restore(
    kind: type[VariationalOptimizer[Any, Any]],
    model: nn.Module,
    groups: list[dict[str, Any]],
    defaults: dict[str, Any],
    settings: dict[str, Any],
    extra: dict[str, Any],
    state: dict[str, Any],
) -> VariationalOptimizer[Any, Any]:
    """Build a copied or unpickled optimizer anew on its model."""
    named = dict(model.named_parameters())
    opt = kind.__new__(kind)
    opt.__dict__.update(extra)
    groups = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
    VariationalOptimizer.__init__(opt, model, groups, defaults, Settings(**settings), extra["generator"])
    opt.load_state_dict(state)
    return opt
