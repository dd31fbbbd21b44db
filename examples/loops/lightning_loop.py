"""Lightning: automatic optimisation, gradient accumulation, a checkpoint callback."""

import logging
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from common import clouds, compare, network
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import slangvi

data = clouds()


def trainer(folder: str, epochs: int = 40) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=10)
    return L.Trainer(max_epochs=epochs, accumulate_grad_batches=2, accelerator="cpu", callbacks=[saving], **quiet)


class Adam(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class SLANG(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return slangvi.SLANG(self.net, num_data=data.size, rank=4, lr=0.05, accumulation_steps=2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.optimizers().train()
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_after_backward(self) -> None:
        self.optimizers().eval()


def adam() -> torch.Tensor:
    module = Adam(network())
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder).fit(module, data.loader(15))
    return module.net(data.x_test).softmax(-1)


def slang() -> torch.Tensor:
    module = SLANG(network())
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder).fit(module, data.loader(15))
    return slangvi.predictive_samples(module.net, module.optimizers().posterior, data.x_test).mean(0)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compare(adam, slang, data.y_test)
