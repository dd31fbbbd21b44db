"""What the loops share: data they make themselves, small networks, and the table they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import slangvi

Prediction = Callable[[], Tensor]


@dataclass(frozen=True)
class Data:
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def size(self) -> int:
        return len(self.x_train)

    def loader(self, batch_size: int = 30) -> DataLoader:
        """The training set in batches, shuffled in the same way every time."""
        shuffle = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(self.x_train, self.y_train), batch_size, shuffle=True, generator=shuffle)

    def epochs(self, count: int = 25) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of several epochs, one after the other."""
        loader = self.loader()
        for _ in range(count):
            yield from loader

    @property
    def num_batches(self) -> int:
        return len(self.loader())

    def rows(self) -> list[dict[str, Tensor]]:
        """Training examples as Hugging Face's Trainer takes them; positions for each example spare SLANG time."""
        places = torch.arange(self.x_train.shape[1])
        pairs = zip(self.x_train, self.y_train, strict=True)
        return [{"input_ids": x, "position_ids": places, "labels": y} for x, y in pairs]


def clouds() -> Data:
    """Three clouds of points that overlap, in ten dimensions; a network that trusts the training set is too sure."""
    source = torch.Generator().manual_seed(0)
    y = torch.arange(840) % 3
    x = torch.randn(840, 10, generator=source) + 0.8 * torch.randn(3, 10, generator=source)[y]
    return Data(x[:240], y[:240], x[240:], y[240:])


def sentences() -> Data:
    """Six tokens each; the first and the last say which of two classes is more likely."""
    source = torch.Generator().manual_seed(0)
    x = torch.randint(20, (5280, 6), generator=source)
    odds = 6 * torch.linspace(-1, 1, 20)[x[:, [0, -1]]].sum(1)
    y = (torch.rand(len(x), generator=source) < odds.sigmoid()).long()
    return Data(x[:4800], y[:4800], x[4800:], y[4800:])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))


def compare(adam: Prediction, slang: Prediction, targets: Tensor) -> dict[str, float]:
    """Train both ways, print the negative log-likelihood of held-out data, and return it."""
    found = {"Adam": adam(), "SLANG": slang()}
    nll = {name: float(slangvi.metrics.nll(probs.detach().float(), targets)) for name, probs in found.items()}
    print("held-out NLL (nats): " + ", ".join(f"{name} {value:.3f}" for name, value in nll.items()))
    return nll
