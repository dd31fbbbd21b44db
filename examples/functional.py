"""Bayesian logistic regression with the functional interface: pure functions over an immutable state."""

import torch
import torch.nn.functional as F
from torch import Tensor

import slangvi

# 300 points whose labels come from known weights.
generator = torch.Generator().manual_seed(0)
truth = torch.tensor([2.0, -1.0, 0.0])
x = torch.randn(300, 3, generator=generator)
y = torch.bernoulli(torch.sigmoid(x @ truth + 0.5), generator=generator)


def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Log-probability of each label: one value per example."""
    x, y = batch
    logits = x @ params["weight"] + params["bias"]
    return -F.binary_cross_entropy_with_logits(logits, y, reduction="none")


vi = slangvi.slang.build(
    log_likelihood,
    num_data=len(x),
    rank=2,
    lr=slangvi.inverse_time(0.2, decay=0.51),
    prior_precision={"weight": 1.0, "bias": 0.01},
    mc_samples=2,
)
state = vi.init({"weight": torch.zeros(3), "bias": torch.zeros(())})
for _ in range(500):
    rows = torch.randint(len(x), (32,), generator=generator)
    state, info = vi.update(state, (x[rows], y[rows]), generator=generator)

mean = state.spec.unflatten(state.loc)
sd = state.spec.unflatten(vi.posterior(state).stddev)
print(f"{'':<10}{'truth':>8}{'mean':>8}{'sd':>8}")
for k in range(3):
    print(f"weight[{k}] {truth[k]:>8.2f}{mean['weight'][k]:>8.2f}{sd['weight'][k]:>8.2f}")
print(f"{'bias':<10}{0.5:>8.2f}{mean['bias']:>8.2f}{sd['bias']:>8.2f}")
print(f"ELBO at step {info.step}: {info.elbo.value:.1f} nats, of which KL {info.elbo.kl:.1f}")
