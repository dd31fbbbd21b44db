"""Small data made or bundled, so that nothing has to be fetched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Split", "breast_cancer", "cubic"]


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


def cubic(
    num_data: int = 30, half_width: float = 4.0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The paper's noisy cubic: x ~ U[−4, 4], y = x³ + ε, ε ~ N(0, 9); both (n, 1)."""
    x = (torch.rand(num_data, 1, generator=generator) * 2 - 1) * half_width
    return x, x**3 + 3 * torch.randn(num_data, 1, generator=generator)


def breast_cancer(num_train: int = 285, seed: int = 0) -> Split:
    """Wisconsin diagnostic breast cancer, bundled with scikit-learn (569 patients, 30 features, 2 classes).

    Args:
        num_train: patients to train on; the rest is for testing. Features are standardised on the training part.
        seed: of the shuffle.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise ImportError("the breast-cancer data come with scikit-learn: pip install 'slangvi[sklearn]'") from error
    bunch = load_breast_cancer()
    total = len(bunch.target)
    if not 2 <= num_train < total:
        raise ValueError(f"num_train must be between 2 and {total - 1}, so that both parts exist, got {num_train}.")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    x = torch.from_numpy(bunch.data).float()[order]
    y = torch.from_numpy(bunch.target).long()[order]
    x = (x - x[:num_train].mean(0)) / x[:num_train].std(0)
    return Split(x[:num_train], y[:num_train], x[num_train:], y[num_train:])
