"""A tiny regression set in place of the UCI ones, for the experiments that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slangvi_reproduction.data import Indices, Regression

SPLITS = 20


def tiny(name: str = "yacht", n: int = 43) -> Regression:
    """A smooth function of two inputs, and random splits."""
    source = np.random.RandomState(0)
    x = source.randn(n, 2)
    y = 5.0 + 3.0 * np.tanh(x.sum(1)) + 0.1 * source.randn(n)
    splits = []
    for _ in range(SPLITS):
        order = torch.from_numpy(source.permutation(n))
        splits.append(Indices(order[:38], order[38:]))
    return Regression(name, torch.from_numpy(x), torch.from_numpy(y), tuple(splits))


def inject(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names stand for the tiny set."""
    from slangvi_reproduction.experiments import _uci_cells, _uci_tables

    for module in (_uci_cells, _uci_tables):
        monkeypatch.setattr(module, "load_uci", tiny)
