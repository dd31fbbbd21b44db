"""Tensors that say they are on a GPU: what is written for one runs on the CPU, and can be compared with what is not."""

from __future__ import annotations

import torch
from torch import Tensor


class OnGpu(torch.Tensor):
    """Lies about its device; results of operations lie as well."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]


def on_gpu(x: Tensor) -> OnGpu:
    return x.as_subclass(OnGpu)


def plain(x: Tensor) -> Tensor:
    """As itself again, to be compared."""
    assert isinstance(x, OnGpu)
    return x.as_subclass(Tensor)
