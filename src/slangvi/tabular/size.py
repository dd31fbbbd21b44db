"""Whether a network fits into memory, asked before hours are spent on finding out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from slangvi.errors import DataError
from slangvi.estimators.network import num_weights
from slangvi.memory import estimate_memory
from slangvi.out_of_memory import human

__all__ = ["check_size", "memory_of"]

# Smaller networks fit anywhere, and are not worth the seconds of a plan.
LARGE = 1_000_000
# Of a step of the estimators: rows at most, and draws.
ROWS, DRAWS = 32, 4


def check_size(sizes: Sequence[int], rank: int, device: str) -> None:
    """Refuse a network whose training would take more memory than there is.

    Args:
        sizes: features, widths of the hidden layers, outputs.
        rank: L.
        device: to train on.

    Raises:
        DataError: it would.
    """
    num_params, there = num_weights(sizes), memory_of(device)
    if num_params < LARGE or there is None:
        return
    with torch.device("meta"):
        layers = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.ReLU())]
        model, batch = nn.Sequential(*layers[:-1]).double(), torch.empty(ROWS, sizes[0], dtype=torch.float64)
    needed = estimate_memory(model, batch, rank, DRAWS).peak
    if needed > there:
        raise DataError(
            f"a network of {num_params:,} weights with a posterior of rank {rank} takes {human(needed)} to train, and "
            f"{'this machine' if device == 'cpu' else 'the GPU'} has {human(there)}. Choose fewer or narrower --hidden "
            "layers, or a lower --rank."
        )


def memory_of(device: str) -> int | None:
    """Bytes of memory of the machine or the GPU; None where the system does not tell."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
