"""Models the engines are tested on: one row each, with a batch, a loss per example, and a name.

A row is (name, build) where build() returns a `Case`: a module, its inputs as a dict of keyword arguments or a tuple,
targets, and the loss of each example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

M = 5


@dataclass
class Case:
    model: nn.Module
    args: tuple[Any, ...]
    losses: Callable[[Any], Tensor]  # model output → (M,) negative log-likelihoods
    num_examples: int = M

    def double(self) -> Case:
        cast = lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
        self.model.double()
        self.args = tree_map(cast, self.args)
        return self


def cross_entropy(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda out: F.cross_entropy(out, targets, reduction="none")


def squares(out: Any) -> Tensor:
    return out.flatten(1).square().sum(1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)), inplace=True)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class GPT(nn.Module):
    """Causal block with a tied output layer and position embeddings of shape (T, D), broadcast over the batch."""

    def __init__(self, vocab: int = 7, width: int = 8, length: int = 6, functional_head: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.functional_head = functional_head
        if not functional_head:
            self.head = nn.Linear(width, vocab, bias=False)
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return F.linear(x, self.tokens.weight) if self.functional_head else self.head(x)


class RawParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.gain = nn.Parameter(torch.randn(6))
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.gain + self.shift


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class DictInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 4)
        self.deep = nn.Linear(2, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.wide(batch["wide"]) * self.deep(batch["deep"])


class MultiOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.mean = nn.Linear(6, 2)
        self.scale = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.trunk(x))
        return {"mean": self.mean(h), "scale": F.softplus(self.scale(h)) + 0.1}


class UsesWeightDirectly(nn.Module):
    """The layer is there, but its weight is read by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.t())


class FlattensTime(nn.Module):
    """Batch and time are merged before the layer, so its first dimension is M·T."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.flatten(0, 1))).unflatten(0, x.shape[:2]).sum(1)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x * self.gain, 0.5, self.training))


class DataDependent(nn.Module):
    """Control flow through .item(): vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain if x.abs().sum().item() > 0 else x


def _gaussian(out: dict[str, Tensor]) -> Tensor:
    return (out["mean"] / out["scale"]).square().sum(1) / 2 + out["scale"].log().sum(1)


def _next_token(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda out: F.cross_entropy(out.transpose(1, 2), targets, reduction="none").sum(1)


def _labels(classes: int = 3) -> Tensor:
    return torch.arange(M) % classes


def _mlp() -> Case:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return Case(model, (torch.randn(M, 4),), cross_entropy(_labels()))


def _convnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (2, 3), padding="same", groups=2, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, dilation=2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, 3),
    )
    return Case(model, (torch.randn(M, 2, 7, 7),), cross_entropy(_labels()))


def _conv1d() -> Case:
    model = nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=2, dilation=2),
        nn.GELU(),
        nn.Conv1d(6, 6, 3, groups=6),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return Case(model, (torch.randn(M, 3, 8),), cross_entropy(_labels()))


def _conv3d() -> Case:
    model = nn.Sequential(nn.Conv3d(1, 2, 2, padding=(1, 0, 1)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(M, 1, 3, 4, 3)
    model(x)
    return Case(model, (x,), cross_entropy(_labels()))


def _gpt(length: int = 4, **options: Any) -> Case:
    ids = torch.randint(7, (M, length))
    return Case(GPT(**options), (ids,), _next_token(ids.roll(-1, 1)))


def _batchnorm() -> Case:
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))
    x = torch.randn(M, 1, 4, 4)
    model(x)
    return Case(model.eval(), (x,), cross_entropy(_labels()))


def _weight_norm() -> Case:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, M)), nn.Tanh(), nn.Linear(M, 3))
    return Case(model, (torch.randn(M, 4),), cross_entropy(_labels()))


def _embedding_mlp() -> Case:
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    return Case(model, (torch.randint(6, (M, 3)),), cross_entropy(_labels()))


def _sequence_norms() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm((2, 4)), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, 2))
    return Case(model, (torch.randn(M, 3, 2, 3),), squares)


def _norms_without_positions() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.LayerNorm(4, bias=False))
    return Case(model, (torch.randn(M, 3),), lambda out: out.pow(3).sum(1))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": _mlp,
    "convnet": _convnet,
    "conv1d": _conv1d,
    "conv3d": _conv3d,
    "residual_groupnorm": lambda: Case(
        nn.Sequential(nn.Conv2d(1, 4, 3), Residual(4), nn.Flatten(), nn.Linear(36, 3)),
        (torch.randn(M, 1, 5, 5),),
        cross_entropy(_labels()),
    ),
    "lstm": lambda: Case(Recurrent(nn.LSTM), (torch.randn(M, 4, 3),), cross_entropy(_labels())),
    "gru": lambda: Case(Recurrent(nn.GRU), (torch.randn(M, 4, 3),), cross_entropy(_labels())),
    "transformer_encoder": lambda: Case(Encoder(), (torch.randn(M, 4, 8),), cross_entropy(_labels())),
    "gpt_tied": _gpt,
    "gpt_length_equals_batch": lambda: _gpt(length=M),
    "gpt_functional_head": lambda: _gpt(functional_head=True),
    "raw_parameter": lambda: Case(RawParameter(), (torch.randn(M, 4),), squares),
    "reused_module": lambda: Case(Reused(), (torch.randn(M, 5),), squares),
    "dict_input": lambda: Case(
        DictInput(), ({"wide": torch.randn(M, 3), "deep": torch.randn(M, 2)},), cross_entropy(_labels())
    ),
    "multi_output": lambda: Case(MultiOutput(), (torch.randn(M, 4),), _gaussian),
    "batchnorm_eval": _batchnorm,
    "weight_norm": _weight_norm,
    "embedding_mlp": _embedding_mlp,
    "sequence_norms": _sequence_norms,
    "norms_without_positions": _norms_without_positions,
    "weight_read_by_hand": lambda: Case(UsesWeightDirectly(), (torch.randn(M, 4),), squares),
    "time_flattened": lambda: Case(FlattensTime(), (torch.randn(M, 3, 3),), squares),
    "data_dependent": lambda: Case(DataDependent(), (torch.randn(M, 4),), squares),
}

RANDOM_CASES: dict[str, Callable[[], Case]] = {
    "encoder_dropout": lambda: Case(Encoder(dropout=0.3), (torch.randn(M, 4, 8),), cross_entropy(_labels())),
    "functional_dropout": lambda: Case(FunctionalDropout(), (torch.randn(M, 4),), cross_entropy(_labels())),
}


def build(name: str, seed: int = 0) -> Case:
    """A case with fixed values, in float64."""
    torch.manual_seed(seed)
    table = CASES | RANDOM_CASES
    return table[name]().double()


def num_params(model: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in model.parameters())
