"""Bytes of a step by part, read off a rehearsal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from slangvi import checks
from slangvi.memory.ledger import Record
from slangvi.memory.rehearsal import Loss, Rehearsal, rehearse
from slangvi.out_of_memory import human

__all__ = ["MemoryPlan", "estimate_memory"]

# Part of a plan → what it is, and what changes it.
PARTS = {
    "parameters": ("the model's parameters and buffers", "a smaller model, or a narrower dtype"),
    "gradients": ("p.grad, filled by backward", "zero_grad() before step()"),
    "data": ("the batch", "batch size"),
    "state": ("mean, diagonal, momentum, prior unless a number: (P,) each", "freeze parameters"),
    "factor": ("the factor U, (L, P), and what is kept with it", "rank"),
    "next_state": ("the state after the step, beside the one before", "rank"),
    "draws": ("draws of the weights, (S, P)", "mc_samples"),
    "activations": ("forward and backward of the model", "batch size, checkpointing"),
    "captured": ("layer inputs, output gradients, gradient sums: kept for step", "batch size, mc_samples"),
    "rows": ("per-example gradients, formed or stacked", "batch size, mc_samples, memory_limit"),
    "temporaries": ("inside the update: products, Gram matrix", "rank, batch size, mc_samples"),
}
# Part that was asking for memory at the peak → what the step was doing; the others come from setting up.
PHASES = {
    "draws": "a draw of the weights",
    "activations": "forward and backward",
    "captured": "forward and backward",
    "gradients": "forward and backward",
    "rows": "collecting per-example gradients",
    "temporaries": "the update",
    "next_state": "the update",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes alive at the moment of a step when most are, by part. Build it with `estimate_memory`; print it.

    Args:
        parameters: parameters and buffers of the model.
        gradients: p.grad.
        data: the batch.
        state: loc, prec_diag, momentum, and the prior's two vectors where they are not numbers, (P,) each.
        factor: prec_factor, (L, P), and what is kept with it.
        next_state: what the update has already made of the next state.
        draws: draws of the weights, and other copies of all weights.
        activations: what forward and backward of the model take for themselves.
        captured: layer inputs, output gradients and gradient sums that are kept until the update.
        rows: per-example gradients that are formed, stacked, or computed by calling a module again.
        temporaries: what the update takes for itself.
        peak_in: what the step is doing at that moment.
        later_peak: the same peak in a later step, which does not check per-example gradients.
        between_steps: what stays between steps.
        guesses: how often the model asked for a value (`item()`, `if tensor:`) that had to be made up.
        num_params: P.
        num_examples: M.
        rank: L.
        mc_samples: S.
    """

    parameters: int
    gradients: int
    data: int
    state: int
    factor: int
    next_state: int
    draws: int
    activations: int
    captured: int
    rows: int
    temporaries: int
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
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name in PARTS}

    def __str__(self) -> str:
        lines = [
            f"One step takes {human(self.peak)} at its peak, in {self.peak_in}: P = {self.num_params:,} parameters, "
            f"M = {self.num_examples:,} examples, S = {self.mc_samples} draws, rank L = {self.rank}.",
            f"{human(self.between_steps)} stay between steps; later steps peak at {human(self.later_peak)}.",
            "",
            f"{'part':<12} {'bytes':>10}  {'what':<61} changed by",
        ]
        for name, nbytes in sorted(self.parts.items(), key=lambda item: -item[1]):
            what, knob = PARTS[name]
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
    loss: Loss | None = None,
) -> MemoryPlan:
    """Bytes that training steps of SLANG will take, without spending them.

    A few steps are gone through on tensors that have sizes but no values. This runs the library's own code and the
    model's, takes seconds, and allocates nothing to speak of. The model is not touched: no hook, no mode, no buffer,
    no random number. It may be on the meta device, and is then planned for a CPU. Inside `torch.autocast` the steps
    are planned with it.

    The count is of tensors, and is exact as far as nothing depends on values; where something does, the larger case is
    taken. Steps are planned as run eagerly, without `compile`. Left out is what lies below tensors: a GPU's context
    (some hundred MB), workspaces of cuBLAS, cuDNN and cuSOLVER (tens of MB), and what the caching allocator rounds up
    or cannot reuse. Leave a tenth free.

    Args:
        model: the module to be trained; call it in the mode (train or eval) it will be trained in.
        batch: what a loader gives: an input, or a tuple whose first entry is the input and whose second is the target.
            The input may be a tensor, `model(x)`; a dict, `model(**x)`; or a tuple, `model(*x)`. It may be on any
            device.
        rank: L.
        mc_samples: S, draws of the weights for one step.
        interface: "optimizer" for `slangvi.SLANG` in a loop of one's own, "functional" for `slangvi.slang.build`.
        engine: "factored" or "dense".
        memory_limit: as given to the optimizer or to `build`.
        verify: likewise.
        loss: (output, target) → loss, one number or one for each example; None stands in something of the size of a
            cross-entropy over the last dimension.

    Returns:
        A plan; `print` shows it as a table that says what each part depends on.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10))
        >>> plan = estimate_memory(model, torch.empty(200, 784), rank=8, mc_samples=4)
        >>> plan.num_params, plan.parameters
        (318010, 1272040)
        >>> plan.between_steps < plan.later_peak <= plan.peak
        True
    """
    checks.choice("interface", interface, ("optimizer", "functional"))
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the module itself.")
    rank = checks.rank("rank", rank)
    mc_samples = checks.count("mc_samples", mc_samples)
    options = {"rank": rank, "mc_samples": mc_samples, "engine": engine, "memory_limit": memory_limit, "verify": verify}
    seen = rehearse(model, batch, interface, loss, options)
    live = seen.ledger.live
    peak = max(range(len(live)), key=lambda event: (live[event], event))  # of equals the last, a usual step
    parts, doing = _parts_at(peak, seen)
    return MemoryPlan(
        **parts,
        peak_in=PHASES.get(doing, "setting up"),
        later_peak=max(live[seen.marks[-2] : seen.marks[-1]]),
        between_steps=live[seen.marks[-1] - 1],
        guesses=seen.guesses,
        num_params=seen.num_params,
        num_examples=seen.num_examples,
        rank=rank,
        mc_samples=mc_samples,
    )


def _parts_at(event: int, seen: Rehearsal) -> tuple[dict[str, int], str]:
    """Bytes alive after an event by part, and the part that the event itself was for."""
    start = max((mark for mark in seen.marks if mark <= event), default=event + 1)
    births = (r.born for r in seen.ledger.records if r.part == "temporaries" and r.born >= start)
    update = next(births, len(seen.ledger.live))

    def part_of(record: Record) -> str:
        if record.part in ("state", "factor") and record.born >= update:
            return "next_state"
        kept = record.died is None or record.died > update
        return "captured" if record.part == "activations" and kept else record.part

    alive = seen.ledger.at(event)
    sums: Counter[str] = Counter()
    for record in alive:
        sums[part_of(record)] += record.nbytes
    latest = max(alive, key=lambda record: record.born)
    return {part: sums[part] for part in PARTS}, part_of(latest)
