"""Mixed precision with float16 and a GradScaler."""

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in data.epochs():
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = network()
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.05)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in data.epochs():
        opt.zero_grad()
        opt.train()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
