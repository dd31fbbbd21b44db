"""What part of an uncertainty more data would remove, and what part is in the data themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slangvi.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, likelihood_named

__all__ = ["Uncertainty", "decompose_uncertainty"]


class Uncertainty(NamedTuple):
    """Total = aleatoric + epistemic, for every prediction.

    Args:
        total: of a prediction; entropy in nats, or variance.
        aleatoric: what remains when the weights are known: noise, overlapping classes.
        epistemic: what knowing the weights would take away: mutual information in nats, or variance.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def decompose_uncertainty(
    samples: Tensor, likelihood: str | Likelihood = "categorical", *, noise_variance: float | Tensor | None = None
) -> Uncertainty:
    r"""Return total, aleatoric and epistemic uncertainty of predictions, each (n, ...), from draws of them.

    Classes, with probabilities $p_s$ at draw s of the weights and entropy H:

    $$ \underbrace{H\bigl[\tfrac1S\textstyle\sum_s p_s\bigr]}_{\text{total}} =
       \underbrace{\tfrac1S\textstyle\sum_s H[p_s]}_{\text{aleatoric}} +
       \underbrace{I[y;\theta]}_{\text{epistemic}} $$

    Real targets, with means $f_s$ and noise variance σ²: total = σ² + Var_s f_s, of which σ² is aleatoric. The
    variance over draws divides by S − 1.

    Args:
        samples: from `predictive_samples`, (S, n, ...): probabilities (S, n, ..., C) for "categorical",
            probabilities of class 1 for "bernoulli", means for "gaussian".
        likelihood: the one the samples were made with.
        noise_variance: σ² on the scale of the samples, a number or a tensor that broadcasts to (n, ...); for
            "gaussian" only. None takes that of a `Gaussian` instance.

    Example:
        >>> torn = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> decompose_uncertainty(torn)
        Uncertainty(total=tensor([0.6931]), aleatoric=tensor([0.]), epistemic=tensor([0.6931]))
        >>> decompose_uncertainty(torch.tensor([[1.0], [3.0]]), "gaussian", noise_variance=0.5)
        Uncertainty(total=tensor([2.5000]), aleatoric=tensor([0.5000]), epistemic=tensor([2.]))
    """
    kind = likelihood_named(likelihood)
    if not isinstance(samples, Tensor) or samples.ndim < 2 or len(samples) == 0:
        shape = tuple(samples.shape) if isinstance(samples, Tensor) else type(samples).__name__
        raise ValueError(f"samples must have shape (S, n, ...) with S ≥ 1, got {shape}. Use predictive_samples.")
    if isinstance(kind, Gaussian):
        if noise_variance is None and not isinstance(likelihood, Likelihood):
            raise ValueError(
                "noise_variance is needed with likelihood='gaussian': the variance of the noise on the scale of the "
                "samples. Give it, or pass slangvi.Gaussian(noise_precision=...)."
            )
        return _of_means(samples, 1.0 / kind.noise_precision if noise_variance is None else noise_variance)
    if noise_variance is not None:
        raise ValueError(f"noise_variance is for the Gaussian likelihood only, got it with {type(kind).__name__}.")
    if isinstance(kind, Categorical):
        return _of_probabilities(samples)
    if isinstance(kind, Bernoulli):
        return _of_probabilities(torch.stack([samples, 1.0 - samples], -1))
    raise TypeError(
        f"decompose_uncertainty knows categorical, bernoulli and gaussian likelihoods, got {type(kind).__name__}."
    )


def _of_means(samples: Tensor, noise_variance: float | Tensor) -> Uncertainty:
    noise = torch.as_tensor(noise_variance, dtype=samples.dtype, device=samples.device)
    if not bool((torch.isfinite(noise) & (noise >= 0)).all()):
        raise ValueError(f"noise_variance must be finite and ≥ 0, got {noise_variance}.")
    try:
        noise = noise.expand(samples.shape[1:])
    except RuntimeError as error:
        raise ValueError(
            f"noise_variance must be a number, or broadcast to the predictions, {tuple(samples.shape[1:])}, got shape "
            f"{tuple(noise.shape)}. Give one number for each output, or reshape it."
        ) from error
    if len(samples) < 2:
        raise ValueError(f"a variance over draws needs S ≥ 2 samples, got {len(samples)}.")
    epistemic = samples.var(0)
    return Uncertainty(epistemic + noise, noise, epistemic)


def _of_probabilities(probs: Tensor) -> Uncertainty:
    if not bool(((probs >= 0) & (probs <= 1 + 1e-4)).all()):
        raise ValueError("samples must be probabilities in [0, 1], got values outside or NaN. Use predictive_samples.")
    dtype = probs.dtype if probs.is_floating_point() else torch.get_default_dtype()
    exact = probs.double()  # the difference of two entropies may be far smaller than either
    total, aleatoric = (torch.special.entr(p.clamp(0.0, 1.0)).sum(-1) for p in (exact.mean(0), exact))
    aleatoric = aleatoric.mean(0)
    # Entropy is concave, so the difference is negative by rounding only.
    aleatoric, epistemic = aleatoric.to(dtype), (total - aleatoric).clamp_min(0.0).to(dtype)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
