"""Hugging Face Accelerate, with gradient accumulation."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import clouds, compare, network

import slangvi

data = clouds()


def adam() -> torch.Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, opt, loader = accelerator.prepare(model, opt, data.loader(15))
    for _ in range(40):
        for x, y in loader:
            with accelerator.accumulate(model):
                opt.zero_grad()
                accelerator.backward(F.cross_entropy(model(x), y))
                opt.step()
    return model(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.05, accumulation_steps=2)
    model, opt, loader = accelerator.prepare(model, opt, data.loader(15))
    for _ in range(40):
        for x, y in loader:
            with accelerator.accumulate(model):
                opt.zero_grad()
                opt.train()
                accelerator.backward(F.cross_entropy(model(x), y))
                opt.step()
    return slangvi.predictive_samples(model, opt.optimizer.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
