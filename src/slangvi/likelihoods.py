"""How a network's outputs explain targets: log-probability of each example, and the predictive behind the link."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi import checks
from slangvi.errors import NumericalError
from slangvi.quadrature import softplus_expectations

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "OutputLogLikelihood",
    "curvature_seeds",
    "defer_checks",
    "likelihood_named",
    "one_entry_each",
]

# Most backward passes' worth of columns that a square root of an example's Hessian may have, and outputs of an example
# up to which "auto" takes them all instead of one target that is drawn.
MOST_COLUMNS, MOST_EXACT = 1024, 4


class Likelihood(ABC):
    """log p(y | f) for network outputs f.

    `has_constant_hessian` tells whether −∂² log p/∂f² is the same for all outputs and targets.
    """

    has_constant_hessian = False

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of each example, summed over its output dimensions: (M,)."""

    @abstractmethod
    def predictive(self, outputs: Tensor) -> Tensor:
        """Outputs behind the link: class probabilities or the mean."""

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return columns b of a square root of each example's Hessian, −∂² log p/∂f² = Σ_q b_q b_qᵀ, for "ggn".

        Args:
            outputs: f, (M, ...).

        Returns:
            (Q, M, ...), where Q does not depend on the examples.
        """
        raise TypeError(
            f'{type(self).__name__} has no hessian_root, which curvature="ggn" takes its rows from. Define it, or use '
            'curvature="fisher" with a method sample, or curvature="ef".'
        )

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return targets drawn from p(y | f), for "fisher".

        Args:
            outputs: f, (M, ...).
            generator: source of randomness, on the device of the outputs.
        """
        raise TypeError(
            f'{type(self).__name__} has no sample, which curvature="fisher" takes its targets from. Define it, or use '
            'curvature="ggn" with a method hessian_root, or curvature="ef".'
        )

    def draws_targets(self, kind: str, shape: torch.Size) -> bool:
        """Tell whether the curvature of a kind comes from one target that is drawn; "auto" does so for many outputs.

        Args:
            kind: "ggn", "fisher" or "auto".
            shape: of the outputs of an example.
        """
        has_root = type(self).hessian_root is not Likelihood.hessian_root
        return kind == "fisher" or (kind == "auto" and (shape.numel() > MOST_EXACT or not has_root))

    @property
    def gives_curvature(self) -> bool:
        """Tell whether it has one of the two methods that curvature is taken from."""
        own = type(self)
        return own.hessian_root is not Likelihood.hessian_root or own.sample is not Likelihood.sample

    def of(self, model: nn.Module) -> OutputLogLikelihood:
        """Return the log-likelihood of a module as a function of (params, (x, y)), for `slangvi.slang.build`."""

        def outputs(params: Mapping[str, Tensor], x: Any) -> Tensor:
            found: Tensor = torch.func.functional_call(model, dict(params), (x,))
            return found

        return OutputLogLikelihood(self, outputs, model)

    def on(self, outputs: Callable[[Mapping[str, Tensor], Any], Tensor]) -> OutputLogLikelihood:
        """Return the log-likelihood of a function (params, x) → outputs, as a function of (params, (x, y))."""
        return OutputLogLikelihood(self, outputs)


