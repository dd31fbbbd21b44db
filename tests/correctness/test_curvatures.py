"""Widths by curvature, against posteriors that Stan computed: means and scale of a linear model are both unknown."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import slangvi
from correctness.kidscores import NUM_ROWS, REFERENCES, rows
from slangvi.likelihoods import Likelihood


class MeanAndScale(Likelihood):
    """Real targets; outputs are a mean and a log standard deviation. The root is that of the Fisher matrix."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_scale = outputs.unbind(-1)
        return -log_scale - 0.5 * ((targets - mean) / log_scale.exp()).square() - 0.5 * math.log(2 * math.pi)

    def predictive(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0]

    def hessian_root(self, outputs: Tensor) -> Tensor:
        inverse = (-outputs[..., 1]).exp()
        none = torch.zeros_like(inverse)
        columns = (inverse, none), (none, torch.full_like(inverse, 2**0.5))
        return torch.stack([torch.stack(column, -1) for column in columns])

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, log_scale = outputs.unbind(-1)
        return mean + log_scale.exp() * torch.empty_like(mean).normal_(generator=generator)


def posterior_deviations(name: str, curvature: str) -> tuple[Tensor, Tensor]:
    """Deviations of the coefficients and of σ over Stan's, and how far the means are from Stan's in these units."""
    reference, data = REFERENCES[name], rows()
    x = torch.cat([torch.ones(NUM_ROWS, 1, dtype=torch.float64), data[:, list(reference.columns)]], 1)
    y, size = data[:, 0], x.shape[1]

    def outputs(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.stack([x @ params["coefficients"], params["log_scale"].expand(len(x))], -1)

    def rate(step: int, first: float) -> float:
        return first if step < 400 else first * 40 / (step - 360)

    vi = slangvi.slang.build(
        MeanAndScale().on(outputs),
        num_data=NUM_ROWS,
        rank=size + 1,
        lr=lambda step: rate(step, 0.2),
        precision_lr=lambda step: rate(step, 0.05),
        curvature=curvature,
        mc_samples=6,
        prior_precision=1e-8,
        engine="factored",
    )
    start = torch.linalg.lstsq(x, y).solution
    state = vi.init({"coefficients": start, "log_scale": torch.tensor(3.0, dtype=torch.float64)})
    generator = torch.Generator().manual_seed(0)
    for _ in range(900):
        state, _ = vi.update(state, (x, y), generator)
    q = vi.posterior(state)
    mean, variance = q.loc, q.variance
    scale = (mean[-1] + variance[-1] / 2).exp()  # σ is log-normal
    spread = scale * variance[-1].expm1().sqrt()
    deviations = torch.cat([variance[:-1].sqrt(), spread[None]])
    apart = torch.cat([mean[:-1], scale[None]]) - torch.tensor(reference.means).double()
    return deviations / reference.deviations, apart / reference.deviations


@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
@pytest.mark.parametrize("name", REFERENCES)
def test_curvature_of_the_likelihood_gives_the_widths_that_stan_found(name, curvature):
    ratios, apart = posterior_deviations(name, curvature)
    assert float((ratios - 1).abs().max()) < 0.02
    assert float(apart.abs().max()) < 0.15


def test_the_empirical_fisher_does_not():
    ratios, _ = posterior_deviations("momhsiq", "ef")
    assert float(ratios.min()) > 1.1
