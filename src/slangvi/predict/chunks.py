"""Outputs at draws of the weights, for no more rows at a time than memory should hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slangvi.distributions import Posterior
from slangvi.predict.samples import evaluating, functional_samples

__all__ = ["drawn_in_chunks", "sizes_for_a_row"]

# Numbers that the outputs of all draws may be for one chunk of rows, and that one layer may make of the rows in it.
_CHUNK = 1 << 22


def drawn_in_chunks(module: nn.Module, posterior: Posterior, x: Tensor, samples: int, seed: int) -> Iterator[Tensor]:
    """Outputs at draws of the weights, (S, m, C) for chunks of m rows; the same draws for every row and call.

    Args:
        module: the posterior belongs to.
        posterior: over its weights.
        x: (n, D), n ≥ 1.
        samples: S.
        seed: of the draws.
    """
    outputs, widest = sizes_for_a_row(module, x[:1])
    passing = max(1, _CHUNK // widest)
    for chunk in x.split(max(1, _CHUNK // (samples * outputs))):
        generator = torch.Generator(x.device).manual_seed(seed)
        yield functional_samples(module, posterior, chunk, samples, batch_size=passing, generator=generator)


def sizes_for_a_row(module: nn.Module, row: Tensor) -> tuple[int, int]:
    """Numbers that a module makes of a row, and those of the layer that makes most.

    Example:
        >>> sizes_for_a_row(nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2)), torch.zeros(1, 3))
        (2, 50)
    """
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
