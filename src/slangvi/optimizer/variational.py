"""A torch optimizer whose weights are a distribution: draws, gradients at draws, steps, and the state behind them."""

from __future__ import annotations

import atexit
import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache
from itertools import chain
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

from slangvi import checks
from slangvi.errors import DivergenceError, NumericalError, UnsupportedModuleError, user_stacklevel
from slangvi.keywords import document_fields
from slangvi.optimizer.groups import JOINED, GroupValues, check_group
from slangvi.optimizer.saving import (
    call_hooks,
    hold_hooks,
    require_same_prior,
    restored_random_state,
    warn_of_other_data,
    warn_of_other_ways,
)
from slangvi.out_of_memory import out_of_memory_advice
from slangvi.params import Params, ParamSpec
from slangvi.params.mirror import Mirror
from slangvi.params.spec import uncompiled
from slangvi.params.state import FlatState, check_packed, pack, state_dtype, tensors_of
from slangvi.priors import ELBO, Prior
from slangvi.rows import GradientRecorder, RowGroup
from slangvi.settings import OptimizerSettings

__all__ = ["InfoT", "Inspection", "StateT", "VariationalOptimizer"]

StateT = TypeVar("StateT", bound=FlatState)
InfoT = TypeVar("InfoT")
# Settings that decide which steps are taken.
WAYS = ("curvature", "projection", "curvature_rows")
# Optimizers in a block that `train()` began.
_BEGUN: weakref.WeakSet[Any] = weakref.WeakSet()


class Inspection(NamedTuple):
    """A run as it is, for one who looks at it, see `VariationalOptimizer.inspect`.

    Args:
        optimizer: the optimizer itself, where a wrapper was asked.
        name: of its class.
        state: before the next step.
        prior: λ and μ₀.
        init_precision: d at the start, (P,); None where the method has none.
        exceeds_num_data: whether a batch was larger than N.
        write: puts weights, (P,), into the model.
    """

    optimizer: Any
    name: str
    state: Any
    prior: Prior
    init_precision: Tensor | None
    exceeds_num_data: bool
    write: Callable[[Tensor], None]


