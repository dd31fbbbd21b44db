"""The networks that are trained, and a problem: one of them with a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Problem", "ResNet20", "Transformer", "images", "mlp", "mlp_width", "tokens", "vectors"]


@dataclass(frozen=True)
class Problem:
    """What all contenders train.

    Args:
        build: makes the network, on the default device.
        x: inputs, (M, ...).
        y: labels, (M,) or (M, T).
        draws: S, draws of the weights in a step.
        repeated: inputs and labels S times over, so that one pass is as much work as S draws; (M·S, ...).
        num_data: N.
    """

    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    draws: int
    repeated: tuple[Tensor, Tensor]
    num_data: int = 60_000

    @classmethod
    def of(cls, build: Callable[[], nn.Module], x: Tensor, y: Tensor, draws: int) -> Problem:
        """With the batch repeated once for all."""
        return cls(build, x, y, draws, (torch.cat([x] * draws), torch.cat([y] * draws)))

    def model(self) -> nn.Module:
        """The network with the same weights every time; the global random state is left alone."""
        device = self.x.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            return self.build()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Negative log-likelihood of an example, its tokens summed, averaged over the batch."""
        return F.cross_entropy(outputs.movedim(-1, 1), labels) * labels[0].numel()


def vectors(build: Callable[[], nn.Module], batch: int, inputs: int, classes: int, draws: int, device: str) -> Problem:
    """Vectors around a centre for each class: without it all directions would matter alike, which they never do."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(classes, inputs, generator=generator)
    y = torch.randint(classes, (batch,), generator=generator)
    x = 0.5 * (centres[y] + torch.rand(batch, inputs, generator=generator))
    return Problem.of(build, x.to(device), y.to(device), draws)


def images(build: Callable[[], nn.Module], batch: int, side: int, draws: int, device: str) -> Problem:
    """Random colour images of ten classes."""
    flat = vectors(build, batch, 3 * side * side, 10, draws, device)
    return Problem.of(build, flat.x.unflatten(1, (3, side, side)), flat.y, draws)


def tokens(build: Callable[[], nn.Module], batch: int, length: int, vocab: int, draws: int, device: str) -> Problem:
    """Random text, each token labelled with the next."""
    text = torch.randint(vocab, (batch, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    return Problem.of(build, text[:, :-1], text[:, 1:], draws)


def mlp(sizes: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp_width(num_params: float, inputs: int, outputs: int) -> int:
    """Width w of two hidden layers that gives about P parameters: w² + (inputs + outputs + 2) w + outputs = P.

    Example:
        >>> mlp_width(478_410, 784, 10)
        400
    """
    half = (inputs + outputs + 2) / 2
    return max(1, round(math.sqrt(half * half + num_params - outputs) - half))


class _Residual(nn.Module):
    """Two convolutions and a shortcut, which pools and pads with zeros where the width doubles."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(shortcut, (0, 0, 0, 0, 0, y.shape[1] - x.shape[1])))


class ResNet20(nn.Sequential):
    """ResNet-20 for small images with GroupNorm in place of BatchNorm; 0.27 million parameters.

    Args:
        width: channels of the first stage.
        depth: blocks in each of the three stages.
    """

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        stages = [(width * 2 ** max(0, s - (b == 0)), width * 2**s) for s in range(3) for b in range(depth)]
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            *(_Residual(inputs, outputs) for inputs, outputs in stages),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )


class _Attention(nn.Module):
    """One pre-norm block of a causal transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        widened: Tensor = self.mlp(self.norm2(x))
        return x + widened


class Transformer(nn.Module):
    """A causal transformer that predicts the next token, its output layer tied to the embedding as in GPT-2.

    Args:
        vocab: number of tokens.
        width: of the residual stream.
        heads: of each attention layer.
        depth: number of blocks.
        length: longest text.
    """

    def __init__(self, vocab: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Attention(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next token, (M, T) → (M, T, vocab)."""
        # Positions are looked up for every example, (M, T): so a rule serves their table.
        places = torch.arange(text.shape[1], device=text.device).expand(text.shape)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(text) + self.positions(places))))
        return logits
