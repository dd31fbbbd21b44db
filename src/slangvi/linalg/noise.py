"""Standard normal noise."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["standard_normal"]


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return N(0, 1) with the dtype and device of another tensor.

    Args:
        shape: of the result.
        like: tensor whose dtype and device it has.
        generator: source; None is torch's own.

    Example:
        >>> standard_normal((2, 3), torch.zeros(()), torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3])
    """
    return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)
