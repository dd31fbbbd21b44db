"""How much memory a prediction will take, told before any of it is spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slangvi.distributions import Posterior
from slangvi.memory.ledger import Ledger
from slangvi.memory.weightless import weightless, without_memory
from slangvi.out_of_memory import human, tensors_in
from slangvi.predict.samples import check_given

__all__ = ["PredictionPlan", "estimate_prediction_memory"]


@dataclass(frozen=True)
class PredictionPlan:
    """Bytes alive at the moment of a prediction when most are. Build it with `estimate_prediction_memory`; print it.

    Args:
        given: the model, the posterior and the inputs, which are there before.
        result: what is handed back.
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
        lines = [
            f"The prediction takes {human(self.peak)} at its peak: {human(self.given)} for model, posterior and "
            f"inputs, {human(self.result)} for the result, {human(self.working)} in between (changed by batch_size "
            "or memory_limit)."
        ]
        if self.guesses:
            lines += [f"The model asked for values {self.guesses} times; another path through it may take more."]
        return "\n".join(lines)


def estimate_prediction_memory(
    predict: Callable[..., Any], model: nn.Module, posterior: Posterior, x: Any, **options: Any
) -> PredictionPlan:
    """Bytes that a prediction will take, without spending them.

    The prediction is gone through on tensors that have sizes but no values, as `slangvi.estimate_memory` does with
    training steps; what is said there about workspaces below tensors holds here too.

    Args:
        predict: `functional_samples`, `predictive_samples` or `linearised_predictive`.
        model: as given to `predict`.
        posterior: likewise.
        x: likewise.
        options: all else that is given to `predict`; a generator is not needed and is left out.

    Returns:
        A plan; `print` shows it in words.

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
    ledger = Ledger()
    with weightless(ledger, device) as allocations:
        given = tuple(without_memory(thing, allocations.fake, device) for thing in (model, posterior, x))
        twin, q, inputs = given
        tensors = [*twin.parameters(), *twin.buffers(), *tensors_in(vars(q)), *tree_leaves(inputs)]
        ledger.label([tensor for tensor in tensors if isinstance(tensor, Tensor)], "given")
        start = len(ledger.live)
        before = ledger.live[-1]
        result = predict(twin, q, inputs, **options)
        ledger.label(tensors_in(result), "result")
        held = sum(record.nbytes for record in ledger.at(len(ledger.live)) if record.part == "result")
    peak = max(ledger.live[start - 1 :])
    return PredictionPlan(before, held, max(peak - before - held, 0), allocations.guesses)
