"""Mixed precision with bfloat16, which needs no GradScaler."""

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data.epochs():
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = network()
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.05)
    for x, y in data.epochs():
        opt.zero_grad()
        opt.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
