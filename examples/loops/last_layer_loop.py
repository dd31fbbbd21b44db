"""A posterior over the last layer alone; Adam goes on training the layers before it."""

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    model = network()
    body = torch.optim.Adam(model[0].parameters(), lr=1e-3)
    head = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    for x, y in data.epochs():
        body.zero_grad()
        head.zero_grad()
        F.cross_entropy(model(x), y).backward()
        head.step()
        body.step()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = network()
    body = torch.optim.Adam(model[0].parameters(), lr=1e-3)
    cool = {"temperature": 0.1, "prior_precision": 10.0}
    head = slangvi.SLANG(model, model[2].parameters(), num_data=data.size, rank=4, lr=0.02, **cool)
    for x, y in data.epochs():
        body.zero_grad()
        head.zero_grad()
        head.train()
        F.cross_entropy(model(x), y).backward()
        head.step()
        body.step()
    return slangvi.predictive_samples(model, head.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
