"""A posterior over some parameters, chosen by name; the others are frozen."""

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    model = network()
    chosen = [p for name, p in model.named_parameters() if name.endswith("bias") or name == "2.weight"]
    opt = torch.optim.Adam(chosen, lr=1e-2)
    for x, y in data.epochs():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = network()
    chosen = [p for name, p in model.named_parameters() if name.endswith("bias") or name == "2.weight"]
    opt = slangvi.SLANG(model, chosen, num_data=data.size, rank=4, lr=0.05, temperature=0.1, prior_precision=10.0)
    for x, y in data.epochs():
        opt.zero_grad()
        opt.train()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