class VariationalOptimizer(Optimizer, ABC, Generic[StateT, InfoT]):
    """Base of the methods' optimizers: draws weights, collects gradients, takes transactional steps.

    The state is one flat vector per quantity, in float32 (float64 if a parameter is), whatever the model computes in.
    The model's parameters hold the mean except inside `sampled_params`.
    """

    settings: OptimizerSettings
    info: InfoT | None  # what the last step could tell
    _state: StateT
    _hyper: GroupValues
    _rows: list[RowGroup]  # collected since the last step

    # GradScaler then hands over its scale instead of touching p.grad, which holds no per-example gradients.
    _step_supports_amp_scaling = True

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
        self._sampling = False
        self._begun: AbstractContextManager[None] | None = None
        self._bad_in_a_row = self._bad_in_all = 0  # batches with NaN or Inf that were passed over
        self._warned: set[str] = set()
        self.info = None  # of the object: wrappers ask their own class before the optimizer
        # Wrappers that pass for their optimizer, as Lightning's do, run its methods as their own.
        self._itself: Callable[[], Any] = weakref.ref(self)
        super().__init__(_chosen(self.model, settings.params), settings.group_defaults())
        self._rebuild(None)
        self._ready = True

    # ---- what a method supplies

    @abstractmethod
    def _begin(self, params: Params, hyper: GroupValues) -> StateT:
        """Return the state before the first step."""

    def _with_learnt(self, fresh: StateT, hyper: GroupValues) -> StateT:
        """Return that state with the numbers of noise and prior that the run is to learn, if its method can."""
        hyper.prior()  # checks it
        return fresh

    @abstractmethod
    def _listener(self, spec: ParamSpec, dtype: torch.dtype) -> GradientRecorder:
        """Return what reads gradients off the user's own backward."""

    @abstractmethod
    def _draw(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        """Return one draw of the weights, (P,)."""

    def _draw_to_learn(self, state: StateT, generator: torch.Generator | None) -> Tensor:
        """Return one draw of the weights that gradients will be taken at, (P,)."""
        return self._draw(state, generator)

    @abstractmethod
    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        """Return the state after a step from the rows collected since the last one, and what is known about it."""

    @abstractmethod
    def _posterior(self, state: StateT) -> Distribution:
        """Return q as a distribution."""

    def _prior(self) -> Prior:
        """Return the prior of the next step."""
        return self._hyper.prior()

    @abstractmethod
    def _kl(self, state: StateT, prior: Prior) -> float:
        """Return KL(q ‖ prior)."""

    # ---- draws and gradients at them

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
        """Tell whether gradients were collected since the last step; a `state_dict` does not hold them."""
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear p.grad; gradients collected for the next step stay, see `discard_gradients`."""
        self._own()._recorder.unrecorded.clear()
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:  # as torch does, without its wrappers, which take several times as long
            for param in group["params"]:
                param.grad = None

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
            draw = self._draw_to_learn if train else self._draw
            self._write(draw(self._state, self._checked_generator()))
        self._sampling, doing = True, "in sampled_params"
        try:
            if not train:
                yield
                return
            with self._recorder.recording():
                yield
            doing = "while gradients were collected"
            with self._exact():
                groups = self._collected()
            # Gradients of each example's own loss, whatever the batch's loss was divided by.
            is_mean, divisor = self.settings.loss_reduction == "mean", float(self.settings.accumulation_steps)
            self._rows += [group.scaled(divisor * group.num_rows if is_mean else divisor) for group in groups]
        except (RuntimeError, MemoryError):
            if not train:
                raise
            with out_of_memory_advice(doing, self._state, self._rows):
                raise
        finally:
            self._sampling = False
            self._write(self._state.loc)

    def _collected(self) -> list[RowGroup]:
        """Rows of the passes of the last block."""
        return self._recorder.collect()

    def _write(self, flat: Tensor) -> None:
        """Put a draw or the mean into the model's parameters."""
        self._mirror.write(flat)
        # Inside one autocast block torch would go on with its half-precision copy of what was there before.
        torch.clear_autocast_cache()

    def _checked_generator(self) -> torch.Generator | None:
        device = self._state.loc.device
        if self.generator is not None and self.generator.device.type != device.type:
            raise ValueError(
                f"generator is on {self.generator.device}, but the parameters are on {device}. "
                f"Use torch.Generator(device={device.type!r})."
            )
        return self.generator

    # ---- steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients collected since the last one.

        Args:
            closure: computes the loss and calls backward; it is run `mc_samples` times, each at its own draw. One that
                returns None without backward leaves the batch out, and nothing is done.

        Returns:
            The mean of the closure's losses, or None. A step that fails leaves state and weights as they were. With
            `max_bad_batches` a batch with NaN or Inf is passed over, and the loss of its closure is NaN.
        """
        try:
            self.eval()
            if self._sampling:
                raise RuntimeError("step() was called inside sampled_params. Leave the block first.")
            earlier = len(self._rows)
            losses = self._run(closure) if closure is not None else []
            rows, self._rows = self._rows, []
            self._recorder.forget_data()
            if closure is not None and not (rows or losses or self._recorder.unrecorded):
                return None  # a batch left out on purpose: Lightning's closures then do nothing
            scale, skip = _amplification(self.__dict__, self._recorder.own_pass is not None)
            if not skip:
                if self._recorder.own_pass is not None:
                    rows = self._recorder.with_changed_gradient(rows, self.__dict__.get("grad_scale", 1.0) is None)
                self._take([row.scaled(1.0 / scale) for row in rows], losses, earlier)
        except BaseException as error:
            try:
                if not isinstance(error, NumericalError) or isinstance(error, DivergenceError):
                    raise
                self._pass_over(error)
            except BaseException:
                # GradScaler takes these away itself after a step, but not after an error.
                self.__dict__.pop("grad_scale", None)
                self.__dict__.pop("found_inf", None)
                raise
            return None if closure is None else math.nan
        return sum(losses) / len(losses) if losses else None

    @property
    def num_skipped(self) -> int:
        """Batches with NaN or Inf that were passed over, see `max_bad_batches`."""
        return self._bad_in_all

    def _run(self, closure: Callable[[], Any]) -> list[Any]:
        """The closure at each draw; gradients of all of them are kept, or of none."""
        before, losses = list(self._rows), []
        try:
            for _ in range(self.settings.mc_samples):
                with torch.enable_grad(), self.sampled_params(train=True):
                    losses.append(closure())
            seen = [loss for loss in losses if loss is not None]
            for loss in seen:
                _require_finite_loss(loss, self._state.step + 1)
        except BaseException:
            self._rows = before
            raise
        return seen

    def _take(self, rows: list[RowGroup], losses: list[Any], earlier: int) -> None:
        """The step itself: state and weights change together, at the end.

        Args:
            rows: one group for each backward pass.
            losses: of the closure.
            earlier: how many groups are of passes before the closure, whose losses are not known.
        """
        if not rows:
            raise RuntimeError(
                "step() found no gradients. Run loss.backward() inside `with opt.sampled_params(train=True):`, call "
                "opt.train() before forward, or pass a closure that does forward and backward."
            )
        self._sync(contents=False)  # the numbers were compared when the weights were drawn
        largest = max(group.num_rows for group in rows)
        if largest > self.settings.num_data or self._recorder.unrecorded:
            self._warn_of_input(largest)
        try:
            with self._exact():
                state, info = self._advance_rows(rows)
        except (RuntimeError, MemoryError):
            with out_of_memory_advice("in the update", self._state, rows):
                raise
        if losses:
            fit = _expected_log_likelihood(losses, sum(group.num_rows for group in rows[earlier:]), self.settings)
            info = replace(info, expected_log_likelihood=fit)  # type: ignore[type-var]
        self._bad_in_a_row = 0
        if self._bad_in_all:
            info = replace(info, skipped=self._bad_in_all)  # type: ignore[type-var]
        self._state, self.info, self._handed_out = state, info, False
        self._write(self._state.loc)

    def _pass_over(self, error: NumericalError) -> None:
        """Go on without the batch that failed, unless there were too many in a row."""
        self._bad_in_a_row += 1
        allowed = self.settings.max_bad_batches
        if not allowed:
            raise error
        if self._bad_in_a_row > allowed:
            raise NumericalError(
                f"{error} It is bad batch number {self._bad_in_a_row} in a row, and max_bad_batches={allowed} allows "
                f"for {allowed}."
            ) from error
        self._bad_in_all += 1
        self.discard_gradients()
        if self.info is not None:
            self.info = replace(self.info, skipped=self.num_skipped)  # type: ignore[type-var]

    def _warn_of_input(self, largest: int) -> None:
        """Warn, once each, of a batch larger than the training set, and of backward passes outside blocks."""
        num_data, lost = self.settings.num_data, len(self._recorder.unrecorded)
        self._recorder.unrecorded.clear()
        if largest > num_data and "small data" not in self._warned:
            self._warned.add("small data")
            warnings.warn(
                f"a batch of {largest} examples is larger than num_data={num_data}. num_data is the size "
                "of the training set; the posterior is as wide as it says.",
                UserWarning,
                stacklevel=user_stacklevel(),
            )
        if lost and "lost gradients" not in self._warned:
            self._warned.add("lost gradients")
            warnings.warn(
                "backward() ran outside sampled_params since the last step. Those gradients are not those "
                "of a draw, and the step goes without them. Run every micro-batch inside "
                "`with opt.sampled_params(train=True):` or after opt.train(); opt.zero_grad() says that they were not "
                "meant for the step.",
                UserWarning,
                stacklevel=user_stacklevel(),
            )

    # ---- the posterior

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
            return own._kl(own._state, own._prior())

    def elbo(self, closure: Callable[[], Any], mc_samples: int | None = None) -> ELBO:
        """Expected log-likelihood and KL, apart.

        Args:
            closure: returns the loss on the data at the current weights, without backward: its mean over examples
                for `loss_reduction="mean"`, its sum over the whole training set for "sum".
            mc_samples: draws to average over; None takes the optimizer's.
        """
        draws = checks.count("mc_samples", self.settings.mc_samples if mc_samples is None else mc_samples)
        losses = []
        for _ in range(draws):
            with self.sampled_params(), torch.no_grad():
                losses.append(float(_loss_alone(closure)))
        scale = self.settings.num_data if self.settings.loss_reduction == "mean" else 1
        return ELBO(-scale * sum(losses) / draws, self.kl())

    @contextmanager
    def inspect(self) -> Iterator[Inspection]:
        """Yield the run as it is, until the block ends; other weights may be tried in it, and p.grad is None at first.

        After the block the weights are the mean, and gradients are as they were: later steps do not change.
        """
        own = self._own()
        own._sync()
        hyper, unrecorded = own._hyper, set(own._recorder.unrecorded)
        begun = hyper.per_parameter("init_precision") if "init_precision" in own.param_groups[0] else None
        warned = "small data" in own._warned
        grads = [(param, param.grad) for param in own.model.parameters()]
        try:
            for param, _ in grads:
                param.grad = None
            yield Inspection(own, type(own).__name__, own._state, own._prior(), begun, warned, own._write)
        finally:
            own._write(own._state.loc)
            for param, grad in grads:
                param.grad = grad
            own._recorder.unrecorded.clear()
            own._recorder.unrecorded.update(unrecorded)

    # ---- saving, loading and copying

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact resume needs: flat tensors, step, layout, groups, and the generator's state."""
        if self._own() is not self:
            return self._own().state_dict()
        self._sync()
        with hold_hooks(self, "_optimizer_state_dict_post_hooks") as after:
            packed = super().state_dict()
        self._handed_out = True
        packed["slangvi"] = pack(type(self).__name__, self._state, self.generator, self.settings.num_data)
        packed["slangvi"]["prior"] = self._fingerprint
        packed["slangvi"]["learns"] = self._learns()
        packed["slangvi"]["ways"] = self._ways()
        packed["slangvi"]["bad_batches"] = [self._bad_in_a_row, self._bad_in_all]
        return call_hooks(after, self, packed)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; the model's parameters become its mean."""
        own = self._own()
        if own._sampling and own._begun is None:
            raise RuntimeError("load_state_dict() was called inside sampled_params. Leave the block first.")
        kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        with hold_hooks(own, kinds[0]) as before, hold_hooks(own, kinds[1]) as after:
            own._take_over(call_hooks(before, own, state_dict.copy()))
        for hook in after:
            hook(own)

    def _learns(self) -> list[Any] | None:
        """Return which prior precisions are learnt, for files; None for none."""
        return None

    def _ways(self) -> dict[str, str]:
        """Return settings that a run can go on without, but to other steps, for files."""
        return {name: str(getattr(self.settings, name)) for name in WAYS if hasattr(self.settings, name)}

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        saved: dict[str, Any] = state_dict.get("slangvi")  # type: ignore[assignment]
        check_packed(saved, type(self).__name__, self._state)
        require_same_prior(saved.get("prior"), self._fingerprint)
        if saved.get("learns", self._learns()) != self._learns():
            raise ValueError(
                "state_dict is of a run that learns prior precisions of other parameters. Build the optimizer with the "
                "same prior_precision."
            )
        warn_of_other_ways(saved.get("ways", {}), self._ways())
        warn_of_other_data(saved["num_data"], self.settings.num_data)
        random = restored_random_state(saved["generator"], self.generator)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if self.generator is not None and random is not None:
            self.generator.set_state(random)
        device = self._state.loc.device
        tensors = {name: value.detach().to(device, copy=True) for name, value in saved["tensors"].items()}
        self._replace(tensors, step=int(saved["step"]))
        self._bad_in_a_row, self._bad_in_all = saved.get("bad_batches", (0, 0))
        self.discard_gradients()
        self._write(self._state.loc)
        self.info = None  # what is known is of another run

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own() is not self:  # a copy of a wrapper is an optimizer
            return self._own().__reduce__()
        # Copies and pickles carry the model along: an optimizer without its module could not read gradients.
        groups = [{**g, "params": [self._name_of[id(p)] for p in g["params"]]} for g in self.param_groups]
        settings = {item.name: getattr(self.settings, item.name) for item in fields(self.settings)}
        others = {"generator": self.generator, "settings_class": type(self.settings)}
        return _restore, (type(self), self.model, groups, self.defaults, settings, others, self.state_dict())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; their posterior starts at their values with `init_precision`.

        Warm-up and corrections of averages count the steps of a group from when it was added.
        """
        if self._own() is not self:
            self._own().add_param_group(param_group)
            return
        if self.__dict__.get("_rows"):
            raise RuntimeError(
                "add_param_group was called between backward and step: the gradients collected so far know nothing of "
                "the new parameters. Call step() or discard_gradients() first."
            )
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
        hyper = GroupValues(self.param_groups, spec, name_of, like, getattr(self.settings, "prior", None))
        if hyper.posterior is not None:
            hyper.prior()  # whether it is of these parameters, before anything is made by it
        fresh = self._with_learnt(self._begin(mirror.named, hyper), hyper)
        if old is not None:
            for name, value in tensors_of(old):
                getattr(fresh, name)[tuple(slice(length) for length in value.shape)] = value
            fresh = replace(fresh, step=old.step)  # type: ignore[type-var]
        self._spec, self._mirror, self._name_of, self._hyper, self._state = spec, mirror, name_of, hyper, fresh
        self._recorder = self._listener(spec, fresh.loc.dtype)
        self._rows = []  # those of another layout are of no use

    def _sync(self, contents: bool = True) -> None:
        """Take over parameters that were changed from outside: a loaded model, another device, a re-initialisation.

        Args:
            contents: also compare the numbers, where that makes a GPU wait.
        """
        if self._sampling:
            leave = "Leave sampled_params" if self._begun is None else "Call opt.eval()"
            raise RuntimeError(f"this needs the mean, but the weights are a sample. {leave} first.")
        if self._mirror.changed(self._state.loc, contents and not self._rows):  # once after every step is enough
            moved = {name: value.to(self._mirror.device) for name, value in tensors_of(self._state)}
            moved["loc"] = self._mirror.read(moved["loc"])
            self._replace(moved)

    def _replace(self, tensors: dict[str, Tensor], **others: Any) -> None:
        """Put other tensors, perhaps on another device, into the state."""
        self._state = replace(self._state, **tensors, **others)  # type: ignore[type-var]
        given = getattr(self.settings, "prior", None)
        self._hyper = GroupValues(self.param_groups, self._spec, self._name_of, self._state.loc, given)

    @property
    def _fingerprint(self) -> str | None:
        """Digest of the posterior that is the prior, by which files know it; None where there is none."""
        return None if self._hyper.posterior is None else self._hyper.prior().fingerprint

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


def _amplification(attributes: Mapping[str, Any], follows_grad: bool) -> tuple[float, bool]:
    """GradScaler's factor, and whether it found Inf, in which case a step is skipped as by every optimizer.

    Args:
        attributes: of the optimizer, on which GradScaler leaves them for the time of a step.
        follows_grad: whether what was done to p.grad acts on the step.
    """
    given = attributes.get("grad_scale", 1.0)
    if given is None and follows_grad:
        given = 1.0
    if given is None:
        raise RuntimeError(
            "scaler.unscale_(opt) divides p.grad only, not the per-example gradients. "
            "Call scaler.step(opt) without it (max_grad_norm=0 in Hugging Face's Trainer)."
        )
    return float(given), bool(attributes.get("found_inf", 0.0))


def _require_finite_loss(loss: Any, step: int) -> None:
    """Raise `NumericalError` if a closure's loss is NaN or Inf.

    Args:
        loss: what the closure returned.
        step: number of the step, for the message.
    """
    seen = loss if isinstance(loss, Tensor) else torch.as_tensor(loss, device="cpu")
    if not bool(torch.isfinite(seen).all()):
        raise NumericalError(
            f"step {step}: the loss is {float(loss)}. The state is unchanged. Look for NaN or Inf in the inputs and "
            "targets, lower lr, or skip this batch."
        )


def _expected_log_likelihood(losses: list[Any], num_rows: int, settings: OptimizerSettings) -> float:
    """N times the mean log-likelihood of an example.

    Args:
        losses: of the closure, one for each draw.
        num_rows: examples at draws that the losses are of.
        settings: say what the losses were divided by.
    """
    count = len(losses) if settings.loss_reduction == "mean" else num_rows
    return -settings.num_data * settings.accumulation_steps * float(sum(losses)) / count


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


@cache
def _watch_the_end() -> None:
    """From the first block that has no end of its own."""
    atexit.register(_leave)


def _leave() -> None:
    """Put the mean back where a program ends inside a block: later, tensors are being taken apart, and torch aborts."""
    for opt in list(_BEGUN):
        opt._begun.gen.close()


def _restore(
    kind: type[VariationalOptimizer[Any, Any]],
    model: nn.Module,
    groups: list[dict[str, Any]],
    defaults: dict[str, Any],
    settings: dict[str, Any],
    others: dict[str, Any],
    state: dict[str, Any],
) -> VariationalOptimizer[Any, Any]:
    """Build a copied or unpickled optimizer anew on its model.

    Pickles of version 0.1 have some settings among the defaults and the others, and some that a method does not use.
    """
    named = dict(model.named_parameters())
    settings_class = others.get("settings_class") or kind.__init__.settings_class  # type: ignore[attr-defined]
    known = {item.name for item in fields(settings_class)}
    given = {name: value for name, value in {**defaults, **settings, **others}.items() if name in known}
    given["params"] = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
    opt = kind.__new__(kind)
    VariationalOptimizer.__init__(opt, model, settings_class(**given))
    opt.defaults.update(defaults)
    opt.load_state_dict(state)
    return opt


# Pickles name the place of this function, and outlive the order of files in here.
_restore.__module__ = "slangvi.optimizer"
