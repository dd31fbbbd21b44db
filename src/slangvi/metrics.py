"""How good a prediction and its uncertainty are: pure functions of tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slangvi import checks
from slangvi.likelihoods import check_labels

__all__ = [
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "auroc",
    "brier",
    "coverage",
    "ece",
    "fpr95",
    "interval_error",
    "mixture_nll",
    "mutual_information",
    "nll",
    "predictive_entropy",
    "reliability",
    "risk_coverage",
    "rmse",
]


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of examples whose most probable class is right; probs (n, C), labels (n,)."""
    _check(probs, labels)
    return float((probs.argmax(-1) == labels).double().mean())


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the true class, in nats; probs (n, C), labels (n,).

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), 4)
        0.6931
    """
    _check(probs, labels)
    chosen = probs.double().gather(-1, labels.long().unsqueeze(-1))
    return float(-chosen.clamp_min(torch.finfo(torch.float64).tiny).log().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance to the one-hot truth; probs (n, C), labels (n,)."""
    _check(probs, labels)
    truth = torch.nn.functional.one_hot(labels.long(), probs.shape[-1])
    return float((probs.double() - truth).square().sum(-1).mean())


class Reliability(NamedTuple):
    """Examples put in bins by how sure the prediction is; bins nobody is in have NaN for means.

    Args:
        confidence: mean probability of the predicted class, (B,).
        accuracy: share of right predictions, (B,).
        size: examples in each bin, (B,).
    """

    confidence: Tensor
    accuracy: Tensor
    size: Tensor


def reliability(probs: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Confidence and accuracy in bins of equal width, for a reliability diagram.

    Args:
        probs: (n, C).
        labels: (n,).
        bins: B. Bins are open below and closed above, as is usual; confidence 0 cannot occur.

    Example:
        >>> reliability(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), torch.tensor([0, 1, 1]), bins=2)
        Reliability(confidence=tensor([ nan, 0.7333]), accuracy=tensor([ nan, 0.6667]), size=tensor([0, 3]))
    """
    _check(probs, labels)
    bins = checks.count("bins", bins)
    confidence, predicted = probs.double().max(-1)
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    size, sure, right = (
        confidence.new_zeros(bins).index_add_(0, place, value)
        for value in (torch.ones_like(confidence), confidence, (predicted == labels).double())
    )
    return Reliability(_like(probs, sure / size), _like(probs, right / size), size.long())


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal-width bins.

    Example:
        >>> round(ece(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1])), 4)
        0.3
    """
    _check(probs, labels)
    found = reliability(probs.double(), labels, bins)
    gaps = (found.confidence - found.accuracy).abs() * found.size
    return float(gaps.nansum() / len(labels))


# ---- how uncertain a prediction is, and whether that tells errors and strangers ----


