"""A tiny set of two classes in place of the LIBSVM ones, for experiments that train networks on them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from slangvi.data.toy import Split


def tiny(name: str = "breast_cancer", splits: Iterable[int] = (1,), n: int = 40) -> Split:
    """Two noisy classes in the plane behind a column of ones, 40 examples to train on and 40 to test on."""
    parts = []
    for split in splits:
        source = np.random.RandomState(split)
        x = np.column_stack([np.ones(2 * n), source.uniform(-1.0, 1.0, (2 * n, 2))])
        y = (x[:, 1] * x[:, 2] + 0.05 * source.randn(2 * n) > 0).astype(np.float64)
        parts.append([torch.from_numpy(part) for part in (x[:n], y[:n], x[n:], y[n:])])
    return Split(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))


def inject(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All names stand for the tiny set; returns those that were asked for before anything was computed."""
    from slangvi_reproduction.experiments import _bnn_cells, bnn_convergence

    asked: list[str] = []
    monkeypatch.setattr(_bnn_cells, "libsvm_splits", tiny)
    monkeypatch.setattr(bnn_convergence, "load_libsvm", asked.append)
    return asked
