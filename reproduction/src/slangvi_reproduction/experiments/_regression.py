"""Regression with small networks on many splits at once: data side by side, and how well draws of weights predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from slangvi_reproduction.data import Standardised

__all__ = ["Problems", "Scores", "batches", "network", "outputs_of", "portions", "scores", "side_by_side", "starts"]

# Entries of outputs and hidden units that are held at once while predicting.
_AT_ONCE = 1 << 27


@dataclass(frozen=True)
class Problems:
    """K regression problems of one shape, on standardised scales; zeros behind the shorter ones.

    Args:
        x_train: (K, N, D).
        y_train: (K, N).
        num_train: how many of them are real, (K,).
        x_test: (K, T, D).
        y_test: (K, T).
        real: which test examples are real, (K, T).
        y_scale: of the targets, (K,).
    """

    x_train: Tensor
    y_train: Tensor
    num_train: Tensor
    x_test: Tensor
    y_test: Tensor
    real: Tensor
    y_scale: Tensor

    @property
    def least(self) -> int:
        """Training examples that every problem has."""
        return int(self.num_train.min())


def side_by_side(parts: Sequence[Standardised], device: str) -> Problems:
    """Problems in float32 on a device."""

    def padded(pick: Callable[[Standardised], Tensor]) -> Tensor:
        return pad_sequence([pick(part).float() for part in parts], batch_first=True).to(device)

    counts = torch.tensor([len(part.y_test) for part in parts])
    width = int(counts.max())
    return Problems(
        padded(lambda part: part.x_train),
        padded(lambda part: part.y_train),
        torch.tensor([len(part.y_train) for part in parts]),
        padded(lambda part: part.x_test),
        padded(lambda part: part.y_test),
        (torch.arange(width) < counts.unsqueeze(1)).to(device),
        torch.tensor([float(part.y_scale) for part in parts], device=device),
    )


def network(inputs: int, hidden: int) -> nn.Module:
    """One hidden layer of rectified units and one output; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(-2))


def starts(inputs: int, hidden: int, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Torch's own initial weights for every seed, name → (K, ...)."""
    found = []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            found.append(dict(network(inputs, hidden).named_parameters()))
    return {name: torch.stack([one[name].detach() for one in found]) for name in found[0]}


def batches(problems: Problems, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of minibatches (K, M, D) and (K, M), shuffled for each problem; what does not fill one is left out."""
    x, y = problems.x_train, problems.y_train
    order = torch.rand(y.shape, generator=generator, device=y.device)
    beyond = torch.arange(y.shape[1]) >= problems.num_train.unsqueeze(1)
    order = order.masked_fill(beyond.to(y.device), torch.inf).argsort(1)
    for first in range(0, problems.least - size + 1, size):
        index = order[:, first : first + size]
        yield x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2])), y.gather(1, index)


@dataclass(frozen=True)
class Scores:
    """On test data, in the targets' own units.

    Args:
        rmse: root mean squared error of the mean prediction, (K,).
        log_likelihood: mean logarithm of the predictive density, (K,).
    """

    rmse: Tensor
    log_likelihood: Tensor


@torch.no_grad()
def scores(
    model: nn.Module, draw: Callable[[int], dict[str, Tensor]], draws: int, problems: Problems, tau: Tensor
) -> Scores:
    """How well draws of weights predict, with N(f, 1/τ) around the output of each.

    Args:
        model: the network.
        draw: (count) → name → (K, count, ...).
        draws: of each problem.
        problems: K of them.
        tau: noise precision on the standardised scale, (K,).
    """
    y, real = problems.y_test, problems.real
    total, density = torch.zeros_like(y), torch.full_like(y, -torch.inf)
    for count in portions(model, y, draws):
        outputs = outputs_of(model, draw(count), problems.x_test)
        total += outputs.sum(1)
        energy = -0.5 * tau[:, None, None] * (y.unsqueeze(1) - outputs).square()
        density = torch.logaddexp(density, energy.logsumexp(1))
    density += 0.5 * (tau / (2 * math.pi)).log().unsqueeze(1) - math.log(draws) - problems.y_scale.log().unsqueeze(1)
    squares = (total / draws - y).square()
    there = real.sum(1)
    rmse = (squares.where(real, 0.0).sum(1) / there).sqrt() * problems.y_scale
    return Scores(rmse, density.where(real, 0.0).sum(1) / there)


def portions(model: nn.Module, y: Tensor, draws: int) -> list[int]:
    """How many draws of each network to take at a time, so that all outputs for targets (K, T) fit into memory."""
    most = max(1, _AT_ONCE // (y.numel() * sum(p.shape[0] for p in model.parameters() if p.ndim > 1)))
    return [min(most, draws - first) for first in range(0, draws, most)]


def outputs_of(model: nn.Module, draws: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of draws (K, s, ...) for inputs (K, T, D): (K, s, T)."""

    def one(params: dict[str, Tensor], inputs: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, params, (inputs,))
        return found

    found: Tensor = torch.func.vmap(torch.func.vmap(one, in_dims=(0, None)))(draws, x)
    return found
