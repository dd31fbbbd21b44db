"""Steps: from the gradients collected at draws to the next state, whole or not at all."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from slangvi import checks
from slangvi.errors import DivergenceError, NumericalError
from slangvi.optimizer._inferred import StateT
from slangvi.optimizer._losses import amplification, expected_log_likelihood, loss_alone, mean_loss, require_finite_loss
from slangvi.optimizer._saving import Saving
from slangvi.out_of_memory import out_of_memory_advice
from slangvi.priors import ELBO
from slangvi.rows import RowGroup

__all__ = ["VariationalOptimizer"]

InfoT = TypeVar("InfoT")


class VariationalOptimizer(Saving[StateT], Generic[StateT, InfoT]):
    """Base of the methods' optimizers: draws weights, collects gradients, takes transactional steps.

    The state is one flat vector per quantity, in float32 (float64 if a parameter is), whatever the model computes in.
    The model's parameters hold the mean except inside `sampled_params`.
    """

    info: InfoT | None  # what the last step could tell

    # GradScaler then hands over its scale instead of touching p.grad, which holds no per-example gradients.
    _step_supports_amp_scaling = True

    def _prepare(self) -> None:
        super()._prepare()
        self.info = None  # of the object: wrappers ask their own class before the optimizer

    @abstractmethod
    def _advance_rows(self, rows: list[RowGroup]) -> tuple[StateT, InfoT]:
        """The method's pure update from what was collected since the last step."""

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
            scale, skip = amplification(self.__dict__)
            if not skip:
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
        return mean_loss(losses)

    @property
    def num_skipped(self) -> int:
        """Batches with NaN or Inf that were passed over, see `max_bad_batches`."""
        return self._bad.total

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
                losses.append(float(loss_alone(closure)))
        scale = self.settings.num_data if self.settings.loss_reduction == "mean" else 1
        return ELBO(-scale * sum(losses) / draws, self.kl())

    def _run(self, closure: Callable[[], Any]) -> list[Any]:
        """The closure at each draw; gradients of all of them are kept, or of none."""
        before, losses = list(self._rows), []
        try:
            for _ in range(self.settings.mc_samples):
                with torch.enable_grad(), self.sampled_params(train=True):
                    losses.append(closure())
            seen = [loss for loss in losses if loss is not None]
            for loss in seen:
                require_finite_loss(loss, self._state.step + 1)
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
        self._sync()
        self._warnings.of_small_data(rows, self.settings.num_data)
        self._warnings.of_lost_gradients(self._recorder.unrecorded)
        with out_of_memory_advice("in the update", self._state, rows), self._exact():
            state, info = self._advance_rows(rows)
        if losses:
            fit = expected_log_likelihood(losses, sum(group.num_rows for group in rows[earlier:]), self.settings)
            info = replace(info, expected_log_likelihood=fit)  # type: ignore[type-var]
        self._bad.in_a_row = 0
        if self.num_skipped:
            info = replace(info, skipped=self.num_skipped)  # type: ignore[type-var]
        self._state, self.info, self._handed_out = state, info, False
        self._write_mean()

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        super()._take_over(state_dict)
        self.info = None  # what is known is of another run

    def _pass_over(self, error: NumericalError) -> None:
        """Go on without the batch that failed, unless there were too many."""
        self._bad.met(error, self.settings.max_bad_batches)
        self.discard_gradients()
        if self.info is not None:
            self.info = replace(self.info, skipped=self.num_skipped)  # type: ignore[type-var]