def predictive_entropy(probs: Tensor) -> Tensor:
    r"""Entropy of each prediction in nats, $-\sum_c p_c \log p_c$: all uncertainty there is.

    Args:
        probs: (..., C), averaged over draws of the weights.

    Returns:
        (...), between 0 and log C.

    Example:
        >>> predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    _check_probs(probs)
    found: Tensor = torch.special.entr(probs).sum(-1)
    return found


def mutual_information(probs: Tensor) -> Tensor:
    r"""What the label would tell about the weights, in nats: the uncertainty that more data could take away.

    $$ \mathrm H\Bigl[\tfrac1S \textstyle\sum_s p_s\Bigr] - \tfrac1S \sum_s \mathrm H[p_s] $$

    Args:
        probs: of each draw of the weights, (S, ..., C).

    Returns:
        (...), not negative; 0 where all draws agree.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]))
        tensor([0.6931, 0.0000])
    """
    checks.tensors(probs=probs)
    if probs.ndim < 2 or len(probs) == 0:
        raise ValueError(f"probs must be (S, ..., C) with S ≥ 1 draws in front, got {tuple(probs.shape)}.")
    exact = probs.double()
    found = predictive_entropy(exact.mean(0)) - predictive_entropy(exact).mean(0)
    return _like(probs, found.clamp_min(0.0))


def auroc(inside: Tensor, outside: Tensor) -> float:
    r"""Area under the ROC curve: how often a stranger looks more uncertain than an example of the known kind.

    $$ \Pr(u_\text{out} > u_\text{in}) + \tfrac12 \Pr(u_\text{out} = u_\text{in}) $$

    Args:
        inside: uncertainty of inputs like those of training, (n,).
        outside: uncertainty of others, (m,); higher should mean more uncertain.

    Returns:
        1 when every stranger is told, 0.5 when uncertainty tells nothing.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
        0.9166...
    """
    known, strange = _scores(inside, outside)
    ordered = known.sort().values
    below, at_most = (torch.searchsorted(ordered, strange, right=right).double() for right in (False, True))
    return float((below + at_most).mean() / (2 * len(known)))


def fpr95(inside: Tensor, outside: Tensor, level: float = 0.95) -> float:
    """Share of strangers that pass for known where 95 % of the known pass: low is good.

    The bar is the lowest uncertainty that at least `level` of the known examples do not exceed.

    Args:
        inside: uncertainty of inputs like those of training, (n,).
        outside: uncertainty of others, (m,).
        level: share of known examples to let pass.

    Example:
        >>> fpr95(torch.arange(100.0), torch.tensor([50.0, 94.0, 95.0, 200.0]))
        0.5
    """
    known, strange = _scores(inside, outside)
    level = checks.number("level", level, 0.0, 1.0, closed="high")
    needed = max(1, math.ceil(round(level * len(known), 9)))  # 0.95 · 100 is a little more than 95
    bar = known.sort().values[needed - 1]
    return float((strange <= bar).double().mean())


class RiskCoverage(NamedTuple):
    """Errors among the predictions one is surest of.

    Args:
        coverage: shares of examples that are answered, 1/n to 1, (n,).
        risk: share of wrong answers among them, (n,).
        area: under the curve, the mean of `risk`; low is good.
    """

    coverage: Tensor
    risk: Tensor
    area: float


def risk_coverage(probs: Tensor, labels: Tensor, uncertainty: Tensor | None = None) -> RiskCoverage:
    """The error rate if only the surest predictions are given, for every share of them.

    Args:
        probs: (n, C).
        labels: (n,).
        uncertainty: (n,), by which predictions are withheld, highest first; None takes 1 − confidence. Examples with
            the same one count as equally likely to come first, so the order of the rows does not matter.

    Example:
        >>> probs, labels = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]]), torch.tensor([0, 1, 1, 0])
        >>> risk_coverage(probs, labels)
        RiskCoverage(coverage=tensor([0.2500, 0.5000, 0.7500, 1.0000]),
                     risk=tensor([0.0000, 0.0000, 0.0000, 0.2500]), area=0.0625)
    """
    _check(probs, labels)
    confidence, predicted = probs.double().max(-1)
    (doubt,) = _scores(-confidence if uncertainty is None else uncertainty)
    if doubt.shape != labels.shape:
        raise ValueError(f"uncertainty must be ({len(labels)},), one for each example, got {tuple(doubt.shape)}.")
    doubt, order = doubt.sort()
    wrong = (predicted != labels).double()[order]
    _, group, sizes = doubt.unique_consecutive(return_inverse=True, return_counts=True)
    wrong = (torch.zeros_like(sizes, dtype=wrong.dtype).index_add_(0, group, wrong) / sizes)[group]
    answered = torch.arange(1, len(labels) + 1, dtype=torch.float64, device=wrong.device)
    risk = wrong.cumsum(0) / answered
    return RiskCoverage(_like(probs, answered / len(labels)), _like(probs, risk), float(risk.mean()))


# ---- regression ----


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Root mean squared error; both of the same shape."""
    _same_shape(mean, targets)
    return float((mean.double() - targets.double()).square().mean().sqrt())


def mixture_nll(means: Tensor, std: float | Tensor, targets: Tensor) -> float:
    """Mean of −log (1/S) Σ_s N(y | f_s, σ²), in nats: the log of the averaged likelihood.

    Args:
        means: f_s, (S, n, ...).
        std: σ of the noise, broadcast against `means`.
        targets: (n, ...).

    Example:
        >>> round(mixture_nll(torch.zeros(2, 3, 1), 1.0, torch.zeros(3, 1)), 4)
        0.9189
    """
    _same_shape(_one_of(means), targets)
    scale = torch.as_tensor(std, dtype=torch.float64, device=means.device)
    try:
        scale = scale.expand(means.shape)
    except RuntimeError as error:
        shapes = f"{tuple(means.shape)} of means, got shape {tuple(scale.shape)}"
        raise ValueError(f"std must be a number or a tensor that broadcasts to the shape {shapes}.") from error
    # Asked for by name, since torch.compile turns torch's own checks off for the whole process.
    normal = torch.distributions.Normal(means.double(), scale, validate_args=True)
    logs = normal.log_prob(targets.double()).reshape(len(means), len(targets), -1).sum(-1)
    return float(-(logs.logsumexp(0) - math.log(len(means))).mean())


