"""A learning rate that changes with every step: OneCycleLR."""

import torch
import torch.nn.functional as F
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=2e-2, epochs=40, steps_per_epoch=data.num_batches)
    for x, y in data.epochs(40):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        sched.step()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    model = network()
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, epochs=40, steps_per_epoch=data.num_batches)
    for x, y in data.epochs(40):
        opt.zero_grad()
        opt.train()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        sched.step()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
