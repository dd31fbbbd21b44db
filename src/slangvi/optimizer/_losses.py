"""What losses and their scales say: how long a gradient is, whether it is one, how well the data are fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi.rows import RowGroup
from slangvi.settings import OptimizerSettings

__all__ = ["amplification", "expected_log_likelihood", "loss_alone", "mean_loss", "require_finite_loss", "unscaled"]


def unscaled(group: RowGroup, settings: OptimizerSettings) -> RowGroup:
    """Gradients of each example's own loss, whatever the batch's loss was divided by."""
    divisor = settings.accumulation_steps * (group.num_rows if settings.loss_reduction == "mean" else 1)
    return group if divisor == 1 else group.scaled(float(divisor))


def amplification(attributes: Mapping[str, Any]) -> tuple[float, bool]:
    """GradScaler's factor, and whether it found Inf, in which case a step is skipped as by every optimizer.

    Args:
        attributes: of the optimizer, on which GradScaler leaves them for the time of a step.
    """
    given = attributes.get("grad_scale", 1.0)
    if given is None:
        raise RuntimeError(
            "scaler.unscale_(opt) divides p.grad only, not the per-example gradients. "
            "Call scaler.step(opt) without it (max_grad_norm=0 in Hugging Face's Trainer)."
        )
    return float(given), bool(attributes.get("found_inf", 0.0))


def require_finite_loss(loss: Any, step: int) -> None:
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


def mean_loss(losses: list[Any]) -> Any:
    """The mean, or None if there are none."""
    return sum(losses) / len(losses) if losses else None


def expected_log_likelihood(losses: list[Any], num_rows: int, settings: OptimizerSettings) -> float:
    """N times the mean log-likelihood of an example.

    Args:
        losses: of the closure, one for each draw.
        num_rows: examples at draws that the losses are of.
        settings: say what the losses were divided by.
    """
    count = len(losses) if settings.loss_reduction == "mean" else num_rows
    return -settings.num_data * settings.accumulation_steps * float(sum(losses)) / count


def loss_alone(closure: Callable[[], Any]) -> Any:
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
