"""A tiny stand-in for MNIST: blurred prototypes of ten classes, small enough that networks learn them in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slangvi_reproduction.data import Images

if TYPE_CHECKING:
    import pytest

SIZES = {"train": 120, "test": 60}


def images(part: str = "train") -> Images:
    """Images of 28 × 28 whose bright rows tell the class, with noise."""
    source = torch.Generator().manual_seed(len(part))
    y = torch.arange(SIZES[part]) % 10
    x = 0.3 * torch.rand(len(y), 28, 28, generator=source)
    for k, label in enumerate(y.tolist()):
        x[k, 2 * label : 2 * label + 3] += 0.6
    return Images(x, y)


def inject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the experiment see these in place of MNIST."""
    from slangvi_reproduction.experiments import _image_cells, _mnist_tables, mnist

    for name in _image_cells.LOADERS:
        monkeypatch.setitem(_image_cells.LOADERS, name, images)
    for module in (_mnist_tables, mnist):
        monkeypatch.setattr(module, "load_mnist", images)
    _image_cells.load.cache_clear()
