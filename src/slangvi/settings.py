"""What an optimizer is told once, for all parameters alike."""

from __future__ import annotations

from dataclasses import dataclass

from slangvi import checks
from slangvi.divergence import REACTIONS
from slangvi.grads.assemble import Engine
from slangvi.types import Routes

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What holds for all parameters alike; checked when built.

    Args:
        num_data: N.
        mc_samples: S in `step(closure)`.
        temperature: likelihood weighed by 1/temperature.
        loss_reduction: "mean" or "sum".
        accumulation_steps: what the loop divides each micro-batch's loss by.
        precision_warmup: whether β is at least 1/(t+1).
        engine: "factored" or "dense".
        verify: check per-example gradients of new patterns of calls.
        memory_limit: bytes that formed gradients of a parameter, and temporaries, may take.
        routes: what to form, and how.
        compile: replay the step and the draws from CUDA graphs.
        max_bad_batches: batches with NaN or Inf that may be skipped in a row.
        on_divergence: "warn", "raise" or "ignore".
    """

    num_data: int
    mc_samples: int = 1
    temperature: float = 1.0
    loss_reduction: str = "mean"
    accumulation_steps: int = 1
    precision_warmup: bool = True
    engine: Engine = "factored"
    verify: bool = True
    memory_limit: int | None = None
    routes: Routes = Routes()  # noqa: RUF009 — frozen
    compile: bool = False
    max_bad_batches: int = 0
    on_divergence: str = "warn"

    def __post_init__(self) -> None:
        checks.count("num_data", self.num_data, hint="Pass the number of training examples, len(train_set).")
        checks.count("mc_samples", self.mc_samples)
        checks.number("temperature", self.temperature, 0.0)
        checks.choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        checks.count("accumulation_steps", self.accumulation_steps)
        checks.choice("engine", self.engine, ("factored", "dense"))
        checks.flag("precision_warmup", self.precision_warmup)
        checks.flag("verify", self.verify)
        checks.flag("compile", self.compile)
        checks.count("max_bad_batches", self.max_bad_batches, least=0, hint="0 raises at the first one.")
        checks.choice("on_divergence", self.on_divergence, REACTIONS)
        if self.compile and self.max_bad_batches:
            raise ValueError(
                "max_bad_batches must be 0 with compile=True: a replayed step is still running when the next batch "
                "comes, and its error is known only then. Drop one of them."
            )
        if self.memory_limit is not None:
            checks.count("memory_limit", self.memory_limit, hint="It is a number of bytes.")
