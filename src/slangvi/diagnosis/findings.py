"""Judgements of a diagnosis: each check looks at its numbers and returns a sentence, and a remedy where one is due."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from slangvi.diagnosis.history import Trend, trend_of
from slangvi.diagnosis.report import Diagnosis, Finding, Layer

__all__ = ["judge"]

# Share of the curvature that a rank has to capture to hold it, and share below which no direction stands out.
CAPTURED, NOTHING_CAPTURED = 0.9, 0.1
# sds below this share of the reference's are too small, below the second one smaller than they should be; above its
# inverse the precision has not yet learnt what the batch says.
SHRUNK, SMALL = 0.5, 0.8
# A half of the batch may find this many times its own curvature in the other half.
COVERED = 3.0
# Share of the starting precision that may be left, and share within which sds have not moved from the start.
REMEMBERED, STILL = 0.05, 0.01
# Shares of all parameters that the data determine, below and above which one side dominates.
FEW, NEARLY_ALL = 0.01, 0.99
# Layers whose sd is that of the prior, above it, or this small beside it.
SILENT, WIDE, NARROW = 0.99, 1.05, 1e-3
# Noise scale in batches above which larger batches are worth a note while the loss falls, and share of draws.
NOISY, BY_DRAWS = 4.0, 0.8
# Share of batches with NaN or Inf that may be passed over.
PASSED_OVER = 0.01

# Level, sentence, and remedy where there is one; None where numbers are missing.
Judgement = tuple[str, ...] | None


def judge(found: Diagnosis) -> tuple[Finding, ...]:
    """Return what all checks find; those whose numbers are missing say nothing."""
    judged = ((name, check(found)) for name, check in CHECKS.items())
    return tuple(Finding(made[0], name, *made[1:]) for name, made in judged if made is not None)


def _rank(found: Diagnosis) -> Judgement:
    if found.rank is None:
        return "ok", "the precision is dense, so that no rank limits it."
    if found.captured is None:
        return None
    held = f"rank {found.rank} holds {found.captured:.0%} of the curvature"
    if found.enough_rank is None:
        if found.rank and found.captured < NOTHING_CAPTURED:
            remedy = "VOGN costs less and knows about as much; or pass a batch to see what a higher rank would hold."
            return "note", f"{held} of the last step: no direction stands out.", remedy
        return "ok", f"{held} of the last step; a batch would tell what rank is enough."
    sentence = f"{held} relative to its diagonal, and rank {found.enough_rank} would hold {CAPTURED:.0%}."
    is_faithful = found.faithful_rank is not None and found.faithful_rank <= found.rank
    if found.captured >= CAPTURED or is_faithful:
        return "ok", sentence
    if found.faithful_rank is None:
        remedy = "Compare a higher rank by held-out NLL: more examples may show more directions than this batch."
        return "note", sentence, remedy
    return "note", sentence, f"rank={found.faithful_rank}, if sds matter more than memory."


def _shrinkage(found: Diagnosis) -> Judgement:
    if found.batch_examples is None:
        return None
    if found.shrinkage is None:
        return (
            "note",
            f"{found.batch_examples} examples do not determine the curvature, so that sds cannot be checked by it.",
            "Pass a larger batch, at best all of the training set; large networks cannot be checked in this way.",
        )
    sentence = f"sds are {found.shrinkage:.2f} times those that the batch's whole curvature gives"
    if found.shrinkage > 1 / SHRUNK:
        remedy = "Take more steps, or a larger precision_lr."
        return "note", f"{sentence}: the precision has not learnt all of it yet.", remedy
    if found.shrinkage >= SMALL:
        return "ok", f"{sentence}."
    level = "warning" if found.shrinkage < SHRUNK else "note"
    if found.rank is not None and found.faithful_rank is not None and found.faithful_rank > found.rank:
        return (
            level,
            f"{sentence}: parameters are correlated in {found.faithful_rank} or so directions, of which rank "
            f"{found.rank} keeps {found.rank}; the diagonal takes the others for knowledge of each parameter.",
            f"rank={found.faithful_rank}, or whiten the inputs so that they are not correlated.",
        )
    return (
        level,
        f"{sentence}, although the rank is enough: the precision holds curvature of its start, or of earlier weights.",
        "Take more steps with a precision_lr that forgets faster, or lower init_precision.",
    )


def _start(found: Diagnosis) -> Judgement:
    if found.start_share is None:
        return None
    sentence = f"about {found.start_share:.1%} of the starting precision is left (estimated from its rate and steps)"
    if found.start_share > REMEMBERED:
        remedy = "Take more steps, or a larger precision_lr: 3/precision_lr steps forget 95 %."
        return "warning", f"{sentence}: the posterior still remembers init_precision.", remedy
    return "ok", f"{sentence}."


def _moved(found: Diagnosis) -> Judgement:
    remedy = "Train it; if it was trained, look for lr=0, and for frozen parameters."
    if found.step == 0:
        return "warning", "no step was taken: the posterior is its start.", remedy
    known = [layer.start_ratio for layer in found.layers if layer.start_ratio is not None]
    if not known:
        return None
    far = "" if found.moved is None else f", and the mean is {found.moved:.2g} sds per weight from its start"
    if all(abs(ratio - 1) < STILL for ratio in known):
        return "warning", f"sds of all layers are those of the start{far}.", remedy
    return "ok", f"sds by layer are {min(known):.2g} to {max(known):.2g} times those of the start{far}."


def _loss(found: Diagnosis) -> Judgement:
    trend = _trend(found, "loss")
    if trend is None:
        return None
    beside = f"with a noise of {trend.noise:.3g} from step to step"
    if trend.direction == "rising":
        remedy = "Lower lr or let it fall; start again from a checkpoint before the rise."
        return "warning", f"the loss goes up, by {trend.change:.3g} lately, {beside}.", remedy
    if trend.direction == "falling":
        return "note", f"the loss still falls, by {-trend.change:.3g} lately, {beside}.", "Train longer."
    return "ok", f"the loss has settled at {trend.level:.4g}, {beside}."


def _kl(found: Diagnosis) -> Judgement:
    trend = _trend(found, "kl")
    if trend is None:
        return None
    if trend.direction == "rising":
        remedy = "Train longer, with rates that fall; if it never ends, the rates are too large."
        return "note", f"the KL still grows, by {trend.change:.3g} nats lately.", remedy
    word = "falls slowly" if trend.direction == "falling" else "has settled"
    return "ok", f"the KL {word} at {trend.level:.4g} nats."


def _parameters(found: Diagnosis) -> Judgement:
    share = found.effective_parameters / found.num_params
    sentence = f"the data determine {found.effective_parameters:.3g} of {found.num_params:,} parameters"
    if share < FEW:
        remedy = "Lower prior_precision, check num_data, and take more steps."
        return "warning", f"{sentence}: the posterior is the prior nearly everywhere.", remedy
    if share > NEARLY_ALL:
        remedy = "That is right with little noise and many examples; if not, check num_data and the loss's scale."
        return "note", f"{sentence}: the prior hardly matters.", remedy
    return "ok", f"{sentence}."


def _noise(found: Diagnosis) -> Judgement:
    if found.gradient_noise is None or found.draw_share is None or found.batch_examples is None:
        return None
    scale, size = found.gradient_noise, found.step_examples or found.batch_examples
    if found.draw_share > BY_DRAWS:
        sentence = f"{found.draw_share:.0%} of the noise of a step's gradient comes from draws of the weights."
        return "note", sentence, "More mc_samples help more than a larger batch."
    said = "no signal is left beside the noise" if math.isinf(scale) else f"noise equals signal at {scale:.3g} examples"
    trend = _trend(found, "loss")
    if scale > NOISY * size and trend is not None and trend.direction == "falling":
        remedy = "A larger batch takes fewer steps; later falling rates average the noise."
        return "note", f"{said}, while the loss still falls with steps of {size:,}.", remedy
    return "ok", f"{said}, and a step takes {size:,}."


def _layers(found: Diagnosis) -> Judgement:
    if wide := [layer for layer in found.layers if layer.ratio > WIDE]:
        remedy = "init_precision is below prior_precision there: raise it, or take more steps."
        return "warning", f"{_named(wide)}: sds are larger than the prior's.", remedy
    if narrow := [layer for layer in found.layers if layer.ratio < NARROW]:
        remedy = "Check num_data, the scale of inputs and loss, and whether the run has diverged."
        return "warning", f"{_named(narrow)}: sds are below a thousandth of the prior's.", remedy
    if silent := [layer for layer in found.layers if layer.ratio > SILENT and layer.effective < FEW * layer.size]:
        remedy = "Inputs that never vary, units that are never active, or more weights than data determine."
        return "note", f"{_named(silent)}: the data say nothing about most weights.", remedy
    low, high = min(layer.ratio for layer in found.layers), max(layer.ratio for layer in found.layers)
    return "ok", f"typical sds are {low:.2g} to {high:.2g} of the prior's."


def _temperature(found: Diagnosis) -> Judgement:
    if found.temperature == 1.0:
        return None
    word = "more" if found.temperature < 1 else "less"
    sentence = f"temperature {found.temperature:g}: every example counts {1 / found.temperature:.3g} times, and the "
    sentence += f"posterior is {word} sure than the model says."
    return "note", sentence, "Choose it by held-out NLL, and say so beside results."


def _num_data(found: Diagnosis) -> Judgement:
    if not found.exceeds_num_data:
        return None
    sentence = f"a batch had more than num_data={found.num_data:,} examples: the posterior is as wide as num_data says."
    return "warning", sentence, "Pass len(train_set), the number of examples and not of batches."


def _skipped(found: Diagnosis) -> Judgement:
    if not found.skipped:
        return None
    share = found.skipped / (found.skipped + found.step)
    sentence = f"{found.skipped:,} batches with NaN or Inf were passed over, {share:.1%} of all."
    level = "warning" if share > PASSED_OVER else "note"
    return level, sentence, "Look for the examples; lower lr if they are not to blame."


def _rank_used(found: Diagnosis) -> Judgement:
    if not found.rank or found.rank_used is None or found.rank_used >= found.rank:
        return None
    seen = [value for value in found.curves.get("rank_used", []) if not math.isnan(value)]
    late = seen[len(seen) // 2 :]
    remedy = f"rank={found.rank_used} gives the same and takes less memory; larger batches fill more."
    if late and median(late) < found.rank:
        return "warning", f"only {median(late):g} of {found.rank} directions are in use, persistently.", remedy
    return "note", f"the last step used {found.rank_used} of {found.rank} directions.", remedy


def _trend(found: Diagnosis, name: str) -> Trend | None:
    """Return the trend of a curve; None where there are too few numbers."""
    trend = trend_of(found.curves.get(name, []))
    return None if trend.direction == "short" else trend


def _named(layers: list[Layer]) -> str:
    """Return the names of layers, at most four of them."""
    names = [layer.name for layer in layers]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


CHECKS: dict[str, Callable[[Diagnosis], Judgement]] = {
    "rank": _rank,
    "shrinkage": _shrinkage,
    "start": _start,
    "moved": _moved,
    "loss": _loss,
    "kl": _kl,
    "parameters": _parameters,
    "gradient noise": _noise,
    "layers": _layers,
    "temperature": _temperature,
    "num_data": _num_data,
    "skipped": _skipped,
    "rank used": _rank_used,
}
