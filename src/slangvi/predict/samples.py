"""The model evaluated at draws of its weights, all rows at once or in chunks that memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slangvi import checks
from slangvi.distributions import Posterior
from slangvi.likelihoods import Likelihood, likelihood_named
from slangvi.params import ParamSpec
from slangvi.params.spec import uncompiled
from slangvi.rows import dense

__all__ = [
    "call",
    "check_given",
    "drawn_in_chunks",
    "evaluating",
    "functional_samples",
    "predictive_samples",
    "spec_of",
]

# Numbers that the outputs of all draws may be for one chunk of rows, and that one layer may make of the rows in it.
_CHUNK = 1 << 22


def functional_samples(
    model: nn.Module,
    posterior: Posterior,
    x: Any,
    n_samples: int = 32,
    *,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return outputs f(x, θ_s) before the link, (S, n, ...), for draws θ_s of the weights.

    Weights are drawn one at a time and rows pass through the model `batch_size` at a time, so memory is one set of
    weights plus one chunk's activations plus the result, which is on the model's device and does not depend on
    `batch_size`. The model runs in eval mode; its weights, mode and gradients are left as they were.

    Args:
        model: the module the posterior belongs to.
        posterior: `opt.posterior` or `slangvi.slang.posterior(state)`.
        x: inputs with n rows: a tensor, or a tuple (positional arguments) or dict (keyword arguments) of tensors.
        n_samples: S.
        batch_size: rows at a time; None takes all.
        generator: source of randomness; None uses torch's global one.

    Example:
        >>> import slangvi
        >>> model = nn.Linear(3, 2)
        >>> q = slangvi.LowRankPrecisionNormal(torch.zeros(8), torch.zeros(8, 1), torch.ones(8))
        >>> functional_samples(model, q, torch.zeros(4, 3), n_samples=5).shape
        torch.Size([5, 4, 2])
    """
    return predictive_samples(
        model, posterior, x, n_samples, likelihood="gaussian", batch_size=batch_size, generator=generator
    )


def predictive_samples(
    model: nn.Module,
    posterior: Posterior,
    x: Any,
    n_samples: int = 32,
    *,
    likelihood: str | Likelihood = "categorical",
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return predictions behind the link, (S, n, ...), for draws of the weights; their mean is the predictive.

    Args:
        model: the module the posterior belongs to.
        posterior: `opt.posterior` or `slangvi.slang.posterior(state)`.
        x: inputs with n rows, as in `functional_samples`.
        n_samples: S.
        likelihood: "categorical" (softmax), "bernoulli" (sigmoid), "gaussian" (identity), or a `Likelihood`.
        batch_size: rows at a time; None takes all.
        generator: source of randomness; None uses torch's global one.
    """
    link = likelihood_named(likelihood).predictive
    draws = checks.count("n_samples", n_samples)
    check_given(model, posterior)
    model, rows = uncompiled(model), dense.batch_size(x)
    step = rows if batch_size is None else checks.count("batch_size", batch_size)
    spec = spec_of(model, posterior)
    values = dict(model.named_parameters())
    result = None
    with torch.no_grad(), evaluating(model):
        for s in range(draws):
            flat = spec.unflatten(posterior.rsample(generator=generator))
            params = {name: value.to(values[name].dtype) for name, value in flat.items()}
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                piece = link(call(model, params, dense.slice_batch(x, start, stop)))
                if piece.ndim == 0 or piece.shape[0] != stop - start:
                    raise ValueError(
                        f"the model must return one row per input row, ({stop - start}, ...), got {tuple(piece.shape)}."
                    )
                if result is None:
                    result = piece.new_empty(draws, rows, *piece.shape[1:])
                result[s, start:stop] = piece
    assert result is not None
    return result


def call(model: nn.Module, params: dict[str, Tensor], x: Any) -> Tensor:
    """Call the model at given weights; a tuple holds positional arguments, a dict keyword arguments."""
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    outputs = torch.func.functional_call(model, params, args, kwargs)
    outputs = getattr(outputs, "logits", outputs)  # Hugging Face's models return several parts
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"the model must return one tensor to be predicted from, got {type(outputs).__name__}. "
            "Wrap it in a module that returns the logits."
        )
    return outputs


def check_given(model: Any, posterior: Any) -> None:
    """Check that these are a module and a posterior."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not (hasattr(posterior, "rsample") and hasattr(posterior, "param_spec")):
        raise TypeError(f"posterior must be that of an optimizer or a method, got {type(posterior).__name__}.")


def spec_of(model: nn.Module, posterior: Posterior) -> ParamSpec:
    """Return the layout of a posterior; raise a `ValueError` unless it is that of the model."""
    spec = posterior.param_spec or ParamSpec.of_module(model)
    if posterior.batch_shape:
        raise ValueError(f"posterior must be a single distribution, got batch shape {tuple(posterior.batch_shape)}.")
    if spec.num_params != posterior.event_shape[0]:
        raise ValueError(
            f"posterior is over {posterior.event_shape[0]} parameters, the model has {spec.num_params} trainable ones. "
            "Pass the model the posterior was learnt on."
        )
    shapes = {name: value.shape for name, value in model.named_parameters()}
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        if shapes.get(name) != shape:
            raise ValueError(
                f"posterior does not fit the model: it expects parameter {name!r} of shape {tuple(shape)}, the model "
                f"has {tuple(shapes[name]) if name in shapes else 'none'}."
            )
    return spec


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and every module's own mode again after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def drawn_in_chunks(module: nn.Module, posterior: Posterior, x: Tensor, samples: int, seed: int) -> Iterator[Tensor]:
    """Yield outputs at S draws of the weights, (S, m, C) for chunks of m rows; draws are the same for all rows."""
    outputs, widest = sizes_for_a_row(module, x[:1])
    passing = max(1, _CHUNK // widest)
    for chunk in x.split(max(1, _CHUNK // (samples * outputs))):
        generator = torch.Generator(x.device).manual_seed(seed)
        yield functional_samples(module, posterior, chunk, samples, batch_size=passing, generator=generator)


def sizes_for_a_row(module: nn.Module, row: Tensor) -> tuple[int, int]:
    """Return how many numbers a module makes of a row, and how many its widest layer makes."""
    sizes = [row.numel()]

    def note(part: nn.Module, given: Any, made: Any) -> None:
        sizes.extend(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))

    handles = [part.register_forward_hook(note) for part in module.modules()]
    try:
        with torch.no_grad(), evaluating(module):
            module(row)
    finally:
        for handle in handles:
            handle.remove()
    return sizes[-1], max(sizes)
