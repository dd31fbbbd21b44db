"""The same network trained by Adam and by SLANG on the breast-cancer data that scikit-learn bundles.

Needs scikit-learn: pip install 'slangvi[sklearn]'. Nothing is downloaded. The run is short and shows the two loops, not
which method is better; `slangvi demo` trains longer.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slangvi
from slangvi.data.toy import breast_cancer

data = breast_cancer()
train_set = TensorDataset(data.x_train, data.y_train)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 2))


def batches() -> DataLoader:
    return DataLoader(train_set, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))


# ---- Adam

model, loader = network(), batches()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(20):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
with torch.no_grad():
    adam_probs = model(data.x_test).softmax(-1)

# ---- SLANG

model, loader = network(), batches()
generator = torch.Generator().manual_seed(0)
opt = slangvi.SLANG(model, num_data=len(train_set), rank=4, lr=0.05, generator=generator)
for _ in range(20):
    for x, y in loader:
        for _ in range(2):  # Monte-Carlo samples
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
        opt.step()
draws = slangvi.predictive_samples(model, opt.posterior, data.x_test, n_samples=64, generator=generator)
slang_probs = draws.mean(0)

# ---- side by side

print(f"{'method':<8}{'accuracy':>10}{'NLL (nats)':>12}{'ECE':>8}")
for name, probs in (("Adam", adam_probs), ("SLANG", slang_probs)):
    accuracy = slangvi.metrics.accuracy(probs, data.y_test)
    nll = slangvi.metrics.nll(probs, data.y_test)
    ece = slangvi.metrics.ece(probs, data.y_test)
    print(f"{name:<8}{accuracy:>10.3f}{nll:>12.3f}{ece:>8.3f}")
