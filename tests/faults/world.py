"""Everything global that no call may change."""

from __future__ import annotations

import os
import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch imports it at the first optimizer, and it writes to the environment
from torch import nn


def snapshot(model: nn.Module | None) -> dict[str, Any]:
    """What can be compared by ==, by name."""
    kept = {
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "numpy's random state": pickle.dumps(np.random.get_state()),
        "python's random state": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "matmul precision": torch.get_float32_matmul_precision(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "warning filters": list(warnings.filters),
        "recursion limit": sys.getrecursionlimit(),
        "print options": str(torch._tensor_str.PRINT_OPTS),
    }
    if model is not None:
        kept["training flags"] = [m.training for m in model.modules()]
        kept["requires_grad"] = [p.requires_grad for p in model.parameters()]
        kept["hooks outside"] = [len(m._forward_pre_hooks) for m in model.modules() if not list(m.children())]
    return kept


@contextmanager
def unchanged(model: nn.Module | None = None) -> Iterator[None]:
    """The block leaves the world as it was, whether it raises or not."""
    before = snapshot(model)
    try:
        yield
    finally:
        after = snapshot(model)
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, f"changed: {changed}"
