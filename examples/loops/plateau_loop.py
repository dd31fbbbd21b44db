"""A learning rate that falls when a loss no longer does: ReduceLROnPlateau."""

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3)
    for _ in range(40):
        for x, y in data.epochs(1):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        with torch.no_grad():
            sched.step(F.cross_entropy(model(data.x_train), data.y_train))
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = network()
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.05)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3)
    for _ in range(40):
        for x, y in data.epochs(1):
            opt.zero_grad()
            opt.train()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        with torch.no_grad():
            sched.step(F.cross_entropy(model(data.x_train), data.y_train))
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