def coverage(draws: Tensor, targets: Tensor, level: float) -> float:
    """Share of targets inside the central interval that holds `level` of the predictive draws.

    Args:
        draws: predictive draws, noise included, (S, n, ...).
        targets: (n, ...).
        level: between 0 and 1.

    Example:
        >>> coverage(torch.linspace(-1, 1, 101).unsqueeze(1), torch.tensor([0.3]), 0.5)
        1.0
    """
    _same_shape(_one_of(draws), targets)
    level = checks.number("level", level, 0.0, 1.0)
    wide = draws.to(torch.promote_types(draws.dtype, torch.float32))  # torch has no quantiles of half precision
    tails = torch.tensor([0.5 - level / 2, 0.5 + level / 2], dtype=wide.dtype, device=wide.device)
    low, high = torch.quantile(wide, tails, dim=0)
    return float(((targets >= low) & (targets <= high)).double().mean())


def interval_error(draws: Tensor, targets: Tensor) -> float:
    """Calibration error of a regression: mean |coverage − level| over levels 0.1, 0.2, …, 0.9."""
    levels = [k / 10 for k in range(1, 10)]
    return sum(abs(coverage(draws, targets, level) - level) for level in levels) / len(levels)


def _one_of(draws: Tensor) -> Tensor:
    """What the first draw predicts."""
    checks.tensors(draws=draws)
    if draws.ndim == 0 or len(draws) == 0 or not draws.is_floating_point():
        raise ValueError(f"draws must be real, (S, n, ...) with S ≥ 1, got {tuple(draws.shape)} of {draws.dtype}.")
    return draws[0]


def _same_shape(mean: Tensor, targets: Tensor) -> None:
    checks.tensors(predictions=mean, targets=targets)
    if mean.shape != targets.shape:
        raise ValueError(
            f"predictions and targets must have the same shape, got {tuple(mean.shape)} and {tuple(targets.shape)}."
        )
    if targets.numel() == 0:
        raise ValueError("there is nothing to score: give at least one example.")


def _check(probs: Tensor, labels: Tensor) -> None:
    checks.tensors(probs=probs, labels=labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"probs must be (n, C) and labels (n,) with n ≥ 1, got {tuple(probs.shape)} and {tuple(labels.shape)}."
        )
    _check_probs(probs)
    check_labels(labels, probs.shape[-1])


def _check_probs(probs: Tensor) -> None:
    checks.tensors(probs=probs)
    if not bool(((probs >= 0) & (probs <= 1 + 1e-4)).all()):
        raise ValueError("probs must lie in [0, 1], got values outside or NaN. Pass probabilities, not logits.")
    total = probs.sum(-1, dtype=torch.float64)
    off = (total - 1).abs().amax() if total.numel() else 0.0
    if off > (1e-3 if probs.dtype in (torch.float32, torch.float64) or not probs.is_floating_point() else 0.05):
        raise ValueError(
            f"probs must add up to 1 over the classes, the last dimension, got sums from {float(total.min()):.3g} to "
            f"{float(total.max()):.3g}. For one probability p of two classes pass (1 - p, p)."
        )


def _like(probs: Tensor, found: Tensor) -> Tensor:
    """In the dtype of the probabilities, unless these are whole numbers, as votes of single draws are."""
    return found.to(probs.dtype if probs.is_floating_point() else torch.get_default_dtype())


def _scores(*scores: Tensor) -> tuple[Tensor, ...]:
    """In float64, one number for each example, at least one, none NaN."""
    for score in scores:
        checks.tensors(uncertainty=score)
        if score.ndim != 1 or len(score) == 0 or bool(score.isnan().any()):
            raise ValueError(
                f"an uncertainty must be (n,) with n ≥ 1 and without NaN, got {tuple(score.shape)}, "
                f"{int(score.isnan().sum())} of them NaN."
            )
    return tuple(score.double() for score in scores)
