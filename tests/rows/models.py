"""Models whose parameters meet the data in ways of their own; those of `cases` have the usual layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cases import Case, M, cross_entropy, squares

T, D = 4, 6


class Lambda(nn.Module):
    """Parameters, and a function of them and the input."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))


class ClassToken(nn.Module):
    """A token and positions shared by the batch, as in vision transformers; the token's output is the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.randn(1, T + 1, D))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.attention(x, x, x, need_weights=False)[0][:, 0]


class TimeFirst(nn.Module):
    """Words come time first, as in older models of language; so do the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, D)
        self.layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0)
        self.rnn = nn.GRU(D, D)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.layer(self.words(x)))[0])


class Cells(nn.Module):
    """One cell over many steps: its weights are used at each."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0]


class Scale(torch.autograd.Function):
    """A function of one's own, for which there is no rule."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, delta):
        x, weight = ctx.saved_tensors
        return delta * weight, (delta * x).flatten(0, -2).sum(0)


class RelativeBias(nn.Module):
    """A table of biases looked up by constant indices, as in windowed attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * T - 1, 2))
        self.register_buffer("places", torch.arange(T)[:, None] - torch.arange(T) + T - 1)
        self.project = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.project(x).view(len(x), T, 2, 2, D // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT + self.table[self.places.view(-1)].view(T, T, 2).permute(2, 0, 1)
        return scores.softmax(-1).flatten(1)


def on_sequences(model: nn.Module) -> Case:
    return Case(model, (torch.randn(M, T, D),), squares)


def on_images(model: nn.Module, channels: int = 2, size: tuple[int, ...] = (5, 6)) -> Case:
    return Case(model, (torch.randn(M, channels, *size),), squares)


def on_vectors(model: nn.Module) -> Case:
    return Case(model, (torch.randn(M, D),), squares)


def by_time(out: Tensor) -> Tensor:
    """Losses of examples in the second dimension."""
    return out.square().sum((0, 2))


MODELS: dict[str, Callable[[], Case]] = {
    "conv_groups_dilated": lambda: on_images(nn.Conv2d(4, 6, 3, 2, 1, 2, groups=2), 4, (7, 8)),
    "conv_padding_modes": lambda: on_images(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Conv2d(3, 2, 3, padding="same"))
    ),
    "conv_transposed": lambda: on_images(
        nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), 2
    ),
    "conv_transposed_1d_3d": lambda: on_images(nn.ConvTranspose3d(2, 3, 2), 2, (2, 3, 2)),
    "conv1d_strided": lambda: Case(
        nn.Conv1d(T, 3, 2, stride=2, dilation=2, padding=1), (torch.randn(M, T, D),), squares
    ),
    "batchnorm_2d_eval": lambda: on_images(nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).eval()),
    "instance_norm": lambda: on_images(nn.InstanceNorm2d(2, affine=True)),
    "rms_norm": lambda: on_sequences(nn.Sequential(nn.Linear(D, 4), nn.RMSNorm(4))),
    "prelu": lambda: on_images(nn.Sequential(nn.PReLU(2), nn.Flatten(), nn.PReLU())),
    "einsum": lambda: on_sequences(Lambda(lambda x, w: torch.einsum("btd,tde->bte", x, w), w=(T, D, 3))),
    "weights_on_the_left": lambda: on_vectors(Lambda(lambda x, w: (w @ x.T).T, w=(3, D))),
    "batched_product": lambda: on_sequences(Lambda(lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1)), w=(D, 3))),
    "baddbmm": lambda: on_sequences(
        Lambda(
            lambda x, w, b: torch.baddbmm(b, x.transpose(0, 1), w, beta=0.5, alpha=2.0).transpose(0, 1),
            w=(T, D, 3),
            b=(T, 1, 3),
        )
    ),
    "bilinear": lambda: on_vectors(Lambda(lambda x, w: F.bilinear(x, x.tanh(), w), w=(2, D, D))),
    "low_rank_adapter": lambda: on_sequences(
        Lambda(lambda x, w, a, b: F.linear(x, w + 0.5 * (b @ a)), w=(3, D), a=(2, D), b=(3, 2))
    ),
    "spectral_norm": lambda: on_vectors(parametrizations.spectral_norm(nn.Linear(D, 4)).eval()),
    "orthogonal": lambda: on_vectors(parametrizations.orthogonal(nn.Linear(D, D))),
    "pruned": lambda: on_vectors(Lambda(lambda x, w: x @ (w * (torch.arange(D * 3).view(D, 3) % 2)), w=(D, 3))),
    "differences": lambda: on_sequences(Lambda(lambda x, a, b, c: (a - x) * b / (1 + c**2), a=(D,), b=(T, 1), c=(1,))),
    "gates": lambda: on_sequences(Lambda(lambda x, a, b: torch.where(x > 0, a * x, b.exp()), a=(T, D), b=(D,))),
    "class_token": lambda: on_sequences(ClassToken()),
    "time_first_attention": lambda: Case(
        nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0), (torch.randn(T, M, D),), by_time
    ),
    "time_first_language": lambda: Case(TimeFirst(), (torch.randint(7, (T, M)),), by_time),
    "cells": lambda: on_sequences(Cells()),
    "bidirectional": lambda: Case(
        nn.Sequential(nn.LSTM(D, 3, 2, batch_first=True, bidirectional=True)),
        (torch.randn(M, T, D),),
        lambda out: squares(out[0]),
    ),
    "function_of_ones_own": lambda: on_sequences(Lambda(lambda x, w: Scale.apply(x, w) + 0 * x, w=(D,))),
    "relative_bias": lambda: on_sequences(RelativeBias()),
    "embedding_padding": lambda: Case(
        nn.Sequential(nn.Embedding(5, D, padding_idx=1), nn.Linear(D, 3)), (torch.randint(5, (M, T)),), squares
    ),
    "embedding_bag": lambda: Case(nn.EmbeddingBag(5, D, mode="mean"), (torch.randint(5, (M, T)),), squares),
    "decoder": lambda: Case(
        nn.TransformerDecoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
        (torch.randn(M, T, D), torch.randn(M, 3, D)),
        squares,
    ),
    "as_wide_as_the_batch": lambda: Case(
        nn.Sequential(nn.Linear(M, 2 * M), nn.Tanh(), nn.Linear(2 * M, M)),
        (torch.randn(M, M),),
        cross_entropy(torch.arange(M)),
    ),
    "units_that_are_off": lambda: on_vectors(nn.Sequential(nn.Linear(D, 40), nn.ReLU(), nn.Linear(40, 2))),
}
