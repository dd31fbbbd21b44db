"""Where the numbers of each step go: a TensorBoard writer, a progress meter, a logger, or any function."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from numbers import Real
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from slangvi import checks
from slangvi.optimizer import VariationalOptimizer
from slangvi.priors import ELBO

__all__ = ["Send", "scalars", "track"]

Send = Callable[[dict[str, float], int], Any]
_NOT_A_CURVE = {"step", "expected_log_likelihood"}  # the axis, and the loss with another sign


def scalars(info: Any) -> dict[str, float]:
    """Return the single numbers that an `Info` tells, by name, without unknown ones and tensors of several.

    Args:
        info: `opt.info`, or what `update` returns beside the state.

    Example:
        >>> from slangvi.methods.slang import Info
        >>> import torch
        >>> one = torch.tensor(1.0)
        >>> scalars(Info(3, 8, spectrum=torch.tensor([3.0, 1.0]), total=8 * one, residual=0 * one, clipped=0 * one))
        {'captured': 0.5, 'clipped': 0.0, 'num_rows': 8.0, 'rank_used': 2.0, 'residual': 0.0, 'skipped': 0.0,
         'total': 8.0}
    """
    kind = type(info)
    computed = {name for name in dir(kind) if isinstance(getattr(kind, name), property | cached_property)}
    if getattr(info, "_prior", None) is None:
        computed -= {"kl", "elbo"}
    names = ({item.name for item in fields(info)} | computed) - _NOT_A_CURVE
    found = {}
    for name in sorted(name for name in names if not name.startswith("_")):
        value = getattr(info, name)
        value = value.value if isinstance(value, ELBO) else value
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
            found[name] = float(value)
    return {name: value for name, value in found.items() if not math.isnan(value)}


def track(
    optimizer: VariationalOptimizer[Any, Any], to: Any, *, prefix: str = "slangvi/", every: int = 1
) -> RemovableHandle:
    """Send what each step tells, `opt.info` and the learning rate, to a place of your own.

    Steps that were skipped send nothing. Numbers on a GPU are waited for, so a large `every` spares time.

    Args:
        optimizer: any of the optimizers.
        to: a TensorBoard `SummaryWriter` (or what else has `add_scalar`), a tqdm bar (`set_postfix`), a
            `logging.Logger`, or a function of (name → number, step).
        prefix: of the names.
        every: send the 1st step and then every so many.

    Returns:
        A handle; its `remove()` ends it.

    Example:
        >>> import torch, slangvi
        >>> model, seen = torch.nn.Linear(2, 2), []
        >>> opt = slangvi.SLANG(model, num_data=10)
        >>> handle = track(opt, lambda numbers, step: seen.append((step, numbers["slangvi/lr"])))
        >>> with opt.sampled_params(train=True):
        ...     model(torch.ones(3, 2)).logsumexp(-1).mean().backward()
        >>> opt.step()
        >>> seen
        [(1, 0.05)]
    """
    if not isinstance(optimizer, VariationalOptimizer):
        raise TypeError(f"optimizer must be one of slangvi's, got {type(optimizer).__name__}.")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, got {type(prefix).__name__}.")
    if not (callable(to) or isinstance(to, logging.Logger) or hasattr(to, "add_scalar") or hasattr(to, "set_postfix")):
        raise TypeError(
            f"to must be a writer with add_scalar, a meter with set_postfix, a logging.Logger or a function of "
            f"(numbers, step), got {type(to).__name__}."
        )
    gap, sent = checks.count("every", every), [optimizer.info]

    def after_step(opt: Any, args: Any, kwargs: Any) -> None:
        info = opt.info
        if info is None or info is sent[0] or (info.step - 1) % gap:
            return
        last, sent[0] = sent[0], info
        # A batch that was passed over makes another info of the same step, and so does going back to a saved state.
        if last is None or info.step != last.step or info.skipped == last.skipped:
            groups = opt.param_groups
            rates = {"lr" if len(groups) == 1 else f"lr/{k}": float(group["lr"]) for k, group in enumerate(groups)}
            _send(to, {prefix + name: value for name, value in (rates | scalars(info)).items()}, info.step)

    return optimizer.register_step_post_hook(after_step)


def _send(to: Any, numbers: dict[str, float], step: int) -> None:
    """Send numbers to a place in its own way."""
    if isinstance(to, logging.Logger):
        to.info("step %d: %s", step, ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()))
    elif hasattr(to, "add_scalar"):
        for name, value in numbers.items():
            to.add_scalar(name, value, step)
    elif hasattr(to, "set_postfix"):
        short = {name.rpartition("/")[2]: f"{value:.4g}" for name, value in numbers.items()}
        to.set_postfix({"step": step, **short})
    else:
        to(numbers, step)
