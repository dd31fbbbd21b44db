"""The network behind an estimator: layers by their sizes, or a module of the user's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slangvi import checks

__all__ = ["ACTIVATIONS", "check_outputs", "input_dtype", "layer_sizes", "made_module", "mlp", "num_weights", "seeded"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "identity": nn.Identity,
}


def layer_sizes(value: Any) -> tuple[int, ...]:
    """Return hidden layers as a tuple of widths; one number is one layer, and none is a linear model."""
    if isinstance(value, Integral):
        value = (value,)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            f"hidden_layer_sizes must be a sequence of whole numbers ≥ 1, such as (50,), got {value!r}. "
            "() is a model without hidden layers."
        )
    return tuple(checks.count("hidden_layer_sizes", width) for width in value)


def num_weights(sizes: Sequence[int]) -> int:
    """Return P, the number of weights and biases of linear layers between units."""
    return sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))


def mlp(sizes: Sequence[int], activation: str, dtype: torch.dtype, generator: torch.Generator) -> nn.Sequential:
    """Make linear layers with an activation between them; weights and biases uniform in ±1/√fan_in, as in torch."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        # Made without values first: nn.Linear would fill them from the global source.
        layer = nn.Linear(fan_in, fan_out, dtype=dtype, device="meta").to_empty(device="cpu")
        bound = 1.0 / math.sqrt(fan_in)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        layers += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def made_module(given: Any, num_features: int, num_outputs: int, generator: torch.Generator) -> nn.Module:
    """Return a copy of the user's module, or what the user's function (num_features, num_outputs) → module makes.

    A function draws its initial values from the global source, which is seeded from `generator` and set back after.
    """
    if isinstance(given, nn.Module):
        return copy.deepcopy(given)
    if not callable(given):
        raise TypeError(
            "module must be a torch.nn.Module, or a function of the number of features and of outputs that makes one, "
            f"got {type(given).__name__}."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        made = given(num_features, num_outputs)
    if not isinstance(made, nn.Module):
        raise TypeError(f"module must make a torch.nn.Module, got {type(made).__name__} from it.")
    return made


@contextmanager
def seeded(generator: torch.Generator, device: str | torch.device) -> Iterator[None]:
    """Seed what a module draws by itself in the block, as dropout does, by a generator; no global source moves."""
    place, seed = torch.device(device), 2**31 + generator.initial_seed()  # no other source has a seed this large
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if place.type == "cuda":
            with torch.cuda.device(place):
                torch.cuda.manual_seed(seed)
        yield


def input_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of inputs: that of the module's first floating-point parameter."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def check_outputs(outputs: Tensor, rows: int, num_outputs: int) -> None:
    """Raise a `ValueError` unless outputs are (rows, C)."""
    if not isinstance(outputs, Tensor) or outputs.shape != (rows, num_outputs):
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"module must return {num_outputs} outputs for every row, shape ({rows}, {num_outputs}) for {rows} rows, "
            f"got {shape}. One output per class, or per target column, is needed."
        )
