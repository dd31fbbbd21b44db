"""Bytes of a step by part, from one step on tensors without values."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import nn

from slangvi import checks
from slangvi.likelihoods import Likelihood
from slangvi.memory.fake import fake_memory
from slangvi.memory.step import CHECK, FIRST_UPDATE, FakePlans, FakeRun, Loss
from slangvi.out_of_memory import human
from slangvi.settings import CompiledOptimizerSettings, CompiledSettings

__all__ = ["MemoryPlan", "estimate_memory"]


def _part(what: str, knob: str) -> int:
    """Return a field of a plan that is a part of the peak: what it is, and what changes it."""
    made: int = field(metadata={"part": (what, knob)})
    return made


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes alive at the moment of a step when most are. Build it with `estimate_memory`; print it.

    Fields not listed here are the parts of the peak, which the printed table explains.

    Args:
        peak_in: what the step does at that moment.
        later_peak: peak of a later step, which does not check per-example gradients or begin with eigenvectors.
        between_steps: what stays between steps.
        guesses: how often the model asked for a value (`item()`, `if tensor:`) that had to be made up.
        num_params: P.
        num_examples: M.
        rank: L.
        mc_samples: S.
    """

    parameters: int = _part("the model's parameters and buffers", "a smaller model, or a narrower dtype")
    gradients: int = _part("p.grad, filled by backward", "zero_grad() before step()")
    data: int = _part("the batch", "batch size")
    state: int = _part("mean, diagonal, momentum: (P,) each", "freeze parameters")
    factor: int = _part("the factor U, (L, P)", "rank")
    next_state: int = _part("the state after the step, beside the one before", "rank")
    draws: int = _part("draws of the weights, (S, P), and scales of the noise", "mc_samples")
    activations: int = _part("forward and backward of the model", "batch size, checkpointing")
    captured: int = _part("layer inputs, output gradients, gradient sums: kept for step", "curvature_rows, mc_samples")
    rows: int = _part("per-example gradients, formed or stacked", "curvature_rows, mc_samples, memory_limit")
    temporaries: int = _part("inside the update: a segment's rows and U, Gram matrix", "rank, rows, memory_limit")
    peak_in: str
    later_peak: int
    between_steps: int
    guesses: int
    num_params: int
    num_examples: int
    rank: int
    mc_samples: int

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Part → bytes at the peak."""
        return {item.name: getattr(self, item.name) for item in fields(self) if "part" in item.metadata}

    def __str__(self) -> str:
        lines = [
            f"One step takes {human(self.peak)} at its peak, in {self.peak_in}: P = {self.num_params:,} parameters, "
            f"M = {self.num_examples:,} examples, S = {self.mc_samples} draws, rank L = {self.rank}.",
            f"{human(self.between_steps)} stay between steps; later steps peak at {human(self.later_peak)}.",
            "",
            f"{'part':<12} {'bytes':>10}  {'what':<61} changed by",
        ]
        texts = {item.name: item.metadata.get("part", ()) for item in fields(self)}
        for name, nbytes in sorted(self.parts.items(), key=lambda item: -item[1]):
            what, knob = texts[name]
            lines += [f"{name:<12} {human(nbytes):>10}  {what:<61} {knob}"] if nbytes else []
        if self.guesses:
            lines += ["", f"The model asked for values {self.guesses} times; another path through it may take more."]
        return "\n".join(lines)


def estimate_memory(
    model: nn.Module,
    batch: Any,
    rank: int = 1,
    mc_samples: int = 1,
    *,
    interface: str = "optimizer",
    engine: str = "factored",
    memory_limit: int | None = None,
    verify: bool = True,
    curvature_rows: int | Literal["auto"] | None = "auto",
    curvature: str = "auto",
    projection: str = "auto",
    likelihood: str | Likelihood | None = None,
    loss: Loss | None = None,
) -> MemoryPlan:
    """Return the bytes that training steps of SLANG will take, without spending them.

    One step of the model and of the library runs on tensors that have sizes but no values, which takes seconds. Model,
    batch and random numbers are not touched. The model may be on the meta device, and is then planned for a CPU.
    Inside `torch.autocast` the step is planned with it.

    The count is of tensors. Plans were 0.95 to 1.05 of what torch's CPU allocator gave out, and up to 1.5 where the
    Gram matrix of many rows is large beside the factor: it is taken to be decomposed in full, which an iteration mostly
    spares. Left out is what lies below tensors: a GPU's context (some hundred MB), workspaces of cuBLAS, cuDNN and
    cuSOLVER (tens of MB), and what the caching allocator rounds up or cannot reuse. Leave a tenth free.

    Args:
        model: the module to be trained, in the mode (train or eval) it will be trained in.
        batch: as a loader gives it: an input, or a tuple whose first entry is the input and whose second is the target.
            The input may be a tensor, `model(x)`; a dict, `model(**x)`; or a tuple, `model(*x)`. It may be on any
            device.
        rank: L.
        mc_samples: S, draws of the weights for one step.
        interface: "optimizer" for `slangvi.SLANG` in a loop of one's own, "functional" for `slangvi.slang.build`.
        engine: as given to the optimizer or to `build`.
        memory_limit: likewise.
        verify: likewise.
        curvature_rows: likewise.
        curvature: likewise; all but "ef" need a likelihood, and in the functional interface a target.
        projection: likewise.
        likelihood: "categorical", "bernoulli", "gaussian" or a `Likelihood`, which "auto" decides by.
        loss: (output, target) → loss, one number or one for each example; None takes something of the size of a
            cross-entropy over the last dimension.

    Returns:
        A plan; `print` shows it as a table that says what each part depends on.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10))
        >>> plan = estimate_memory(model, torch.empty(200, 784), rank=8, curvature_rows=8)
        >>> plan.num_params, plan.parameters
        (318010, 1272040)
        >>> plan.between_steps < plan.later_peak <= plan.peak
        True
    """
    checks.choice("interface", interface, ("optimizer", "functional"))
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the module itself.")
    options: dict[str, Any] = {"rank": rank, "mc_samples": mc_samples, "engine": engine, "memory_limit": memory_limit}
    options |= {"num_data": 1, "lr": 0.1, "verify": verify, "curvature_rows": curvature_rows}
    options |= {"curvature": curvature, "projection": projection}
    settings: Any = CompiledOptimizerSettings(**options, likelihood=likelihood)  # asks for a likelihood where it must
    if interface == "functional":
        settings = CompiledSettings(**options, model=model)
    settings = settings.for_likelihood(likelihood)
    is_pair = isinstance(batch, tuple | list) and len(batch) > 1
    if interface == "functional" and settings.curvature != "ef" and not is_pair:
        raise ValueError(
            "batch must be (input, target): the likelihood's curvature needs a target where functions are."
        )
    run = (model, batch, loss, likelihood, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training will show them
        plans = FakePlans(*run)
        with fake_memory() as memory:
            fake, plans.memory = FakeRun(memory, *run), memory
            between_steps = fake.take_step(plans)
    phase = max(memory.peaks, key=lambda name: memory.peaks[name][0])
    parts = Counter[str]()
    for nbytes, part in memory.peaks[phase][1]:
        parts[part] += nbytes
    return MemoryPlan(
        **{item.name: parts[item.name] for item in fields(MemoryPlan) if "part" in item.metadata},
        peak_in=phase,
        later_peak=max(peak for name, (peak, _) in memory.peaks.items() if name not in (CHECK[0], FIRST_UPDATE[0])),
        between_steps=between_steps,
        guesses=memory.guesses,
        num_params=fake.spec.num_params,
        num_examples=fake.num_examples,
        rank=settings.rank,
        mc_samples=settings.mc_samples,
    )
