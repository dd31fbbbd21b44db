"""The memory that a prediction will take, found before any of it is spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slangvi.distributions import Posterior
from slangvi.memory.fake import fake_memory
from slangvi.out_of_memory import human, storage_bytes, tensors_in
from slangvi.predict.samples import check_given

__all__ = ["PredictionPlan", "estimate_prediction_memory"]


@dataclass(frozen=True)
class PredictionPlan:
    """The bytes alive at the peak of a prediction. Build it with `estimate_prediction_memory`; print it.

    Args:
        given: the model, the posterior and the inputs, which are there before.
        result: of the prediction.
        working: all else at the peak: a draw of the weights, a chunk's activations, its Jacobians.
        guesses: how often the model asked for a value (`item()`, `if tensor:`) that had to be made up.
    """

    given: int
    result: int
    working: int
    guesses: int

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return self.given + self.result + self.working

    def __str__(self) -> str:
        text = (
            f"The prediction takes {human(self.peak)} at its peak: {human(self.given)} for model, posterior and "
            f"inputs, {human(self.result)} for the result, {human(self.working)} in between (changed by batch_size "
            "or memory_limit)."
        )
        if self.guesses:
            text += f"\nThe model asked for values {self.guesses} times; another path through it may take more."
        return text


def estimate_prediction_memory(
    predict: Callable[..., Any], model: nn.Module, posterior: Posterior, x: Any, **options: Any
) -> PredictionPlan:
    """Return the bytes that a prediction will take, without spending them.

    The prediction runs on tensors that have sizes but no values, as the step of `slangvi.estimate_memory` does; what is
    said there about workspaces below tensors holds here too.

    Args:
        predict: `functional_samples`, `predictive_samples` or `linearised_predictive`.
        model: as given to `predict`.
        posterior: likewise.
        x: likewise.
        options: all else that is given to `predict`; a generator is not needed and is left out.

    Example:
        >>> import slangvi
        >>> model = nn.Linear(100, 10)
        >>> q = slangvi.LowRankPrecisionNormal(torch.zeros(1010), torch.zeros(1010, 2), torch.ones(1010))
        >>> x = torch.zeros(200, 100)
        >>> plan = estimate_prediction_memory(slangvi.linearised_predictive, model, q, x, memory_limit=10_000_000)
        >>> plan.result, plan.working < 10_000_000
        (96000, True)
    """
    check_given(model, posterior)
    if not callable(predict):
        raise TypeError(f"predict must be a function such as slangvi.predictive_samples, got {predict!r}.")
    options.pop("generator", None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with fake_memory() as memory:
        twin = memory.copy(model, [*model.parameters(), *model.buffers()], "given", device)
        q = memory.copy(posterior, tensors_in(vars(posterior)), "given", device)
        inputs = memory.copy(x, tree_leaves(x), "given", device)
        given = memory.live
        with memory.phase("the prediction", "working"):
            result = predict(twin, q, inputs, **options)
        held = storage_bytes(tensors_in(result))
    peak = max(memory.peaks["the prediction"][0], given + held)
    return PredictionPlan(given, held, peak - given - held, memory.guesses)
