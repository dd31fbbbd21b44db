"""Linear models of test scores of 434 children, with reference posteriors that Stan computed.

From posteriordb (https://github.com/stan-dev/posteriordb, BSD-3): kidiq-kidscore_momhs, -kidscore_momiq and
-kidscore_momhsiq, means and mean squares over ten chains of 1,000 draws. The likelihood of a linear model depends on
the data through their number, means and covariances alone; those of the original data are below, and rows that have
them are made here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NUM_ROWS = 434
# Score of the child, whether the mother finished high school, her IQ.
MEANS = torch.tensor([86.797235023, 0.785714285714, 100], dtype=torch.float64)
COVARIANCE = torch.tensor(
    [
        [415.636305719, 1.9818959842, 136.928047583],
        [1.9818959842, 0.168367346939, 1.73803878445],
        [136.928047583, 1.73803878445, 224.48156682],
    ],
    dtype=torch.float64,
)
CAUCHY_SCALE = 2.5  # of the prior of σ; that of the coefficients is flat


class Reference(NamedTuple):
    """Columns of the model beside the constant, and moments of its coefficients and of σ."""

    columns: tuple[int, ...]
    means: tuple[float, ...]
    mean_squares: tuple[float, ...]

    @property
    def deviations(self) -> Tensor:
        """Standard deviations."""
        return (torch.tensor(self.mean_squares).double() - torch.tensor(self.means).double().square()).sqrt()


REFERENCES = {
    "momhs": Reference((1,), (77.5146147479399, 11.8131711144596, 19.8659904467415), (6012.6610, 144.8276, 395.1092)),
    "momiq": Reference(
        (2,), (25.9165315719362, 0.608628437090334, 18.2758483814245), (707.2872671, 0.3739071, 334.3959904)
    ),
    "momhsiq": Reference(
        (1, 2),
        (25.7941145578544, 5.98743192293386, 0.562993791866958, 18.1391940930461),
        (699.6797861, 40.7595917, 0.3206177, 329.412899),
    ),
}


def rows() -> Tensor:
    """Rows with exactly these means and covariances, (434, 3): waves are orthogonal, and so are their mixtures."""
    turns = 2 * math.pi * torch.arange(NUM_ROWS, dtype=torch.float64)[:, None] / NUM_ROWS * torch.arange(1, 4)
    return MEANS + math.sqrt(2) * torch.cos(turns) @ torch.linalg.cholesky(COVARIANCE).T
