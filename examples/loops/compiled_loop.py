"""A model under torch.compile."""

import shutil

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()
backend = "inductor" if shutil.which("g++") else "aot_eager"  # the first writes C++ and compiles it


def adam() -> torch.Tensor:
    model = torch.compile(network(), backend=backend)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data.epochs():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = torch.compile(network(), backend=backend)
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.05)
    for x, y in data.epochs():
        opt.zero_grad()
        opt.train()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