@dataclass(frozen=True)
class OutputLogLikelihood:
    """A log-likelihood, (params, (x, y)) → (M,), that knows the outputs it is made of.

    Args:
        likelihood: of targets, given the outputs.
        outputs: (params, x) → f, (M, ...).
        model: the module that is called, if it is one.
    """

    likelihood: Likelihood
    outputs: Callable[[Mapping[str, Tensor], Any], Tensor]
    model: nn.Module | None = None

    def __call__(self, params: Mapping[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
        """Return the log-likelihood of each example, (M,)."""
        x, y = input_and_target(batch)
        return self.likelihood.log_prob(self.outputs(params, x), y)


def input_and_target(batch: Any) -> tuple[Any, Tensor]:
    """Return both parts of a batch (x, y), or say that it is none."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
    raise TypeError(f"batch must be a pair (x, y) for a likelihood on outputs, got a {kind}. Pass (x, y).")


def curvature_seeds(
    likelihood: Likelihood,
    kind: str,
    outputs: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return gradients of the outputs whose outer products are the curvature of each example, (Q, M, ...).

    For "ggn" they are the columns of a square root of −∂² log p/∂f². For "fisher" there is one, −∂ log p/∂f at a target
    that is drawn from p(y | f): its outer product has that Hessian as its expectation.

    Args:
        likelihood: of targets, given the outputs.
        kind: "ggn", "fisher", or "auto" for one of them.
        outputs: f, (M, ...).
        generator: source of the targets.
    """
    outputs = outputs.detach()
    if not likelihood.draws_targets(kind, outputs.shape[1:]):
        seeds = likelihood.hessian_root(outputs)
        if seeds.shape[1:] != outputs.shape:
            raise ValueError(
                f"{type(likelihood).__name__}.hessian_root must return (Q, *outputs.shape), got {tuple(seeds.shape)} "
                f"for outputs of shape {tuple(outputs.shape)}."
            )
        return seeds
    with torch.enable_grad():
        free = outputs.requires_grad_()
        value = likelihood.log_prob(free, likelihood.sample(free.detach(), generator)).sum()
        return -torch.autograd.grad(value, free)[0].unsqueeze(0)


def one_entry_each(sizes: Tensor) -> Tensor:
    """Return the root of diagonal Hessians: entry j of each example alone, for all j; sizes (M, ...) → (Q, M, ...)."""
    flat = sizes.reshape(len(sizes), -1)
    _check_columns(flat.shape[1])
    return torch.diag_embed(flat).transpose(0, 1).reshape(-1, *sizes.shape)


def _check_columns(count: int) -> None:
    """Refuse Hessians with too many columns to go back for each."""
    if count > MOST_COLUMNS:
        raise ValueError(
            f'curvature="ggn" would take {count} rows for each example, one for each output; {MOST_COLUMNS} are the '
            'most. Use curvature="fisher", which takes one.'
        )


class Categorical(Likelihood):
    """Classes 0…C−1 from C logits in the last dimension.

    Example:
        >>> Categorical().log_prob(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([-0.6931])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-softmax at the targets; outputs (M, ..., C), targets (M, ...)."""
        _check_tensors(outputs, targets)
        _check_classes(outputs)
        check_labels(targets, outputs.shape[-1])
        _check_shape(targets, outputs.shape[:-1])
        labels, capturing = targets.long(), _capturing(targets)
        # A label out of range would stop the device for good; divided by zero, its value is found after the step.
        index = labels.clamp(0, outputs.shape[-1] - 1) if capturing else labels
        # Not cross_entropy, which under vmap falls apart into some forty small operations.
        values = outputs.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return _sum_but_first(values / (index == labels) if capturing else values)

    def predictive(self, outputs: Tensor) -> Tensor:
        """Softmax over the last dimension; outputs (M, ..., C) with C ≥ 2."""
        _check_classes(outputs)
        check_several(outputs.shape)
        return outputs.softmax(-1)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""Return the columns of the Cholesky factor of diag(p) − ppᵀ, C − 1 for each position.

        $$ b_k = \sqrt{p_k r_{k+1} / r_k}\,\bigl(e_k - p_{>k} / r_{k+1}\bigr), \qquad
           r_k = \textstyle\sum_{j \ge k} p_j $$
        """
        _check_classes(outputs)
        check_several(outputs.shape)
        classes, positions = outputs.shape[-1], outputs.shape[1:-1].numel()
        _check_columns(positions * (classes - 1))
        tiny = torch.finfo(outputs.dtype).tiny
        p = outputs.reshape(len(outputs), positions, classes).softmax(-1)
        tail = p.flip(-1).cumsum(-1).flip(-1).clamp_min(tiny)
        after = tail[..., 1:]
        slope = -(p[..., :-1] / tail[..., :-1]).sqrt() / after.sqrt()  # of p_j in column k, for j > k
        lower = torch.triu(slope.unsqueeze(-1) * p.unsqueeze(-2), diagonal=1)
        pivot = (p[..., :-1] * (after / tail[..., :-1])).sqrt()
        lower.diagonal(dim1=-2, dim2=-1).copy_(pivot)
        columns = outputs.new_zeros(len(outputs), positions, classes - 1, positions, classes)
        place = torch.arange(positions, device=outputs.device)
        columns[:, place, :, place] = lower.transpose(0, 1)  # a column is zero at other positions
        return columns.flatten(1, 2).transpose(0, 1).reshape(-1, *outputs.shape)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a class for each position."""
        _check_classes(outputs)
        p = outputs.float().softmax(-1).reshape(-1, outputs.shape[-1])
        return torch.multinomial(p, 1, generator=generator).reshape(outputs.shape[:-1])


class Bernoulli(Likelihood):
    """Zero-one targets from logits of the same shape.

    Example:
        >>> Bernoulli().log_prob(torch.zeros(2), torch.tensor([0.0, 1.0]))
        tensor([-0.6931, -0.6931])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log σ(±f), stable at any logit."""
        _check_tensors(outputs, targets)
        _check_shape(targets, outputs.shape)
        values = targets.to(outputs.dtype)
        if _eager(values) and not bool(((values >= 0) & (values <= 1)).all()):
            raise ValueError("targets must lie in [0, 1], got values outside. Code the classes as 0 and 1.")
        if _capturing(values):
            values = values.where((values >= 0) & (values <= 1), torch.nan)
        return -_sum_but_first(F.binary_cross_entropy_with_logits(outputs, values, reduction="none"))

    def predictive(self, outputs: Tensor) -> Tensor:
        """Sigmoid."""
        return outputs.sigmoid()

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return √(p(1 − p)) at one output of each example, for every output."""
        return one_entry_each((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return zeros and ones."""
        return torch.bernoulli(outputs.sigmoid(), generator=generator)

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return E[log p(y | f)] for logits f ~ N(mean, variance) and y in [0, 1], without sampling, (...).

        It is y·mean − E[log(1 + eᶠ)], accurate to about 1e-13 in float64.

        Example:
            >>> Bernoulli().expected_log_prob(torch.zeros(2), torch.tensor([0.0, 9.0]), torch.ones(2))
            tensor([-0.6931, -1.3941])
        """
        return targets * mean - softplus_expectations(mean, variance, orders=1)[0]

    def predictive_from_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the probability of class 1 for logits f ~ N(mean, variance): E[σ(f)], without sampling, (...).

        Example:
            >>> Bernoulli().predictive_from_moments(torch.tensor(2.0), torch.tensor([0.0, 9.0]))
            tensor([0.8808, 0.7174])
        """
        return softplus_expectations(mean, variance, orders=2)[1]

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return log E[p(y | f)] for logits f ~ N(mean, variance) and classes y ∈ {0, 1}, without sampling, (...).

        Where the probability is too small to tell from rounding errors, its lower bound E[log p(y | f)] stands in.
        """
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise ValueError("targets must be 0 or 1, got other values. Code the classes as 0 and 1.")
        signed = torch.where(targets == 1, mean, -mean)
        softplus, probability = softplus_expectations(signed, variance, orders=2)
        tiny, bound = torch.finfo(probability.dtype).tiny, signed - softplus
        return torch.where(probability > tiny, torch.maximum(probability.clamp_min(tiny).log(), bound), bound)


class Gaussian(Likelihood):
    """Real targets with known noise.

    Args:
        noise_precision: τ = 1/σ², on the scale of the targets.

    Example:
        >>> Gaussian(noise_precision=4.0).log_prob(torch.zeros(1), torch.tensor([0.5]))
        tensor([-0.7258])
    """

    has_constant_hessian = True

    def __init__(self, noise_precision: float = 1.0) -> None:
        self.noise_precision = checks.number("noise_precision", noise_precision, 0.0, hint="It is 1/σ².")

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½ (log τ − log 2π − τ (y − f)²)."""
        _check_tensors(outputs, targets)
        _check_shape(targets, outputs.shape)
        if _eager(targets) and not bool(torch.isfinite(targets).all()):
            raise NumericalError(f"targets hold {int((~torch.isfinite(targets)).sum())} NaN or Inf. Clean the data.")
        constant = math.log(self.noise_precision) - math.log(2 * math.pi)
        return _sum_but_first(0.5 * (constant - self.noise_precision * (targets - outputs).square()))

    def predictive(self, outputs: Tensor) -> Tensor:
        """The mean, unchanged."""
        return outputs

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return √τ at one output of each example, for every output."""
        return one_entry_each(torch.full_like(outputs, self.noise_precision**0.5))

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return outputs with noise."""
        noise = torch.empty_like(outputs).normal_(generator=generator)
        targets: Tensor = outputs + noise / self.noise_precision**0.5
        return targets


_ONE_OUTPUT = "For one output per example take the likelihood 'bernoulli' (two classes) or 'gaussian'."
_NAMED: dict[str, type[Likelihood]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def likelihood_named(value: str | Likelihood) -> Likelihood:
    """Return a likelihood, given itself or its name."""
    if isinstance(value, Likelihood):
        return value
    return _NAMED[checks.choice("likelihood", value, tuple(_NAMED))]()


def _check_tensors(outputs: Tensor, targets: Tensor) -> None:
    checks.tensors(outputs=outputs, targets=targets)
    if not outputs.is_floating_point():
        raise TypeError(f"outputs must be floating-point numbers, got dtype {outputs.dtype}. Convert with .float().")


def _check_classes(outputs: Tensor) -> None:
    """Refuse outputs without a dimension of classes, which would be compared with those of other examples."""
    if outputs.ndim < 2:
        raise ValueError(f"outputs must have shape (M, ..., C), got {tuple(outputs.shape)}. {_ONE_OUTPUT}")


def check_several(shape: Sequence[int]) -> None:
    """Refuse to predict a single class: its probability would be 1 whatever the outputs."""
    if shape[-1] == 1:
        raise ValueError(f"class probabilities need at least two outputs, got shape {tuple(shape)}. {_ONE_OUTPUT}")


def check_labels(targets: Tensor, num_classes: int) -> None:
    """Refuse labels that are not whole numbers 0…C−1."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise TypeError(f"targets must be integer class labels, got dtype {targets.dtype}. Convert with .long().")
    if not _eager(targets) or targets.numel() == 0:
        return
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"targets must be labels 0…{num_classes - 1} (the model has {num_classes} outputs), got values from {low} "
            f"to {high}. Renumber the classes or widen the last layer."
        )


def _eager(values: Tensor) -> bool:
    """Tell whether numbers can be read: not inside torch.func transforms or a graph capture."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(values) and not _capturing(values)


_DEFERRED = [0]  # open blocks of `defer_checks`


@contextmanager
def defer_checks() -> Iterator[None]:
    """Let targets out of range become NaN instead of errors inside the block, so that no number is looked at."""
    _DEFERRED[0] += 1
    try:
        yield
    finally:
        _DEFERRED[0] -= 1


def _capturing(values: Tensor) -> bool:
    """Tell whether no number may be read, since operations are recorded for a CUDA graph."""
    return _DEFERRED[0] > 0 or (values.is_cuda and torch.cuda.is_current_stream_capturing())


def _sum_but_first(values: Tensor) -> Tensor:
    if values.ndim == 0:
        raise ValueError("outputs must have shape (M, ...), one row per example, got a scalar.")
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _check_shape(targets: Tensor, expected: torch.Size) -> None:
    if targets.shape != expected:
        raise ValueError(
            f"targets must have shape {tuple(expected)} to match the outputs, got {tuple(targets.shape)}. Reshape one "
            "of them: broadcasting would compare every target with every output."
        )
