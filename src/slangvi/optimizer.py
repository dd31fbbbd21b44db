"""A torch optimizer whose weights are a distribution: what every method's optimizer shares."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

from slangvi import _checks
from slangvi._bad_batches import BadBatches
from slangvi._flat import FlatState, Mirror, check_packed, pack, state_dtype, tensors_of
from slangvi._groups import GroupValues, check_group
from slangvi._hooks import called, held
from slangvi._out_of_memory import out_of_memory_advice
from slangvi._settings import Settings
from slangvi._steps import ELBO, Prior
from slangvi.errors import DivergenceError, NumericalError, UnsupportedModuleError
from slangvi.grads import GradientCapture, RowGroup
from slangvi.grads.assemble import outside_frames
from slangvi.types import Params, ParamSpec, uncompiled

__all__ = ["Settings", "VariationalOptimizer"]


StateT = TypeVar("StateT", bound=FlatState)
InfoT = TypeVar("InfoT")


class VariationalOptimizer(Optimizer, ABC, Generic[StateT, InfoT]):
    """Base of the methods' optimizers: draws weights, collects gradients, takes transactional steps.

    The state is one flat vector per quantity, in float32 (float64 if a parameter is), whatever the model computes in.
    The model's parameters hold the mean except inside `sampled_params`.
    """

    _state: StateT
    _hyper: GroupValues
    _kept: tuple[str, ...] = ("generator",)  # attributes that copies take along, besides groups and settings

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
        self.model = model = uncompiled(model)
        self.settings = settings
        self.generator = generator
        self.info: InfoT | None = None
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}.")
        if getattr(model, "batch_first", None) is False:
            raise UnsupportedModuleError(
                f"{type(model).__name__} has batch_first=False, but examples must be the first dimension of the "
                "model's input and output. Build it with batch_first=True."
            )
        self._ready = self._warned = self._warned_of_loss = False
        self._rows: list[RowGroup] = []
        self._sampling = False
        self._begun: AbstractContextManager[None] | None = None
        # Wrappers that pass for their optimizer, as Lightning's do, run its methods as their own.
        self._itself = weakref.ref(self)
        self._bad = BadBatches()
        if isinstance(params, Tensor):
            raise TypeError(
                "params must be an iterable of parameters or groups, got a single tensor. Put it in a list."
            )
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        if not chosen:
            raise ValueError(
                "there is nothing to infer: the model has no trainable parameters. Set requires_grad_(True) on some."
            )
        super().__init__(chosen, defaults)
        self._rebuild(None)
        self._ready = True

    # ---- what a method supplies

    @abstractmethod
    def _begin(self, params: Params, hyper: GroupValues) -> StateT:
        """The state before the first step."""

    @abstractmethod
    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientCapture:
        """What reads gradients off the user's own backward."""

    @abstractmethod
    def _draw(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        """One draw of the weights, (P,)."""

    @abstractmethod
    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        """The method's pure update from what was collected since the last step."""

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
        return own._posterior(own._state)

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
        if own._begun is None and own._sampling and own._capture.active:
            return
        own.eval()
        block = own._block(train=True)
        block.__enter__()
        own._begun = block

    def eval(self) -> None:
        """End the block that `train()` began: its gradients are kept for `step()`, and the weights are the mean."""
        own = self._own()
        block, own._begun = own._begun, None
        if block is not None:
            with torch.enable_grad():  # modules may have to be called again
                block.__exit__(None, None, None)

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
                with out_of_memory_advice("in sampled_params", self._state, self._rows), self._recorded():
                    yield
                advice = out_of_memory_advice("while gradients were collected", self._state, self._rows)
                with advice, self._exact():
                    groups = self._collected()
                self._rows += [self._unscaled(group) for group in groups]
            else:
                yield
        finally:
            self._sampling = False
            self._write_mean()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients collected since the last one.

        Args:
            closure: computes the loss and calls backward; it is run `mc_samples` times, each at its own draw.

        Returns:
            The mean of the closure's losses, or None. A step that fails leaves state and weights as they were. With
            `max_bad_batches` a batch with NaN or Inf is passed over, and the loss of its closure is NaN.
        """
        self.eval()
        if self._sampling:
            raise RuntimeError("step() was called inside sampled_params. Leave the block first.")
        try:
            losses = self._run(closure) if closure is not None else []
            rows, self._rows = self._rows, []
            self._capture.forget_inputs()
            scale, skip = self._amplification()
            if not skip:
                self._take([row.scaled(1.0 / scale) for row in rows], losses)
        except BaseException as error:
            # GradScaler takes these away only after a step that went well.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            if not isinstance(error, NumericalError) or isinstance(error, DivergenceError):
                raise
            self._pass_over(error)
            return None if closure is None else math.nan
        return _mean(losses)

    @property
    def num_skipped(self) -> int:
        """Batches with NaN or Inf that were passed over, see `max_bad_batches`."""
        return self._bad.total

    def _pass_over(self, error: NumericalError) -> None:
        """Go on without the batch that failed, unless there were too many."""
        self._bad.met(error, self.settings.max_bad_batches)
        self.discard_gradients()
        if self.info is not None:
            self.info = replace(self.info, skipped=self.num_skipped)  # type: ignore[type-var]

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Forward and backward inside the block are written down."""
        with self._capture.recording():
            yield

    def _collected(self) -> list[RowGroup]:
        """Rows of the passes of the last block."""
        return self._capture.collect(self._mirror.named)

    def _take(self, rows: list[RowGroup], losses: list[Any]) -> None:
        """The step itself: state and weights change together, at the end."""
        if not rows:
            raise RuntimeError(
                "step() found no gradients. Run loss.backward() inside `with opt.sampled_params(train=True):`, call "
                "opt.train() before forward, or pass a closure that does forward and backward."
            )
        self._sync()
        self._warn_of_small_data(rows)
        self._warn_of_lost_gradients()
        with out_of_memory_advice("in the update", self._state, rows), self._exact():
            state, info = self._advance_rows(rows)
            self._examine(state)
        if losses:
            fit = self._log_likelihood(losses, sum(group.num_rows for group in rows))
            info = replace(info, expected_log_likelihood=fit)  # type: ignore[type-var]
        self._bad.in_a_row = 0
        if self.num_skipped:
            info = replace(info, skipped=self.num_skipped)  # type: ignore[type-var]
        self._state, self.info = state, info
        self._write_mean()

    def _examine(self, after: StateT) -> None:
        """Look at a state that is about to be taken over; raises to refuse it."""

    def _write_draw(self, generator: torch.Generator | None) -> None:
        """One draw into the model's parameters."""
        self._mirror.write(self._draw(self._state, generator))
        # Inside one autocast block torch would go on with its half-precision copy of the draw before.
        torch.clear_autocast_cache()

    def _write_mean(self) -> None:
        """The mean into the model's parameters."""
        self._mirror.write(self._state.loc)
        torch.clear_autocast_cache()

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were collected since the last step; a `state_dict` does not hold them."""
        return bool(self._rows)

    def discard_gradients(self) -> None:
        """Forget gradients collected since the last step, e.g. after skipping a batch half way."""
        own = self._own()
        own.eval()
        own._rows = []
        own._capture.forget_inputs()

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
                losses.append(float(self._loss_alone(closure)))
        scale = self.settings.num_data if self.settings.loss_reduction == "mean" else 1
        return ELBO(-scale * sum(losses) / draws, self.kl())

    @staticmethod
    def _loss_alone(closure: Callable[[], Any]) -> Any:
        """The loss, or an error that says what torch's own does not: the closure of `step` is another one."""
        try:
            return closure()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise RuntimeError(
                "elbo(closure): the closure must return the loss without calling backward(); the one of "
                "step(closure) calls it. Pass a function that computes the loss alone."
            ) from error

    def kl(self) -> float:
        """KL(q ‖ prior), in closed form."""
        own = self._own()
        own._sync()
        with own._exact():
            return own._kl(own._state, own._hyper.prior())

    # ---- torch.optim's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; their posterior starts at their values with `init_precision`."""
        if self._ready:
            self._sync()
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            if self._ready:
                self._rebuild(self._state)
                self.discard_gradients()
        except BaseException:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients collected for the next step stay, see `discard_gradients`."""
        self._own()._capture.unheard.clear()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact resume needs: flat tensors, step, layout, groups, and the generator's state."""
        self._sync()
        with held(self, "_optimizer_state_dict_post_hooks") as after:
            packed = super().state_dict()
        packed["slangvi"] = pack(type(self).__name__, self._state, self.generator, self.settings.num_data)
        packed["slangvi"]["bad_batches"] = [self._bad.in_a_row, self._bad.total]
        return called(after, self, packed)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; the model's parameters become its mean."""
        kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        with held(self, kinds[0]) as before, held(self, kinds[1]) as after:
            self._take_over(called(before, self, state_dict.copy()))
        for hook in after:
            hook(self)

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        saved: dict[str, Any] = state_dict.get("slangvi")  # type: ignore[assignment]
        check_packed(saved, type(self).__name__, self._state)
        if saved["num_data"] != self.settings.num_data:
            warnings.warn(
                f"state_dict was made with num_data={saved['num_data']}, this optimizer has "
                f"num_data={self.settings.num_data}; the posterior will change width.",
                UserWarning,
                stacklevel=outside_frames(),
            )
        random = self._random_state(saved["generator"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if self.generator is not None and random is not None:
            self.generator.set_state(random)
        like = self._state.loc
        tensors = {name: value.detach().to(like.device, copy=True) for name, value in saved["tensors"].items()}
        self._state = replace(self._state, step=int(saved["step"]), **tensors)  # type: ignore[type-var]
        self._bad = BadBatches(*saved.get("bad_batches", (0, 0)))
        self._hyper = GroupValues(self.param_groups, self._spec, self._name_of, like)
        self.discard_gradients()
        self._mirror.write(self._state.loc)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles carry the model along: an optimizer without its module could not read gradients.
        groups = [{**g, "params": [self._name_of[id(p)] for p in g["params"]]} for g in self.param_groups]
        keep = {k: v for k, v in self.__dict__.items() if k in self._kept}
        return _restore, (
            type(self),
            self.model,
            groups,
            self.defaults,
            {item.name: getattr(self.settings, item.name) for item in fields(self.settings)},
            keep,
            self.state_dict(),
        )

    # ---- inside

    def _own(self) -> VariationalOptimizer[StateT, InfoT]:
        """The optimizer itself, when this is a wrapper that passes for it."""
        found = self._itself()
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
        self._capture = self._listener(spec, fresh.loc.dtype)

    def _sync(self) -> None:
        """Take over parameters that were changed from outside: a loaded model, another device, a re-initialisation."""
        if self._sampling:
            leave = "Leave sampled_params" if self._begun is None else "Call opt.eval()"
            raise RuntimeError(f"this needs the mean, but the weights are a sample. {leave} first.")
        # Contents are compared once after every step: it makes a GPU wait.
        if self._mirror.changed(self._state.loc, contents=not self._rows):
            moved = {name: value.to(self._mirror.device) for name, value in tensors_of(self._state)}
            moved["loc"] = self._mirror.read(moved["loc"])
            self._state = replace(self._state, **moved)  # type: ignore[type-var]
            self._hyper = GroupValues(self.param_groups, self._spec, self._name_of, moved["loc"])

    def _random_state(self, saved: Tensor | None) -> Tensor | None:
        """A saved state of the generator, seen to be one before anything is changed."""
        if saved is None:
            return None
        if self.generator is None:
            warnings.warn(
                "state_dict holds the state of a generator, and this optimizer has none: its draws will be others. "
                "Build it with generator=torch.Generator() to go on with the same draws.",
                UserWarning,
                stacklevel=outside_frames(),
            )
            return None
        try:
            torch.Generator(self.generator.device).set_state(saved.cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"state_dict['generator'] is no state of a generator on {self.generator.device}: {error}"
            ) from error
        return saved.cpu()

    def _checked_generator(self) -> torch.Generator | None:
        device = self._state.loc.device
        if self.generator is not None and self.generator.device.type != device.type:
            raise ValueError(
                f"generator is on {self.generator.device}, but the parameters are on {device}. "
                f"Use torch.Generator(device={device.type!r})."
            )
        return self.generator

    def _run(self, closure: Callable[[], Any]) -> list[Any]:
        before, losses = list(self._rows), []
        try:
            for _ in range(self.settings.mc_samples):
                with torch.enable_grad(), self.sampled_params(train=True):
                    losses.append(closure())
            seen = [loss for loss in losses if loss is not None]
            for loss in seen:
                self._check_loss(loss)
        except BaseException:
            self._rows = before
            raise
        return seen

    def _check_loss(self, loss: Any) -> None:
        if not bool(torch.isfinite(torch.as_tensor(loss)).all()):
            raise NumericalError(
                f"step {self._state.step + 1}: the loss is {float(loss)}. The state is unchanged. Look for NaN or "
                "Inf in the inputs and targets, lower lr, or skip this batch."
            )

    def _unscaled(self, group: RowGroup) -> RowGroup:
        """Gradients of each example's own loss, whatever the batch's loss was divided by."""
        if self.settings.loss_reduction == "sum":
            return group
        return group.scaled(float(group.num_rows * self.settings.accumulation_steps))

    def _amplification(self) -> tuple[float, bool]:
        """GradScaler's factor, and whether it found Inf, in which case a step is skipped as by every optimizer."""
        given = self.__dict__.get("grad_scale", 1.0)
        if given is None:
            raise RuntimeError(
                "scaler.unscale_(opt) divides p.grad only, not the per-example gradients. "
                "Call scaler.step(opt) without it (max_grad_norm=0 in Hugging Face's Trainer)."
            )
        return float(given), bool(self.__dict__.get("found_inf", 0.0))

    def _exact(self) -> AbstractContextManager[Any]:
        """Full precision for the state's own arithmetic, whatever autocast the caller is in."""
        kind = self._mirror.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _warn_of_small_data(self, rows: list[RowGroup]) -> None:
        largest = max(group.num_rows for group in rows)
        if largest > self.settings.num_data and not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {largest} examples is larger than num_data={self.settings.num_data}. num_data is the size "
                "of the training set; the posterior is as wide as it says.",
                UserWarning,
                stacklevel=outside_frames(),
            )

    def _warn_of_lost_gradients(self) -> None:
        lost = len(self._capture.unheard)
        self._capture.unheard.clear()
        if lost and not self._warned_of_loss:
            self._warned_of_loss = True
            warnings.warn(
                "backward() ran outside sampled_params since the last step. Those gradients are not those "
                "of a draw, and the step goes without them. Run every micro-batch inside "
                "`with opt.sampled_params(train=True):` or after opt.train(); opt.zero_grad() says that they were not "
                "meant for the step.",
                UserWarning,
                stacklevel=outside_frames(),
            )

    def _log_likelihood(self, losses: list[Any], num_rows: int) -> float:
        mean = float(sum(losses)) / len(losses) * self.settings.accumulation_steps
        if self.settings.loss_reduction == "sum":
            mean = float(sum(losses)) / num_rows
        return -self.settings.num_data * mean


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
