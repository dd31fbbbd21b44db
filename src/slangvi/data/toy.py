"""Small data made or bundled, so that nothing has to be fetched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Split", "cubic", "digits"]


class Split(NamedTuple):
    """Training and test parts of a data set.

    Args:
        x_train: (n, ...).
        y_train: (n,) labels or (n, 1) values.
        x_test: (m, ...).
        y_test: as `y_train`.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def cubic(num_data: int = 30, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The paper's noisy cubic: x ~ U[−4, 4], y = x³ + ε, ε ~ N(0, 9); both (n, 1)."""
    x = torch.rand(num_data, 1, generator=generator) * 8 - 4
    return x, x**3 + 3 * torch.randn(num_data, 1, generator=generator)


def digits(num_train: int = 400, seed: int = 0) -> Split:
    """Handwritten 8×8 digits bundled with scikit-learn (1797 images, 10 classes), pixels scaled to [0, 1].

    Args:
        num_train: images to train on; the rest is for testing.
        seed: of the shuffle.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits data come with scikit-learn: pip install 'slangvi[sklearn]'") from error
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    x = (torch.from_numpy(bunch.data).float() / 16.0)[order]
    y = torch.from_numpy(bunch.target).long()[order]
    return Split(x[:num_train], y[:num_train], x[num_train:], y[num_train:])
